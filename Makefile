# Two commands do all the set-up: `make train` and `make test`. Each makes what it needs and is quick the
# second time. Settings: PYTHON (the interpreter of the virtual environment), TORCH (which torch to install,
# e.g. TORCH='torch==2.11.*'), WORKERS, RUN and DATA of `make train`.
PYTHON  ?= python3
VENV    ?= .venv
TORCH   ?= torch
OLDEST  := torch==2.11.*
WORKERS ?= 2
DATA    ?= runs/builtin-text
RUN     ?= runs/first-light
BIN     := $(VENV)/bin
UV      := $(BIN)/uv pip install --quiet --python $(BIN)/python
EXTRAS  := torch,text,corpora,vision,aws,objects,report,watch,mlperf,scores,onnx,lora,wandb,mlflow,dev,bench,docs
STAMP   := $(VENV)/.installed
# Builds have no environment of their own: in a new one scikit-build-core compiles all of csrc again.
BUILDS   = $(shell $(PYTHON) -c 'import tomllib; print(*map(repr, tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]))')
QUICK    = $(if $(P),tests/unit/$(P) tests/unit/test_$(P).py)
# Whole files: what a file's tests share is made once. Of all tests three at a time on two cores: those of processes
# wait for much of their time. The longest file of tests/real, which waits for slow links, begins.
FILES   := --dist loadfile --no-loadscope-reorder
REAL     = tests/real/test_slurm_training.py $(filter-out %/test_slurm_training.py,$(sort $(wildcard tests/real/test_*.py)))
# Keep compiled modules where an image's environment forbids it: a process that compiles torch's starts seconds later.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name '*.map')

comma   := ,
# $(call core_build,NAME,SANITIZERS): builds the C++ tests in build/core-NAME, from few large sources: most of the time of
# a source goes into its headers. $(call core_run,NAME) runs them.
core_build = $(BIN)/cmake -S . -B build/core-$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DSHOAL_BUILD_TESTS=ON -DSHOAL_SANITIZE=$(2) -DCMAKE_UNITY_BUILD=ON --log-level=WARNING >/dev/null && \
	$(BIN)/cmake --build build/core-$(1) -- --quiet
# Clang has libFuzzer; its package is libclang-rt-VERSION-dev.
fuzzer_build = $(BIN)/cmake -S . -B build/core-fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_CXX_COMPILER=clang++ \
	  -DSHOAL_BUILD_FUZZER=ON -DSHOAL_SANITIZE=address$(comma)undefined -DSHOAL_LIBFABRIC=OFF -DCMAKE_UNITY_BUILD=ON >/dev/null && \
	$(BIN)/cmake --build build/core-fuzz --target shoal_core_fuzzer -- --quiet
core_run = build/core-$(1)/shoal_core_tests && build/core-$(1)/shoal_c_api_test

.PHONY: help setup train quick test test-core test-real test-all fuzz soak bench gpu gpu-wheels gpu-data gpu-inputs gpu-rehearsal \
	lint shape docs wheels wheels-all clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP)  ## make the virtual environment, build the C++ core, install shoal into it

$(BIN)/uv:
	@$(PYTHON) .ci/prerequisites
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv

$(STAMP): $(SOURCES) | $(BIN)/uv
	@echo 'installing packages (6 GB the first time) and building the core: some minutes without output'
	$(UV) $(BUILDS) cmake ninja
	$(UV) '$(TORCH)' --no-build-isolation-package shoal --editable '.[$(EXTRAS)]'
	@touch $@

train: $(STAMP)  ## pretrain the tiny ALBERT on English found in this Python, then write the report
	$(BIN)/shoal prepare text builtin --out $(DATA) --vocab-size 2048
	$(BIN)/shoal train albert --preset tiny --data.path $(DATA) --run.dir $(RUN) --workers $(WORKERS)
	$(BIN)/shoal report $(RUN)

