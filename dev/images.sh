#!/bin/bash
# The container images, built from the Dockerfiles under images/ without Docker, and put into the embedded cluster.
#
#   dev/images.sh build [operator|workload]   build what has changed: the base and the dependencies once per lock file (minutes),
#                                             our own code as a thin layer on top (a second)
#   dev/images.sh load  [operator|workload]   import into the embedded cluster what it does not hold yet
#   dev/images.sh all   [operator|workload]   both
#   dev/images.sh hash  operator|workload     print the name that stands for the content (it changes with every change of it)
#   dev/images.sh clean                       delete everything that was built here (not what the cluster has imported)
#
# With KUBECONFIG set to a cluster of your own, `load` says how to push the images instead, and `all` leaves out those that
# RLJOB_OPERATOR_IMAGE and RLJOB_WORKLOAD_IMAGE name.
# RLJOB_BASE_IMAGE    build upon this image (any with Python 3.12 or 3.13 and venv) instead of the one made from Debian packages
# XDG_CACHE_HOME      where images are kept (default ~/.cache, below rljob/images)
set -euo pipefail
DEV=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
SELF=$DEV/images.sh
ROOT=$(dirname "$DEV")
CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/rljob
IMAGES=$CACHE/images
SOCKET=/run/rljob/containerd.sock
DEBIAN=trixie # its Python is one that all our wheels are made for
export PATH=$PATH:/usr/sbin:/sbin
unset PYTHONDONTWRITEBYTECODE
cd "$ROOT"

BEGAN=$(date +%s%N)
say() { local ms=$((($(date +%s%N) - BEGAN) / 1000000)); printf '[%4d.%ds] images: %s\n' $((ms / 1000)) $((ms / 100 % 10)) "$*"; }
die() { echo "ERROR: $*" >&2; exit 1; }

# ---------------------------------------------------------------- what the content is called
digest() { sha256sum | cut -c1-12; }
tree() { find "$@" -type f ! -path '*/__pycache__/*' ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum; }
packages_of_base() { grep -v '^ *\(#\|$\)' images/base/packages; }
base_key() {
  if [ -n "${RLJOB_BASE_IMAGE:-}" ]; then echo "$RLJOB_BASE_IMAGE"; else echo "$DEBIAN" | cat - images/base/Dockerfile images/base/packages; fi | digest
}
# The part of a Dockerfile before our own code. Comments do not count.
dependency_steps() { sed -n '/^#/d; /^FROM dependencies$/q; p' "images/$1/Dockerfile"; }
dependency_key() {
  { base_key; dependency_steps "$1"; cat images/install-dependencies.sh "requirements-$1.lock" requirements-uv.lock; } | digest
}
code_folders() { sed -n 's/^COPY \([a-z_/]*\) .*/\1/p' "images/$1/Dockerfile" | grep -v '\.'; }
content_key() { # shellcheck disable=SC2046 # folders of our own, without spaces
  { dependency_key "$1"; cat "images/$1/Dockerfile" images/dockerignore; tree $(code_folders "$1"); } | digest
}

# name_all KIND: taken once, since somebody may be editing while this runs; the build makes sure that it took what it named.
name_all() {
  BASE=localhost/rljob-base:$(base_key)
  DEPENDENCIES=localhost/rljob-$1-dependencies:$(dependency_key "$1")
  CONTENT=localhost/rljob-$1:$(content_key "$1")
  LATEST=localhost/rljob-$1:dev
}

# ---------------------------------------------------------------- build
builder() { # COMMAND ARGUMENT...
  TMPDIR=$IMAGES/tmp buildah --root "$IMAGES/storage" --runroot "$IMAGES/run" --storage-driver overlay "$@"
}
exists() { builder inspect --type image "$1" > /dev/null 2>&1; }

# timed WHAT COMMAND...: a line at the start and at the end; the command's words only when it fails. Inside COMMAND bash does not
# stop at a failure by itself, so a function of several steps joins them with &&.
timed() {
  local what=$1 began log=$IMAGES/build.log seconds
  shift
  began=$(date +%s)
  say "$what ..."
  if ! "$@" > "$log" 2>&1; then
    tail -n 25 "$log" >&2
    die "$what: failed; the last lines are above, all of them in $log"
  fi
  seconds=$(($(date +%s) - began))
  say "$what: done in $((seconds / 60))m$(printf %02d $((seconds % 60)))s"
}

