#!/bin/sh
# Makes the virtual environment /opt/rljob from a lock file. Runs inside an image build, for both images.
#   install-dependencies.sh LOCK UV_LOCK
# Optional build secrets: /run/secrets/registry (lines NAME=value: the builder's own index or proxy) and /run/secrets/ca
# (its certificate bundle). Both are mounted for this step alone: no address and no certificate gets into the image.
set -eu
lock=$1 uv_lock=$2 venv=/opt/rljob
if [ -s /run/secrets/registry ]; then set -a; . /run/secrets/registry; set +a; fi
if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
unset PYTHONDONTWRITEBYTECODE

python3 -m venv --without-pip "$venv"
python3 -m venv /tmp/installer
/tmp/installer/bin/pip install --quiet --require-hashes -r "$uv_lock"
# Bytecode is compiled here, once: without it every process of a pod compiles torch and megatron on import (10 s more).
/tmp/installer/bin/uv pip sync --quiet --python "$venv/bin/python" --require-hashes --link-mode copy --compile-bytecode "$lock"
rm -rf /tmp/installer /root/.cache/pip

# Our own code lies beside the environment, so that a change of it is a small layer of its own.
mkdir -p "$venv/app"
echo "$venv/app" > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/rljob.pth"
# KubeRay starts Ray through a login shell, and /etc/profile sets PATH anew.
mkdir -p /etc/profile.d
echo "export PATH=$venv/bin:\$PATH" > /etc/profile.d/rljob.sh
