# Two commands on a fresh machine with Python: make demo, make test.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PINS := setup.cfg pyproject.toml constraints.txt
# Exists once everything for development is installed. `demo`, `site` and `dist` need less, and install less.
READY := $(VENV)/.ready
GENERATED := README.md $(addprefix docs/,ci.md codes.md commands.md compatibility.md errors.md guide.md in-place.md \
	inputs.md json.md performance.md quantized.md recipes.md reference.md tutorial.md)

# The tests of `make test-quick`.
QUICK := $(addprefix tests/,laws/test_layers.py laws/test_lossless.py laws/test_atomic_folders.py \
	base pickles/test_roundtrip.py checkpoint/test_meaning.py formats/test_readback.py formats/test_toy_format.py \
	edits/test_renames.py edits/test_metadata.py edits/test_edit_properties.py edits/test_recompute.py \
	reports/test_inspect.py api/test_arguments.py cli/test_edits.py cli/test_options.py cli/test_exit_codes.py \
	cli/test_corrections.py cli/test_tables.py cli/test_screens.py project/test_prose.py \
	project/test_release.py cli/test_schemas.py::test_every_command_with_a_report_has_a_schema_and_a_line_here) \
	$(patsubst %,'tests/cli/test_transcripts.py::test_transcript[%]',help usage inspect keys strip-module convert validate)

# Tests start hundreds of processes of Python. Without this each compiles all modules if the environment has it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-remote test-browser mutants torture fuzz check docs site bench fixtures rank-fixtures torch-lists dist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("ckptool needs Python 3.10 or later, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

$(READY): $(PINS) | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.demo: $(PINS) | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.site: $(PINS) | $(BIN)/python
	$(INSTALL) --editable '.[site]'
	@touch $@

$(VENV)/.build: $(PINS) | $(BIN)/python
	$(INSTALL) build setuptools
	@touch $@

demo: $(if $(wildcard $(READY)),$(READY),$(VENV)/.demo) ## Inspect, strip, remap and load a 4-GPU training checkpoint
	@BIN=$(BIN) sh fixtures/demo.sh

test: $(READY) ## Run the tests
	$(BIN)/python -m pytest -n auto --dist worksteal

test-quick: $(READY) ## What a change breaks first, in a minute: lint, layers, lossless edits, some transcripts
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --dist worksteal $(QUICK)

test-remote: $(READY) ## Read and write remote files on Azurite and fake-gcs-server, where they are installed
	$(INSTALL) --editable '.[dev,servers]'
	CKPTOOL_SERVERS=all CKPTOOL_TESTS=all $(BIN)/python -m pytest -rs tests/remote/test_servers.py

test-browser: $(READY) ## Run the tests of the page of report, in a Chromium of the system
	$(INSTALL) --editable '.[dev,browser]'
	CKPTOOL_BROWSER=$${CKPTOOL_BROWSER:-chromium} $(BIN)/python -m pytest -rs tests/browser

mutants: $(READY) ## Put in twenty faults, one for each law and room, and see that the tests find them (four minutes)
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

torture: $(READY) ## The long matrix of failures: kill, full disk, bit flips (two hours; needs strace)
	CKPTOOL_TESTS=all $(BIN)/python -m pytest -n auto -m sampled
	$(BIN)/python tests/torture/run.py

fuzz: $(READY) ## Mutated files in front of ckptool and the real readers (ten minutes; FUZZ=1h, FUZZ='--kind tar --files 1000')
	$(BIN)/python tests/fuzz/run.py $(FUZZ)

check: $(READY) ## Lint, types, generated documentation, fixtures, lines of each room
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/cog --check -I . $(GENERATED)
	$(BIN)/python -m docs.tour --check
	$(BIN)/python fixtures/generators/make.py --check
	$(BIN)/python fixtures/generators/torch_facts.py --check
	$(BIN)/python tests/project/lines.py

docs: $(READY) ## Regenerate the documentation
	$(BIN)/cog -r -I . $(GENERATED)
	$(BIN)/python -m docs.tour

site: $(VENV)/.site ## Make the site of the documentation in build/site; broken links are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --fresh-env --write-all --quiet \
		--doctree-dir build/doctrees docs build/site
	$(BIN)/python -m docs.schemas build/site/schemas

bench: $(READY) ## Measure against torch, cp and other tools (half an hour, 10 GB of disk; BENCH='--quick')
	$(BIN)/python -m bench $(BENCH)
	$(if $(filter --stale --list --clean,$(BENCH)),,$(BIN)/python -m bench.pages)

fixtures: $(READY) ## Regenerate the fixtures
	$(BIN)/python fixtures/generators/make.py

RANKS ?= deepspeed torch megatron
rank-fixtures: ## Regenerate what many ranks wrote, in an environment for each library (RANKS=torch)
	set -e; for family in $(RANKS); do \
		python=$(PYTHON); test $$family != megatron || python=python3.12; \
		bin=$(VENV)-ranks/$$family/bin; test -x $$bin/python || $$python -m venv $(VENV)-ranks/$$family; \
		$$bin/python -m pip install --quiet --disable-pip-version-check \
			--requirement fixtures/generators/ranks-$$family.txt; \
		test $$family != megatron || $$bin/python -m pip install --quiet --no-deps megatron-core==0.19.2; \
		$$bin/python fixtures/generators/make_ranks.py $$family; \
	done

torch-lists: $(READY) ## What moved in torch's own lists since the version before (TORCH=wheel, TORCH='wheel --write')
	$(BIN)/python fixtures/generators/torch_facts.py $(TORCH)
	$(BIN)/python fixtures/generators/code_runners.py $(filter-out --%,$(TORCH))

dist: $(VENV)/.build ## Wheel and sdist of the last commit: the same bytes wherever they are built
	rm -rf dist build/source
	mkdir -p build/source
	git archive HEAD | tar -x -C build/source
	$(BIN)/python -m build --no-isolation --outdir dist build/source

clean: ## Remove the environment and everything generated
	rm -rf $(VENV) $(VENV)-ranks build dist demo bench/scratch *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
