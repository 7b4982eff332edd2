# Kernel Book: `make html` builds the book, `make test` proves it.
# VENV= (empty) uses the python3 that is active, and installs nothing into it.

VENV ?= .venv
PORT ?= 8000
SPHINXOPTS ?=
MINUTES ?= 10
ONLY ?=

ifeq ($(strip $(VENV)),)
PYTHON := python3
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
SITE := build/html
BUILT := build/.built
GENERATED := docs/chapters docs/api docs/_dark
SOURCES = $(shell find conf.py pyproject.toml CITATION.cff LICENSE* src docs gallery results -type f \
	-not -path '*/__pycache__/*' -not -path 'docs/chapters/*' -not -path 'docs/api/*' \
	-not -path 'docs/_dark/*' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help html test fuzz memcheck compile lint serve clean

help:  ## show this list
	@echo "Kernel Book"
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16
	@echo
	@echo "  VENV=           use the active python3 and install nothing"
	@echo "  SPHINXOPTS=-W   pass options to sphinx-build"
	@echo "  ONLY=ops        test one room: ops, lab or site"
	@echo "  MINUTES=10      how long to fuzz"
	@echo "  KERNELBOOK_MODE=live|replay   measure, or redraw what is recorded"

html: $(READY)  ## build the book into build/html, running every chapter
	@rm -rf $(GENERATED) build/doctrees $(SITE).new $(SITE).old
	$(PYTHON) -m sphinx -b html -c . -d build/doctrees $(SPHINXOPTS) docs $(SITE).new
	@if [ -e $(SITE) ]; then mv $(SITE) $(SITE).old; fi
	@mv $(SITE).new $(SITE)
	@rm -rf $(SITE).old
	@touch $(BUILT)

test: $(READY) $(if $(filter ops lab,$(ONLY)),,$(BUILT))  ## run every test, or those of one room: ONLY=ops
	$(PYTHON) -m pytest -n 2 --dist worksteal tests/$(ONLY)

fuzz: $(READY)  ## explore what the property tests do not, for MINUTES=10
	$(PYTHON) tests/fuzz.py --minutes $(MINUTES)

memcheck: $(READY)  ## run every kernel with memory that ends where its tensors end
	$(PYTHON) tests/memcheck.py --sanitize

compile: $(READY)  ## compile every kernel for GPUs that are not there, and compare
	$(PYTHON) tests/compiling.py --check

lint: $(READY)  ## check the style of the code
	$(PYTHON) -m ruff check .

serve: $(BUILT)  ## open the built book on http://127.0.0.1:8000 (PORT= to change)
	$(PYTHON) -m http.server $(PORT) --bind 127.0.0.1 --directory $(SITE)

clean:  ## remove what the build wrote (not .venv, not results)
	rm -rf build $(GENERATED)

$(BUILT): $(SOURCES)
	@$(MAKE) --no-print-directory html

$(VENV)/.installed: constraints.txt
	@test -x $(VENV)/bin/python || { echo "Creating $(VENV)"; python3 -m venv $(VENV); }
	$(VENV)/bin/python -m pip install --disable-pip-version-check -r constraints.txt
	@touch $@
