#!/usr/bin/env bash
# Makes the environment, installs the package and trains the default preset: a tiny model learns to add on
# the CPU in about two minutes. Only the Python packages are downloaded.
#
#   bash scripts/quickstart.sh [options of `grpo train`]
#
# Every run gets a new name, so running the script again never changes an earlier run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment ""
cd "$REPOSITORY"
arguments=(train "$@")
case " $* " in
    *run.name=* | *--config* | *--resume*) ;; # the caller chooses the run
    *) arguments+=(--set "run.name=quickstart-$(date +%Y%m%d-%H%M%S)") ;;
esac
echo "Running: grpo ${arguments[*]}"
exec "$VENV/bin/grpo" "${arguments[@]}"
