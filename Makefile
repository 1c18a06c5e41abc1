# SPDX-License-Identifier: Apache-2.0
# kbpf. `make demo` and `make test` do everything on a fresh Debian 12 or 13, as root.
#
# Python is Debian's own, whatever else is on the PATH: bcc is Debian's python3-bpfcc.

PYTHON := /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
C_FILES := $(shell find kbpf/bpf -name include -prune -o -name "*.[ch]" -print)

.DEFAULT_GOAL := help
.PHONY: help check venv packages demo screens test test-kernels test-cnis test-image conformance lint format bench campaigns mutants clean

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -ts '	'

packages: ## Debian packages that are missing
	@tools/packages

# The stamp's name holds all that the environment depends on: a second run costs nothing.
STAMP := $(VENV)/.ready-$(shell cat pyproject.toml requirements-dev.lock tools/packages 2>/dev/null | sha256sum | cut -c1-12)

venv: $(STAMP) ## .venv/bin/kbpf
$(STAMP):
	@tools/packages
	@rm -f $(VENV)/.ready-*
	@test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || \
		$(PYTHON) -m venv --clear --system-site-packages $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary=:all: \
		--no-deps --requirement requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# The fast lane for contributors: no root, no Debian packages, no Go. Its own environment sees no system
# packages, so that it is the same everywhere.
CHECK := .venv-check
CHECK_STAMP := $(CHECK)/.ready-$(shell cat pyproject.toml requirements-dev.lock 2>/dev/null | sha256sum | cut -c1-12)

$(CHECK_STAMP):
	@rm -rf $(CHECK)
	python3 -m venv $(CHECK)
	$(CHECK)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--only-binary=:all: --no-deps --requirement requirements-dev.lock
	@touch $@

check: $(CHECK_STAMP) ## style, types and the tests that need no root: about a minute
	$(CHECK)/bin/ruff check .
	$(CHECK)/bin/ruff format --check .
	$(CHECK)/bin/mypy
	$(CHECK)/bin/mypy kubectl/kubectl-kbpf
	$(CHECK)/bin/clang-format --dry-run --Werror $(C_FILES)
	$(CHECK)/bin/python -m pytest -q -n auto --dist loadfile -p no:cacheprovider tests/values $(PYTEST)

demo: venv ## a Service, three backends and a client on this machine, no cluster
	@$(BIN)/kbpf demo

screens: venv ## the pictures and the output of commands in the documents, from a real run; only="trace failures"
	$(BIN)/python -m tests.screens $(only)

lint: venv ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy kubectl/kubectl-kbpf
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)

format: $(CHECK_STAMP) ## rewrite everything in the house's format; needs no root
	$(CHECK)/bin/ruff format .
	$(CHECK)/bin/ruff check --fix .
	$(CHECK)/bin/clang-format -i $(C_FILES)

test: venv lint ## everything, against a real API server and real sockets, and in two other kernels
	@tools/packages tests image $(if $(PYTEST),,kernels)
	$(BIN)/python -m tests.support.build $(if $(PYTEST),--programs)
	$(BIN)/python -m tests $(PYTEST)

test-kernels: venv ## a part of it inside of Debian's kernels; kernels="5.10 6.1" only="loading"
	@tools/packages tests kernels
	$(BIN)/python -m tests.kernels $(kernels) $(if $(only),--only $(only))

test-cnis: venv ## the pod networks of CNIs, with what takes minutes
	@tools/packages tests
	KBPF_TEST_CNIS=1 $(BIN)/python -m pytest -s tests/lab/cni

test-image: venv ## the container image alone; arm64=1: that for arm64 too, by an emulator: half an hour
	@tools/packages tests image $(if $(arm64),arm64)
	$(if $(arm64),KBPF_TEST_ARM64=1 )$(BIN)/python -m pytest -s $(if $(arm64),--timeout=7200) tests/image

conformance: venv ## Kubernetes' own network tests: proxy=kube-proxy-nftables version=1.36.3 nodes=3 focus="Conntrack"
	@tools/packages tests image
	$(BIN)/python -m tests.conformance $(if $(proxy),--proxy '$(proxy)') $(if $(version),--version $(version)) \
		$(if $(nodes),--nodes $(nodes)) $(if $(focus),--focus '$(focus)')
	$(if $(proxy)$(focus),,$(BIN)/python -m pytest tests/conformance/restarts.py tests/conformance/plugin.py)

bench: venv ## speed and memory, JSON out
	$(BIN)/python -m benchmarks

campaigns: venv ## long runs that look for faults; only="packets floods" seed=7 minutes=5
	@tools/packages tests
	$(BIN)/python -m tests.campaigns $(if $(only),--only $(only)) $(if $(seed),--seed $(seed)) \
		$(if $(minutes),--minutes $(minutes))

mutants: venv ## what the tests do not notice; only="policy c" seed=7 count=100 (0: all)
	@tools/packages tests
	$(BIN)/python -m tests.mutations $(if $(only),--only $(only)) $(if $(seed),--seed $(seed)) \
		$(if $(count),--count $(count))

clean: ## what was built here
	rm -rf $(VENV) $(CHECK) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
