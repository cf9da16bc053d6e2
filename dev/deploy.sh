#!/bin/bash
# Installs the operator into the cluster with Helm, from the image that dev/images.sh loaded.
#
#   dev/deploy.sh up      helm upgrade --install, and wait until the operator is available; says what is wrong when it is not
#   dev/deploy.sh down    helm uninstall (the CustomResourceDefinition and the jobs stay)
#
# With KUBECONFIG set to a cluster of your own, RLJOB_OPERATOR_IMAGE=REPOSITORY:TAG names the image that its nodes can pull.
# RLJOB_STATUS_SECONDS   least seconds between two status writes that bring only new numbers (default here 5; the chart's is 15)
set -euo pipefail
DEV=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
ROOT=$(dirname "$DEV")
NAMESPACE=rljob-system
RELEASE=rljob
SECONDS_TO_START=120
EMBEDDED=/run/rljob/kubeconfig
SOCKET=/run/rljob/containerd.sock
cd "$ROOT"

die() { echo "ERROR: $*" >&2; exit 1; }
kube() { kubectl -n "$NAMESPACE" --request-timeout=30s "$@"; }
embedded() { [ "$KUBECONFIG" = "$EMBEDDED" ]; }

find_tools() {
  local lines tool
  lines=$(dev/cluster.sh env) || exit 1
  eval "$lines"
  # the ones that the embedded cluster brought do for others too
  for tool in "${XDG_CACHE_HOME:-${HOME:-/root}/.cache}"/rljob/cluster/*/helm; do [ ! -x "$tool" ] || PATH=$PATH:$(dirname "$tool"); done
  for tool in kubectl helm; do
    command -v "$tool" > /dev/null || die "$tool is not on PATH; install it to use the cluster of KUBECONFIG=$KUBECONFIG"
  done
  embedded || dev/cluster.sh up > /dev/null || exit 1 # it only looks whether the cluster answers and has KubeRay
  ! embedded || dev/cluster.sh ready || exit 1
}

# What `helm upgrade` gets for the image. The digest in an annotation restarts the pod when :dev has new content.
image_settings() {
  local digest image=${RLJOB_OPERATOR_IMAGE:-}
  if embedded && [ -z "$image" ]; then
    image=localhost/rljob-operator:dev
    digest=$(ctr -a "$SOCKET" -n k8s.io images ls "name==$image" | awk 'NR == 2 {print $3}')
    [ -n "$digest" ] || die "$image is not in the cluster; build and load it: dev/images.sh all operator"
    SETTINGS=(--set "image.pullPolicy=Never" --set-string "podAnnotations.rljob\.dev/image=$digest")
  elif [ -z "$image" ]; then
    die "KUBECONFIG=$KUBECONFIG is a cluster of your own: name the operator's image that its nodes can pull, RLJOB_OPERATOR_IMAGE=REPOSITORY:TAG (dev/images.sh load tells how to push it)"
  else
    SETTINGS=(--set "image.pullPolicy=IfNotPresent")
  fi
  case ${image##*/} in *:*) ;; *) die "RLJOB_OPERATOR_IMAGE=$image has no tag; REPOSITORY:TAG would do" ;; esac
  SETTINGS+=(--set-string "image.repository=${image%:*}" --set-string "image.tag=${image##*:}" --set "operator.statusSeconds=${RLJOB_STATUS_SECONDS:-5}")
}

# A helm that was interrupted leaves the release locked.
unlock() {
  case $(helm status "$RELEASE" -n "$NAMESPACE" 2> /dev/null | sed -n 's/^STATUS: //p') in
    pending-install | uninstalling) helm uninstall "$RELEASE" -n "$NAMESPACE" > /dev/null ;;
    pending-upgrade | pending-rollback) helm rollback "$RELEASE" -n "$NAMESPACE" > /dev/null ;;
  esac
}

selector() { echo "app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component=operator"; }
available() { # SECONDS
  kube rollout status "deployment/$RELEASE" --timeout="$1s" > /dev/null 2>&1
}

# Why its newest pod does not run: REASON: MESSAGE, or nothing.
waiting_reason() {
  kube get pods -l "$(selector)" --sort-by=.metadata.creationTimestamp -o \
    'jsonpath={range .items[-1:].status.containerStatuses[*]}{.state.waiting.reason}: {.state.waiting.message}{end}' 2> /dev/null | sed 's/^: $//'
}
explain() {
  local reason log
  reason=$(waiting_reason)
  echo "ERROR: the operator is not available${reason:+; its pod waits: $reason}" >&2
  kube get pods -l "$(selector)" >&2 || true
  [ -n "$reason" ] || kube get events --field-selector type=Warning --sort-by=.lastTimestamp -o 'custom-columns=WARNING:.reason,MESSAGE:.message' 2> /dev/null | tail -n 5 >&2
  log=$(kube logs "deployment/$RELEASE" --tail=15 2> /dev/null || true)
  [ -n "$log" ] || log=$(kube logs "deployment/$RELEASE" --tail=15 --previous 2> /dev/null || true)
  [ -z "$log" ] || printf 'its last log lines:\n%s\n' "$log" >&2
}

up() {
  local said end
  image_settings
  unlock
  echo "operator: helm upgrade --install $RELEASE charts/rljob, then until its pod is ready (about half a minute)"
  # The tests put the definition there by themselves: take it over.
  if ! said=$(helm upgrade --install "$RELEASE" charts/rljob -n "$NAMESPACE" --create-namespace --take-ownership --timeout 60s "${SETTINGS[@]}" 2>&1); then
    die "helm upgrade --install $RELEASE charts/rljob: $(tail -n 5 <<< "$said")"
  fi
  end=$(($(date +%s) + SECONDS_TO_START))
  until available 5; do
    case $(waiting_reason) in
      ErrImageNeverPull:* | ImagePullBackOff:* | InvalidImageName:* | CreateContainerConfigError:* | CrashLoopBackOff:*) explain; exit 1 ;;
    esac
    [ "$(date +%s)" -lt $end ] || { explain; exit 1; }
  done
  echo "operator: release $RELEASE in namespace $NAMESPACE is available ($(helm list -n "$NAMESPACE" --filter "^$RELEASE\$" --no-headers | awk '{print $9}'), revision $(helm list -n "$NAMESPACE" --filter "^$RELEASE\$" --no-headers | awk '{print $3}'))"
}

case ${1:-} in
  up) find_tools; up ;;
  down) find_tools; helm uninstall "$RELEASE" -n "$NAMESPACE" --ignore-not-found --wait ;;
  *) sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 2 ;;
esac
