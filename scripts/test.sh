#!/usr/bin/env bash
# Sets up .venv, checks style and types, and runs the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/python.sh
set_up dev
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyrefly check
exec .venv/bin/python -m pytest -q -n 2 --dist worksteal "$@"