build_from() { # DOCKERFILE TAG CONTEXT ARGUMENT...
  local file=$1 tag=$2 context=$3
  shift 3
  builder build --isolation chroot --signature-policy "$IMAGES/policy.json" --quiet -f "$file" -t "$tag" "$@" "$context"
}

# The mirror is the one that this machine installs its own packages from.
debian_mirror() {
  apt-get indextargets --format '$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' 2> /dev/null |
    sed -n 's/^Debian|Debian|main|//p' | head -n 1
}
make_base() {
  local work=$IMAGES/tmp/base mirror
  mirror=$(debian_mirror)
  [ -n "$mirror" ] || { echo "no Debian mirror is configured for apt on this machine; name an image with Python 3.12 or 3.13 in RLJOB_BASE_IMAGE"; return 1; }
  rm -rf "$work" && mkdir -p "$work" &&
    SOURCE_DATE_EPOCH=1735689600 mmdebstrap --variant=minbase --mode=root --skip=output/dev --include="$(packages_of_base | paste -sd,)" \
      --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/info/*' \
      --dpkgopt='path-exclude=/usr/share/locale/*' --customize-hook='rm -f "$1"/etc/resolv.conf "$1"/etc/hostname "$1"/etc/apt/sources.list' \
      "$DEBIAN" "$work/rootfs.tar" "$mirror" &&
    build_from images/base/Dockerfile "$BASE" "$work" &&
    rm -rf "$work"
}
ensure_base() {
  if exists "$BASE"; then return; fi
  if [ -n "${RLJOB_BASE_IMAGE:-}" ]; then
    timed "base image $RLJOB_BASE_IMAGE" builder pull --signature-policy "$IMAGES/policy.json" "$RLJOB_BASE_IMAGE"
    builder tag "$RLJOB_BASE_IMAGE" "$BASE"
  else
    timed "base image from Debian $DEBIAN packages" make_base
  fi
}

# What the build needs to reach the package index the way this machine does. Secrets: they leave no trace in the image.
write_secrets() {
  local name value
  : > "$IMAGES/tmp/registry"
  for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST UV_INDEX_URL UV_EXTRA_INDEX_URL UV_DEFAULT_INDEX UV_INDEX UV_INSECURE_HOST \
    HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy; do
    value=${!name:-}
    [ -z "$value" ] || printf '%s=%q\n' "$name" "$value" >> "$IMAGES/tmp/registry"
  done
  cat "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" > "$IMAGES/tmp/ca" 2> /dev/null || : > "$IMAGES/tmp/ca"
}
make_dependencies() {
  write_secrets &&
    build_from "images/$1/Dockerfile" "$DEPENDENCIES" . --ignorefile images/dockerignore --target dependencies \
      --build-arg "BASE_IMAGE=$BASE" --secret "id=registry,src=$IMAGES/tmp/registry" --secret "id=ca,src=$IMAGES/tmp/ca" &&
    rm -f "$IMAGES/tmp/registry" "$IMAGES/tmp/ca"
}
make_content() {
  build_from "images/$1/Dockerfile" "$CONTENT" . --ignorefile images/dockerignore \
    --build-context "dependencies=container-image://$DEPENDENCIES"
}
build_code() {
  timed "$1: our code" make_content "$1"
  while [ "$CONTENT" != "localhost/rljob-$1:$(content_key "$1")" ]; do
    builder rmi "$CONTENT" > /dev/null
    name_all "$1"
    timed "$1: our code, which was changed meanwhile" make_content "$1"
  done
  builder tag "$CONTENT" "$LATEST"
}

# Earlier contents of an image, and earlier dependencies, so that the folder does not grow with every change.
forget_earlier() {
  local image old
  for image in "$CONTENT" "$DEPENDENCIES"; do
    builder images --format '{{.Name}}:{{.Tag}}' | sed -n "s#^${image%:*}:#&#p" | grep -v -e ":dev$" -e "^$image\$" | while read -r old; do
      builder rmi "$old" > /dev/null 2>&1 || say "note: could not delete the earlier image $old"
    done || true
  done
}
size() { builder inspect --type image --format '{{.Manifest}}' "$1" | tr ',' '\n' | sed -n 's/.*"size":\([0-9]*\).*/\1/p' | awk '{s += $1} END {printf s < 1e9 ? "%d MB" : "%.1f GB", s < 1e9 ? s / 1e6 : s / 1e9}'; }

build() { # KIND
  if exists "$CONTENT"; then say "$1: unchanged ($CONTENT)"; return; fi
  if ! exists "$DEPENDENCIES"; then
    ensure_base
    timed "$1: dependencies (once per lock file)" make_dependencies "$1"
  fi
  build_code "$1"
  forget_earlier "$1"
  say "$1: built $LATEST, $(size "$LATEST")"
}

# ---------------------------------------------------------------- load
embedded() { [ -z "${KUBECONFIG:-}" ] || [ "$KUBECONFIG" = /run/rljob/kubeconfig ]; }
how_to_push() {
  say "KUBECONFIG=$KUBECONFIG is a cluster of your own, which is not written to. Push $LATEST to a registry that its nodes can pull from:
    buildah --root $IMAGES/storage --runroot $IMAGES/run push $LATEST docker://REGISTRY/rljob-$1:dev
  and name it: RLJOB_${1^^}_IMAGE=REGISTRY/rljob-$1:dev"
}
load() { # KIND
  embedded || { how_to_push "$1"; return 0; }
  "$DEV/cluster.sh" ready || die "$1 was not loaded"
  exists "$CONTENT" || die "$1 is not built, or has changed since: dev/images.sh build $1"
  TMPDIR=$IMAGES/tmp python3 -IS "$DEV/image_load.py" --socket "$SOCKET" --storage "$IMAGES" \
    --dependencies "$DEPENDENCIES" --name "$LATEST" "$CONTENT"
}

# ---------------------------------------------------------------- the command line
prepare() {
  [ "$(id -u)" = 0 ] || die "images are built as root here (chroots and overlay mounts): run with sudo, or build with Docker: docker build -f images/operator/Dockerfile ."
  dev/packages.sh ensure buildah mmdebstrap util-linux
  mkdir -p "$IMAGES"/{storage,run,tmp/buildah-cache} "$CACHE/uv"
  # the cache mount of the Dockerfiles is the one that `make install` fills
  ln -sfn "${UV_CACHE_DIR:-$CACHE/uv}" "$IMAGES/tmp/buildah-cache/rljob-uv"
  echo '{"default": [{"type": "insecureAcceptAnything"}]}' > "$IMAGES/policy.json"
}
# In a mount namespace of its own, so that the builder's mounts end with it however it ends; what it insists on keeping under
# /var/lib/containers lies in the cache.
isolated() {
  mkdir -p "$IMAGES/cache"
  mount --bind "$IMAGES/cache" /var/lib/containers
  exec 9> "$IMAGES/lock"
  flock -n 9 || { say "waiting for another build"; flock 9; }
  # what an interrupted build left
  builder rm --all > /dev/null 2>&1 || true
  find "$IMAGES/tmp" -mindepth 1 -maxdepth 1 ! -name buildah-cache -exec rm -rf {} +
  local action=$1 kind
  shift
  for kind in "$@"; do
    name_all "$kind"
    case $action in build | all) build "$kind" ;; esac
    case $action in load | all) load "$kind" ;; esac
  done
}
enter() {
  prepare
  if [ ! -d /var/lib/containers ]; then
    mkdir -p /var/lib/containers
    trap 'rmdir /var/lib/containers 2> /dev/null || true' EXIT
  fi
  unshare --mount --propagation private "$SELF" --isolated "$@"
}
kinds() { # KIND... -> the same, checked; without any: both
  local kind
  [ $# -gt 0 ] || set -- operator workload
  for kind in "$@"; do [ -f "images/$kind/Dockerfile" ] && [ "$kind" != base ] || die "no image called '$kind'; there are operator and workload"; done
  echo "$@"
}

# Without those that a cluster of the user's pulls from a registry already.
not_given() { # KIND...
  local kind given
  for kind in "$@"; do
    given=RLJOB_${kind^^}_IMAGE
    if ! embedded && [ -n "${!given:-}" ]; then say "$kind: ${!given}, as $given says" >&2; else echo "$kind"; fi
  done
}

case ${1:-} in
  build | load | all)
    action=$1
    shift
    wanted=$(kinds "$@")
    [ "$action" = build ] || wanted=$(not_given $wanted)
    # shellcheck disable=SC2086 # words of our own
    [ -z "$wanted" ] || enter "$action" $wanted
    ;;
  hash) [ $# = 2 ] || die "hash wants one of operator, workload"; content_key "$(kinds "$2")" ;;
  clean) rm -rf "$IMAGES"; echo "deleted $IMAGES" ;;
  --isolated) shift; isolated "$@" ;;
  *) sed -n '2,14p' "$SELF" | sed 's/^# \{0,1\}//'; exit 2 ;;
esac
