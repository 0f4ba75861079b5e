#!/usr/bin/env bash
# Makes the environment with the test extra and runs the suite.
#
#   bash scripts/test.sh [--lint] [options of pytest]
#
# --lint, or CI=true, first checks style, formatting and types with ruff and pyright, and the scripts with shellcheck.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${CI:-} in true | 1) lint=true ;; *) lint=false ;; esac
if [ "${1:-}" = --lint ]; then
    lint=true
    shift
fi

if [ "$lint" = true ]; then make_environment dev; else make_environment test; fi
cd "$REPOSITORY"
if [ "$lint" = true ]; then
    echo "Checking style, formatting and types"
    "$VENV/bin/ruff" check
    "$VENV/bin/ruff" format --check
    "$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
    "$VENV/bin/shellcheck" scripts/*.sh .ci/run
fi
echo "Running the tests"
run_tests "$@"
