# The kit's commands. Works with GNU make 3.81 (macOS) and newer.
#
#   make lab            JupyterLab at the table of lessons, in your own copies of the lessons (work/); the first time installs everything into .venv
#   make test           lint, the fast tests of labkit and the lessons, a smoke test of each package, and every notebook against its stored outputs
#   make test-all       lint, all tests of everything with large sets whole, and the notebooks
#   make unit-packages  the fast tests of the packages that the kit is built on, which `make test` leaves out
#   make unit-slow      the slow tests of everything; of large sets a fixed sample
#   make unit-rest      the slow tests of everything, and all cases outside the fixed samples of large sets
#   make test-gpu       unit tests and notebooks on this machine's own CUDA GPUs
#   make test-versions  the unit tests and lessons on the oldest torch that the kit admits, the pinned one and the newest
#   make test-browser   some lessons, all widgets and the site in a real browser (needs Chromium); pictures of them stay in build/screenshots
#   make test-nbgrader  what is released for nbgrader, with nbgrader's own commands
#   make test-cluster   grading a class on a Dask cluster
#   make test-classic   some lessons on what stands in for Colab, and some widgets in the classic notebook 6.5 with Colab's ipywidgets 7.7.1;
#                       (PYTHON=python3.13 is Colab's Python)
#   make test-binder    some lessons in JupyterLab within Binder's 2 GB and one core; builds what Binder would
#   make coverage       which lines the fast unit tests run, as a page: build/coverage/html/index.html; ARGS=--everything for all tests
#   make docs           the site, in build/site: all lessons, the guides and the reference; a warning is an error
#   make lint, format   check the code's style, its types and which package imports which, or correct the style
#   make pins           compile constraints.txt and tools/constraints-classic.txt; ARGS=--upgrade takes the newest versions
#   make clean          remove .venv, .nox (the environments of test-binder, test-classic, test-nbgrader and test-versions) and what the tools left behind
#
# Variables:
#   ARGS="--no-browser --port=9999"                         passed on to JupyterLab, coverage or pins
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu        where PyTorch comes from; else its CPU build on Linux without an NVIDIA driver
#   PYTHON=/path/to/python3.12                              the Python that .venv is made with
#   SIZE=--everything                                       all lessons and widgets in test-browser, test-classic and test-binder, as every night
#   VERSIONS="2.8 newest"                                   for test-versions: oldest, pinned, newest or a number

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
CLASSIC := .nox/classic
BINDER := .nox/binder
NBGRADER := .nox/nbgrader
NOX = $(BIN)/nox --session
ARGS ?=
TORCH_INDEX ?=
VERSIONS ?= oldest pinned newest
SIZE ?=
FIRST := index.ipynb

# python3 if it is 3.11 to 3.14 (the versions with wheels of the pinned torch), else the newest of those that is installed.
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(SUITABLE)' 2>/dev/null && { echo "$$python"; break; }; done)

export PYTHON TORCH_INDEX VERSIONS

# IPython warns where another environment is active than the one it runs in.
unexport VIRTUAL_ENV

# Without compiled files, each of the hundreds of processes that tests start would compile the kit again, which takes most of a second.
unexport PYTHONDONTWRITEBYTECODE

