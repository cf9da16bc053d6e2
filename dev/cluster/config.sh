# shellcheck shell=bash
# Certificates, kubeconfigs and the components' configuration files. Sourced by dev/cluster.sh.

PKI=$STATE/pki

cert() { # FILE CN [O] [extra lines for the extension file]
  local f=$PKI/$1 subject="/CN=$2"
  [ -z "${3:-}" ] || subject="/O=$3/CN=$2"
  openssl ecparam -name prime256v1 -genkey -noout -out "$f.key"
  openssl req -new -key "$f.key" -subj "$subject" -out "$f.csr"
  openssl x509 -req -in "$f.csr" -CA "$PKI/ca.crt" -CAkey "$PKI/ca.key" -CAcreateserial -days 3650 -out "$f.crt" \
    -extfile <(printf 'keyUsage=critical,digitalSignature\nextendedKeyUsage=clientAuth,serverAuth\n%s\n' "${4:-}") 2> /dev/null
  rm -f "$f.csr"
}
kubeconfig() { # FILE CERT
  local ca crt key
  ca=$(base64 -w0 "$PKI/ca.crt")
  crt=$(base64 -w0 "$PKI/$2.crt")
  key=$(base64 -w0 "$PKI/$2.key")
  (umask 077 && cat > "$1") << A
apiVersion: v1
kind: Config
clusters: [{name: $CLUSTER, cluster: {server: "https://127.0.0.1:$API_PORT", certificate-authority-data: $ca}}]
users: [{name: $2, user: {client-certificate-data: $crt, client-key-data: $key}}]
contexts: [{name: $CLUSTER, context: {cluster: $CLUSTER, user: $2}}]
current-context: $CLUSTER
A
}
write_pki() {
  local c names="DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
  mkdir -p "$PKI"
  chmod 700 "$PKI"
  openssl ecparam -name prime256v1 -genkey -noout -out "$PKI/ca.key"
  openssl req -x509 -new -key "$PKI/ca.key" -subj "/CN=$CLUSTER-ca" -days 3650 -out "$PKI/ca.crt" \
    -addext keyUsage=critical,keyCertSign,cRLSign # Python 3.13 refuses an authority without it
  openssl ecparam -name prime256v1 -genkey -noout -out "$PKI/sa.key"
  openssl ec -in "$PKI/sa.key" -pubout -out "$PKI/sa.pub" 2> /dev/null
  cert apiserver kube-apiserver "" "subjectAltName=$names,IP:127.0.0.1,IP:$NODE_IP,IP:$SVC_IP"
  cert admin admin system:masters
  cert kubelet-client kube-apiserver-kubelet-client system:masters
  cert kubelet "system:node:$CLUSTER" system:nodes
  cert controller-manager system:kube-controller-manager
  cert scheduler system:kube-scheduler
  cert proxy system:kube-proxy
  cert coredns system:coredns
  cert volumes "rljob:volume-provisioner"
  for c in controller-manager scheduler proxy kubelet coredns volumes; do kubeconfig "$PKI/$c.kubeconfig" $c; done
  kubeconfig "$CLUSTER_KUBECONFIG" admin
}

write_configs() {
  containerd_config > "$STATE/conf/containerd.toml"
  cni_config > "$STATE/cni/10-$CLUSTER.conflist"
  kubelet_config > "$STATE/conf/kubelet.yaml"
  proxy_config > "$STATE/conf/proxy.yaml"
  coredns_config > "$STATE/conf/Corefile"
}
cni_programs() { if [ -x /usr/lib/cni/bridge ]; then echo /usr/lib/cni; else echo /opt/cni/bin; fi; }

# restrict_oom_score_adj: inside a container the rights to lower the score are mostly missing.
# root in the cache: imported images are there again after the next start, in a clean clone as well.
containerd_config() {
  cat << A
version = 2
root = "$CACHE/containerd"
state = "$STATE/containerd"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "$SOCKET"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/rljob-pause:dev"
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$(cni_programs)"
    conf_dir = "$STATE/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
[plugins."io.containerd.internal.v1.opt"]
  path = "$STATE/containerd-opt"
A
}
# ipMasq off and no portmap plugin: neither iptables nor rules that outlive a pod are needed (so there is no hostPort).
cni_config() {
  cat << A
{"cniVersion":"1.0.0","name":"$CLUSTER","plugins":[
 {"type":"bridge","bridge":"$CLUSTER","isGateway":true,"ipMasq":false,"hairpinMode":true,
  "ipam":{"type":"host-local","ranges":[[{"subnet":"$POD_CIDR","gateway":"$NODE_IP"}]],"routes":[{"dst":"0.0.0.0/0"}],"dataDir":"$STATE/ipam"}}]}
A
}
# oomScoreAdj and maxOpenFiles: lowering the one and raising the other need rights that a container often lacks.
# Images are never collected: the cache keeps what was imported.
kubelet_config() {
  cat << A
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /$CLUSTER
oomScoreAdj: 0
maxOpenFiles: 20000
containerRuntimeEndpoint: unix://$SOCKET
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: "$PKI/ca.crt"}}
authorization: {mode: Webhook}
clusterDomain: cluster.local
clusterDNS: ["$NODE_IP"]
resolvConf: $STATE/conf/resolv.conf
address: $NODE_IP
healthzBindAddress: 127.0.0.1
failSwapOn: false
makeIPTablesUtilChains: false
podLogsDir: $DATA/pod-logs
evictionHard: {memory.available: 200Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
imageMaximumGCAge: 0s
nodeStatusUpdateFrequency: 5s
serializeImagePulls: false
A
}
proxy_config() {
  cat << A
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {kubeconfig: "$PKI/proxy.kubeconfig"}
clusterCIDR: $POD_CIDR
hostnameOverride: $CLUSTER
bindAddress: $NODE_IP
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 127.0.0.1:10256
oomScoreAdj: 0
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
A
}
# There is nothing outside to ask: every other name does not exist, which is said at once, so that nobody waits for a time-out.
coredns_config() {
  cat << A
.:53 {
    bind $NODE_IP
    errors
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig $PKI/coredns.kubeconfig
        pods insecure
        ttl 5
    }
    cache 5
    template ANY ANY . {
        rcode NXDOMAIN
    }
}
A
}
