#!/bin/bash
# Lists everything that the embedded cluster has left on this machine; ends with 0 when there is nothing, else with 1.
#
#   dev/check-clean.sh              after dev/cluster.sh down
#   dev/check-clean.sh --snapshot   print the machine's state; `up` keeps it before it changes anything, for the comparison
set -u   # not -e: a search that finds nothing is the good case
DEV=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
for part in lib machine; do
  # shellcheck source=/dev/null
  . "$DEV/cluster/$part.sh"
done
BEFORE=$CACHE/cluster/before-up

# Values that change by themselves, or with the load.
VOLATILE='^(kernel\.(random|ns_last_pid|pty|perf_event_max_sample_rate|sched_domain)|kernel\.core_modes|fs\.(dentry-state|file-nr|inode-nr|inode-state|aio-nr|quota|epoll)|net\.netfilter\.nf_conntrack_count|vm\.stat_refresh|dev\.cdrom)'
snapshot() {
  cat /proc/sys/kernel/random/boot_id
  sysctl -a 2> /dev/null | grep -Ev "$VOLATILE" | sed 's/^/sysctl /' | sort
  ip -o link show | sed 's/^[0-9]*: \([^:@]*\).*/link \1/' | sort
  ip -4 route show | sed 's/^/route /'
  nft list tables 2> /dev/null | sed 's/^/nft /' | sort
  local f
  for f in $FIXED_FOLDERS; do [ ! -e "$f" ] || echo "folder $f"; done
  find /var/lib/cni /var/lib/kubelet /var/log/containers -mindepth 1 -maxdepth 1 2> /dev/null | sed 's/^/file /' | sort
}

found=0
left() { # WHAT LINES
  local lines=$2
  [ -n "$lines" ] || return 0
  found=1
  echo "left behind: $1"
  echo "$lines" | head -n 20 | sed 's/^/    /'
}

# changes: what is new (links, routes, tables, folders) and which kernel settings differ. A setting that was not there before came with
# a kernel module, which stays loaded. Interfaces of other programs may come and go.
changes() {
  local boot
  boot=$(head -n 1 "$BEFORE" 2> /dev/null)
  if [ "$boot" != "$(cat /proc/sys/kernel/random/boot_id)" ]; then return; fi   # no `up` since this machine was started
  awk 'FNR == 1 { next }
       FNR == NR { seen[$0] = 1; if ($1 == "sysctl") old[$2] = $0; next }
       $1 != "sysctl" && !($0 in seen) { print }
       $1 == "sysctl" && ($2 in old) && !($0 in seen) { print $0 "   (was: " substr(old[$2], 8) ")" }' "$BEFORE" <(snapshot) |
    grep -v '^link docker\|^link veth'
}

describe_pids() { # PID...
  local pid
  for pid in "$@"; do echo "$pid $(tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c1-120)"; done 2> /dev/null
}
existing() { local f; for f in "$@"; do [ ! -e "$f" ] || echo "$f"; done; }

check() {
  # shellcheck disable=SC2046
  left "processes" "$(describe_pids $(cluster_pids))"
  left "mounts" "$(left_mounts)"
  left "cgroups" "$(find /sys/fs/cgroup -maxdepth 2 -name "$CLUSTER")"
  left "network namespaces" "$(ip netns list 2> /dev/null | grep -E "^($CLUSTER|cni-)")"
  left "links" "$(ip -o link show "$CLUSTER" 2> /dev/null)"
  left "nft tables" "$(nft list tables 2> /dev/null | grep -E " ($CLUSTER|kube-proxy)\$")"
  left "routes" "$(ip -4 route show | grep -F -e "${POD_CIDR%/*}" -e "${SVC_CIDR%/*}")"
  left "files" "$(existing "$STATE" "$DATA" /tmp/hostpath_pv "$NETNS")"
  left "a listener on the API server's port" "$(ss -Hltnp "( sport = :$API_PORT )")"
  left "changed since before \`up\`" "$(changes)"
}

case ${1:-} in
  --snapshot) snapshot ;;
  '') check; [ $found = 0 ] || exit 1; echo "clean: the embedded cluster has left nothing on this machine" ;;
  *) sed -n '2,5p' "$0" | sed 's/^# \{0,1\}//'; exit 2 ;;
esac
