#!/bin/bash
# The embedded cluster: a real one-node Kubernetes with the real KubeRay operator, on this machine, from packages.
#
#   dev/cluster.sh up              start it and wait until it is ready (the first time: compile it, some minutes)
#   dev/cluster.sh down [--force]  stop it and undo every change to the machine; --force also another checkout's cluster
#   dev/cluster.sh status          say what runs; ends with 1 when it is not up
#   dev/cluster.sh ready           end with 0 when it is up and held by this checkout, else say who holds it
#   dev/cluster.sh exec COMMAND    run a command where pod and service addresses and names exist
#   dev/cluster.sh load ARCHIVE    import a docker or OCI archive, so that pods can use its images
#   dev/cluster.sh env             print the lines that make kubectl and helm use it: eval "$(dev/cluster.sh env)"
#   dev/cluster.sh build           only compile what `up` needs
#
# With KUBECONFIG set to a cluster of your own, up, down, status and env speak about that one, and nothing is built or started.
# RLJOB_API_PORT   the loopback port of its API server (default 6443)
# XDG_CACHE_HOME   where the compiled programs and imported images are kept (default ~/.cache, below rljob/)
# CLUSTER_DEBUG    set: keep everything running after a failed `up`
set -euo pipefail
DEV=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
SELF=$DEV/cluster.sh
for part in lib build machine config components commands external; do
  # shellcheck source=/dev/null
  . "$DEV/cluster/$part.sh"
done

case ${1:-} in
  up | down | status | ready | load | exec | env | build)
    command=$1
    shift
    if external; then "external_$command" "$@"; else "cluster_$command" "$@"; fi
    ;;
  # by up, inside the cluster's namespaces
  --inside) shift; trap 'exit 130' INT TERM; "$@" ;;
  -h | --help | help) sed -n '2,16p' "$SELF" | sed 's/^# \{0,1\}//' ;;
  *) { [ -z "${1:-}" ] || echo "unknown command: $1"; sed -n '2,16p' "$SELF" | sed 's/^# \{0,1\}//'; } >&2; exit 2 ;;
esac
