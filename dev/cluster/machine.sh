# shellcheck shell=bash
# What the cluster changes on the machine, and how that is undone. Sourced by dev/cluster.sh.
#
# Everything runs in a network namespace without a route outside (no packet of the cluster can leave the machine, and the host's
# addresses, routes and firewall stay as they are) and in a mount namespace of its own, which hides the folders whose places the
# programs fix and dies with its last process, with all mounts in it. What is left for `down`: the network namespace's name, the
# cgroups, one sysctl, and our folders.

# The folders that kubelet, containerd and CNI insist on. Inside, ours lie over them; outside they stay empty.
FIXED_FOLDERS="/var/lib/kubelet /var/lib/cni /var/log/containers /run/containerd"
# What the kubelet sets for the whole machine: inside, it finds these files with its values already there and changes nothing.
KUBELET_SYSCTLS="vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000"
INOTIFY=/proc/sys/fs/inotify/max_user_instances
INOTIFY_WANTED=1024

# inside COMMAND...: a function of these scripts, in the cluster's namespaces
inside() {
  nsenter --net="$NETNS" --mount="/proc/$(pid_of keeper)/ns/mnt" bash "$SELF" --inside "$@"
}

machine_up() {
  local folder
  mkdir -p "$STATE"/{conf,cni,hidden} "$DATA"/{pv,kubelet,logs}
  chmod 711 "$DATA" "$DATA/pv"
  if [ "$(cat $INOTIFY)" -lt $INOTIFY_WANTED ]; then
    cat $INOTIFY > "$STATE/inotify.saved"
    echo $INOTIFY_WANTED > $INOTIFY
  fi
  for folder in $FIXED_FOLDERS; do
    [ -d "$folder" ] || { mkdir -p "$folder"; echo "$folder" >> "$STATE/made-folders"; }
  done
  cgroups_up
  ip netns add "$CLUSTER"
  # slave: when the host unmounts something, it goes here too. Then shared, for pods that ask for mount propagation.
  start keeper nsenter --net="$NETNS" unshare --mount --propagation slave bash "$SELF" --inside keeper
  wait_for 20 "the namespaces" keeper test -e "$STATE/namespaces"
}

keeper() { # the first process in the namespaces: sets them up and stays
  local folder setting name
  mount --make-rshared /
  ip link set lo up
  for folder in $FIXED_FOLDERS; do
    mkdir -p "$STATE/hidden$folder"
    mount --bind "$STATE/hidden$folder" "$folder"
  done
  mount --bind "$DATA/kubelet" /var/lib/kubelet
  for setting in $KUBELET_SYSCTLS; do
    name=${setting%%=*}
    [ -e "/proc/sys/$name" ] || continue
    echo "${setting#*=}" > "$STATE/hidden/${name//\//.}"
    mount --bind "$STATE/hidden/${name//\//.}" "/proc/sys/$name"
  done
  printf 'nameserver %s\nsearch default.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n' "$NODE_IP" > "$STATE/conf/resolv.conf"
  [ ! -e /etc/resolv.conf ] || mount --bind "$STATE/conf/resolv.conf" /etc/resolv.conf
  network_up
  touch "$STATE/namespaces"
  exec sleep infinity
}

network_up() {
  # no dummy device is needed: the pods' bridge is the node's address as well
  ip link add "$CLUSTER" type bridge
  ip addr replace "$NODE_IP/24" dev "$CLUSTER"
  ip link set "$CLUSTER" up
  ip route replace "$SVC_CIDR" dev "$CLUSTER"
  echo 1 > /proc/sys/net/ipv4/ip_forward    # of this namespace only
  nft -f - << A
table ip $CLUSTER {
  chain post {
    type nat hook postrouting priority srcnat
    ip saddr $POD_CIDR ip daddr != $POD_CIDR oifname != "$CLUSTER" masquerade
  }
}
A
}

