#!/usr/bin/env bash
# Makes the environment, installs the package and trains the embedded default: a tiny model learns to add on
# the CPU, in about two minutes, without any download but the Python packages.
#
#   bash scripts/quickstart.sh [options of `grpo train`]
#
# Every run gets a name of its own, so running it again never touches an earlier run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment ""
cd "$REPOSITORY"
arguments=(train "$@")
case " $* " in
    *run.name=* | *--config* | *--resume*) ;; # the caller knows which run
    *) arguments+=(--set "run.name=quickstart-$(date +%Y%m%d-%H%M%S)") ;;
esac
echo "Running: grpo ${arguments[*]}"
exec "$VENV/bin/grpo" "${arguments[@]}"