PIP_OPTIONS = --quiet --disable-pip-version-check $(shell "$(PYTHON)" tools/torch_index.py $(TORCH_INDEX))
PIP_INSTALL = $(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --timeout 600
TESTS := tests packages
SOURCES := $(CURDIR):$(CURDIR)/packages/virtualgpu/src:$(CURDIR)/packages/gputrace/src:$(CURDIR)/packages/labcourse/src
PARALLEL := -n auto --maxprocesses 4
NBVAL := --nbval-current-env --nbval-cell-timeout=240 --nbval-sanitize-with=tests/notebooks/sanitize.cfg $(PARALLEL) --dist loadfile

.PHONY: lab test test-all test-gpu test-versions test-browser test-nbgrader test-cluster test-classic test-binder coverage pins unit lint-and-unit unit-packages unit-all unit-slow unit-rest notebooks stored-outputs docs lint format clean

# The address that JupyterLab prints leads to the table of lessons. A kernel without encryption would warn of it in the terminal. JupyterLab refuses
# to run as root, which is who you are in most containers, unless told.
lab: $(VENV)/installed-lab
	@$(BIN)/python -m labkit lessons --to work
	@$(BIN)/python tools/running_lab.py work $(FIRST) || $(BIN)/python -m jupyterlab --ServerApp.root_dir=work --LabApp.default_url=/lab/tree/$(FIRST) \
		--KernelManager.transport_encryption=auto $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

# $(call in_turn,PARTS): make one part after the other, say which one runs, and at the end how long each took. A part that fails is the last.
in_turn = @number=0; report=""; status=0; \
	for part in $(1); do \
		number=$$((number + 1)); started=$$(date +%s); \
		echo "== $$number of $(words $(1)): $$part"; \
		$(MAKE) --no-print-directory $$part && outcome=passed || { status=$$?; outcome=FAILED; }; \
		report="$$report\n   $$part: $$outcome after $$(($$(date +%s) - started)) s"; \
		test $$status = 0 || break; \
	done; \
	printf "==$$report\n"; exit $$status

test: $(VENV)/installed
	$(call in_turn,lint-and-unit notebooks)

test-all: $(VENV)/installed
	$(call in_turn,lint unit-all notebooks)

# mypy has one process, so a second core would be idle.
lint-and-unit: $(VENV)/installed
	@$(MAKE) --no-print-directory -j2 lint unit

# A worker runs whole files: what the tests of a file share, such as a server of processes, is made once.
unit: $(VENV)/installed
	$(PYTEST) $(PARALLEL) --dist loadfile tests

unit-packages: $(VENV)/installed
	$(PYTEST) $(PARALLEL) --dist loadfile packages

unit-all: $(VENV)/installed
	$(PYTEST) $(PARALLEL) --dist loadfile --everything $(TESTS)

# Most of these tests wait for processes that they start, so more of them than there are cores run at once. What the tests of a file share, such as
# a sandbox, takes long to make: one worker runs them all.
unit-slow: $(VENV)/installed
	$(PYTEST) -n 4 --dist loadfile --slow $(TESTS)

unit-rest: $(VENV)/installed
	$(PYTEST) -n 4 --dist loadfile --rest $(TESTS)

# With one thread each (conftest.py says why): what they print was stored with as many as there were cores. A kernel is a copy of a process
# that has imported PyTorch, which saves a quarter of the time.
notebooks: $(VENV)/installed
	@ls notebooks/*.ipynb >/dev/null 2>&1 || { echo "no notebooks found in notebooks/" >&2; exit 1; }
	OMP_NUM_THREADS=1 LABKIT_VIRTUAL=1 LABKIT_PROGRESS= $(PYTEST) -p tools.forked_kernels --nbval $(NBVAL) notebooks

test-gpu: $(VENV)/installed
	$(PYTEST) --everything $(TESTS)
	$(PYTEST) --nbval-lax $(NBVAL) -n 1 notebooks

test-versions: $(VENV)/installed-nox
	$(NOX) versions

# A test waits for the page more than half of its time, so more of them than there are cores run at once.
test-browser: $(VENV)/installed-browser docs
	$(PYTEST) -n 4 --dist loadfile -m browser $(SIZE) tests/browser

test-nbgrader: $(VENV)/installed $(NBGRADER)/installed
	NBGRADER="$(CURDIR)/$(NBGRADER)/bin/nbgrader" $(PYTEST) --everything packages/labcourse/tests/test_nbgrader.py

test-cluster: $(VENV)/installed-cluster
	$(PYTEST) --everything packages/labcourse/tests/test_cluster.py

# Where old widgets could differ: in what all panels share, in two that draw by hand, and in what a page shows of them.
ifeq ($(SIZE),--everything)
OLD_PANELS = $$(grep -lE '(Lab|Panel)\(' tests/labs/*.py tests/lessons/*/*.py)
OLD_PAGES = tests/browser --ignore=tests/browser/test_site.py
else
OLD_PANELS = tests/labs tests/lessons/lesson_02/test_stream_program.py tests/lessons/lesson_05/test_allocator_by_hand.py
OLD_PAGES = $(addprefix tests/browser/,test_pages.py test_labs.py test_widgets.py test_slow_connection.py)
endif

