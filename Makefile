# The commands that people and CI use. The first one makes .venv and builds the extension there; each installs what it
# needs. HOOKSTATS_CUDA and TORCH_CUDA_ARCH_LIST say which CUDA kernels are built (setup.py).
PYTHON ?= python3
TORCH ?= 2.13.0
PY := .venv/bin/python
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
# Tests wait for ranks, browsers and clocks a quarter of their time, so there are more of them at once than processors.
WORKERS := $(shell $(PYTHON) -c "import os; print(min(8, 3 * len(os.sched_getaffinity(0)) // 2))")
# The processes that tests start, some hundred, read what the first of them compiled.
export PYTHONDONTWRITEBYTECODE :=
ASKED := $(TORCH) HOOKSTATS_CUDA=$(HOOKSTATS_CUDA) TORCH_CUDA_ARCH_LIST=$(TORCH_CUDA_ARCH_LIST)

.PHONY: demo test quick compat lint format bench gpu gpu-first gpu-bench gpu-prebuilt clean FORCE

demo: .venv/.demo       ## trains a small CNN on handwritten digits, every layer watched
	$(PY) examples/digits.py

.PHONY: report-example
report-example: .venv/.demo  ## a small GPT with two faults put in, and the report of its run
	$(PY) docs/report_example.py --output build/example

.PHONY: rule-pictures
rule-pictures: .venv/.dev  ## a picture of a broken run for each rule (needs Chromium)
	PYTHONPATH=. $(PY) docs/rules_pictures.py

test: .venv/.dev        ## the whole test suite, one torch thread in each process
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -p no:benchmark

quick: .venv/.dev       ## one pass over every room on the CPU: less than a minute. What it runs: tests/quick.txt
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -p no:benchmark @tests/quick.txt

.PHONY: kernels stress
ARCH ?= 9.0
kernels:                ## compiles the CUDA kernels, and checks their bounds: make kernels ARCH=all, or ARCH="8.0 9.0"
	HOOKSTATS_CUDA=1 TORCH_CUDA_ARCH_LIST="$(filter-out all,$(ARCH))" $(MAKE) .venv/.dev
	$(PY) -m pytest -q -p no:benchmark tests/kernels/test_resources.py tests/kernels/test_instructions.py
	test "$(ARCH)" != all || $(PY) -m tests.kernels.compiled record
stress: .venv/.dev      ## the suite three times, while four processes compute: finds tests that can lose a race
	$(PY) -m tests.stress

# In an environment of its own, beside a torchvision that is built for the same torch. It takes 10 GB.
CLIENTS := build/clients/bin/python
.PHONY: clients
clients: build/clients/.made  ## trainers of other packages, with hookstats and without: the table of docs/clients.md
	$(CLIENTS) -m tests.clients
build/clients/.made: $(SOURCES) tests/clients/requirements.txt
	test -x $(CLIENTS) || $(PYTHON) -m venv build/clients
	$(CLIENTS) -m pip install -q "torch==2.14.1" "torchvision==0.29.2" "setuptools>=70" wheel ninja pybind11
	$(CLIENTS) -m pip install -q -r tests/clients/requirements.txt
	HOOKSTATS_CUDA=0 $(CLIENTS) -m pip install -q --no-build-isolation -e ".[report]"
	touch $@

# In a copy of the sources with an environment, an extension and a harness of its own, which are kept for the next time.
COPY = build/compat-$(TORCH)
compat:                 ## the whole test suite with another torch: make compat TORCH=2.15.0
	mkdir -p $(COPY)
	find $(COPY) -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents --target-directory=$(COPY)
	rm -f $(COPY)/.venv/.dev
	$(MAKE) -C $(COPY) test TORCH=$(TORCH)

# Which torches: make wheel TORCHES="2.13 2.15". HOOKSTATS_CUDA=1 puts kernels for GPUs into it. For other Pythons than that
# of .venv, a wheel each: PYTHONS="3.10 3.12", or PYTHONS=all for those that PATH has.
WHEELS = $(TORCHES) $(if $(PYTHONS),--pythons $(PYTHONS))
TORCHES ?= 2.11 2.12 2.13 2.14 2.15
.PHONY: wheel wheel-test sdist release-check
wheel: .venv/.dev       ## dist/hookstats-*.whl, with glue for several torches; an environment for each under build/wheel
	$(PY) -m tests.wheel build $(WHEELS)
