# make help    this list
# make demo    the main job, on a new machine with Python 3.11 or later; sets everything up
# make demo-torchrun   a job under three torchrun agents: a worker is killed, the others keep their processes, then a node is lost
# make demo-ray   a job under Ray on three virtual nodes: an actor is killed, then a node is lost and replaced
# make test    unit tests, and a test with real processes of each promise (tests/canaries.txt): six minutes on two cores
# make test-rest    what else is tested on each change: the rest of tests/ without what is marked slow; a quarter of an hour
# make test-all     all of it, every grid and drawn case whole: two hours; for all three TESTS=... selects tests
# make test-other   the fast tests on Python 3.13 or 3.12, without torch: three minutes
# make check   lint, format and types, and whether the published figures are of today's code
# make matrix  every kind of job, killed, restored and compared: two minutes
# make chaos   2,000 faults, 300 of them during recoveries: most of an hour
# make loops   2,000 training loops drawn from seeds, undisturbed and killed: LOOPS="--seeds 30 --first 777 --json FILE"
# make fuzz    two million inputs, spread over all parsers: a quarter of an hour on two cores
# make stall   what a snapshot costs, for README and docs: 15 minutes, on an idle machine; STALL="--systems all --minutes 90"
# make bench-node   speed of an SMP, in parts and as a whole, for holdfast plan and benchmarks.fleet: six minutes; AGAINST=CHECKOUT
# make bench-service   SMPs under load, 10,000 snapshots: half an hour
# make bench-load   load a lost node's state from memory or a file server, over shaped links: ten minutes, as root
# make bench-links   use of four network links per node, and the cost of losing one: three minutes, as root
# make bench-scale   communication between up to 16,384 ranks, by size of the job: 15 minutes on an idle machine
# make gpu     on a machine with a GPU: is it right (GPU="A A-jobs"), fast ("B B-steps"), cheaper than others (C)?
# make gpu-wheels  download what a GPU machine without network needs besides torch and NumPy; GPU_PYTHON=3.12
# make gpu-offline   on such a machine: set up with these packages and its own torch, before make gpu
# make gpu-dry   make gpu on a machine without a GPU, with an emulated device: six minutes, if it does nothing else
# make wheels  an sdist, and a wheel per processor architecture with a compiler on this machine, in dist/
# make wheels-check  install each for every Python on this machine, outside the checkout; lose a trainer and a node
# make journeys   newcomers' first hours, a keeper's upgrade, OOM and S3: half an hour, as root; JOURNEYS="keeper --python python3.12"
# make real    third-party scripts, killed and compared; REAL=FOLDER has their checkouts: twenty minutes on idle cores
# make optimizers   every optimizer class of PyPI's libraries, killed and compared; OPTIMIZERS="--library muon": 20 minutes
# make proof   the tests that prove the promises of README and docs, and a table of the results
# make pictures   take the pictures of the page in docs/, with Chromium
# make docs    generate the reference from the code, build the documentation, check every link: build/docs/index.html
# make setup   the environment in .venv that the other targets use; they make it themselves: 1.2 GB
# make frameworks   what test-rest, test-all and a few others need besides: Lightning, Hugging Face, Ray and more
# make clean   delete the environments in .venv and .venv-peers

