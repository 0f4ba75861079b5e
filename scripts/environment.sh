# The other scripts source this file: `make_environment` creates a virtual environment with the package,
# and `run_tests` runs the tests in it.
#   PYTHON     interpreter of the environment (3.11 or newer; default: the first one below that runs)
#   GRPO_VENV  folder of the environment (.venv in the repository)
# shellcheck shell=bash

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${GRPO_VENV:-$REPOSITORY/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# 3.11 is tried before 3.12, because the parity tests need torch, which the test extra installs only for 3.11.
find_python() {
    local candidate reason reasons='' candidates=(python3.11 python3.12 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        # The candidate is run, because the shim of a version manager is on PATH even if its version is not selected.
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

# make_environment EXTRAS [CONSTRAINTS]: creates or updates the environment; does nothing if all inputs are unchanged.
make_environment() {
    local extras=$1 constraints=${2:-} python base key stamp pip_options=()
    local describe='import sys; print(sys.base_prefix, *sys.version_info[:3])'
    python=$(find_python) || exit 1
    base=$("$python" -c "$describe")

    if [ "$("$VENV/bin/python" -c "$describe" 2>/dev/null)" != "$base" ]; then
        # An environment is replaced only if these scripts made it.
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

# run_tests [options of pytest]: runs the tests in at most four processes, since each process loads JAX. The tests of a
# file run in one process, which shares fixtures and compiled programs; a process that dies is only one failure.
# Bytecode is written even if the environment disables it, as in containers: hundreds of processes load the sources.
run_tests() {
    cd "$REPOSITORY" || exit 1
    PYTHONDONTWRITEBYTECODE='' "$VENV/bin/python" -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile "$@"
}
