#!/usr/bin/env bash
# Sets up .venv and runs the demo: four adapters on SmolLM2-135M, trained together.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/python.sh
extras=demo
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  extras=demo,cuda
fi
set_up "$extras"
exec .venv/bin/python scripts/demo.py "$@"
