#!/usr/bin/env bash
# Creates the environment with the test extra and runs the tests.
#
#   bash scripts/test.sh [--lint] [--all | --compile] [options of pytest]
#
# --all also runs the slow tests and the tests that start two processes as hosts.
# --compile only runs the tests that compile the presets for their hardware, one at a time; each takes minutes.
# --lint, or CI=true, first checks style, formatting, imports and types, and the scripts with shellcheck.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${CI:-} in true | 1) lint=true ;; *) lint=false ;; esac
selection=(-m "not slow and not two_hosts and not compile")
while :; do
    case ${1:-} in
        --lint) lint=true ;;
        --all) selection=(-m "not compile") ;;
        --compile) selection=(-m compile --numprocesses 0) ;;
        *) break ;;
    esac
    shift
done

if [ "$lint" = true ]; then make_environment dev; else make_environment test; fi
cd "$REPOSITORY"
if [ "$lint" = true ]; then
    echo "Checking style, formatting, imports and types"
    "$VENV/bin/ruff" check
    "$VENV/bin/ruff" format --check
    "$VENV/bin/lint-imports"
    "$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
    "$VENV/bin/shellcheck" scripts/*.sh .ci/run
fi
echo "Running the tests"
run_tests "${selection[@]}" "$@"
