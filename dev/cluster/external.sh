# shellcheck shell=bash
# The commands when KUBECONFIG names a cluster of the user's own: look, tell, change nothing. Sourced by dev/cluster.sh.

# Our own kubeconfig, exported by `env`, means the embedded cluster.
external() { [ -n "${KUBECONFIG:-}" ] && [ "$KUBECONFIG" != "$CLUSTER_KUBECONFIG" ]; }

external_kubectl() {
  local kubectl
  kubectl=$(command -v kubectl || true)
  [ -n "$kubectl" ] || { [ ! -x "$(bin_dir)/kubectl" ] || kubectl=$(bin_dir)/kubectl; }
  [ -n "$kubectl" ] || die "kubectl is not on PATH; it is needed to use the cluster of KUBECONFIG=$KUBECONFIG"
  timeout 20 "$kubectl" --request-timeout=5s "$@" < /dev/null
}

external_reachable() {
  local file found='' answer server
  local -a files
  IFS=: read -ra files <<< "$KUBECONFIG"
  for file in "${files[@]}"; do [ ! -r "$file" ] || found=1; done
  [ -n "$found" ] || die "KUBECONFIG=$KUBECONFIG: no such file, or it cannot be read. Correct it, or unset KUBECONFIG to use the embedded cluster"
  if ! answer=$(external_kubectl get --raw /version 2>&1); then
    server=$(external_kubectl config view --minify -o 'jsonpath={.clusters[0].cluster.server}' 2> /dev/null || true)
    die "the cluster of KUBECONFIG=$KUBECONFIG does not answer${server:+ at $server}: $(tail -n 1 <<< "$answer")
  Check the file and the cluster (kubectl get nodes), or unset KUBECONFIG to use the embedded cluster"
  fi
  say "using the cluster of KUBECONFIG=$KUBECONFIG, Kubernetes $(sed -n 's/.*"gitVersion": *"\([^"]*\)".*/\1/p' <<< "$answer")"
}
external_kuberay() {
  external_kubectl get customresourcedefinition rayclusters.ray.io -o name > /dev/null 2>&1 ||
    die "KubeRay is not installed in the cluster of KUBECONFIG=$KUBECONFIG (no CustomResourceDefinition rayclusters.ray.io).
  Install its operator, version $KUBERAY_VERSION or newer, with the Helm chart kuberay-operator of the KubeRay project, then try again"
  say "KubeRay is installed"
}

external_up() { external_reachable; external_kuberay; }
external_down() { say "KUBECONFIG=$KUBECONFIG is a cluster of your own: nothing was stopped or changed. Unset KUBECONFIG to stop the embedded one"; }
external_status() { external_reachable; external_kubectl get nodes -o wide; external_kuberay; }
external_ready() { external_reachable; }
external_env() { printf 'export KUBECONFIG=%q\n' "$KUBECONFIG"; }
external_load() { die "KUBECONFIG=$KUBECONFIG is a cluster of your own: push $1 to a registry that its nodes can pull from"; }
external_exec() { die "exec works in the embedded cluster only, but KUBECONFIG=$KUBECONFIG is a cluster of your own; use kubectl exec or kubectl port-forward"; }
external_build() { say "KUBECONFIG=$KUBECONFIG is a cluster of your own: nothing to build"; }
