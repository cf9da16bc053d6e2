# RLJob. `make help` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
# One thread per process: the tests and the demo run several processes on few cores.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED := 0
unexport PYTHONDONTWRITEBYTECODE
PY := .venv/bin/python

.PHONY: help
help: ## List the commands
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

.PHONY: install
install: ## Make .venv with everything pinned (extras operator, workload, dev)
	@dev/install.sh

.PHONY: demo
demo: install ## The whole path: cluster, images, helm install, kubectl apply, a live view, the end
	@$(PY) -m dev.demo

.PHONY: cluster-up cluster-down cluster-status
cluster-up: install ## Start the embedded one-node Kubernetes with KubeRay (or check the one of KUBECONFIG)
	@dev/cluster.sh up
cluster-down: ## Stop it and undo every change to this machine (caches stay)
	@dev/cluster.sh down
cluster-status: ## Say what runs
	@dev/cluster.sh status

.PHONY: test
test: install check ## Everything: check, unit, API server, end to end on the embedded cluster
	@dev/test.sh

.PHONY: unit
unit: install ## Unit tests only (seconds)
	@$(PY) -m pytest -q tests/unit

.PHONY: check
check: install ## Format, lint, types (benchmarks and dev too), import arrows, generated files, shell scripts
	@.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) -m rljob_api.generate --check
	dev/shellcheck.sh

.PHONY: format generate lock
format: install ## Format and mend what ruff can mend
	@.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
generate: install ## Write the generated files: CRD, reference pages
	@$(PY) -m rljob_api.generate
lock: install ## Pin the dependencies again
	@dev/lock.sh

.PHONY: oracle test-slow
SEED ?= 1
N ?= 2000
oracle: install ## Ask the real Megatron and our rules about N random layouts of SEED (build/oracle.json)
	@$(PY) -W ignore -m dev.oracle --seed $(SEED) -n $(N)
test-slow: install ## The long forms: parity with the API server and jobs of other shapes (cluster up), fuzz, hand-overs of all layouts, oracle
	@eval "$$(dev/cluster.sh env)"
	RLJOB_CRASHES=all $(PY) -m pytest -q -s tests/apiserver/test_crash_matrix.py
	$(PY) -m pytest -q tests/e2e -m slow
	RLJOB_PARITY_SPECS=5000 $(PY) -m pytest -q tests/apiserver/test_cel_parity.py
	RLJOB_FUZZ=100000 $(PY) -m pytest -q tests/unit/fuzz
	RLJOB_LAYOUT_CYCLES=200 $(PY) -m pytest -q tests/workload/test_layouts.py -k hand_over
	$(PY) -W ignore -m dev.oracle --seed $(SEED) -n 5000

.PHONY: faults proof-kubernetes
faults: install ## Every fault of the catalogue on the cluster, with the job's condition trail (build/faults.json)
	@dev/faults.sh
proof-kubernetes: install ## Kill head, worker and driver of a run on the cluster; writes docs/proof/kubernetes.*
	@dev/faults.sh $(PY) -m dev.proof_kubernetes

.PHONY: bench-train bench-train-page bench-operator bench-operator-page bench-handover
bench-handover: install ## 1,000 hand-overs in each cache mode with answers in flight: processor time, memory
	@$(PY) -W ignore -m benchmarks.handover
bench-train: install ## The trainer against its parts, against TRL, async against sync, saves (10 minutes)
	@$(PY) -m benchmarks.train
bench-train-page: install ## The same, written into docs/trainer.md too
	@$(PY) -m benchmarks.train --page
bench-operator: install ## The operator's memory, time and requests; first child and killed head beside RayJob (cluster)
	@dev/faults.sh $(PY) -m benchmarks.operator_process
bench-operator-page: install ## The same, written into docs/operator.md too
	@dev/faults.sh $(PY) -m benchmarks.operator_process --page

.PHONY: proof-sim bench-ledger
proof-sim: install ## 10,000 simulated schedules, the mutants and the rivals: no prompt lost; writes docs/lossless.md's table
	@$(PY) -m rljob_workload.core.simulation.proof
bench-ledger: install ## Cost of the prompt ledger: time, memory, saved size
	@$(PY) -m benchmarks.ledger

.PHONY: proof proof-slow bench-checkpoint
proof: install ## Kill the real trainer at least 24 times in 2,000 steps of SEED; audit it; writes docs/proof and the README's figures
	@$(PY) -m dev.proof --seed $(SEED)
proof-slow: install ## 200 SIGKILLs in short runs (build/proof-slow.json)
	@$(PY) -m dev.proof --slow --seed $(SEED)
bench-checkpoint: install ## Saves and loads at 0.1 M, 10 M and 135 M parameters beside torch.save
	@$(PY) -m benchmarks.checkpoint

.PHONY: gpu-smoke bench-export check-bridge
gpu-smoke: install ## The stack on this machine's NVIDIA GPUs, part by part (build/gpu-smoke.json); without one it says so
	@$(PY) -W ignore -m dev.gpu_smoke
check-bridge: install ## Our mapping of Hugging Face models beside megatron-bridge's and transformers (own environment)
	@dev/bridge.sh check
bench-export: install ## Logits of exported models in transformers beside the trainer's (build/bench/export.json)
	@$(PY) -W ignore -m benchmarks.export

.PHONY: bench-http bench-http-page
bench-http: install ## The copy task through HTTP and an agent beside in process (build/bench/http.json)
	@$(PY) -W ignore -m benchmarks.over_http
bench-http-page: install ## The same, written into docs/agents.md too
	@$(PY) -W ignore -m benchmarks.over_http --page
