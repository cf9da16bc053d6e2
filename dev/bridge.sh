#!/usr/bin/env bash
# megatron-bridge 0.6.2 in an environment of its own, and what to do with it.
#   dev/bridge.sh check MODEL...         our mapping of Hugging Face models beside megatron-bridge's, tensor by tensor
#   dev/bridge.sh copy MODEL DIR         MODEL into Megatron and back into DIR, by megatron-bridge alone (any architecture it has)
#   dev/bridge.sh venv                   make the environment and print its interpreter
#   dev/bridge.sh lock                   pin it again, with the torch that the trainer uses
# dev/locked-venv.sh makes it. megatron-bridge asks for packages that have no wheels for most machines and that nothing here imports,
# so what the lock lists is installed, and nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE
uv=${UV:-.venv/bin/uv}
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
  dev/locked-venv.sh bridge-venv requirements-bridge.lock "5 GB beside uv's cache; torch's wheels are shared where .venv was made here"
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