quick: $(STAMP)  ## the unit tests of one package: make quick P=comm
	@[ -n "$(wildcard $(QUICK))" ] || { echo 'name a package or module of src/shoal: make quick P=comm'; exit 2; }
	$(BIN)/pytest -m 'not slow' -n 2 $(FILES) $(wildcard $(QUICK))

test: test-core  ## the tests of every change; CONTRIBUTING.md has the times
	$(BIN)/pytest -m 'not slow' --ignore=tests/real --ignore=tests/site -n 3 $(FILES)

test-core: $(STAMP)  ## the C++ tests under address-, undefined-behaviour and thread sanitizer
	@$(call core_build,asan,address$(comma)undefined)
	@$(call core_build,tsan,thread)
	@{ $(call core_run,tsan); } >build/core-tsan/tests.txt 2>&1 & tsan=$$!; \
	{ $(call core_run,asan); }; asan=$$?; \
	wait $$tsan; tsan=$$?; cat build/core-tsan/tests.txt; exit $$((asan + tsan))

test-real: wheels  ## the tests with what the real world brings: a wheel in fresh environments, Slurm
	$(BIN)/pytest -m 'not slow' -n 2 $(FILES) $(REAL)

test-all: $(STAMP) wheels-all  ## all tests, the complete matrices too; then the quick ones on the oldest torch
	$(BIN)/pytest --ignore=tests/site -n 3 $(FILES)
	.ci/instruction-sets $(BIN)
	$(MAKE) VENV=.venv-oldest TORCH='$(OLDEST)' test

# Seconds of both fuzzers together, and the seed: 0 takes one from the clock. It is printed.
FUZZ_S    ?= 300
FUZZ_SEED ?= 0
ATHERIS   := atheris==3.*

$(VENV)/.fuzzer: $(STAMP)
	$(UV) '$(ATHERIS)'
	@touch $@

fuzz: $(VENV)/.fuzzer  ## fuzz the readers of files and of frames: FUZZ_S=300 seconds, FUZZ_SEED= repeats (tests/fuzz/README.md)
	@$(call fuzzer_build)
	@mkdir -p build/fuzz/core/seeds && seed=$(FUZZ_SEED) && if [ $$seed = 0 ]; then seed=$$(($$(date +%s) % 1000000)); fi && \
	echo "fuzzing for $(FUZZ_S) s: make fuzz FUZZ_S=$(FUZZ_S) FUZZ_SEED=$$seed" && \
	build/core-fuzz/shoal_core_fuzzer -seed=$$seed -max_total_time=$$(($(FUZZ_S) / 3)) -max_len=2000 -timeout=10 -rss_limit_mb=1024 \
	  -artifact_prefix=build/fuzz/core/ build/fuzz/core/seeds tests/fuzz/corpus/core 2>build/fuzz/core/log.txt || \
	  { tail -60 build/fuzz/core/log.txt; exit 1; } && \
	tail -1 build/fuzz/core/log.txt && \
	PYTHONPATH=tests $(BIN)/python -m fuzz.run --seconds $$(($(FUZZ_S) * 2 / 3)) --seed $$seed

# Seconds of the soak, its seed (0: from the clock, printed), and the file of the result. Members come and go for a
# sixth of that besides, at least 10 s.
SOAK_S    ?= 3600
CHURN_S    = $(shell echo $$(($(SOAK_S) < 60 ? 10 : $(SOAK_S) / 6)))
SOAK_SEED ?= 0
SOAK_OUT  ?= build/soak_$(shell date +%F).md

soak: $(STAMP)  ## sums on 8 emulated hosts in random faults, and members that come and go, against a replay: SOAK_S=3600 (root)
	@mkdir -p build
	PYTHONPATH=.:tests:tests/processes $(BIN)/python -m soak --seconds $(SOAK_S) --seed $(SOAK_SEED) --out $(SOAK_OUT)
	PYTHONPATH=.:tests:tests/processes $(BIN)/python -m churn --seconds $(CHURN_S) --seed $(SOAK_SEED) --out $(SOAK_OUT:.md=_churn.md)

