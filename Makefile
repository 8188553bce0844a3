# Needs python3 (3.11 or later), make and git; everything else comes into .venv.

VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
CORES ?= all

.PHONY: drafter bench doctor plan trace push pull status test test-scenarios test-recipe test-targets test-sglang test-slurm docs graph lint

drafter: $(VENV)/ready
	snakemake --cores $(CORES) drafter

bench: $(VENV)/ready
	snakemake --cores $(CORES) bench

# Rows, tokens, bytes and hours of the build in params.yaml, before anything runs. make plan ARGS=--json
plan: $(VENV)/ready
	@python workflow/scripts/plan.py $(ARGS)

# What a drafter was made from, and what of it is missing here. make trace DRAFTER=some/folder
DRAFTER ?= data/drafter
trace: $(VENV)/ready
	@python workflow/scripts/trace.py $(DRAFTER) $(ARGS)

# Sends the artifacts of the stages in runtime.push (answers and drafter, not states) to the DVC remote.
push: $(VENV)/ready
	@python workflow/scripts/push.py $(ARGS)

# Brings what the DVC remote has into data/, hashed. make pull ARGS="train generate" for some stages only.
pull: $(VENV)/ready
	@python workflow/scripts/pull.py $(ARGS)

# How generation stands: during a build, and after a crash. make status ARGS=--watch
status: $(VENV)/ready
	@python workflow/scripts/status.py $(ARGS)

# Whether SGLang will use a drafter rightly, with reasons and remedies. make doctor DRAFTER=some/folder
doctor: $(VENV)/ready
	@python workflow/scripts/doctor.py $(DRAFTER) $(ARGS)

test: $(VENV)/ready-test
	python -m pytest -q tests

# Whole builds in every situation of docs/build.md; `make test` has the quick ones.
test-scenarios: $(VENV)/ready-test
	EAGLEMAKE_SCENARIOS=1 python -m pytest -q tests/scenarios

# The whole Kimi recipe on a tiny model of its architecture; minutes.
test-recipe: $(VENV)/ready-test
	EAGLEMAKE_RECIPE=1 python -m pytest -q tests/test_kimi_recipe.py

# Every architecture of docs/targets.md, tiny, through every stage; writes that page. SGLANG as in test-sglang, optional.
test-targets: $(VENV)/ready-test
	EAGLEMAKE_TARGETS=1 $(if $(SGLANG),SGLANG="$(SGLANG)") python -m pytest -q tests/test_targets.py

# A real SGLang: life cycle, answers, fingerprint, kills, a bench. SGLANG is a command that takes launch_server's flags.
test-sglang: $(VENV)/ready-test
	SGLANG="$(or $(SGLANG),$(error SGLANG=command, for example SGLANG="python3 -m sglang.launch_server"))" \
	    python -m pytest -q tests/test_real_sglang.py tests/capture/test_sglang_capture.py

# The slurm profile against a SLURM of this machine's own; needs root and Debian's slurmctld, slurmd, slurm-client, munge.
test-slurm: $(VENV)/ready-test
	EAGLEMAKE_SLURM=1 python -m pytest -q tests/test_slurm.py

lint: $(VENV)/ready-test
	ruff format --check workflow tests benchmarks
	ruff check workflow tests benchmarks
	PYTHONPATH=workflow lint-imports
	snakefmt --check Snakefile workflow/rules
	snakemake --lint

# Writes docs/params.md and docs/report.md from their schemas.
docs: $(VENV)/ready
	PYTHONPATH=workflow python -m eagle3.commands.reference
	PYTHONPATH=workflow python -m eagle3.bench.report_schema

# Draws the graph of stages as Snakemake sees it; needs Graphviz.
graph: $(VENV)/ready
	snakemake --cores 1 --rulegraph -- bench | dot -Tsvg > docs/stages.svg

$(VENV)/bin/python:
	python3 -m venv $(VENV)

$(VENV)/ready: requirements.txt $(VENV)/bin/python
	@echo "installing requirements.txt into $(VENV): 1.6 GB, some minutes, once"
	@$(BIN)/python -m pip install -q -r requirements.txt
	@touch $@

$(VENV)/ready-test: requirements-test.txt $(VENV)/ready
	@$(BIN)/python -m pip install -q -r requirements-test.txt
	@touch $@
