# Each target creates the environment it needs on a fresh machine and can be run again.
PYTHON ?= python3
# `make test TORCH=2.14.1` runs on another torch, in an environment of its own.
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
PEERS ?= .venv-peers
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export RAY_AUTH_MODE ?= disabled
export RAY_DEDUP_LOGS ?= 0
export RAY_USAGE_STATS_ENABLED ?= 0
export RAY_worker_niceness ?= 0
export AWS_EC2_METADATA_DISABLED ?= true
SLICE ?= 1/1
SEED ?= 0

.PHONY: env demo check test faults docs bench bench-quick bench-peers clean

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

demo: env
	$(BIN)/python -m jobs.demo

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	# Types and tests side by side: each of them keeps one core busy.
	$(BIN)/pyright & types=$$!; \
	$(BIN)/python -m pytest -q -m "ring0 and not matrix"; tests=$$?; \
	wait $$types && exit $$tests

test: env
	$(BIN)/python -m pytest -q -m "not matrix"

faults: env
	SLICE=$(SLICE) SEED=$(SEED) $(BIN)/python -m pytest -q -m matrix

# A site of the documentation with the reference from docstrings, in build/docs; whatever it warns of is an error.
docs: env
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs/site -d build/doctrees . build/docs

QUESTIONS := control long_life overhead planner recovery replay reshard stall start_build switch

bench-quick: env
	for name in $(QUESTIONS); do $(BIN)/python -m benchmarks.$$name --quick || exit 1; done

bench: env
	for name in $(QUESTIONS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

# Systems that stall, reshard and recovery are compared with, in an environment of their own beside ours; tests
# of DeepSpeed run where it is.
bench-peers: env
	test -x $(PEERS)/bin/python || $(BIN)/python -m venv --without-pip $(PEERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
	$(BIN)/python -m pip --python $(PEERS)/bin/python install --quiet --disable-pip-version-check \
		torchsnapshot==0.1.0 torch_checkpointing==0.1.1 dlrover==0.6.1 nvidia-resiliency-ext==0.4.1 grpcio protobuf \
		torchft==0.2.0
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip --python $(PEERS)/bin/python install --quiet \
		--disable-pip-version-check --no-build-isolation deepspeed==0.19.8
	$(BIN)/python -m benchmarks.stall --peers $(PEERS)/bin/python
	$(BIN)/python -m benchmarks.reshard --peers $(PEERS)/bin/python
	$(BIN)/python -m benchmarks.recovery --case node --case crash --peers $(PEERS)/bin/python

clean:
	rm -rf $(VENV) .venv-torch-* $(PEERS) .pytest_cache .ruff_cache .hypothesis
