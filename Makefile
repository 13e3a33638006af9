# Everything from a clean clone: `make train`. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv train demo cluster-demo test test-slow scenarios smoke fuzz twin simulate lint wheel release site bench gpu-check learning atari57 results reproduce paper peers peers-reverb peers-dqn clean check-python

VENV  ?= .venv
ARGS  ?=
NAME  ?= sumtree
QUICK ?=
SERVE ?=
MINUTES ?= 10
# cpu: the build without CUDA. cuda: with it, several GB. existing: the one that your Python has.
# auto: yours if there is one, otherwise cuda where there is an NVIDIA GPU, otherwise cpu.
# Not given: cuda where there is a GPU, which is asked first on a terminal; otherwise cpu.
# What was chosen once stays: the name of the stamp in $(VENV) holds it.
INSTALLED := $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*)))
DEVICES   ?= /dev
GPU       := $(wildcard $(DEVICES)/nvidia[0-9]*)
TORCH ?= $(or $(INSTALLED),$(if $(GPU),cuda,cpu))
ASKS  := $(if $(INSTALLED),,$(if $(filter file,$(origin TORCH)),$(filter cuda,$(TORCH))))
# An index with torch's CPU builds, besides pip's own; without it PyTorch's public one is tried once.
TORCH_INDEX ?=
CPU_INDEX   ?= https://download.pytorch.org/whl/cpu

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.14 python3,$(shell \
	$(p) -c 'import sys; print(sys._base_executable) if sys.version_info >= (3, 11) else 0' 2>/dev/null)))

ifeq ($(TORCH),auto)
  override TORCH := $(shell if $(PYTHON) -c 'import torch' 2>/dev/null; then echo existing; \
	else echo $(if $(GPU),cuda,cpu); fi)
endif

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(TORCH)
PIP   := $(BIN)/python -m pip install --disable-pip-version-check
# By a path, not an import hook, which type checkers don't follow.
EDITABLE := --config-settings editable_mode=compat

help:
	@printf '%s\n' \
	  '' \
	  '  make train    ten minutes of Breakout with the real ROM; more: make train ARGS="--max-minutes 60"' \
	  '  make demo     CartPole to 475 of 500 in about two minutes, then the curve' \
	  '  make cluster-demo   CartPole on four hosts of this machine; as root in network namespaces' \
	  '  make test     the tests, two at a time; some: ARGS="tests/library -x -n 0"' \
	  '  make scenarios  one whole run of each world: a host, SLURM, Ray, the wheel' \
	  '  make test-slow  the tests that take too long for make test, an hour; some: ARGS="tests/stress"' \
	  '  make smoke    each benchmark for some seconds' \
	  '  make lint     ruff, mypy, direction of imports' \
	  '  make fuzz     fuzz the decoders: ARGS="--runs 10000000 --decoder push"' \
	  '  make twin     compare the replay with a naive twin: ARGS="--minutes 60 --seed 7"' \
	  '  make simulate a cluster in one process, every fault drawn from a seed: ARGS="--seed 7", ARGS="--hours 1"' \
  '  make site     the documentation as a site, in build/site: SERVE=1 shows it at http://127.0.0.1:8000' \
	  '  make release  what a package index gets, in dist/, checked and installed on every Python here: docs/releasing.md' \
	  '  make wheel    a wheel, in dist/                make bench   a benchmark: NAME=sumtree ARGS="..."' \
	  '  make learning   variants, games and seeds, one run at a time: ARGS="--variant preset --hours 3", ARGS=--list' \
	  '  make atari57    ten minutes of each of 57 games, ten hours in all: MINUTES=10' \
	  '  make gpu-check  what the GPU path does on a GPU, in eight minutes: PYTHON=python3 WHEELS=FOLDER' \
	  '  make reproduce  measure the headline numbers again, in an hour; QUICK=1: in ten minutes' \
	  '  make results  write the tables of docs/results.md and the pictures from benchmarks/results' \
	  '  make paper    the systems of arXiv 2110.13506 and their figures, in runs/paper: ARGS=--quick in five minutes' \
	  '  make venv     the environment alone, in $(VENV)  make clean   remove build output' \
	  '  make peers    other libraries to compare with, in .peers: make bench ARGS=--peers' \
	  '  make peers-reverb   Reverb and its TensorFlow (600 MB), in .peers-reverb' \
	  '  make peers-dqn      Stable-Baselines3, and what the DQN of CleanRL needs, in .peers-dqn' \
	  '' \
	  '  TORCH=cpu | cuda | existing (the torch of your Python) | auto; not given: cuda where a GPU is, and it asks' \
	  '  PYTHON=...   which Python 3.11 or newer; here: $(or $(PYTHON),none found)' \
	  ''

