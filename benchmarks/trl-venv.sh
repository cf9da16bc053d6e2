#!/usr/bin/env bash
# Makes the virtual environment of the bench's rival (TRL) from requirements-trl.lock and prints its interpreter.
#   benchmarks/trl-venv.sh          make it, unless it is there
#   benchmarks/trl-venv.sh lock     pin TRL again, with the torch that the trainer uses
# dev/locked-venv.sh makes it, apart from .venv: TRL's dependencies are not ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = lock ]; then
  mkdir -p build
  printf 'trl==1.16.0\ntorch\n' > build/trl.in
  exec "${UV:-.venv/bin/uv}" pip compile build/trl.in -c requirements-workload.lock --universal --python-version 3.12 --generate-hashes \
    --no-annotate --no-header --quiet -o requirements-trl.lock
fi
export UV_COMPILE_BYTECODE=1 # the bench times its start-up
exec dev/locked-venv.sh bench-venv requirements-trl.lock "torch's wheels come from uv's cache when .venv was made here"
