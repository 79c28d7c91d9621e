# The commands that people and CI use. The first one makes .venv with everything in it and builds the extension there.
PYTHON ?= python3
TORCH ?= 2.13.0
PY := .venv/bin/python
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

.PHONY: demo test compat lint format bench gpu clean

demo: .venv/.built      ## trains a small CNN on handwritten digits, every layer watched
	$(PY) -m hookstats.demo

test: .venv/.built      ## the whole test suite
	$(PY) -m pytest

# In a copy of the sources with an environment, an extension and a harness of its own, which are kept for the next time.
COPY = build/compat-$(TORCH)
compat:                 ## the whole test suite with another torch: make compat TORCH=2.15.0
	mkdir -p $(COPY)
	find $(COPY) -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents --target-directory=$(COPY)
	rm -f $(COPY)/.venv/.built
	$(MAKE) -C $(COPY) test TORCH=$(TORCH)

lint: .venv/.built      ## ruff, mypy --strict, clang-format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs .venv/bin/clang-format --dry-run --Werror

format: .venv/.built
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs .venv/bin/clang-format -i

bench: .venv/.built     ## benchmarks on this machine
	$(PY) -m pytest benchmarks --benchmark-columns=median,min,rounds --benchmark-sort=fullname \
		--benchmark-json=build/benchmark.json

# On a machine with an NVIDIA GPU, nvcc and torch >= 2.11: uses $(PYTHON) as it is, and no network.
gpu:
	$(PYTHON) benchmarks/gpu.py

# In an environment of its own: the pages are made from sources, without torch and the extension.
DOCS = build/docs-venv
DOCS_NEED = $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)
.PHONY: docs
docs:                   ## the site, into build/site; a dead link or any other warning is an error
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q $(DOCS_NEED)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

clean:
	rm -rf .venv build hookstats/_built.json hookstats/_C.*.so *.egg-info

.venv/.built: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q "torch==$(TORCH)" "setuptools>=70" wheel ninja pybind11
	$(PY) -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@
