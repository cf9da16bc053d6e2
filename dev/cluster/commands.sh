# shellcheck shell=bash
# The commands for the embedded cluster. Sourced by dev/cluster.sh.

cluster_build() {
  "$DEV/packages.sh" ensure curl openssl util-linux
  build
  say "built: $(bin_dir)"
}

cluster_up() {
  need_root
  if already_up; then return; fi
  # shellcheck disable=SC2086
  "$DEV/packages.sh" ensure $CLUSTER_PACKAGES
  command -v python3 > /dev/null || die "python3 is missing; install it (Debian: apt-get install python3)"
  mine
  build
  lock
  if already_up; then return; fi   # another command may have been faster
  mine
  if leftovers; then
    say "removing what is left of an earlier cluster$(left_by)"
    sweep
  fi
  port_free
  "$DEV/check-clean.sh" --snapshot > "$CACHE/cluster/before-up"
  trap 'up_failed' EXIT
  trap 'exit 130' INT TERM
  write_owner
  machine_up
  inside components_up
  start forward python3 "$DEV/cluster/netns_forward.py" "$API_PORT" "$NETNS" "$API_PORT"
  wait_for 15 "the API server from the host" forward api_ready
  touch "$STATE/ready"
  trap - EXIT INT TERM
  say "up; in your shell: eval \"\$($SELF env)\""
}
already_up() {
  cluster_lives && cluster_complete && [ "$(owner_field checkout)" = "$CHECKOUT" ] || return 1
  say "already up; in your shell: eval \"\$($SELF env)\""
  [ "$(owner_field build)" = "$(build_key)" ] || say "note: it was started from other sources or versions; restart it with: $SELF down && $SELF up"
}
left_by() { local holder; holder=$(owner_field checkout); if [ -n "$holder" ] && [ "$holder" != "$CHECKOUT" ]; then echo " of $holder"; fi; }

# up_failed: nothing half started stays; the logs do, elsewhere.
up_failed() {
  local status=$?
  trap - EXIT INT TERM
  [ -z "${CLUSTER_DEBUG:-}" ] || { echo "CLUSTER_DEBUG is set: left as it is; logs in $LOGS" >&2; exit $status; }
  rm -rf "$CACHE/cluster/failed-logs"
  cp -r "$LOGS" "$CACHE/cluster/failed-logs" 2> /dev/null || true
  if [ $status = 130 ]; then
    echo "interrupted; taking down what had started" >&2
  else
    echo "the start did not succeed; taking down what had started. Its logs: $CACHE/cluster/failed-logs" >&2
  fi
  sweep
  [ $status -ne 0 ] || status=1
  exit $status
}

port_free() {
  local holder
  [[ $API_PORT =~ ^[1-9][0-9]{0,4}$ && $API_PORT -le 65535 ]] || die "RLJOB_API_PORT must be a port number, but it is '$API_PORT'"
  case $API_PORT in
    53 | 2379 | 2380 | 8181 | 10248 | 10249 | 10250 | 10256 | 10257 | 10259) die "RLJOB_API_PORT=$API_PORT is used by another component of the cluster; choose another, for example 16443" ;;
  esac
  holder=$(ss -Hltnp "( sport = :$API_PORT )")
  [ -z "$holder" ] ||
    die "port $API_PORT, for the API server, is taken by another program: $(sed -n 's/.*users:((\(.*\)))/\1/p' <<< "$holder" | head -1 | grep . || echo "(not visible)")
  Stop that program, or choose another port: RLJOB_API_PORT=16443 make cluster-up"
}

cluster_down() {
  local force=${1:-}
  [ -z "$force" ] || [ "$force" = --force ] || die "down knows only --force, not '$force'"
  need_root
  lock
  if ! leftovers; then say "nothing to stop: the embedded cluster is not up"; return; fi
  [ -n "$force" ] || mine
  if [ -x "$BIN/k8s" ] && alive containerd; then
    stop kubelet
    # the runtime itself ends the pods and undoes their networks and mounts
    "$BIN/k8s" cri-clean "unix://$SOCKET" >> "$LOGS/cri-clean.log" 2>&1 || say "note: not all pods ended in order: $(tail -n 1 "$LOGS/cri-clean.log")"
  fi
  stop forward containerd   # it keeps the images' book; nothing of the others is kept, so they need no goodbye
  sweep
  say "down; nothing is left behind (a check: dev/check-clean.sh). Compiled programs and images stay in $CACHE"
}

cluster_status() {
  local name pid kb
  if ! cluster_lives; then
    if leftovers; then echo "the embedded cluster is not up, but things of an earlier one are left; \`up\` or \`down\` removes them"; else echo "the embedded cluster is not up; start it with: $SELF up"; fi
    return 1
  fi
  echo "checkout $(owner_field checkout), since $(owner_field since), kubeconfig $CLUSTER_KUBECONFIG, logs $LOGS"
  for name in $PROCESSES; do
    if pid=$(pid_of "$name"); then
      kb=$(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status" 2> /dev/null || true)
      printf '%-24s pid %-8s rss %5d MiB\n' "$name" "$pid" $((${kb:-0} / 1024))
    else
      printf '%-24s down; see %s\n' "$name" "$LOGS/$name.log"
    fi
  done
  export KUBECONFIG=$CLUSTER_KUBECONFIG KUBECACHEDIR=$STATE/kubecache
  "$BIN/kubectl" --request-timeout=10s get nodes,pods -A -o wide || true
  cluster_complete || { echo "not complete; \`$SELF up\` starts it anew"; return 1; }
}

need_up() {
  need_root
  if ! cluster_lives || ! cluster_complete; then die "the embedded cluster is not up; start it with: $SELF up"; fi
  mine
}
cluster_ready() { need_up; }
cluster_load() {
  [ -f "${1:-}" ] || die "load wants one archive of an image (docker save, buildah push docker-archive: or oci-archive:); '${1:-}' is not a file"
  need_up
  load_image "$1" || die "$1 was not imported; the reason is above"
  say "loaded $1"
}
cluster_exec() {
  [ $# -gt 0 ] || die "exec wants a command, for example: $SELF exec curl -s http://web.default.svc.cluster.local"
  need_up
  export PATH KUBECONFIG=$CLUSTER_KUBECONFIG KUBECACHEDIR=$STATE/kubecache
  PATH=$BIN:$PATH
  exec nsenter --net="$NETNS" --mount="/proc/$(pid_of keeper)/ns/mnt" --wd="$PWD" -- "$@"
}
cluster_env() {
  echo "export KUBECONFIG=$CLUSTER_KUBECONFIG"
  echo "export KUBECACHEDIR=$STATE/kubecache"
  echo "export PATH=$BIN:\$PATH"
}
