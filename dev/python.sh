#!/usr/bin/env bash
# Prints a Python >= 3.12 of this machine: $PYTHON, those on PATH, then pyenv's; the oldest that fits comes first,
# since wheels appear late for new versions. Says what is missing when there is none.
set -euo pipefail
fits() {
  # no torch wheels for free-threaded or pre-release builds, so only final CPython counts
  "$1" -c 'import sys, venv, ensurepip; v = sys.version_info
sys.exit(not ((3, 12) <= v < (3, 14) and v.releaselevel == "final" and sys.implementation.name == "cpython"))' > /dev/null 2>&1
}
candidates=()
[ -z "${PYTHON:-}" ] || candidates+=("$PYTHON")
for minor in 12 13; do candidates+=("python3.$minor"); done
candidates+=(python3 python)
for root in "${PYENV_ROOT:-$HOME/.pyenv}" "$HOME/.pyenv"; do
  for minor in 12 13; do
    for path in "$root"/versions/3."$minor".*/bin/python3."$minor"; do [ ! -x "$path" ] || candidates+=("$path"); done
  done
done
for python in "${candidates[@]}"; do
  if command -v "$python" > /dev/null && fits "$python"; then
    "$python" -c 'import sys; print(sys.executable)'
    exit 0
  fi
done
echo "no Python 3.12 or 3.13 found (looked at \$PYTHON, PATH and pyenv; megatron-core needs >= 3.12)." >&2
echo "Install one, with venv and ensurepip, and name it: make install PYTHON=/path/to/python3.12" >&2
exit 1