wheel-test: .venv/.dev  ## installs it next to each torch, without a compiler, and tests it
	$(PY) -m tests.wheel test $(WHEELS)

sdist: .venv/.release   ## dist/hookstats-*.tar.gz, made in an environment of its own, without torch
	rm -f dist/*.tar.gz
	$(PY) -m build --sdist --outdir dist

# What must hold before a release, in the order of CONTRIBUTING.md.
release-check: .venv/.dev .venv/.release
	@test -z "$$(git status --porcelain)" || { echo "expected a clean tree, got:"; git status --short; exit 1; }
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' hookstats/__init__.py); grep -qx "## $$version" CHANGELOG.md || \
		{ echo "CHANGELOG.md: expected a heading '## $$version', got '$$(grep -m1 '^## ' CHANGELOG.md)'"; exit 1; }
	$(MAKE) lint docs sdist wheel wheel-test
	$(PY) -m pip wheel -q --no-deps --no-build-isolation --wheel-dir build/from-sdist dist/hookstats-*.tar.gz
	$(PY) -m twine check --strict dist/*

lint: .venv/.dev        ## ruff, mypy --strict, clang-format; prints the lines of each room
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs .venv/bin/clang-format --dry-run --Werror
	$(PY) -m tests.rooms

format: .venv/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs .venv/bin/clang-format -i

bench: .venv/.dev       ## benchmarks on this machine
	$(PY) -m pytest benchmarks --benchmark-columns=median,min,rounds --benchmark-sort=fullname \
		--benchmark-json=build/benchmark.json

# On a machine with an NVIDIA GPU, nvcc and torch >= 2.11: uses $(PYTHON) as it is, and no network. Each of the two takes
# LIMIT seconds at most, what is worth most first. GPU=harness: a rehearsal without a GPU, PYTHON=.venv/bin/python.
LIMIT ?= 560
gpu:                    ## tests, then benchmarks, that need an NVIDIA GPU
	status=0; $(MAKE) gpu-first || status=1; $(MAKE) gpu-bench || status=1; exit $$status
gpu-first gpu-bench: gpu-%:
	$(PYTHON) benchmarks/gpu.py $* $(LIMIT)

# For a machine whose time is short: build/gpu-prebuilt, which gpu-first and gpu-bench load where it fits.
FOR_GPU := build/for-gpu
FOR_GPU_PYTHON ?= python3.12
FOR_GPU_TORCH ?= 2.11.0
gpu-prebuilt:
	test -x $(FOR_GPU)/.venv/bin/python || $(FOR_GPU_PYTHON) -m venv $(FOR_GPU)/.venv
	$(FOR_GPU)/.venv/bin/python -m pip install -q "torch==$(FOR_GPU_TORCH)" "setuptools>=70" wheel ninja pybind11 numpy
	find $(FOR_GPU) -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents --target-directory=$(FOR_GPU)
	cd $(FOR_GPU) && HOOKSTATS_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0 .venv/bin/python setup.py -q build_ext --inplace
	cd $(FOR_GPU) && .venv/bin/python -m benchmarks.prebuilt pack
	rm -rf build/gpu-prebuilt && mv $(FOR_GPU)/build/gpu-prebuilt build/gpu-prebuilt

# In an environment of its own: the pages are made from sources, without torch and the extension.
DOCS = build/docs-venv
DOCS_NEED = $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
.PHONY: docs
docs:                   ## the site, into build/site; a dead link or any other warning is an error
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q $(DOCS_NEED)
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

clean:
	rm -rf .venv build hookstats/_built.json hookstats/_kernels.so hookstats/_ops.so hookstats/_glue *.egg-info

# One extra of pyproject.toml, and the extension, whose objects setup.py keeps in build/.
.venv/.%: $(SOURCES) .venv/.asked
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q "torch==$(TORCH)" "setuptools>=70" wheel ninja pybind11
	$(PY) -m pip install -q --no-build-isolation -e ".[$*]"
	touch $@

# It is written only when something else is asked for than the last time.
.venv/.asked: FORCE
	@mkdir -p .venv; echo '$(ASKED)' | cmp -s - $@ || echo '$(ASKED)' > $@
