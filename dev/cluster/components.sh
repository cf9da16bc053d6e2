# shellcheck shell=bash
# Starts the control plane, the node and KubeRay; runs inside the cluster's namespaces. Sourced by dev/cluster.sh.

LOOPBACK_ETCD=http://127.0.0.1:2379

components_up() {
  export PATH=$BIN:$PATH KUBECONFIG=$CLUSTER_KUBECONFIG KUBECACHEDIR=$STATE/kubecache
  write_pki
  write_configs
  runtime_start
  control_plane_up
  # in the background: Kubernetes needs seconds to read KubeRay's large definitions
  crds_up &
  local crds=$!
  node_up
  wait $crds || die "KubeRay's definitions were not accepted: $(tail -n 3 "$LOGS/kuberay-crds.log")"
  kuberay_up
}

api_ready() { curl -sf --max-time 5 --cacert "$PKI/ca.crt" --cert "$PKI/admin.crt" --key "$PKI/admin.key" "https://127.0.0.1:$API_PORT/readyz"; }

control_plane_up() {
  start etcd "$BIN/k8s" etcd --name "$CLUSTER" --data-dir "$DATA/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls $LOOPBACK_ETCD --advertise-client-urls $LOOPBACK_ETCD --listen-peer-urls http://127.0.0.1:2380 \
    --initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster "$CLUSTER=http://127.0.0.1:2380"
  start kube-apiserver "$BIN/k8s" kube-apiserver --etcd-servers $LOOPBACK_ETCD \
    --bind-address 0.0.0.0 --advertise-address "$NODE_IP" --secure-port "$API_PORT" --service-cluster-ip-range "$SVC_CIDR" \
    --client-ca-file "$PKI/ca.crt" --tls-cert-file "$PKI/apiserver.crt" --tls-private-key-file "$PKI/apiserver.key" --cert-dir "$PKI" \
    --service-account-issuer https://kubernetes.default.svc.cluster.local --service-account-key-file "$PKI/sa.pub" --service-account-signing-key-file "$PKI/sa.key" \
    --authorization-mode Node,RBAC --enable-admission-plugins NodeRestriction --allow-privileged=true --profiling=false \
    --kubelet-client-certificate "$PKI/kubelet-client.crt" --kubelet-client-key "$PKI/kubelet-client.key" --kubelet-preferred-address-types InternalIP
  wait_for 120 "the API server" kube-apiserver api_ready
  say "API server ready"
  start kube-controller-manager "$BIN/k8s" kube-controller-manager --kubeconfig "$PKI/controller-manager.kubeconfig" --leader-elect=false --bind-address 127.0.0.1 \
    --service-account-private-key-file "$PKI/sa.key" --root-ca-file "$PKI/ca.crt" --use-service-account-credentials --cert-dir "$PKI" \
    --cluster-signing-cert-file "$PKI/ca.crt" --cluster-signing-key-file "$PKI/ca.key" --cluster-cidr "$POD_CIDR" --profiling=false \
    --kube-api-qps 100 --kube-api-burst 200
  start kube-scheduler "$BIN/k8s" kube-scheduler --kubeconfig "$PKI/scheduler.kubeconfig" --leader-elect=false --bind-address 127.0.0.1 --cert-dir "$PKI" --profiling=false
  kubectl apply -f "$DEV/cluster/manifests/base.yaml" > "$LOGS/base.log" 2>&1 || die "the base objects were not accepted: $(tail -n 3 "$LOGS/base.log")"
  start volume-provisioner "$BIN/k8s" volume-provisioner --kubeconfig "$PKI/volumes.kubeconfig" --directory "$DATA/pv" --node "$CLUSTER"
}

runtime_start() { start containerd containerd --config "$STATE/conf/containerd.toml"; }
runtime_ready() { ctr -a "$SOCKET" version; }

node_up() {
  wait_for 60 containerd containerd runtime_ready
  # The cache remembers the pods of a cluster that was not stopped in order; they are gone.
  "$BIN/k8s" cri-clean "unix://$SOCKET" >> "$LOGS/cri-clean.log" 2>&1 || say "note: pods of an earlier cluster are still known to containerd; see $LOGS/cri-clean.log"
  load_image "$BIN/images/pause.tar"
  load_image "$BIN/images/kuberay.tar"
  start kubelet "$BIN/k8s" kubelet --config "$STATE/conf/kubelet.yaml" --kubeconfig "$PKI/kubelet.kubeconfig" --hostname-override "$CLUSTER" --node-ip "$NODE_IP"
  start kube-proxy "$BIN/k8s" kube-proxy --config "$STATE/conf/proxy.yaml"
  start coredns "$BIN/coredns" -conf "$STATE/conf/Corefile"
  wait_for 90 "the node's registration" kubelet kubectl get node "$CLUSTER"
  kubectl wait --for=condition=Ready "node/$CLUSTER" --timeout=120s > /dev/null || die "the node does not get Ready; see $LOGS/kubelet.log: $(tail -n 3 "$LOGS/kubelet.log")"
  wait_for 60 "the DNS server" coredns curl -sf --max-time 5 http://127.0.0.1:8181/ready
  say "node ready"
}

# load_image ARCHIVE: imports it unless the runtime has exactly these images already. Prints nothing; 0 = imported or there.
load_image() {
  local name digest needed=0 list
  list=$(python3 "$DEV/cluster/archive_images.py" "$1") || return 1
  while read -r name digest; do
    [ -n "$name" ] && [ "$("$BIN/k8s" cri-image "unix://$SOCKET" "$name" 2> /dev/null)" = "$digest" ] || needed=1
  done <<< "$list"
  [ $needed = 1 ] || return 0
  ctr -a "$SOCKET" -n k8s.io images import "$1" > "$LOGS/import.log" 2>&1 || { tail -n 5 "$LOGS/import.log" >&2; return 1; }
}

# raycronjobs is left out: its feature gate is off
crds_up() {
  local c files=()
  for c in rayclusters rayjobs rayservices; do files+=(-f "$BIN/kuberay/crd/bases/ray.io_$c.yaml"); done
  { kubectl apply --server-side --force-conflicts "${files[@]}" &&
    kubectl wait --for=condition=Established crd/rayclusters.ray.io crd/rayjobs.ray.io crd/rayservices.ray.io --timeout=90s; } > "$LOGS/kuberay-crds.log" 2>&1 9>&-
}
kuberay_up() {
  sed "s/@KUBERAY_VERSION@/$KUBERAY_VERSION/" "$DEV/cluster/manifests/kuberay.yaml" > "$STATE/conf/kuberay.yaml"
  { kubectl create namespace ray-system && kubectl apply -f "$BIN/kuberay/rbac/role.yaml" -f "$STATE/conf/kuberay.yaml"; } > "$LOGS/kuberay.log" 2>&1 ||
    die "KubeRay's objects were not accepted: $(tail -n 3 "$LOGS/kuberay.log")"
  kubectl -n ray-system rollout status deploy/kuberay-operator --timeout=180s >> "$LOGS/kuberay.log" 2>&1 ||
    die "the KubeRay operator does not get ready: $(kubectl -n ray-system get pods 2>&1 | tail -n 2)"
  say "KubeRay $KUBERAY_VERSION ready"
}
