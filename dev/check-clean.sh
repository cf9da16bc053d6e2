#!/bin/bash
# Lists everything that the embedded cluster has left on this machine; ends with 0 when there is nothing, else with 1.
#
#   dev/check-clean.sh              after dev/cluster.sh down
#   dev/check-clean.sh --snapshot   print the machine's state; `up` keeps it before it changes anything, for the comparison
set -euo pipefail
DEV=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
for part in lib machine; do
  # shellcheck source=/dev/null
  . "$DEV/cluster/$part.sh"
done
BEFORE=$CACHE/cluster/before-up

# Values that change by themselves, or with the load.
VOLATILE='^(kernel\.(random|ns_last_pid|pty|perf_event_max_sample_rate|sched_domain)|fs\.(dentry-state|file-nr|inode-nr|inode-state|aio-nr|quota|epoll)|net\.netfilter\.nf_conntrack_count|vm\.stat_refresh|dev\.cdrom)'
snapshot() {
  cat /proc/sys/kernel/random/boot_id
  sysctl -a 2> /dev/null | grep -Ev "$VOLATILE" | sed 's/^/sysctl /' | sort
  ip -o link show | sed 's/^[0-9]*: \([^:@]*\).*/link \1/' | sort
  ip -4 route show | sed 's/^/route /'
  nft list tables 2> /dev/null | sed 's/^/nft /' | sort
  local f
  for f in $FIXED_FOLDERS; do [ ! -e "$f" ] || echo "folder $f"; done
}

found=0
left() { # WHAT, and lines on standard input
  local lines
  lines=$(cat)
  [ -n "$lines" ] || return 0
  found=1
  echo "left behind: $1"
  echo "$lines" | head -n 20 | sed 's/^/    /'
}

# compare: only what the cluster could have changed counts. What was there before and differs, and what is new but a sysctl
# (a kernel module that was loaded brings new ones).
compare() {
  local now
  [ -s "$BEFORE" ] || { echo "(no state from before an \`up\` to compare with)"; return 0; }
  [ "$(head -1 "$BEFORE")" = "$(cat /proc/sys/kernel/random/boot_id)" ] || { echo "(the machine was started anew since the last \`up\`; nothing to compare with)"; return 0; }
  now=$(mktemp)
  snapshot > "$now"
  awk 'FNR == 1 { next }
       FNR == NR { seen[$0] = 1; if ($1 == "sysctl") old[$2] = $0; next }
       $1 != "sysctl" && !($0 in seen) { print }
       $1 == "sysctl" && ($2 in old) && old[$2] != $0 { print $0 "   (was: " substr(old[$2], 8) ")" }' "$BEFORE" "$now" | grep -v '^link docker\|^link veth' | left "changed since before \`up\`" || true
  rm -f "$now"
}

check() {
  cluster_pids | while read -r pid; do echo "$pid $(tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c1-120)"; done | left "processes"
  left_mounts | left "mounts"
  find /sys/fs/cgroup -maxdepth 2 -name "$CLUSTER" | left "cgroups"
  { ip netns list 2> /dev/null | grep -E "^($CLUSTER|cni-)" || true; } | left "network namespaces"
  { ip -o link show "$CLUSTER" 2> /dev/null || true; } | left "links"
  { nft list tables 2> /dev/null | grep -E " ($CLUSTER|kube-proxy)\$" || true; } | left "nft tables"
  { ip -4 route show | grep -F "$POD_CIDR"; ip -4 route show | grep -F "$SVC_CIDR"; } | left "routes" || true
  { find /run/containerd/s /var/lib/cni /var/lib/kubelet /var/log/containers -mindepth 1 2> /dev/null || true; } | left "files"
  for f in "$STATE" "$DATA" /tmp/hostpath_pv "$NETNS"; do [ ! -e "$f" ] || echo "$f"; done | left "files"
  { ss -Hltn "( sport = :$API_PORT )" || true; } | left "a listener on the API server's port"
  compare
}

case ${1:-} in
  --snapshot) snapshot ;;
  '') check; [ $found = 0 ] || exit 1; echo "clean: the embedded cluster has left nothing on this machine" ;;
  *) sed -n '2,5p' "$0" | sed 's/^# \{0,1\}//'; exit 2 ;;
esac
