#!/usr/bin/env bash
# Sets up .venv, checks style and types, and runs the tests. The tests also run where a
# check fails; either makes the exit status 1.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/python.sh
set_up dev
failed=()
.venv/bin/ruff check . || failed+=("ruff check")
.venv/bin/ruff format --check . || failed+=("ruff format")
.venv/bin/pyrefly check || failed+=("pyrefly")
if [ ${#failed[@]} -gt 0 ]; then
  printf '%s failed; see above. The tests run all the same.\n' "${failed[@]}"
fi
.venv/bin/python -m pytest -q -n 2 --dist worksteal "$@" || failed+=("pytest")
[ ${#failed[@]} -eq 0 ]
