#!/usr/bin/env bash
# Makes a virtual environment from a lock file, unless it is there, and prints its interpreter. Two may ask for it at once.
#   dev/locked-venv.sh NAME LOCKFILE [NOTE]     NOTE is said before an installation, which takes minutes
# It lies below ${XDG_CACHE_HOME:-~/.cache}/rljob as NAME-HASH, the hash being that of the lock file: another lock file, another
# environment. It is apart from .venv, whose interpreter and uv it takes: what is installed here must not mix with what is tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ $# -lt 2 ] || [ ! -f "$2" ]; then
  sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2
  [ $# -lt 2 ] || echo "no such lock file: $2" >&2
  exit 64
fi
name=$1 lockfile=$2 note=${3:-}
unset PYTHONDONTWRITEBYTECODE
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rljob
uv=${UV:-.venv/bin/uv}
export UV_CACHE_DIR="${UV_CACHE_DIR:-$cache/uv}" UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
venv=$cache/$name-$(sha256sum "$lockfile" | cut -c1-16)
if [ ! -e "$venv/ready" ]; then
  mkdir -p "$cache"
  exec 9> "$venv.lock"
  flock 9
  if [ ! -e "$venv/ready" ]; then
    echo "installing $lockfile into $venv${note:+ ($note)}" >&2
    rm -rf "$venv"
    "$uv" venv --quiet --python .venv/bin/python "$venv" >&2
    "$uv" pip sync --quiet --python "$venv/bin/python" --require-hashes "$lockfile" >&2
    touch "$venv/ready"
  fi
fi
echo "$venv/bin/python"
