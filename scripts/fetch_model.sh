#!/usr/bin/env bash
# Downloads a small model as a GGUF file for `model.path`:
#
#   bash scripts/fetch_model.sh NAME [folder]        default: models/ in the repository
#
# NAME is SmolLM2-135M, Qwen2.5-Coder-0.5B or Gemma-3-270M. See fetch_model.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

[ $# -ge 1 ] && [ $# -le 2 ] || fail "expected the name of a model and at most a folder to write to; got $# arguments."
python=$VENV/bin/python
[ -x "$python" ] || python=$(command -v python3) || fail "found neither $python nor python3; install Python."
exec "$python" "$REPOSITORY/scripts/fetch_model.py" "$1" "${2:-$REPOSITORY/models}"
