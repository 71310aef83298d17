# Two commands do everything on a machine with Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin
SAMPLES ?= 100000
# Of what is installed, Python compiles what it imports, and keeps that.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
.NOTPARALLEL:
APT := apt-get -o Acquire::Retries=1 -o Acquire::http::Timeout=20

# The slowest are printed at the end. For the quick tests XLA compiles for a third less, to code that
# is a tenth slower; `make test-all` compiles as users do.
FAST_COMPILER := --xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false
TESTS := $(BIN)/pytest -n 2 --dist worksteal --durations 20 --durations-min 1
# Each notebook in a kernel of its own, as a reader runs it. They share what they compile. The tests
# run their cells too, with few samples.
NOTEBOOKS := JAX_COMPILATION_CACHE_DIR="$(CURDIR)/.pytest_cache/d/notebooks" \
	$(BIN)/pytest --nbmake -n 2 -p no:cacheprovider notebooks

.PHONY: demo test test-all test-newest test-lowest test-accelerators matrix browser lint docs bench reference clean

demo: .venv/demo
	$(BIN)/prism-jax simulate gpt3-175b-h100-4096 --samples $(SAMPLES)
	@echo "Next: source $(BIN)/activate, then prism-jax predict examples/job.toml, or prism-jax init" \
		"my_job.toml for a job of yours. README.md has five things to do, docs/commands.md all."

# All but what takes longest, and what needs Chromium, Ray or the site; `make test-all` leaves out
# nothing.
test: .venv/test lint
	XLA_FLAGS="$(FAST_COMPILER) $$XLA_FLAGS" $(TESTS) -m "not slow"
	@echo "All passed. Next: make demo for a first prediction; make test-all for the slow tests, the" \
		"notebooks and the site, before a change is handed in; CONTRIBUTING.md says where to" \
		"change what."

test-all: .venv/dev lint docs
	$(TESTS)
	$(NOTEBOOKS)
	$(MAKE) test-newest

# The wheel as it is installed, without constraints: with the newest Python from 3.12 on and what pip
# takes there, or with Python 3.11 and the lowest versions that are allowed. And how many quick tests
# pass with each Python and JAX, which takes hours. See tests/versions.py. A JAX that does not know a
# flag of the compiler ends the process, so only that which all know is set.
test-newest test-lowest: .venv/test
	XLA_FLAGS="$(firstword $(FAST_COMPILER)) $$XLA_FLAGS" $(BIN)/python -m tests.versions $(@:test-%=%)

matrix: .venv/test
	XLA_FLAGS="$(firstword $(FAST_COMPILER)) $$XLA_FLAGS" $(BIN)/python -m tests.versions matrix

# What is compiled for devices that are not there, and the kernel's instructions, run on a CPU. See
# docs/accelerators.md.
test-accelerators: .venv-accelerators
	$(BIN)/pytest -n 1 tests/test_accelerators.py

# JAX's plugins and the assembler of CUDA, without drivers and other libraries.
JAX_NEEDS := import importlib.metadata as m; v = m.version("jax"); \
	print(f"jax-cuda13-pjrt=={v} jax-cuda13-plugin=={v} nvidia-cuda-nvcc==13.0.*", \
	*[r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")])
.venv-accelerators: .venv/test
	$(INSTALL) --no-deps --target $@ $$($(BIN)/python -c '$(JAX_NEEDS)')
	touch $@

# Chromium for the tests that open a page in it, which are skipped where it is not there: from
# Debian's packages where that can be done, and left out otherwise.
browser:
	command -v chromedriver > /dev/null || { test "$$(id -u)" = 0 && $(APT) update -qq \
		&& $(APT) install -y -qq --no-install-recommends chromium chromium-driver; } \
		|| echo "No Chromium: install the packages chromium and chromium-driver to run all tests."

# What depends on the machine; see benchmarks/throughput.py for what the figures mean.
bench: .venv/test
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/pytest -q tests/test_baselines.py

lint: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	# It takes the packages of the `python` on the path, whatever is said.
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --ignoreexternal --verifytypes prism_jax > /dev/null
	$(BIN)/lint-imports

# The site, in site/index.html. Warnings are errors, which `--quiet` would drop; nothing comes from
# the network.
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The page of keys, out of the schema.
reference: .venv/demo
	$(BIN)/python tools/job_reference.py
	$(BIN)/python tools/architecture.py

# The package with all that a user needs; what the quick tests need; or what all tests need.
.venv/demo .venv/test .venv/dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e '.[$(patsubst demo,all,$(@F))]'
	touch $@ $(if $(filter dev,$(@F)),.venv/test) .venv/demo

clean:
	rm -rf .venv .venv-* .pytest_cache build dist site
