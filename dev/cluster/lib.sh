# shellcheck shell=bash disable=SC2034
# Names, messages, and processes that are remembered by pid and start time. Sourced by dev/cluster.sh.

CLUSTER=rljob                           # the namespace, bridge, cgroup, nft table and node are called this
STATE=/run/rljob                        # sockets, pids, certificates, kubeconfigs: short paths, gone after down
DATA=/var/lib/rljob                     # etcd, volumes, the kubelet's folder, logs: gone after down
CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/rljob   # what later starts use again
CHECKOUT=$(dirname "$DEV")
OWNER=$STATE/owner
NETNS=/run/netns/$CLUSTER
CLUSTER_KUBECONFIG=$STATE/kubeconfig
BIN=$STATE/bin                          # a link to the programs that the running cluster was started with
SOCKET=$STATE/containerd.sock
LOGS=$DATA/logs

POD_CIDR=10.244.0.0/24
NODE_IP=10.244.0.1
SVC_CIDR=10.96.0.0/16
SVC_IP=10.96.0.1
API_PORT=${RLJOB_API_PORT:-6443}

PROCESSES="keeper etcd kube-apiserver kube-controller-manager kube-scheduler volume-provisioner containerd kubelet kube-proxy coredns forward"

# shellcheck source=dev/versions.env
. "$DEV/versions.env"
export PATH=$PATH:/usr/local/go/bin:/usr/sbin:/sbin

STARTED=${RLJOB_STARTED:-$(date +%s%N)}
export RLJOB_STARTED=$STARTED           # commands inside the namespaces count from the same moment

say() {
  local ms=$((($(date +%s%N) - STARTED) / 1000000))
  printf '[%4d.%ds] %s\n' $((ms / 1000)) $((ms / 100 % 10)) "$*"
}
die() { echo "ERROR: $*" >&2; exit 1; }

# ---------------------------------------------------------------- processes
# A pid file holds "PID STARTTIME", so that a pid that the system gave to another process is never taken for ours.
starttime() {
  local stat fields
  stat=$(cat "/proc/$1/stat" 2> /dev/null) || return 1
  read -ra fields <<< "${stat##*) }"    # the name in parentheses may hold anything; fields counts from the state on
  [ "${fields[0]}" != Z ] && echo "${fields[19]}"
}
alive() { # NAME
  local pid started
  { read -r pid started < "$STATE/pids/$1"; } 2> /dev/null || return 1
  [ "$(starttime "$pid")" = "$started" ]
}
pid_of() { local pid; alive "$1" || return 1; read -r pid _ < "$STATE/pids/$1"; echo "$pid"; }

start() { # NAME COMMAND...
  local name=$1
  shift
  # no inherited descriptor may keep a lock of ours held
  setsid nohup "$@" < /dev/null >> "$LOGS/$name.log" 2>&1 7>&- 9>&- &
  disown $!    # bash would tell of its end in words of its own
  echo "$! $(starttime $!)" > "$STATE/pids/$name"
}

# stop NAME...: SIGTERM to all of them, SIGKILL to those that are there after 10 s.
stop() {
  local name pid end
  for name in "$@"; do if pid=$(pid_of "$name"); then kill "$pid" 2> /dev/null || true; fi; done
  end=$(($(date +%s) + 10))
  for name in "$@"; do
    while pid=$(pid_of "$name"); do
      if [ "$(date +%s)" -ge $end ]; then kill -9 "$pid" 2> /dev/null || true; fi
      sleep .05
    done
    rm -f "$STATE/pids/$name"
  done
}

# wait_for SECONDS WHAT PROCESS COMMAND...: until COMMAND succeeds; fails at once when PROCESS has ended.
wait_for() {
  local seconds=$1 what=$2 process=$3 end
  shift 3
  end=$(($(date +%s) + seconds))
  until "$@" > /dev/null 2>&1; do
    alive "$process" || die "$process ended while waiting for $what: $(tail -n 3 "$LOGS/$process.log")"
    [ "$(date +%s)" -lt "$end" ] || die "no $what after $seconds s: $(tail -n 3 "$LOGS/$process.log")"
    sleep .1
  done
}

# ---------------------------------------------------------------- who holds the cluster
owner_field() { [ ! -r "$OWNER" ] || sed -n "s/^$1=//p" "$OWNER"; }
same_boot() { [ "$(owner_field boot)" = "$(cat /proc/sys/kernel/random/boot_id)" ]; }   # else pids mean nothing any more
cluster_lives() { # does any process of it live?
  local name
  same_boot || return 1
  for name in $PROCESSES; do if alive "$name"; then return 0; fi; done
  return 1
}
cluster_complete() {
  local name
  for name in $PROCESSES; do alive "$name" || return 1; done
  [ -e "$STATE/ready" ]
}
write_owner() {
  mkdir -p "$STATE/pids" "$DATA"
  ln -sfn "$(bin_dir)" "$BIN"
  { echo "checkout=$CHECKOUT"
    echo "since=$(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "boot=$(cat /proc/sys/kernel/random/boot_id)"
    echo "cache=$CACHE"
    echo "build=$(build_key)"; } > "$OWNER"
}

# mine: ends when another checkout's cluster lives. A checkout that was deleted holds nothing.
mine() {
  local holder
  holder=$(owner_field checkout)
  if [ -z "$holder" ] || [ "$holder" = "$CHECKOUT" ] || ! cluster_lives; then return 0; fi
  if [ ! -e "$holder/dev/cluster.sh" ]; then say "the cluster that runs belongs to $holder, which is gone"; return 0; fi
  die "the embedded cluster on this machine is held by the checkout $holder (since $(owner_field since)).
  One runs at a time. Stop it there: $holder/dev/cluster.sh down
  or from here, whatever it is doing: $SELF down --force"
}

# One command at a time changes the cluster. The lock is on a folder that always exists, so that no lock file is left behind.
lock() {
  exec 9< /run
  flock -n 9 && return
  say "waiting for another dev/cluster.sh up or down to end"
  flock -w 900 9 || die "another dev/cluster.sh has been at work for 15 minutes; look for it with: ps -ef | grep cluster.sh"
}
need_root() {
  [ "$(id -u)" = 0 ] || die "the embedded cluster needs root: it makes namespaces, cgroups and containers. Run it with sudo,
  or use a cluster of your own: export KUBECONFIG=/path/to/kubeconfig"
}
