"""``agn-optax launch run.toml``: a run described by a file."""

import json
import os
import re

import pytest
from helpers.commands import ROOT, command, fails, succeeds

RUN = """
program = "train.py"
arguments = ["--epochs", "3"]
workers = 2
environment = {SEED = "7", AGN_OPTAX_TRANSPORTS = "socket,grpc"}

[rule]
rule = "easgd"
moving-rate = 0.25

[center]
barrier = 2

[resources.worker]
cpus = 1
memory = "2GiB"

[local]
"""
WORKER = """
import os, sys, jax.numpy as jnp, optax, agn_optax
from agn_optax import service

me = service.environment()
print("argv", *sys.argv[1:], "seed", os.environ["SEED"])
if {dies!r} == me.worker and not me.restarts:
    os.kill(os.getpid(), 9)
with service.connect(me.address, me.rule) as center:
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=2, name=me.worker)
    params, state = worker.start({{"w": jnp.ones(3)}}, chief=me.rank == 0)
    for step in range(4):
        updates, state = worker.tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        params, state = worker.exchange(params, state)
    print(center, "made", worker.exchanges, "exchanges")
    print("version", center.pull().version)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "train.py").write_text(WORKER.format(dies=""))
    return tmp_path


@pytest.mark.slow
def test_run_file_runs(here):
    output = succeeds("launch", "run.toml", "--on", "local")
    assert output.count("argv --epochs 3 seed 7") == 2
    assert output.count("made 2 exchanges") == 2
    assert output.count("by socket") == 2
    assert f"journal{os.sep}" not in output


@pytest.mark.slow
def test_killed_worker_restarts_and_next_run_resumes_the_center(here):
    (here / "train.py").write_text(WORKER.format(dies="worker-1"))
    (here / "run.toml").write_text('storage = "kept"\nrestarts = 2\n' + RUN)
    result = command("launch", "run.toml", "--json")
    assert result.exit_code == 0, result.output
    programs = {each["name"]: each for each in json.loads(result.stdout)["programs"]}
    assert programs["worker-1"]["restarts"] == 1
    assert (here / "kept/journal").is_dir()
    assert not (here / "kept/center").exists()  # its address, removed at the drain
    again = command("launch", "run.toml", "--json")  # resumes the center
    assert again.exit_code == 0, again.output
    assert max(map(int, re.findall(r"version (\d+)", again.stderr))) == 8


def test_dry_run_prints_the_commands(here):
    output = succeeds("launch", "--dry-run", "run.toml", "--workers=3")
    center, *workers = output.splitlines()[1:]
    assert "serve --rule=easgd --moving-rate=0.25 --barrier=2 --json" in center
    assert len(workers) == 3
    for rank, line in enumerate(workers):
        assert f"AGN_OPTAX_RANK={rank} AGN_OPTAX_WORKERS=3 " in line
        assert "AGN_OPTAX_TRANSPORTS=socket,grpc" in line
        assert line.endswith("train.py --epochs 3")
    assert not (here / "kept").exists()


def test_max_workers_of_the_center_follows_the_workers(here):
    output = succeeds("launch", "--dry-run", "run.toml", "--workers=100")
    assert "--max-workers=100 " in output.splitlines()[1] + " "
    assert "--max-workers" not in succeeds("launch", "--dry-run", "run.toml")


def test_options_may_come_before_or_after_the_file(here):
    first = succeeds("launch", "--dry-run", "--barrier=1", "run.toml")
    last = succeeds("launch", "run.toml", "--dry-run", "--barrier=1")
    assert first == last
    assert "--barrier=1" in first


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("workers = 2", "", "number of workers is missing"),
        ("workers = 2", "workers = 0", "workers must be a whole number >= 1, got 0"),
        ("workers = 2", 'workers = "2"', "must be of type int, got '2'"),
        ("workers", "worker", "unknown key 'worker' (did you mean 'workers'?)"),
        ("[center]", "[centre]", "unknown key 'centre'"),
        ("barrier = 2", "barier = 2", "(did you mean 'barrier'?)"),
        ('program = "train.py"', "", "must have a program, which each worker runs"),
        ('["--epochs", "3"]', '["--epochs", 3]', "arguments in run.toml[1]"),
        ('SEED = "7"', "SEED = 7", "SEED of environment in run.toml must be"),
        ('rule = "easgd"', 'rule = "easgo"', "easgo"),
        ('memory = "2GiB"', 'memory = "much"', "memory in [resources.worker]"),
        ('memory = "2GiB"', "processes = 2", "one process on this machine"),
        ("cpus = 1", "cpus = 0", "cpus in [resources.worker] of run.toml must be"),
        ("[local]", "[local]\nrestart-delay = 1", "[local] of run.toml"),
        ("workers = 2", "workers = 2\ncenter-restarts = 1", "needs storage"),
        ("barrier = 2", "max-workers = 1", "max-workers of the center is 1"),
        ("workers = 2", "workers = 2\nname = 'A b'", "name of a run must be"),
    ],
)
def test_bad_run_files_are_rejected_before_anything_starts(here, old, new, message):
    assert old in RUN
    (here / "run.toml").write_text(RUN.replace(old, new, 1))
    assert message in " ".join(fails("launch", "run.toml", code=2).split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.toml", "more"], "describes the whole run: more does not go with it"),
        (["--on=moon", "run.toml"], "--on must be one of"),
        (["none.toml"], "cannot read none.toml"),
    ],
)
def test_wrong_usage_is_rejected(arguments, message):
    assert message in " ".join(fails("launch", *arguments, code=2).split())


@pytest.mark.parametrize("switch", ["open", "insecure", "page"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_every_switch_of_a_center_can_be_off_in_a_file_of_a_run(here, switch, value):
    """The resulting command line is valid for `agn-optax serve`."""
    run = RUN.replace("barrier = 2", f"{switch} = {value}")
    (here / "run.toml").write_text(run)
    output = succeeds("launch", "run.toml", "--dry-run")
    (line,) = [line for line in output.splitlines() if " serve " in line]
    given = [word for word in line.split() if switch in word]
    if value == "true":
        assert given == [f"--{switch}"]
    for option in given:
        assert option in succeeds("serve", "--help").replace("│", " ").split()
