# shellcheck shell=bash
# Compiles the cluster's programs into the cache. Sourced by dev/cluster.sh.
#
# Cache ($CACHE):  cluster/KEY/   programs and small images of one set of sources and versions
#                  go-build/      the compiler's own cache
#                  containerd/    imported images
# A build goes into a temporary folder and is renamed, so a folder that exists is complete.

GO_SOURCES=$DEV/cluster/go
GO_PACKAGES="./k8s ./coredns ./pause github.com/ray-project/kuberay/ray-operator helm.sh/helm/v3/cmd/helm"
BUILD_GB=6    # what a cold build needs on the disk, with the compiler's cache

build_key() {
  (cd "$DEV" && cat versions.env mkimage.py cluster/build.sh cluster/go/go.mod cluster/go/go.sum cluster/go/*/*.go) | sha256sum | cut -c1-16
}
bin_dir() { echo "$CACHE/cluster/$(build_key)"; }

check_versions() { # versions.env is what people read, go.mod what the compiler reads
  local module version found
  while read -r module version; do
    found=$(sed -n "s#^\t$module \(v[^ ]*\).*#\1#p" "$GO_SOURCES/go.mod")
    [ "$found" = "v$version" ] || die "dev/versions.env wants $module $version, dev/cluster/go/go.mod has $found. Make them agree: (cd dev/cluster/go && go get $module@v$version)"
  done << A
k8s.io/kubernetes $KUBERNETES_VERSION
go.etcd.io/etcd/server/v3 $ETCD_VERSION
github.com/coredns/coredns $COREDNS_VERSION
github.com/ray-project/kuberay/ray-operator $KUBERAY_VERSION
helm.sh/helm/v3 $HELM_VERSION
A
}
check_go() {
  local found
  command -v go > /dev/null || die "Go is missing; the first start compiles Kubernetes with it. Install Go >= $GO_MIN_VERSION and put it on PATH"
  found=$(cd / && go env GOVERSION | sed 's/^go//')
  [ "$(printf '%s\n' "$GO_MIN_VERSION" "$found" | sort -V | head -1)" = "$GO_MIN_VERSION" ] ||
    die "Go $found ($(command -v go)) is too old; Go >= $GO_MIN_VERSION is needed to compile Kubernetes $KUBERNETES_VERSION"
}
check_disk() {
  local free
  free=$(df -Pk "$CACHE" | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$free" -ge $BUILD_GB ] || die "only $free GB free at $CACHE; a first build needs $BUILD_GB GB. Free some, or set XDG_CACHE_HOME to another disk"
}

build() {
  local bin
  bin=$(bin_dir)
  if [ -d "$bin" ]; then touch "$bin"; return; fi
  check_versions
  check_go
  mkdir -p "$CACHE/cluster"
  check_disk
  exec 7> "$CACHE/cluster/lock"
  flock -n 7 || { say "another build runs; waiting for it"; flock 7; }
  if [ ! -d "$bin" ]; then build_into "$bin"; fi
  exec 7>&-
}

build_into() { # DIRECTORY
  local tmp log=$CACHE/cluster/build.log
  rm -rf "$CACHE"/cluster/tmp.*
  tmp=$(mktemp -d "$CACHE/cluster/tmp.XXXXXX")
  chmod 755 "$tmp"
  say "first start with these versions: compiling Kubernetes, etcd, CoreDNS, KubeRay and Helm (5 to 20 minutes on 2 cores)"
  compile "$tmp" "$log"
  ln -s k8s "$tmp/kubectl"
  mkdir "$tmp/images"
  python3 "$DEV/mkimage.py" "$tmp/images/pause.tar" localhost/rljob-pause:dev --entrypoint /pause "$tmp/pause=/pause"
  python3 "$DEV/mkimage.py" "$tmp/images/kuberay.tar" "localhost/kuberay-operator:$KUBERAY_VERSION" --entrypoint /manager --user 65532:65532 "$tmp/ray-operator=/manager"
  rm -f "$tmp/pause" "$tmp/ray-operator"
  mv -T "$tmp" "$1"
  say "compiled; kept in $1"
  # three sets are enough for switching between branches
  find "$CACHE/cluster" -mindepth 1 -maxdepth 1 -type d -printf '%T@ %p\n' | sort -rn | tail -n +4 | cut -d' ' -f2- | xargs -r rm -rf
}

# compile DIRECTORY LOG: go build names each package that it has compiled, so the log's length is the progress.
compile() {
  local v=k8s.io/component-base/version go_pid began
  local minor=${KUBERNETES_VERSION#*.}
  began=$(date +%s)
  : > "$2"
  (
    cd "$GO_SOURCES" || exit
    exec 7>&-
    export GOCACHE=$CACHE/go-build CGO_ENABLED=0 GOFLAGS='' GOWORK=off GOTOOLCHAIN=local
    # shellcheck disable=SC2086
    {
      go mod download
      cp -rT "$(go list -m -f '{{.Dir}}' github.com/ray-project/kuberay/ray-operator)/config" "$1/kuberay"
      chmod -R u+w "$1/kuberay"
      exec go build -v -p 2 -trimpath -buildvcs=false -o "$1/" -ldflags "-s -w -X $v.gitVersion=v$KUBERNETES_VERSION -X $v.gitMajor=1 -X $v.gitMinor=${minor%%.*} -X $v.gitTreeState=clean -X helm.sh/helm/v3/internal/version.version=v$HELM_VERSION -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=${minor%%.*} -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor=1 -X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor=${minor%%.*}" $GO_PACKAGES
    } > "$2" 2>&1
  ) &
  go_pid=$!
  # shellcheck disable=SC2064
  trap "kill $go_pid 2> /dev/null; exit 130" INT TERM
  while kill -0 "$go_pid" 2> /dev/null; do
    # wakes up at once when the compiler ends
    if [ -t 1 ]; then timeout 1 tail --pid="$go_pid" -f /dev/null || true; else timeout 10 tail --pid="$go_pid" -f /dev/null || true; fi
    compile_progress $(($(date +%s) - began)) "$(wc -l < "$2")"
  done
  [ ! -t 1 ] || echo
  trap - INT TERM
  wait "$go_pid" || { tail -n 15 "$2" >&2; die "the compilation failed; its last lines are above, all of them in $2"; }
}
compile_progress() { # SECONDS PACKAGES
  local text
  text="compiling Kubernetes ... $(($1 / 60))m$(printf %02d $(($1 % 60)))s, $2 of about 3150 packages"
  if [ -t 1 ]; then printf '\r%s' "$text"; else say "$text"; fi
}