# ---------------------------------------------------------------- cgroups
# Everything lies under one name in each hierarchy.
cgroup_roots() {
  if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then echo /sys/fs/cgroup; return; fi
  local h
  for h in cpu cpuacct cpuset memory devices freezer blkio pids systemd hugetlb; do
    if mountpoint -q "/sys/fs/cgroup/$h"; then echo "/sys/fs/cgroup/$h"; fi
  done
}
cgroups_up() {
  local root f
  for root in $(cgroup_roots); do
    mkdir -p "$root/$CLUSTER"
    case $root in
      */cpuset) for f in cpuset.cpus cpuset.mems; do cat "$root/$f" > "$root/$CLUSTER/$f"; done ;;
      /sys/fs/cgroup) sed 's/[a-z0-9_]*/+&/g' "$root/cgroup.controllers" > "$root/$CLUSTER/cgroup.subtree_control" ;;
    esac
  done
}
cgroup_pids() { for h in /sys/fs/cgroup /sys/fs/cgroup/*; do [ ! -d "$h/$CLUSTER" ] || find "$h/$CLUSTER" -name cgroup.procs -exec cat {} + 2> /dev/null; done | sort -u; }
cgroups_down() {
  local h
  for h in /sys/fs/cgroup /sys/fs/cgroup/*; do
    [ -d "$h/$CLUSTER" ] || continue
    find "$h/$CLUSTER" -depth -type d -exec rmdir {} + 2> /dev/null || true
  done
}

# ---------------------------------------------------------------- what is left of a cluster, whatever state it is in
cluster_pids() { # all processes of the cluster, pods included
  { cgroup_pids
    if [ -e "$NETNS" ]; then ip netns pids "$CLUSTER" 2> /dev/null || true; fi
    local name
    if same_boot; then for name in $PROCESSES; do pid_of "$name" || true; done; fi
    # shims and pods outlive both the runtime and the namespace's name; a shim names our socket
    grep -laF -- "$SOCKET" /proc/[0-9]*/cmdline 2> /dev/null | cut -d/ -f3 | while read -r pid; do
      case $(readlink "/proc/$pid/exe") in *containerd*) echo "$pid" ;; esac
    done; } | sort -un | grep -vx "$$" || true
}
kill_all() {
  local pids end
  end=$(($(date +%s) + 30))
  while pids=$(cluster_pids) && [ -n "$pids" ]; do
    [ "$(date +%s)" -lt $end ] || die "these processes of the cluster do not end: $(echo "$pids" | tr '\n' ' ')"
    # shellcheck disable=SC2086
    kill -9 $pids 2> /dev/null || true
    sleep .05
  done
}
left_mounts() { awk -v s="$STATE/" -v d="$DATA/" 'index($5, s) == 1 || index($5, d) == 1 { print $5 }' /proc/self/mountinfo | sort -r; }
leftovers() { # is there anything to sweep?
  [ -e "$STATE" ] || [ -e "$DATA" ] || [ -e "$NETNS" ] || [ -n "$(find /sys/fs/cgroup -maxdepth 2 -name "$CLUSTER" -print -quit)" ]
}

# sweep: leave nothing behind, from any state: all processes killed, half of an `up`, a machine that was stopped hard.
sweep() {
  local mount folder
  kill_all
  for mount in $(left_mounts); do umount "$mount" 2> /dev/null || umount -l "$mount"; done
  if [ -e "$NETNS" ]; then
    # after a hard stop the name may be a plain file, without a namespace behind it
    ip netns delete "$CLUSTER" 2> /dev/null || { umount -l "$NETNS" 2> /dev/null || true; rm -f "$NETNS"; }
  fi
  cgroups_down
  if same_boot && [ -s "$STATE/inotify.saved" ]; then cat "$STATE/inotify.saved" > $INOTIFY; fi
  if [ -s "$STATE/made-folders" ]; then
    while read -r folder; do rmdir "$folder" 2> /dev/null || true; done < "$STATE/made-folders"
  fi
  [ -z "$(left_mounts)" ] || die "still mounted: $(left_mounts | tr '\n' ' ')"
  rm -rf --one-file-system "$DATA" "$STATE"
}
