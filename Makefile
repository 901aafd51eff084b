# Needs Python 3.11, git and make; everything else comes from the lock files.
PYTHON ?= python3.11
FULL := .venv/bin/python
LEARNER := .venv-learner/bin/python
SOURCES := longhaul launchers configs tests $(wildcard benchmarks)
TRAIN_CONFIG ?= configs/cartpole.py
TRAIN_LINK ?= rtt_ms=50,rate_mbit=20

.DEFAULT_GOAL := help
.PHONY: help env env-learner envs train test check lint types tests tests-learner proto lock clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

env: ## .venv: all parts, with Reverb, TensorFlow and the environments (requirements/full.lock)
	@requirements/build_env.sh "$(PYTHON)" .venv requirements/full.lock -m launchers.reverb_check

env-learner: ## .venv-learner: the learner alone, on today's JAX (requirements/learner.lock)
	@requirements/build_env.sh "$(PYTHON)" .venv-learner requirements/learner.lock -c "import jax, flax, optax, grpc"

envs: env env-learner

train: envs ## trains CartPole across an emulated 50 ms, 20 Mbit/s link until it is solved
	$(FULL) -m launchers.local --config=$(TRAIN_CONFIG) --link=$(TRAIN_LINK)

test: check ## all checks and tests, in both environments; what CI runs

check: lint types tests tests-learner

lint: env ## style and format
	$(FULL) -m ruff check $(SOURCES)
	$(FULL) -m ruff format --check $(SOURCES)

types: env ## static types
	$(FULL) -m mypy longhaul launchers

tests: env ## tests of all parts
	$(FULL) -m pytest -q

tests-learner: env-learner ## the same tests where neither Reverb nor gymnasium is installed; theirs are skipped
	$(LEARNER) -m pytest -q

proto: env ## regenerates the code of longhaul/proto/longhaul.proto
	$(FULL) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. longhaul/proto/longhaul.proto

LOCK := build/lock/bin/uv pip compile setup.py --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet
# What MinAtar asks for, and needs for drawing alone.
UNLOCKED := $(addprefix --no-emit-package ,pandas pytz seaborn)
lock: ## resolves the lock files anew (uv, in a throwaway environment)
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/pip install --quiet --disable-pip-version-check uv
	$(LOCK) --extra all --extra dev $(UNLOCKED) -o requirements/full.lock
	$(LOCK) --extra test -o requirements/learner.lock

clean: ## removes environments and caches; runs/ stays
	rm -rf .venv .venv-learner build .pytest_cache .mypy_cache .ruff_cache longhaul.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
