#!/usr/bin/env bash
# Tests the devices of this machine before the first long run on them, and prints one block of text to report.
#
#   bash scripts/first_tpu_run.sh [PRESET] [--set NAME=VALUE ...]
#
#   PRESET  name of a preset, or a YAML file (default: quickstart)
#
# Four commands run one after the other, even if one of them fails: `grpo train --dry-run`, which downloads missing
# files; `grpo doctor`; `grpo inspect-mesh --compile` for these devices; and ten steps of `grpo train`.
# Ctrl-C ends the running command. Output is in launches/, and the run is in its run.dir. With several hosts, start it
# on all of them with the same run.name. The exit code is 0, or the code of the first command that failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

preset=quickstart
case ${1:-} in
    '' | -*) ;;
    *) preset=$1 && shift ;;
esac
name=first-run-$(basename -- "$preset" .yaml)-$(date +%Y%m%d-%H%M%S)
options=(--config "$preset" "$@")
case " $* " in
    *run.name=*) ;;
    *) options+=(--set "run.name=$name") ;;
esac
training=("${options[@]}" --set run.steps=10)

grpo() {
    "$VENV/bin/python" "$REPOSITORY/cli.py" "$@"
}

[ -x "$VENV/bin/python" ] || make_environment tpu >&2
settings=$(grpo train "${training[@]}" --print-config)
logs=launches/$name
mkdir -p -- "$logs"
printf '%s\n' "$settings" >"$logs/settings.yaml"

failed=0
try() { # NAME ARGUMENTS...
    local status=0
    echo "grpo ${*:2}; its log is $logs/$1.err" >&2
    grpo "${@:2}" >"$logs/$1.out" 2>"$logs/$1.err" || status=$?
    echo "$status" >"$logs/$1.status"
    [ "$failed" -ne 0 ] || failed=$status
}

trap 'echo "interrupted; continuing with the next command" >&2' INT
try dry-run train "${training[@]}" --dry-run
try doctor doctor "${options[@]}" --json
try inspect-mesh inspect-mesh "${options[@]}" --compile --json
try train train "${training[@]}"
PYTHONPATH=$REPOSITORY "$VENV/bin/python" "$REPOSITORY/scripts/first_run_report.py" "$logs" | tee "$logs/report.txt"
exit "$failed"