# Colab has no labkit: the first cell of a lesson installs it there. The widgets' tests find it in these folders. The site has no widgets.
test-classic: $(CLASSIC)/installed
	$(CLASSIC)/bin/python -m pytest --timeout 600 -m platform $(SIZE) tests/platforms
	PYTHONPATH="$(SOURCES)" $(CLASSIC)/bin/python -m pytest -n 2 --timeout 300 $(SIZE) $(OLD_PANELS)
	PYTHONPATH="$(SOURCES)" $(CLASSIC)/bin/python -m pytest -n 4 --dist loadfile --timeout 300 -m browser $(SIZE) $(OLD_PAGES)

test-binder: $(VENV)/installed-browser $(BINDER)/installed
	$(BIN)/python -m pytest --everything tests/test_binder.py
	LABKIT_BINDER="$(BINDER)" $(BIN)/python -m pytest --timeout 600 -m platform $(SIZE) tests/browser/test_on_binder.py

coverage: $(VENV)/installed
	$(PYTEST) $(PARALLEL) --cov --cov-report=term --cov-report=html $(TESTS) $(ARGS)

pins: $(VENV)/installed-nox
	$(NOX) pins -- $(ARGS)

# From all sources each time: else Sphinx's search forgets the index entries of the pages that have not changed.
docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -c docs . build/site
	@echo "built: open build/site/index.html"

# After a change of the lessons, or of the virtual GPU's times and memory: run the lessons and store what they print.
stored-outputs: $(VENV)/installed
	$(BIN)/python tools/execute_notebooks.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .nox .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call make_venv,FOLDER): a virtual environment there, unless there is one.
make_venv = $(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
	test -n "$(PYTHON)" || { echo "Python 3.11, 3.12, 3.13 or 3.14 is needed: install one, or name it: make lab PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	echo "making $(1) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(1); }

# A changed pin or dependency installs again; an interrupted installation starts again. A learner's installation has no test tools, and shows
# what it does: PyTorch is large.
$(VENV)/installed-lab: constraints.txt pyproject.toml
	@$(call make_venv,$(VENV))
	@echo "installing the pinned packages into $(VENV): this takes some minutes the first time"
	@$(filter-out --quiet,$(PIP_INSTALL)) --editable '.[lab]'
	@$(BIN)/jupyter labextension disable --level=sys_prefix '@jupyterlab/apputils-extension:announcements' >/dev/null 2>&1 # no question about news
	@mkdir -p $(VENV)/share/jupyter/lab/settings
	@echo '{"@jupyterlab/filebrowser-extension:browser": {"showLastModifiedColumn": false}}' > $(VENV)/share/jupyter/lab/settings/overrides.json
	@touch $@

$(VENV)/installed: $(VENV)/installed-lab
	@echo "installing what the tests need into $(VENV)"
	@$(PIP_INSTALL) --editable '.[lab,test]'
	@touch $@

$(VENV)/installed-browser: $(VENV)/installed
	@$(PIP_INSTALL) --editable '.[lab,test,browser]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@$(PIP_INSTALL) --editable '.[lab,test,docs]'
	@touch $@

$(VENV)/installed-cluster: $(VENV)/installed
	@$(PIP_INSTALL) --editable '.[lab,test,cluster]'
	@touch $@

$(VENV)/installed-nox: $(VENV)/installed
	@$(PIP_INSTALL) --editable '.[lab,test,binder,nox]'
	@touch $@

# The environments that nox makes: noxfile.py says what is in each.
$(CLASSIC)/installed: tools/constraints-classic.txt pyproject.toml noxfile.py | $(VENV)/installed-nox
	$(NOX) classic --install-only
	@touch $@

# The copy of the repository follows each change, so nox looks each time.
.PHONY: $(BINDER)/installed
$(BINDER)/installed: | $(VENV)/installed-nox
	$(NOX) binder --install-only

$(NBGRADER)/installed: noxfile.py | $(VENV)/installed-nox
	$(NOX) nbgrader --install-only
	@touch $@
