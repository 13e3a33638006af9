# Everything from a clean clone: `make train`. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv train demo cluster-demo test fuzz stress lint wheel bench peers peers-reverb clean check-python

VENV  ?= .venv
ARGS  ?=
NAME  ?= sumtree
# cpu: the build without CUDA. cuda: with it, several GB. existing: the one that your Python has.
# auto: yours if there is one, otherwise cuda where there is an NVIDIA GPU, otherwise cpu.
# What was chosen once stays: the name of the stamp in $(VENV) holds it.
INSTALLED := $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*)))
TORCH ?= $(or $(INSTALLED),cpu)
# An index with torch's CPU builds, where pip's own has none.
TORCH_INDEX ?=

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.14 python3,$(shell \
	$(p) -c 'import sys; print(sys._base_executable) if sys.version_info >= (3, 11) else 0' 2>/dev/null)))

ifeq ($(TORCH),auto)
  override TORCH := $(shell if $(PYTHON) -c 'import torch' 2>/dev/null; then echo existing; \
	elif compgen -G '/dev/nvidia[0-9]*' >/dev/null; then echo cuda; else echo cpu; fi)
endif

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(TORCH)
PIP   := $(BIN)/python -m pip install --disable-pip-version-check

help:
	@printf '%s\n' \
	  '' \
	  '  make train    ten minutes of Breakout with the real ROM; more: make train ARGS="--max-minutes 60"' \
	  '  make demo     CartPole to 475 of 500 in about two minutes, then the curve' \
	  '  make cluster-demo   CartPole on four hosts of this machine; as root in network namespaces' \
	  '  make test     the tests                        make lint    ruff, mypy, direction of imports' \
	  '  make fuzz     the decoders, as long as told: ARGS="--runs 10000000 --decoder push"' \
	  '  make stress   roles killed at every step, everything accounted for: ARGS="--minutes 10 --seed 7"' \
	  '  make wheel    a wheel, in dist/                make bench   a benchmark: NAME=sumtree ARGS="..."' \
	  '  make venv     the environment alone, in $(VENV)  make clean   away with what was built' \
	  '  make peers    other libraries to compare with, in .peers: make bench ARGS=--peers' \
	  '  make peers-reverb   Reverb and its TensorFlow (600 MB), in .peers-reverb' \
	  '' \
	  '  TORCH=cpu (default) | cuda | existing (the torch of your Python) | auto' \
	  '  PYTHON=...   which Python 3.11 or newer; here: $(or $(PYTHON),none found)' \
	  ''

venv: $(STAMP)

train: $(STAMP)
	@$(BIN)/zapex train --env ALE/Breakout-v5 --max-minutes 10 $(ARGS)

demo: $(STAMP)
	@$(BIN)/zapex train --env CartPole-v1 --stop-at-return 475 --eval-episodes 100 --max-minutes 5 $(ARGS)

cluster-demo: $(STAMP)
	@$(BIN)/zapex demo cluster $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest --durations=10 $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	  $(PIP) --quiet --constraint '$(VENV)/constraints.txt' --editable '.[fuzz]' || \
	  echo 'atheris cannot be had: fuzzing without guidance by coverage' >&2
	@$(BIN)/python -m tests.fuzz.fuzz $(ARGS)

stress: $(STAMP)
	@$(BIN)/python -m tests.stress.chaos $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict zapex
	@$(BIN)/python -m pytest tests/test_layers.py

wheel: $(STAMP)
	@rm -rf build
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

bench: $(STAMP)
	@$(BIN)/zapex bench $(NAME) $(ARGS)

peers: .peers/.installed

# Their own dependencies disagree with ours: torch and numpy alone are the same.
.peers/.installed: benchmarks/peers.txt constraints.txt $(STAMP)
	@test -e .peers/bin/python || $(PYTHON) -m venv .peers
	@$(BIN)/python -m pip freeze --disable-pip-version-check | grep -E '^(torch|numpy)==' > .peers/same.txt
	@.peers/bin/python -m pip install --disable-pip-version-check --quiet \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') \
	  --requirement .peers/same.txt --requirement benchmarks/peers.txt
	@touch '$@'
	@echo 'Made: .peers'

peers-reverb: .peers-reverb/.installed

.peers-reverb/.installed: benchmarks/peers-reverb.txt
	@test -e .peers-reverb/bin/python || $(PYTHON) -m venv .peers-reverb
	@.peers-reverb/bin/python -m pip install --disable-pip-version-check --quiet \
	  --requirement benchmarks/peers-reverb.txt
	@touch '$@'
	@echo 'Made: .peers-reverb'

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find zapex tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo 'kept: $(VENV), .peers and runs/'

# Another choice of TORCH makes the environment anew; a pull that changed a version updates it.
$(STAMP): pyproject.toml constraints.txt | check-python
	@case '$(TORCH)' in cpu|cuda|existing) ;; *) \
	  echo 'TORCH must be cpu, cuda, existing or auto, got "$(TORCH)"' >&2; exit 2;; esac
	@echo 'Making $(VENV) with $(PYTHON) (TORCH=$(TORCH)); the first time takes minutes.'
	@$(if $(filter-out $(TORCH),$(INSTALLED)),rm -rf '$(VENV)')
	@test -e '$(BIN)/python' || $(PYTHON) -m venv \
	  $(if $(filter existing,$(TORCH)),--system-site-packages) '$(VENV)'
	@$(MAKE) --no-print-directory install-torch-$(TORCH)
	@$(PIP) --quiet --constraint '$(VENV)/constraints.txt' --editable '.[plot,video,dev]'
	@touch '$@'
	@echo 'Made: $(BIN)/zapex'

.PHONY: install-torch-cpu install-torch-cuda install-torch-existing
install-torch-cpu:
	@cp constraints.txt '$(VENV)/constraints.txt'
	@$(PIP) --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') \
	  "$$(grep '^torch==' constraints.txt)+cpu" || { printf '%s\n' '' \
	  "pip found no CPU build of $$(grep '^torch==' constraints.txt). The general package index has only the" \
	  'CUDA build for Linux, several GB with what it needs. Choose one:' \
	  '  make TORCH_INDEX=URL ...   an index with CPU builds: see "Get started" on pytorch.org, choose CPU' \
	  '  make TORCH=cuda ...        the CUDA build after all (it runs without a GPU too)' \
	  '  make TORCH=existing ...    the torch that $(PYTHON) has' >&2; exit 1; }

install-torch-cuda:
	@cp constraints.txt '$(VENV)/constraints.txt'
	@$(PIP) --quiet --constraint constraints.txt torch

install-torch-existing:
	@grep -v '^torch==' constraints.txt > '$(VENV)/constraints.txt'
	@$(BIN)/python -c 'import torch; print("Using torch", torch.__version__)' 2>/dev/null || \
	  { echo 'TORCH=existing: $(PYTHON) has no torch that can be imported' >&2; exit 1; }

check-python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { printf '%s\n' \
	  'Python 3.11 or newer is missing$(if $(PYTHON), (asked for: $(PYTHON))). On Debian 12 and Ubuntu 24.04:' \
	  '  sudo apt install python3 python3-venv' \
	  'On Ubuntu 22.04:' \
	  '  sudo apt install python3.11 python3.11-venv' \
	  'Elsewhere: make PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { printf '%s\n' \
	  '$(PYTHON) has no venv module. On Debian and Ubuntu:' \
	  "  sudo apt install python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" >&2; exit 1; }
