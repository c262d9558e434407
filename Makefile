# gptlab's targets. Each sets itself up in .venv first and does nothing twice; Python >= 3.11, git and make are all
# that a machine needs.
#
#   make lab     JupyterLab on the first notebook
#   make demo    the same without a browser: demo.html, demo.png and a table of results
#   make faults  training under failure: kills, hangs, full disks, ..., each against an unbroken run; one table
#   make test    lint, types, floors, unit tests, notebooks, browser
#   make coverage  the slow tests too, some 40 minutes: lines of gptlab/ that none of them runs, beside the limits
#   make notebooks   all notebooks at their default budget, each some minutes
#   make bench   what the README says of speed, measured here and written there
#   make docs    the API reference from the docstrings, and the pages of gptlab/docs: build/docs/index.html
#   make watchcosts   what watching costs: delay, shares of a core, slowdown, growth; each beside its limit

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

# The first Python that is new enough and can make environments. Another one: make PYTHON=/path/to/python test
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# A browser needs a screen; Jupyter refuses root unless told, and root is what containers have.
SCREEN = $(if $(or $(DISPLAY),$(WAYLAND_DISPLAY),$(filter Darwin,$(shell uname))),,--no-browser)
ROOT = $(if $(filter 0,$(shell id -u)),--allow-root,)

.PHONY: help lab demo faults test coverage notebooks bench docs watchcosts

help:
	@sed -n '4,13s/^#//p' Makefile

lab: $(READY)
	GPTLAB_RUNS=$(CURDIR)/runs $(BIN)/jupyter lab --ip=127.0.0.1 --LabApp.default_url=/lab/tree/notebooks/01_sweep.ipynb $(SCREEN) $(ROOT)

demo: $(READY)
	$(BIN)/python -m gptlab.lab.demo

notebooks: $(READY)
	GPTLAB_BUDGET=default $(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=600 \
		--durations=0 --durations-min=1 $(NOTEBOOKS)

faults: $(READY)
	$(BIN)/python tests/faults $(FAULTS)

watchcosts: $(READY)
	$(BIN)/python tests/watchcosts/measure.py $(WATCHCOSTS)

# pytest stands last: its closing line is the verdict.
test: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(NOTEBOOKS),$(BIN)/nbstripout --verify $(NOTEBOOKS))
	$(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout=240 tests $(NOTEBOOKS)

coverage: $(READY)
	rm -rf build/coverage
	-GPTLAB_SLOW=1 $(BIN)/coverage run -m pytest tests
	-GPTLAB_BUDGET=test GPTLAB_RUNS=$(CURDIR)/build/coverage/runs $(BIN)/coverage run $(BIN)/jupyter-execute $(NOTEBOOKS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o build/coverage/lines.json
	$(BIN)/python tests/covered.py build/coverage/lines.json

bench: $(READY)
	$(BIN)/python -m gptlab.benchmark.readme README.md

docs: $(READY)
	$(BIN)/python -m gptlab.docs build/docs

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "gptlab needs Python 3.11 or newer with its venv module (Debian: apt-get install python3-venv), and none is on the PATH: install one, or name it with 'make PYTHON=/path/to/python'." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab,test]'
	$(BIN)/python -c "from gptlab.native.build import compile_ahead; compile_ahead()"
	@touch $@
