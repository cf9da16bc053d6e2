#!/usr/bin/env bash
# Makes the virtual environment of the bench's rival (TRL) from requirements-trl.lock and prints its interpreter.
#   benchmarks/trl-venv.sh          make it, unless it is there
#   benchmarks/trl-venv.sh lock     pin TRL again, with the torch that the trainer uses
# It lies below ${XDG_CACHE_HOME:-~/.cache}/rljob under the hash of the lock file, apart from .venv: TRL's dependencies are not ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rljob
uv=${UV:-.venv/bin/uv}
export UV_CACHE_DIR="${UV_CACHE_DIR:-$cache/uv}" UV_COMPILE_BYTECODE=1 UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
if [ "${1:-}" = lock ]; then
  mkdir -p build
  printf 'trl==1.16.0\ntorch\n' > build/trl.in
  exec "$uv" pip compile build/trl.in -c requirements-workload.lock --universal --python-version 3.12 --generate-hashes \
    --no-annotate --no-header --quiet -o requirements-trl.lock
fi
venv=$cache/bench-venv-$(sha256sum requirements-trl.lock | cut -c1-16)
if [ ! -e "$venv/ready" ]; then
  mkdir -p "$cache"
  exec 9> "$venv.lock"
  flock 9
  if [ ! -e "$venv/ready" ]; then
    echo "installing TRL into $venv (torch's wheels come from uv's cache when .venv was made here)" >&2
    rm -rf "$venv"
    "$uv" venv --quiet --python .venv/bin/python "$venv"
    "$uv" pip sync --quiet --python "$venv/bin/python" --require-hashes requirements-trl.lock >&2
    touch "$venv/ready"
  fi
fi
echo "$venv/bin/python"