venv: $(STAMP)

train: $(STAMP)
	@$(BIN)/zapex train --env ALE/Breakout-v5 --max-minutes 10 $(ARGS)

demo: $(STAMP)
	@$(BIN)/zapex demo --eval-episodes 100 $(ARGS)

cluster-demo: $(STAMP)
	@$(BIN)/python -m tests.support.cluster_demo $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest --durations=10 -n 2 --dist worksteal $(ARGS)

# What these tests need beyond the environment: Ray, a browser's driver, other libraries, visdom.
test-slow: $(VENV)/.slow
	@$(BIN)/python -m pytest --durations=20 --timeout 600 -n 2 --dist loadgroup -m slow $(ARGS)

$(VENV)/.slow: $(STAMP)
	@$(PIP) --quiet --constraint '$(VENV)/constraints.txt' ray playwright build twine
	@$(PIP) --quiet --constraint '$(VENV)/constraints.txt' --no-deps stable-baselines3
	@$(PIP) --quiet --constraint '$(VENV)/constraints.txt' 'minari[arrow]'
	@grep -v '^setuptools==' '$(VENV)/constraints.txt' > '$(VENV)/old.txt'; echo 'setuptools<81' >> '$(VENV)/old.txt'
	@PIP_CONSTRAINT='$(VENV)/old.txt' $(PIP) --quiet visdom  # its setup needs an old setuptools
	@touch '$@'

scenarios: $(STAMP)
	@$(BIN)/python -m pytest --durations=10 -n 2 --dist loadgroup -m scenario $(ARGS)

smoke: $(STAMP)
	@$(BIN)/python -m pytest --durations=20 -m bench tests/benchmarks $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || \
	  $(PIP) --quiet --constraint '$(VENV)/constraints.txt' --editable '.[fuzz]' $(EDITABLE) || \
	  echo 'atheris is not available; fuzzing without coverage guidance' >&2
	@$(BIN)/python -m tests.fuzz.fuzz $(ARGS)

twin: $(STAMP)
	@$(BIN)/python -m tests.library.twin $(ARGS)

simulate: $(STAMP)
	@$(BIN)/python -m tests.simulation $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict zapex
	@$(BIN)/python -m pytest tests/test_layers.py

wheel: $(STAMP)
	@rm -rf build
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

# In dist/, then installed from an index of its own on Python 3.11 to 3.14: docs/releasing.md.
release: $(STAMP)
	@$(PIP) --quiet --constraint '$(VENV)/constraints.txt' build twine
	@ZAPEX_RELEASE=1 $(BIN)/python -m pytest -rs -n 0 -m scenario tests/scenarios/test_index.py \
	  tests/scenarios/test_image.py $(ARGS)
	@ls -l dist/zapex-*

# strict: a broken link or a page that nothing leads to is a failure.
site: $(STAMP)
	@$(BIN)/python -c 'import material, mkdocstrings, plotly' 2>/dev/null || \
	  $(PIP) --quiet --constraint '$(VENV)/constraints.txt' --editable '.[docs]' $(EDITABLE)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build --strict) --quiet
	@$(if $(SERVE),,echo 'Made: build/site/index.html')

bench: $(STAMP)
	@$(BIN)/zapex bench $(NAME) $(ARGS)

# A Python with torch and CUDA is enough: PYTHON=python3 WHEELS=FOLDER, see the script.
gpu-check:
	@$(PYTHON) -m benchmarks.gpu_check $(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT)) $(ARGS)

learning: $(STAMP)
	@$(BIN)/python -m benchmarks.learning $(ARGS)

atari57: $(STAMP)
	@$(BIN)/python -m benchmarks.learning --games-of all --seeds 1 --minutes $(MINUTES) $(ARGS)

reproduce: $(STAMP)
	@$(BIN)/python -m benchmarks.reproduce $(if $(QUICK),--quick) $(ARGS)

results: $(STAMP)
	@$(BIN)/python -m benchmarks.report

paper: $(STAMP)
	@$(BIN)/zapex bench paper --json runs/paper/paper.json --figures runs/paper $(ARGS)

