#!/usr/bin/env bash
# All tests behind `make test`, after `make check`. Takes the embedded cluster down again when it was not up before.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
began=$(date +%s)
say() { printf '\n[%4d s] %s\n' "$(($(date +%s) - began))" "$*"; }
pytest() { .venv/bin/python -m pytest -q "$@"; }

say "cluster"
was_up=$(dev/cluster.sh status > /dev/null 2>&1 && echo yes || echo no)
api_tests=
finish() {
  status=$?
  if [ -n "$api_tests" ]; then kill -INT "$api_tests" 2> /dev/null && wait "$api_tests" || true; fi
  if [ "$was_up" = no ] && [ -z "${RLJOB_KEEP_CLUSTER:-}" ]; then
    dev/cluster.sh down || status=$?
    [ -n "${KUBECONFIG_OWN:-}" ] || dev/check-clean.sh || status=$?
  fi
  say "make test ends with exit status $status"
  exit "$status"
}
trap finish EXIT
KUBECONFIG_OWN=${KUBECONFIG:-} # a cluster of the user's, which stays as it is
dev/cluster.sh up
eval "$(dev/cluster.sh env)"
# Two operators on one cluster would answer for the same jobs, and an older webhook by older rules; installed again below.
if helm -n rljob-system status rljob > /dev/null 2>&1; then dev/deploy.sh down; fi
# The API server's tests mostly wait (for watches, backoffs, time limits), the others mostly compute: side by side.
say "unit tests, beside cluster and API server tests"
mkdir -p build
# An interrupt lets them take down the operators that they started; bash has background commands ignore it.
(trap - INT; exec .venv/bin/python -m pytest -q tests/cluster tests/apiserver) > build/test-apiserver.log 2>&1 &
api_tests=$!
pytest tests/unit
say "trainer tests on the real engine, beside cluster and API server tests"
pytest tests/workload
say "cluster and API server tests"
wait "$api_tests" || { status=$?; api_tests=; cat build/test-apiserver.log; exit "$status"; }
api_tests=
cat build/test-apiserver.log
say "images, chart, operator"
dev/images.sh all
dev/deploy.sh up
say "chart tests, end to end"
pytest tests/chart tests/e2e -m "not slow"
say "faults: the quick ones (make faults runs all)"
pytest tests/faults -m "not slow"
