#!/bin/bash
# Debian packages that this project's scripts need.
#
#   dev/packages.sh ensure NAME...   install those that are missing (as root, on Debian), otherwise name them and end with 1
#   dev/packages.sh check NAME...    only print the missing ones; ends with 1 when there are any
#
# NAME is a Debian package. What counts is the program, not the package: a machine that has containerd from elsewhere keeps it.
# Nothing that a package would start as a service is started.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

have() { local c; for c in "$@"; do command -v "$c" > /dev/null || return 1; done; }

# present NAME: is what the package is needed for on this machine?
present() {
  case $1 in
    containerd) have containerd ctr containerd-shim-runc-v2 ;;
    containernetworking-plugins) [ -x /usr/lib/cni/bridge ] || [ -x /opt/cni/bin/bridge ] ;;
    nftables) have nft ;;
    iproute2) have ip ss ;;
    procps) have ps sysctl ;;
    util-linux) have nsenter unshare flock mountpoint setsid ;;
    runc | conntrack | openssl | curl | debootstrap | buildah | git | make | tmux | shellcheck) have "$1" ;;
    *) have "$1" || dpkg-query -W -f '${db:Status-Status}' "$1" 2> /dev/null | grep -qx installed ;;
  esac
}

missing() { local n; for n in "$@"; do present "$n" || echo "$n"; done; }

# Debian's own way to say "start no service": a policy file. Without systemd or another init it is mostly there already.
forbid_services() {
  POLICY=/usr/sbin/policy-rc.d
  [ ! -e "$POLICY" ] || return 0
  printf '#!/bin/sh\nexit 101\n' > "$POLICY"
  chmod 755 "$POLICY"
  trap 'rm -f "$POLICY"' EXIT
}

# refresh_lists: apt's package lists go stale within days, and a fresh machine has none.
lists_are_fresh() { [ -n "$(find /var/lib/apt/lists -maxdepth 1 -name '*_Packages*' -mmin -1440 -print -quit 2> /dev/null)" ]; }

install() {
  local log ours=0
  log=$(mktemp)
  exec 8< /var/lib/apt
  flock -n 8 || { echo "waiting for another installation of packages"; flock 8; }
  forbid_services
  pgrep -x containerd > /dev/null || ours=1
  export DEBIAN_FRONTEND=noninteractive
  echo "installing Debian packages: $*"
  local get=(apt-get -q -o DPkg::Lock::Timeout=300 -y)
  if ! { { lists_are_fresh || "${get[@]}" update; } && "${get[@]}" install --no-install-recommends "$@"; } > "$log" 2>&1 8<&- &&
    ! { "${get[@]}" update && "${get[@]}" install --no-install-recommends "$@"; } >> "$log" 2>&1 8<&-; then
    tail -n 15 "$log" >&2
    echo "ERROR: apt-get could not install: $*; its last words are above, all of them in $log" >&2
    exit 1
  fi
  rm -f "$log"
  # A policy file of the machine's own may allow services. We need the program only; stop it if it was not there before.
  if [ "$ours" = 1 ] && pgrep -x containerd > /dev/null && have systemctl; then systemctl stop containerd.service; fi
}

ensure() {
  local names
  mapfile -t names < <(missing "$@")
  [ ${#names[@]} -gt 0 ] || return 0
  if ! have apt-get; then
    echo "ERROR: missing on this machine: ${names[*]} (names of Debian packages; install the same programs with this system's package manager)" >&2
    exit 1
  fi
  if [ "$(id -u)" != 0 ]; then
    echo "ERROR: missing on this machine: ${names[*]}. Install with: sudo apt-get install --no-install-recommends ${names[*]}" >&2
    exit 1
  fi
  install "${names[@]}"
  mapfile -t names < <(missing "$@")
  [ ${#names[@]} -eq 0 ] || { echo "ERROR: still missing after the installation: ${names[*]}" >&2; exit 1; }
}

case ${1:-} in
  ensure) shift; ensure "$@" ;;
  check) shift; out=$(missing "$@"); [ -z "$out" ] || { echo "$out"; exit 1; } ;;
  *) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 2 ;;
esac