peers: .peers/.installed

# Their own dependencies disagree with ours: torch and numpy alone are the same.
.peers/.installed: benchmarks/peers/requirements.txt constraints.txt $(STAMP)
	@test -e .peers/bin/python || $(PYTHON) -m venv .peers
	@$(BIN)/python -m pip freeze --disable-pip-version-check | grep -E '^(torch|numpy)==' > .peers/same.txt
	@.peers/bin/python -m pip install --disable-pip-version-check --quiet \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') \
	  --requirement .peers/same.txt --requirement benchmarks/peers/requirements.txt
	@touch '$@'
	@echo 'Made: .peers'

peers-reverb: .peers-reverb/.installed

.peers-reverb/.installed: benchmarks/peers/requirements-reverb.txt
	@test -e .peers-reverb/bin/python || $(PYTHON) -m venv .peers-reverb
	@.peers-reverb/bin/python -m pip install --disable-pip-version-check --quiet \
	  --requirement benchmarks/peers/requirements-reverb.txt
	@touch '$@'
	@echo 'Made: .peers-reverb'

peers-dqn: .peers-dqn/.installed

# The same torch as ours, so that a ratio is of the libraries.
.peers-dqn/.installed: benchmarks/peers/requirements-dqn.txt constraints.txt $(STAMP)
	@test -e .peers-dqn/bin/python || $(PYTHON) -m venv .peers-dqn
	@$(BIN)/python -m pip freeze --disable-pip-version-check | grep -E '^torch==' > .peers-dqn/same.txt
	@.peers-dqn/bin/python -m pip install --disable-pip-version-check --quiet \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') \
	  --requirement .peers-dqn/same.txt --requirement benchmarks/peers/requirements-dqn.txt
	@touch '$@'
	@echo 'Made: .peers-dqn'

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find zapex tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo 'kept: $(VENV), .peers* and runs/'

# Another choice of TORCH makes the environment anew; a pull that changed a version updates it.
$(STAMP): pyproject.toml constraints.txt benchmarks/requirements.txt | check-python
	@case '$(TORCH)' in cpu|cuda|existing) ;; *) \
	  echo 'TORCH must be cpu, cuda, existing or auto, got "$(TORCH)"' >&2; exit 2;; esac
	@torch=$(TORCH); if [ '$(ASKS)' ]; then \
	  echo 'There is an NVIDIA GPU. torch with CUDA takes several GB; without it the GPU is not used.'; \
	  if [ -t 0 ]; then read -r -p 'Take it? [Y/n] ' answer; case "$$answer" in [nN]*) torch=cpu;; esac; fi; \
	fi; $(MAKE) --no-print-directory TORCH=$$torch environment

.PHONY: environment
environment:
	@echo 'Making $(VENV) with $(PYTHON) (TORCH=$(TORCH)); the first time takes minutes.'
	@$(if $(filter-out $(TORCH),$(INSTALLED)),rm -rf '$(VENV)')
	@test -e '$(BIN)/python' || $(PYTHON) -m venv \
	  $(if $(filter existing,$(TORCH)),--system-site-packages) '$(VENV)'
	@$(MAKE) --no-print-directory TORCH=$(TORCH) install-torch-$(TORCH)
	@$(PIP) --quiet --constraint '$(VENV)/constraints.txt' --requirement benchmarks/requirements.txt \
	  --editable '.[curve,fstack,video,dev]' $(EDITABLE)
	@touch '$(STAMP)'
	@echo 'Made: $(BIN)/zapex'

.PHONY: install-torch-cpu install-torch-cuda install-torch-existing
install-torch-cpu:
	@cp constraints.txt '$(VENV)/constraints.txt'
	@torch="$$(grep '^torch==' constraints.txt)+cpu"; \
	$(PIP) --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') "$$torch" 2>/dev/null || \
	{ echo "pip's index has no $$torch: trying $(CPU_INDEX)"; \
	$(PIP) --quiet --no-deps --index-url '$(CPU_INDEX)' --timeout 10 --retries 0 "$$torch"; } || \
	{ printf '%s\n' '' \
	  "There is no CPU build of torch in pip's index or at $(CPU_INDEX)." \
	  'The CUDA build takes several GB with what it needs. Choose one:' \
	  '  make TORCH_INDEX=URL ...   another index with CPU builds' \
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
