# `make demo` and `make test` do all of their own set-up: they find a Python, make .venv and install what they need.
VENV ?= .venv
# A JAX release to test against, e.g. `make test JAX=0.11.2 VENV=.venv-0.11.2`; empty is the newest.
JAX ?=
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo $$p; break; }; done)
comma := ,
CUDA := $(shell nvidia-smi >/dev/null 2>&1 && echo ,cuda13)

RUN := $(VENV)/bin/python

.PHONY: demo test lint notebooks docs clean
demo: $(VENV)/.installed-demo
	$(RUN) -m gdn_jax

test: $(VENV)/.installed-test
	$(RUN) -m pytest -n auto --maxprocesses 4

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright --pythonpath $(RUN)

# Executes copies and compares the pairs; notebooks/ itself stays as it is.
notebooks: $(VENV)/.installed-notebooks
	$(RUN) notebooks/check.py --output-dir build/notebooks

docs: $(VENV)/.installed-docs
	$(RUN) -m sphinx -W --keep-going -q -E -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

# A virtual environment is stale when the project's requirements are newer, or when its Python no longer runs.
$(VENV)/.python: pyproject.toml
	@test -n "$(PYTHON)" || { echo "gdn-jax needs Python 3.12 or newer; none was found"; exit 1; }
	$(RUN) -c pass 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(RUN) -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.installed-%: $(VENV)/.python
	$(RUN) -m pip install --quiet --editable '.$(subst [],,$(subst [$(comma),[,[$(patsubst demo,,$*)$(CUDA)]))' $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
	@touch $@

clean:
	rm -rf .venv .venv-* dist build
