# Everything a developer runs. Each target makes what it needs first, so every one of them works on a fresh clone.
#
#   PYTHON       interpreter for the environment, 3.11 to 3.13 (default: the first one found that runs)
#   VENV         where the environment goes (default .venv)
#   TORCH_INDEX  package index that torch is taken from (default: wherever pip is configured to look);
#                give PyTorch's CPU index here on a Linux machine without a GPU to save gigabytes
#   PYTEST_WORKERS  processes that run test files side by side (default 4 on two cores, as tests mostly wait for the processes they
#                start; 3 in `make frameworks`, whose libraries each process imports)
#   MARKS        which of the tests, by their marks: MARKS="not slow", MARKS="not s3" (pytest's -m; a second -m in PYTEST_ARGS
#                would take the place of the one that tells `make test` from `make drills`)
#   THIRD        0, 1 or 2: of `make drills` and `make frameworks` only a third of the files, as CI does
#   PENSTOCK_DRILL_DAY  a whole number in place of the date, which decides what is tried of drills with more cases than have room
#   PYTEST_ARGS  more arguments for pytest, for instance PYTEST_ARGS="-x tests/ingest"

# Containers set it: then every process compiles anew what it imports and nobody has compiled, our own code and tests among it.
export PYTHONDONTWRITEBYTECODE :=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
PYTHON ?=
TORCH_INDEX ?=
PYTEST_WORKERS ?=
MARKS ?=
PYTEST_ARGS ?=
THIRD ?=
SIDE_BY_SIDE := 4
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := penstock ingest training tasks flows
# A file goes to one process, so that what it starts is started once; tests/conftest.py puts the long ones first. If a process
# dies, the run ends and names its test: with another process in its place it was seen to wait for ever.
PYTEST = $(BIN)/python -m pytest -n $(or $(PYTEST_WORKERS),$(SIDE_BY_SIDE)) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations=15
# Too large for everybody's environment, or slow to import for those who do not use them (torchmetrics imports transformers).
TABLES := Deprecated|arro3-core|datasets|deltalake|dill|lance-namespace|lance-namespace-urllib3-client|mmh3|multiprocess|pyiceberg|pylance|pyroaring|strictyaml|tenacity|xxhash|zstandard
LARGE := ^($(TABLES)|accelerate|hf-xet|httpcore2|httpx2|huggingface_hub|tokenizers|transformers|truststore|tensorflow-cpu|astunparse|flatbuffers|gast|google-pasta|libclang|opt_einsum|termcolor|tf-keras)==
OF_THIRD := $(if $(THIRD),--third $(THIRD))
AND_MARKS := $(if $(MARKS), and ($(MARKS)))

.PHONY: help install demo test drills frameworks frameworks-environment gpu check lint types imports lines format bench clean

help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## make the environment in .venv

# Remade when what to install changes; otherwise `make` costs nothing.
$(READY): pyproject.toml constraints.txt .ci/make-venv .ci/uv_settings.py
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" .ci/make-venv "$(VENV)"
	@touch $@

demo: $(READY) ## make a project with real data in demo/, run it, say where to look
	@[ -e demo/pipeline.yaml ] || $(BIN)/penstock init demo --template images
	@$(BIN)/penstock run demo/pipeline.yaml
	@echo
	@echo "Run the same command again and nothing is done twice:  $(BIN)/penstock run demo/pipeline.yaml"
	@echo "See the run, its curves and its model in a browser:    cd demo && ../$(BIN)/penstock ui"

# Where there is a GPU, `train.gpus: auto` takes it: other weights and other lines than on the machines that the tests were made on.
test drills frameworks: export CUDA_VISIBLE_DEVICES :=

test: $(READY) ## the tests of everything that is promised (9 to 18 minutes on 2 cores, by their speed), and the 15 slowest of them
	@$(PYTEST) -m "not drill$(AND_MARKS)" $(PYTEST_ARGS)

FRAMEWORKS := tests/training/frameworks/transformers tests/training/frameworks/keras \
	tests/runs/test_transformers.py tests/runs/test_keras.py \
	tests/ingest/formats/sources/test_sources.py tests/training/predict/test_sources.py
