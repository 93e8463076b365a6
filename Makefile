# All targets run in .venv, which .ci/venv makes from requirements-dev.txt when needed.
.PHONY: help demo towers test slow anywhere nox frameworks mutants chaos faults fuzz results lint types format bench docs proto lock clean venv

python := .venv/bin/python
export JAX_PLATFORMS ?= cpu

help: ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: venv ## train on real data: a center, two worker processes, gRPC, one kill
	@$(python) -B examples/digits.py $(ARGS)

# Run the tests in random order in three processes, because some tests only wait; the tests
# of a file share a process. Without -B, because pytest takes ten seconds to rewrite all
# assertions and keeps them as bytecode.
pytest := $(python) -m pytest -n 3 --dist loadfile

test: venv ## run the tests
	@$(pytest) -m "not slow" $(ARGS)

slow: venv ## run the slow tests: examples, chaos, kills, packaging, every combination
	@$(pytest) -m slow $(ARGS)

anywhere: venv ## run the tests in other places: other users, no HOME, no network, one core
	@$(python) -B tools/anywhere.py $(ARGS)

nox: venv ## test the wheel on the oldest and newest versions (needs Python 3.11 and 3.13)
	@$(python) -m nox $(ARGS)

frameworks: venv ## run the lines of docs/levanter.md with each framework (needs Python 3.11)
	@$(python) -m nox --session frameworks $(ARGS)

mutants: venv ## put faults into the package, one at a time, and list those no test notices
	@$(python) -B tools/mutants.py $(ARGS)

chaos: venv ## break processes and networks: ARGS="--count 200", or "--seed N" to repeat a run
	@PYTHONPATH=tests:. $(python) -B -m chaos $(ARGS)

faults: venv ## a minute of simulated faults, thousands: ARGS="--seconds 600", "--seed N"
	@PYTHONPATH=tests:. $(python) -B -m faults $(ARGS)

fuzz: venv ## give parsers and a live center nearly valid input: ARGS="--count 1000000"
	@PYTHONPATH=tests:. $(python) -B -m fuzz $(ARGS)

results: venv ## run the programs of docs/results.md: ARGS="--only agn", "--quick"
	@$(python) -B examples/reproduce/results.py $(ARGS)

lint: venv ## check style
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .

types: venv ## check types
	@$(python) -m mypy
	@$(python) -m mypy benchmarks

format: venv ## fix style
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

towers: venv ## train a transformer on a mesh: data parallel, independent, islands
	@$(python) -B examples/towers.py $(ARGS)

bench: venv ## measure everything next to its peers: tables and plots in bench-output/
	@$(python) -B benchmarks/run_all.py $(ARGS)

docs: venv ## build site/html/; notebooks run, and warnings are errors
	@$(python) -B -m sphinx -W --keep-going -b html -d site/doctrees docs site/html $(ARGS)

proto: venv ## generate the code of the service's protobuf messages
	@$(python) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. agn_optax/service/center.proto

extras := cli flax grain keys kubernetes metrics
lock: ## pin all dependencies with hashes (needs uv); ARGS=--upgrade takes the newest versions
	uv pip compile --universal --python-version 3.11 --generate-hashes \
		--group dev $(extras:%=--extra %) --quiet --no-header $(ARGS) \
		pyproject.toml --output-file requirements-dev.txt

clean: ## remove everything that the other targets make
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis demo-output bench-output site .nox mutants-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv:
	@.ci/venv
