#!/usr/bin/env bash
# Pins every dependency with its hashes, without addresses. Run after a change of the dependencies in pyproject.toml.
#   dev/lock.sh          write the lock files
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=${UV:-.venv/bin/uv}
compile() { # FILE EXTRA...
  local out=$1 extras=() extra
  shift
  for extra in "$@"; do extras+=(--extra "$extra"); done
  "$uv" pip compile pyproject.toml "${extras[@]}" --universal --python-version 3.12 --generate-hashes \
    --no-annotate --no-header --quiet -o "$out" "${constraints[@]}"
}
constraints=()
compile requirements.lock operator workload dev
constraints=(-c requirements.lock) # what the images install is what the tests ran
compile requirements-operator.lock operator
compile requirements-workload.lock workload
printf 'uv==%s\n' "$("$uv" --version | cut -d' ' -f2)" > build-uv.in
"$uv" pip compile build-uv.in --universal --generate-hashes --no-annotate --no-header --quiet -c requirements.lock -o requirements-uv.lock
rm -f build-uv.in