# Single tests, of files that run without.
WITH_LIBRARIES := tests/ingest/formats/containers/test_containers.py::test_what_the_library_itself_has_saved_is_read \
	tests/ingest/preprocess/transforms/test_text.py::test_recipe_page_tokenizer_makes_token_lists

frameworks: SIDE_BY_SIDE := 3
frameworks: $(READY) frameworks-environment ## the tests of transformers, Keras, Delta Lake, Iceberg, Lance and datasets, with what they need (1.4 GB) in a folder of its own
	@PYTHONPATH=$(abspath $(VENV))/frameworks $(PYTEST) $(FRAMEWORKS) $(WITH_LIBRARIES) $(OF_THIRD) $(PYTEST_ARGS)

# Needs no more of the environment than its pip, so that CI fills both at the same time.
frameworks-environment: $(BIN)/pip
	@[ $(VENV)/frameworks/.ready -nt constraints.txt ] || { $(BIN)/python -m pip install -qq --no-compile --no-deps --upgrade --target $(VENV)/frameworks \
		$$(grep -E '$(LARGE)' constraints.txt) && touch $(VENV)/frameworks/.ready; }

$(BIN)/pip:
	@$(MAKE) --no-print-directory install

drills: $(READY) ## the other tests: kills of a run in every stage, and what else takes minutes (20 minutes and more)
	@$(PYTEST) -m "drill$(AND_MARKS)" $(addprefix --ignore=,$(FRAMEWORKS)) $(OF_THIRD) $(PYTEST_ARGS)

gpu: $(READY) ## on a machine with a GPU: the tests that need one, and whole runs on it
	@$(PYTEST) -n 1 -m "gpu or drill" tests/training/on_ray/test_gpu.py tests/ingest/feed/test_delivery.py tests/runs/test_templates.py $(PYTEST_ARGS)

check: lint types imports test ## lint, types, import direction, make test

lint: $(READY) ## ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(READY) ## let ruff rewrite
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(READY) ## mypy
	@$(BIN)/mypy

imports: $(READY) ## flows -> tasks -> training -> ingest -> penstock, and nothing back
	@$(BIN)/python -m pytest -q tests/test_imports_point_one_way.py

lines: ## how many lines the core, each plug-in and the tests have, and the ten largest files
	@$(or $(wildcard $(BIN)/python),python3) .ci/lines.py

bench: $(READY) ## every benchmark beside what it is compared with (an hour; writes docs/performance.md)
	@.ci/make-venv .venv-bench
	@.venv-bench/bin/python -m pip install -q --disable-pip-version-check -r benchmarks/requirements.txt
	@.ci/make-venv .venv-bench-mosaic benchmarks/requirements-mosaic.txt
	@.venv-bench/bin/python -m benchmarks.feed
	@$(BIN)/python -m benchmarks.beyond
	@$(BIN)/python -m benchmarks.loop
	@$(BIN)/python -m benchmarks.ray_loop
	@$(BIN)/python -m benchmarks.gpu
	@$(BIN)/python -m benchmarks.gpu_loop
	@for format in parquet csv json one; do .venv-bench/bin/python -m benchmarks.prepare --format $$format; done
	@.venv-bench/bin/python -m benchmarks.prepare_images
	@$(BIN)/python -m benchmarks.growth
	@$(BIN)/python -m benchmarks.scale
	@$(BIN)/python -m benchmarks.start
	@$(BIN)/python -m benchmarks.large
	@$(BIN)/python -m benchmarks.tune
	@$(BIN)/python -m benchmarks.boosted
	@PYTHONPATH=$(abspath $(VENV))/frameworks $(BIN)/python -m benchmarks.frameworks $(if $(RETAIL),--retail $(RETAIL))
	@$(BIN)/python -m benchmarks.raw_rows
	@$(BIN)/python -m benchmarks.predict
	@$(BIN)/python -m benchmarks.report

clean: ## remove the environment, the demo and every cache
	rm -rf $(VENV) .venv-bench .venv-bench-mosaic demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
