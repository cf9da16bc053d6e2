#!/usr/bin/env bash
# megatron-bridge 0.6.2 in an environment of its own, and what to do with it.
#   dev/bridge.sh check MODEL...         our mapping of Hugging Face models beside megatron-bridge's, tensor by tensor
#   dev/bridge.sh copy MODEL DIR         MODEL into Megatron and back into DIR, by megatron-bridge alone (any architecture it has)
#   dev/bridge.sh venv                   make the environment and print its interpreter
#   dev/bridge.sh lock                   pin it again, with the torch that the trainer uses
# It lies below ${XDG_CACHE_HOME:-~/.cache}/rljob under the hash of its lock file. megatron-bridge asks for packages that have no wheels
# for most machines and that nothing here imports, so what the lock lists is installed, and nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rljob
uv=${UV:-.venv/bin/uv}
export UV_CACHE_DIR="${UV_CACHE_DIR:-$cache/uv}" UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
lock() {
  local pins=(--universal --python-version 3.12 --generate-hashes --no-annotate --no-header --quiet)
  mkdir -p build
  printf '%s\n' torch megatron-core==0.19.2 transformers==5.12.1 omegaconf safetensors einops psutil triton pydantic pyyaml > build/bridge.in
  "$uv" pip compile build/bridge.in -c requirements-workload.lock "${pins[@]}" -o build/bridge.lock
  printf 'megatron-bridge==0.6.2\n' > build/bridge.in
  "$uv" pip compile build/bridge.in --no-deps "${pins[@]}" -o build/bridge-itself.lock
  cat build/bridge.lock build/bridge-itself.lock > requirements-bridge.lock
}
venv() {
  local venv
  venv=$cache/bridge-venv-$(sha256sum requirements-bridge.lock | cut -c1-16)
  if [ ! -e "$venv/ready" ]; then
    mkdir -p "$cache"
    exec 9> "$venv.lock"
    flock 9
    if [ ! -e "$venv/ready" ]; then
      echo "installing megatron-bridge into $venv (5 GB beside uv's cache; torch's wheels are shared where .venv was made here)" >&2
      rm -rf "$venv"
      "$uv" venv --quiet --python .venv/bin/python "$venv"
      "$uv" pip sync --quiet --python "$venv/bin/python" --require-hashes requirements-bridge.lock >&2
      touch "$venv/ready"
    fi
  fi
  echo "$venv/bin/python"
}
case ${1:-} in
  lock) lock ;;
  venv) venv ;;
  check | copy)
    python=$(venv)
    export PYTHONPATH="$PWD/operator:$PWD/workload:$PWD" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
    exec "$python" -W ignore -m dev.bridge "$@"
    ;;
  *)
    sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"
    exit 64
    ;;
esac