PYTHON ?= $(or $(shell command -v python3.11 2>/dev/null),python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks

.PHONY: help demo demo-torchrun demo-ray test test-rest test-all test-other proof check matrix real optimizers chaos loops fuzz stall bench-node bench-service bench-load bench-links bench-scale gpu gpu-dry gpu-wheels gpu-offline wheels wheels-check journeys pictures docs clean setup frameworks
.DEFAULT_GOAL := help

help:  # the lines at the top of this file
	@sed -nE 's/^# (make [a-z-]+) +/\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

demo: setup
	@$(BIN)/holdfast demo $(DEMO)

demo-torchrun: setup
	@TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 \
		$(BIN)/holdfast chaos run --seed 1656 --faults 2 --nodes 3 --steps 10 --ignore _hooks -- \
		$(BIN)/torchrun --nnodes=3 --nproc-per-node=1 --max-restarts=9 --rdzv-backend=c10d \
		--rdzv-endpoint=127.0.0.1:29400 --rdzv-id=demo --local-addr=127.0.0.1 -m tests.proof.jobs.surviving

demo-ray: frameworks
	@$(BIN)/python -m tests.proof.ray.drill again

CANARIES := tests/canaries.txt
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=50

test: setup
	@$(PYTEST) $(or $(TESTS),@$(CANARIES) tests/unit)

test-rest: frameworks
	@mkdir -p build
	@sed 's/^/--deselect=/' $(CANARIES) >build/canaries.txt
	@$(PYTEST) @build/canaries.txt $(or $(TESTS),tests/system tests/frameworks tests/proof)

test-all: frameworks
	@$(PYTEST) -m "" --hypothesis-profile=all $(TESTS)

test-other: setup
	@$(BIN)/python -m tools.other_python $(OTHER)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m benchmarks.stall --check

matrix: setup
	$(BIN)/python -m tests.proof.matrix --markdown benchmarks/results/matrix-$$(date +%F).md \
		--json benchmarks/results/matrix-$$(date +%F).json

real: frameworks
	@$(BIN)/python -m tools.real $(if $(REAL),--real $(REAL)) $(if $(ONLY),--only $(ONLY)) \
		--json benchmarks/results/real-$$(date +%F).json --markdown benchmarks/results/real-$$(date +%F).md

OPTIMIZERS ?= --json benchmarks/results/optimizers-$$(date +%F).json \
	--markdown benchmarks/results/optimizers-$$(date +%F).md
LIBRARIES := build/optimizers

optimizers: $(LIBRARIES)/.ready
	@$(BIN)/python -m tools.optimizers --packages $(LIBRARIES) $(OPTIMIZERS)

# Without what they depend on, which would bring another torch.
$(LIBRARIES)/.ready: tools/optimizers/requirements.txt $(FRAMEWORKS)
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps --target $(LIBRARIES) -r $<
	@touch $@

chaos: setup
	$(BIN)/python -m tests.proof.chaos run campaign --json benchmarks/results/chaos-$$(date +%F).json \
		--markdown benchmarks/results/chaos-$$(date +%F).md --html benchmarks/results/chaos-$$(date +%F).html

LOOPS ?= --seeds 2000 --jobs 2 --json benchmarks/results/loops-$$(date +%F).json \
	--markdown benchmarks/results/loops-$$(date +%F).md

loops: setup
	$(BIN)/python -m tests.proof.loops $(LOOPS)

fuzz: setup
	$(BIN)/python -m tools.fuzz --inputs 2000000 --json benchmarks/results/fuzz-$$(date +%F).json

stall: frameworks
	$(BIN)/python -m benchmarks.stall $(STALL) --json benchmarks/results/stall-$$(date +%F).json \
		--markdown benchmarks/results/stall-$$(date +%F).md --plot benchmarks/results/stall-$$(date +%F).svg

bench-node: setup
	$(BIN)/python -m benchmarks.node $(if $(AGAINST),--against $(AGAINST)) --json benchmarks/results/node-$$(date +%F).json \
		--markdown benchmarks/results/node-$$(date +%F).md

bench-service: setup
	$(BIN)/python benchmarks/service.py --json benchmarks/results/service-$$(date +%F).json \
		--markdown benchmarks/results/service-$$(date +%F).md

bench-load: setup
	$(BIN)/python benchmarks/load.py --json benchmarks/results/load-$$(date +%F).json \
		--markdown benchmarks/results/load-$$(date +%F).md

bench-links: setup
	$(BIN)/python benchmarks/links.py --json benchmarks/results/links-$$(date +%F).json \
		--markdown benchmarks/results/links-$$(date +%F).md

bench-scale: setup
	$(BIN)/python benchmarks/scale.py --json benchmarks/results/scale-$$(date +%F).json \
		--markdown benchmarks/results/scale-$$(date +%F).md

GPU ?= A A-jobs B B-steps C
GPU_PYTHON ?= 3.12
WHEELS := build/gpu-wheels

# An environment of gpu-offline stays, whatever the times of files.
GPU_NEEDS := $(if $(wildcard $(READY)),,setup)

gpu: $(GPU_NEEDS)
	@failed=; for part in $(GPU); do \
		$(BIN)/python -m benchmarks.gpu $$part $(DRY) $(if $(OUT),--out $(OUT)) || failed=1; \
	done; test -z "$$failed"

gpu-dry: $(GPU_NEEDS)
	@$(MAKE) --no-print-directory gpu DRY=--dry

gpu-wheels: setup
	@$(BIN)/pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		-c constraints.txt -r benchmarks/gpu/wheels.txt -d $(WHEELS)
	@du -sh $(WHEELS)

gpu-offline:
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > \
		$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	@$(BIN)/pip install -qq --disable-pip-version-check --no-index --no-deps $(WHEELS)/*.whl
	@$(BIN)/pip install -qq --disable-pip-version-check --no-index --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch, holdfast; print("torch", torch.__version__, "sees", torch.cuda.device_count(), "GPUs")'
	@touch $(READY)

wheels: setup
	@$(BIN)/python -m tools.wheels build

wheels-check: setup
	@$(BIN)/python -m tools.wheels check dist/*.whl $(WHEELS_CHECK)

journeys: frameworks
	@$(BIN)/python -m tools.journeys $(JOURNEYS)

proof: frameworks
	@$(BIN)/python -m tools.proof

pictures: setup
	@$(BIN)/python -m tools.pictures

docs: setup
	@$(BIN)/python docs/generate.py
	@$(BIN)/mkdocs build --strict  # not --quiet, with which warnings would not count
	@echo build/docs/index.html

setup: $(READY)

$(READY): pyproject.toml constraints.txt snapshot/stream.c smp_daemon/shared/receive.c smp_daemon/shared/xxh3.h
	@echo "setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[megatron,dev]'
	@touch $@

frameworks: $(FRAMEWORKS)

$(FRAMEWORKS): $(READY)
	@echo "setting up frameworks in $(VENV) (once)"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-peers
