# Everything runs in .venv, which .ci/venv makes from requirements-dev.txt when needed.
.PHONY: help demo towers test slow anywhere nox mutants chaos fuzz lint types format bench docs proto lock clean venv

python := .venv/bin/python
export JAX_PLATFORMS ?= cpu

help: ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: venv ## train on real data: two worker processes, a center, gRPC, one kill
	@$(python) -B examples/digits.py $(ARGS)

# In random order, in three processes (some of them wait), a file's tests in one. Without
# -B, as pytest takes ten seconds to rewrite all assertions and keeps them as bytecode.
pytest := $(python) -m pytest -n 3 --dist loadfile

test: venv ## run the tests
	@$(pytest) -m "not slow" $(ARGS)

slow: venv ## run the others: examples, chaos, kills, packaging, every combination
	@$(pytest) -m slow $(ARGS)

anywhere: venv ## run them in other places: other users, no HOME, no network, one core
	@$(python) -B tools/anywhere.py $(ARGS)

nox: venv ## run them on the oldest and newest versions, on the wheel (needs Python 3.11 and 3.13)
	@$(python) -m nox $(ARGS)

mutants: venv ## put faults into the package, one at a time: which do the tests miss?
	@$(python) -B tools/mutants.py $(ARGS)

chaos: venv ## break processes and networks: ARGS="--count 200", or "--seed N" for one again
	@PYTHONPATH=tests:. $(python) -B -m chaos $(ARGS)

fuzz: venv ## what is nearly right, for every parser and a center: ARGS="--count 1000000"
	@PYTHONPATH=tests:. $(python) -B -m fuzz $(ARGS)

lint: venv ## check style
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .

types: venv ## check types
	@$(python) -m mypy
	@$(python) -m mypy benchmarks

format: venv ## mend style
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

towers: venv ## train a transformer on a mesh: data parallel, independent and islands
	@$(python) -B examples/towers.py $(ARGS)

bench: venv ## measure everything beside its peers: tables and plots in bench-output/
	@$(python) -B benchmarks/run_all.py $(ARGS)

docs: venv ## build site/html/: notebooks run, and a warning is an error
	@$(python) -B -m sphinx -W --keep-going -b html -d site/doctrees docs site/html $(ARGS)

proto: venv ## generate the code of the service's messages
	@$(python) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. agn_optax/service/center.proto

extras := cli flax grain keys kubernetes metrics ray tensorboard
lock: ## pin what pyproject.toml asks for, with hashes (needs uv); ARGS=--upgrade: the newest of all
	uv pip compile --universal --python-version 3.11 --generate-hashes \
		--group dev $(extras:%=--extra %) --quiet --no-header $(ARGS) \
		pyproject.toml --output-file requirements-dev.txt

clean: ## remove what the targets above made
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output bench-output site .nox mutants-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@.ci/venv
