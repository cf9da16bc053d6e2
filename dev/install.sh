#!/usr/bin/env bash
# Makes .venv with the pinned dependencies (extras operator, workload, dev) and the project itself, editable.
# Does nothing when the lock file and the interpreter are those of the last run. Prints what it does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # without .pyc files every import of torch and megatron costs 10 s more
python=$(dev/python.sh)
stamp=$(cat requirements.lock requirements-uv.lock pyproject.toml dev/install.sh <("$python" --version) | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/rljob-stamp 2> /dev/null || true)" = "$stamp" ]; then exit 0; fi
exec 9> .venv.lock
flock 9 # two makes at once
if [ "$(cat .venv/rljob-stamp 2> /dev/null || true)" = "$stamp" ]; then exit 0; fi
echo "installing into .venv with $("$python" --version) (about 5 GB: torch's wheels carry CUDA; minutes when nothing is cached)"
[ -x .venv/bin/python ] && .venv/bin/python -c 'import sys' 2> /dev/null || { rm -rf .venv; "$python" -m venv .venv; }
.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock
# One cache for clean clones: wheels are hard-linked from it when it is on the same disk.
export UV_CACHE_DIR="${UV_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/rljob/uv}" UV_COMPILE_BYTECODE=1 UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
.venv/bin/uv pip sync --quiet --python .venv/bin/python --require-hashes requirements.lock
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
echo "$stamp" > .venv/rljob-stamp
