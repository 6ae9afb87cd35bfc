# The kit's commands. Works with GNU make 3.81 (macOS) and newer.
#
#   make lab            JupyterLab at the first lesson; the first time installs everything into .venv
#   make test           lint, unit tests, and every notebook against its stored outputs, on virtual GPUs
#   make test-gpu       unit tests and notebooks on this machine's own CUDA GPUs
#   make test-browser   a lesson in a real browser (needs Chromium)
#   make lint, format   check the code's style, or correct it
#   make clean          remove .venv and what the tools left behind
#
# Variables:
#   ARGS="--no-browser --port=9999"                         passed on to JupyterLab
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu        PyTorch's CPU wheels: smaller, for a machine without an NVIDIA GPU
#   PYTHON=/path/to/python3.12                              the Python that .venv is made with

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
TORCH_INDEX ?=

# python3 if it is 3.11 to 3.14 (the versions with wheels of the pinned torch), else the newest of those that is installed.
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(SUITABLE)' 2>/dev/null && { echo "$$python"; break; }; done)

PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PYTEST := $(BIN)/python -m pytest --timeout 300
PARALLEL := -n auto --maxprocesses 4
NBVAL := --nbval-current-env --nbval-cell-timeout=60 --nbval-sanitize-with=tests/notebooks/sanitize.cfg $(PARALLEL) --dist loadfile

.PHONY: lab test test-gpu test-browser unit notebooks stored-outputs lint format clean

# JupyterLab refuses to run as root, which is who you are in most containers, unless told.
lab: $(VENV)/installed
	$(BIN)/python -m jupyterlab notebooks/00_start_here.ipynb $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

test: lint unit notebooks

unit: $(VENV)/installed
	$(PYTEST) $(PARALLEL) tests

notebooks: $(VENV)/installed
	@ls notebooks/*.ipynb >/dev/null 2>&1 || { echo "no notebooks found in notebooks/" >&2; exit 1; }
	LABKIT_VIRTUAL=1 $(PYTEST) --nbval $(NBVAL) notebooks

test-gpu: $(VENV)/installed
	$(PYTEST) tests
	$(PYTEST) --nbval-lax $(NBVAL) -n 1 notebooks

test-browser: $(VENV)/installed-browser
	$(PYTEST) -m browser tests/browser

# After a change of the lessons, or of the virtual GPU's times and memory: run the lessons and store what they print.
stored-outputs: $(VENV)/installed
	$(BIN)/python tools/execute_notebooks.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A changed pin or dependency installs again; an interrupted installation starts again.
$(VENV)/installed: constraints.txt pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		test -n "$(PYTHON)" || { echo "Python 3.11, 3.12, 3.13 or 3.14 is needed: install one, or name it: make lab PYTHON=/path/to/python3.12" >&2; exit 1; }; \
		echo "making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "installing the pinned packages into $(VENV) (PyTorch is large: this takes some minutes the first time)"
	@$(PIP_INSTALL) --editable '.[lab,test]'
	@$(BIN)/jupyter labextension disable --level=sys_prefix '@jupyterlab/apputils-extension:announcements' >/dev/null 2>&1 # no question about news
	@touch $@

$(VENV)/installed-browser: $(VENV)/installed
	@$(PIP_INSTALL) --editable '.[lab,test,browser]'
	@touch $@
