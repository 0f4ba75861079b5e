#!/usr/bin/env bash
# Installs the oldest version of every dependency that pyproject.toml allows into a separate environment, and
# runs the tests there to verify the lower bounds. To change a lower bound, edit it and run this script.
#
#   bash scripts/lowest_versions.sh [options of pytest]
set -euo pipefail
GRPO_VENV=${GRPO_VENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv-lowest}
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
python=$(find_python)
"$python" - "$REPOSITORY/pyproject.toml" >"$constraints" <<'PYTHON'
import re
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
    # "name[extra]>=1.2; marker" becomes "name==1.2; marker".
    print(re.sub(r"^([\w.-]+)(\[.*?\])?>=", r"\1==", requirement))
PYTHON

make_environment test "$constraints"
echo "Running the tests with the oldest versions allowed"
run_tests -m "not compile" "$@"
