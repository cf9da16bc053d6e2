#!/usr/bin/env bash
# Runs what hurts jobs on a real cluster: brings the cluster, the images and the operator up first.
#
#   dev/faults.sh                 every fault of the catalogue (tests/faults); prints a table, writes build/faults.json
#   dev/faults.sh COMMAND...      another command on the same cluster
#
# Takes the embedded cluster down again when it was not up before.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
was_up=$(dev/cluster.sh status > /dev/null 2>&1 && echo yes || echo no)
finish() {
  status=$?
  [ "$was_up" = yes ] || [ -n "${RLJOB_KEEP_CLUSTER:-}" ] || dev/cluster.sh down || status=$?
  exit "$status"
}
trap finish EXIT
dev/cluster.sh up
dev/images.sh all
RLJOB_STATUS_SECONDS=${RLJOB_STATUS_SECONDS:-1} dev/deploy.sh up
eval "$(dev/cluster.sh env)"
if [ $# -gt 0 ]; then "$@"; else .venv/bin/python -m pytest -q tests/faults; fi