bench: $(STAMP)  ## the figures of docs/results.md, to benchmarks/results (an hour on a quiet machine; root)
	@for name in reduce optimizers dropout detection_ops detection_loader text_reader image_reader image_loader tokenise text_intake squad_features overhead train_step \
	    bert_step pretraining_gain pipeline comm backend_suite ddp_emulated comm_formats priority \
	    served stragglers losses; do \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json \
	    --markdown benchmarks/results/$$name.md || true; done

# On a machine with a GPU, where neither a network nor `make setup` is: GPU_PYTHON has torch, and what
# `make gpu-wheels` and `make gpu-data` have put into build/gpu comes along with the tree.
GPU_PYTHON  ?= python3
GPU_VERSION ?= 3.12
GPU_FOLDER  ?= build/gpu
GPU_WHEELS  := cyclopts attrs docstring-parser rich-rst docutils tensorboardX faster-coco-eval pycocotools \
	  pytorch_optimizer timm expecttest setuptools-scm vcs-versioning
KIT         ?=
STAGE       ?=
PART        ?=
BUDGET      ?=

gpu:  ## what there is to measure on a machine with a GPU, to build/gpu/results; PART= or STAGE= picks, BUDGET= seconds
	@if [ -d build/gpu/wheels ]; then $(GPU_PYTHON) -m pip install --quiet --upgrade --no-index --no-deps \
	  --find-links build/gpu/wheels $(GPU_WHEELS); fi
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu.kit $(addprefix --budget ,$(BUDGET)) $(addprefix --part ,$(PART)) $(addprefix --stage ,$(STAGE)) $(KIT)

gpu-wheels: $(STAMP)  ## download the packages that such a machine lacks, for Python 3.12
	rm -rf $(GPU_FOLDER)/wheels
	$(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --python-version $(GPU_VERSION) \
	  --dest $(GPU_FOLDER)/wheels $(GPU_WHEELS)
	$(BIN)/python -m benchmarks.gpu.travel check --folder $(GPU_FOLDER)

gpu-data: $(STAMP)  ## copy the test data that it reads
	$(BIN)/python -m benchmarks.gpu.travel data --folder $(GPU_FOLDER)

gpu-inputs: $(STAMP)  ## make its input here, which the machine makes where it did not travel
	$(BIN)/python -m benchmarks.gpu.inputs $(GPU_FOLDER)/made
	$(BIN)/python -m benchmarks.gpu.travel check --folder $(GPU_FOLDER)

gpu-rehearsal: $(STAMP)  ## the same on a CPU with tiny sizes, in a fresh environment without a network
	.ci/gpu-rehearsal $(BIN)

lint: $(STAMP)  ## ruff and mypy, and clang's check of locks in the C++ core
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	.ci/thread-safety

shape: $(STAMP)  ## sizes, floors and imports of the source, the files of one gradient: a report, nothing has to hold
	@$(BIN)/python tests/shape.py
	@echo; echo "one gradient (docs/design/0005-one-gradient.md):"
	@$(BIN)/python -m benchmarks.one_gradient

# Not --quiet, which hides warnings from --strict too.
docs: $(STAMP)  ## the documentation site in build/site; any warning, broken link or cut page fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/pytest tests/site -n 2

wheels: $(STAMP)  ## the wheel for this Python and the sdist in dist/; auditwheel finds which Linux it needs
	rm -rf build/untagged dist
	$(BIN)/uv build --quiet --no-build-isolation --python $(BIN)/python --sdist --wheel --out-dir build/untagged
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/untagged/*.whl
	mv build/untagged/*.tar.gz dist
	ls -l dist

wheels-all: wheels  ## the wheel for Python 3.12 and newer too, built with Debian 13's in build/trixie (root, debootstrap)
	.ci/abi3-wheel $(BIN)

clean:  ## remove the virtual environment and the build
	rm -rf $(VENV) build dist
