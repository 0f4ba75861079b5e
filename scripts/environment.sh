# Sourced by the scripts beside it: `make_environment` leaves a virtual environment with the package in it,
# `run_tests` runs the suite in it.
#   PYTHON     interpreter to build on (3.11 or newer); otherwise the first one below that runs
#   GRPO_VENV  folder of the environment (.venv in the repository)
# shellcheck shell=bash

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${GRPO_VENV:-$REPOSITORY/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# 3.11 before 3.12: the parity tests need torch, which the test extra installs there only.
find_python() {
    local candidate reason reasons='' candidates=(python3.11 python3.12 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # Run, not only looked up: a version manager's shim is on PATH even where its version is not selected.
        if reason=$("$candidate" -c '
import sys
if sys.version_info < (3, 11):
    sys.exit("is Python %d.%d; 3.11 or newer is needed" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("has no venv module (Debian, Ubuntu: apt install python%d.%d-venv)" % sys.version_info[:2])
' 2>&1); then
            printf '%s' "$candidate"
            return
        fi
        reasons+=$'\n'"  $candidate: ${reason%%$'\n'*}"
    done
    fail "found no usable Python. Install 3.11 or 3.12, or name one: PYTHON=/path/to/python. Tried:$reasons"
}

# make_environment EXTRAS [CONSTRAINTS]: does nothing when nothing that decides the outcome has changed.
make_environment() {
    local extras=$1 constraints=${2:-} python base key stamp pip_options=()
    local describe='import sys; print(sys.base_prefix, *sys.version_info[:3])'
    python=$(find_python) || exit 1
    base=$("$python" -c "$describe")

    if [ "$("$VENV/bin/python" -c "$describe" 2>/dev/null)" != "$base" ]; then
        # Only what these scripts made is ever replaced.
        if [ -e "$VENV" ] && [ ! -e "$VENV/made-by-grpo" ]; then
            fail "$VENV exists and is not an environment of $base. Remove it, or set GRPO_VENV or PYTHON."
        fi
        echo "Making the environment $VENV (Python $base)"
        "$python" -m venv --clear "$VENV" || fail "python -m venv failed; see above."
        touch "$VENV/made-by-grpo"
    fi

    stamp=$VENV/installed${extras:+-$extras}
    key="$REPOSITORY $(cat "$REPOSITORY/pyproject.toml" ${constraints:+"$constraints"} | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
        echo "Installing the package${extras:+ with [$extras]} (a few minutes the first time)"
        [ -t 1 ] || pip_options+=(--quiet --quiet)
        [ -z "$constraints" ] || pip_options+=(--constraint "$constraints")
        "$VENV/bin/python" -m pip install --disable-pip-version-check ${pip_options[@]+"${pip_options[@]}"} \
            --editable "$REPOSITORY${extras:+[$extras]}" ||
            fail "pip could not install the package; its reason is above (is the package index reachable?)"
        printf '%s\n' "$key" >"$stamp"
    fi
}

# run_tests [options of pytest]: on every core, four at most, since each process holds its own JAX. The tests of a file
# stay together, with what they share and have compiled; a process that dies is one failure, not the end of all.
# Bytecode is kept even where the environment says otherwise, as in containers: hundreds of processes load the sources.
run_tests() {
    cd "$REPOSITORY" || exit 1
    PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile "$@"
}
