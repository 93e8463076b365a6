"""``agn-optax simulate run.toml``: a run's file with a table [cluster]."""

import io
import json
import re

import jax.numpy as jnp
import pytest
import rich.console
from helpers.commands import command, fails, succeeds

import agn_optax
from agn_optax import rules, simulate
from agn_optax.center import Synchronous
from agn_optax.ops import planning
from agn_optax.ops.cli import _progress

RUN = """
program = "train.py"
workers = 3

[rule]
rule = "diloco"
codec = "int8"

[center]
mode = "synchronous"
quorum = 2
grace = 0.5

[cluster]
step-times = [0.1, 0.1, 0.4]
sigma = 0.2
period = 10
parameters = 1e6
latency = 0.02
bandwidth = "100Mbit"
center-seconds = 0.01
failures-every = 600
failures-down = 5
seconds = 60
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_file_gives_the_schedule_of_the_library(file):
    found = json.loads(succeeds("simulate", str(file), "--seed=3", "--json"))
    cluster = simulate.Cluster(
        workers=3,
        speed=[simulate.LogNormal(s, 0.2) for s in (0.1, 0.1, 0.4)],
        link=simulate.Link(latency=0.02, bandwidth=12.5e6),
        center=simulate.CenterHost(seconds=0.01),
        failures=simulate.Failures(every=600.0, down=5.0),
    )
    schedule = simulate.schedule(
        cluster,
        period=10,
        mode=Synchronous(quorum=2, grace=0.5),
        rule=rules.diloco(codec=rules.CODECS["int8"]),
        params=planning.abstract(1e6),
        seconds=60.0,
        seed=3,
    )
    assert found["digest"] == schedule.digest
    assert found == {"seed": 3, "digest": schedule.digest, **schedule.summary()}


def test_table_begins_with_seed_and_digest(file):
    output = succeeds("simulate", str(file), "--workers=3", "--seconds=20")
    assert re.search(r"^seed 0, digest [0-9a-f]{16}$", output, re.M)
    assert re.search(r"utilization .* \d\d\.\d%", output)


@pytest.mark.slow
def test_fragments_are_equal_parts_of_the_model(file):
    options = ["--fragments=3", "--fragments-delay=2", "--parameters=10", "--json"]
    found = json.loads(succeeds("simulate", str(file), *options))
    schedule = simulate.schedule(
        simulate.Cluster(
            workers=3,
            speed=[simulate.LogNormal(s, 0.2) for s in (0.1, 0.1, 0.4)],
            link=simulate.Link(latency=0.02, bandwidth=12.5e6),
            center=simulate.CenterHost(seconds=0.01),
            failures=simulate.Failures(every=600.0, down=5.0),
        ),
        period=10,
        mode=Synchronous(quorum=2, grace=0.5),
        rule=rules.diloco(codec=rules.CODECS["int8"]),
        params=[jnp.zeros(4), jnp.zeros(3), jnp.zeros(3)],
        fragments=agn_optax.Fragments(3, delay=2),
        seconds=60.0,
    )
    assert found["digest"] == schedule.digest
    # Larger parts than an array can have.
    succeeds("simulate", str(file), "--fragments=2", "--parameters=1e11")


def test_steps_end_a_run(file):
    file.write_text(RUN.replace("seconds = 60", "steps = 45"))
    found = json.loads(succeeds("simulate", str(file), "--json"))
    assert 45 <= 10 * (found["applied"] + found["dropped"]) < 45 + 30


def test_run_without_an_exchange_has_dashes(file):
    output = succeeds("simulate", str(file), "--seconds=0.5")
    assert re.search(r"applied +│ +0 ", output)
    assert re.search(r"staleness mean +│ +- ", output)


def test_center_takes_all_workers_of_the_run(file):
    """A launched center does, too."""
    file.write_text(RUN.replace("step-times = [0.1, 0.1, 0.4]", "step-time = 0.1"))
    options = ["--workers=65", "--seconds=5", "--json"]
    assert json.loads(succeeds("simulate", str(file), *options))["workers"] == 65
    fails("simulate", str(file), *options, "--max-workers=64", code=2)
    output = fails("simulate", str(file), "--workers=1000000000", code=2)
    assert "GB, more than half of this machine's memory" in " ".join(output.split())


def test_progress_of_a_long_simulation_is_shown_in_a_terminal(file, monkeypatch):
    shown = io.StringIO()
    console = rich.console.Console(file=shown, force_terminal=True)
    monkeypatch.setattr(_progress, "_AFTER", -1.0)
    options = ["--exchanges=5000", "--seconds=1e6"]
    succeeds("simulate", str(file), *options)  # where nobody looks, nothing is shown
    monkeypatch.setattr(_progress._table, "console", lambda **_: console)
    command("simulate", str(file), *options)
    assert re.search(r"simulating .*%", shown.getvalue())


def test_help_names_the_table_of_the_cluster():
    assert "[cluster]" in succeeds("simulate", "--help")


def test_launch_ignores_the_cluster(file):
    (file.parent / "train.py").touch()
    assert "train.py" in succeeds("launch", "--dry-run", str(file))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("period = 10", "", "--period is missing"),
        ("step-times", "step-time = 0.1\nstep-times", "give the seconds of a local"),
        ("sigma = 0.2", "memory = 0.2", "--memory needs --sigma"),
        ("[0.1, 0.1, 0.4]", "[0.1]", "a number for each of the 3 workers, got 1"),
        ("[0.1, 0.1, 0.4]", "[0, 1, 1]", "each of step-times must be a positive"),
        ("period = 10", "period = 10\nfragments = 0", "fragments must be a positive"),
        ("period", "fragments-delay = 1\nperiod", "-delay needs --fragments"),
        ("failures-every = 600", "", "--failures-down needs --failures-every"),
        ("parameters = 1e6", "parameters = 1e30", "parameters must be a number in"),
        ("quorum = 2", "quorum = 2\nbarrier = 4", "or no worker ever starts; got 4"),
        ("seconds = 60", "", "give exchanges=, steps= or seconds="),
        ("latency", "lateness", "unknown key 'lateness'"),
        ("workers = 3", "", "the number of workers is missing"),
        ('rule = "diloco"', "", "rule"),
    ],
)
def test_bad_files_are_rejected(file, old, new, message):
    assert old in RUN
    file.write_text(RUN.replace(old, new, 1))
    output = fails("simulate", str(file), code=2)
    assert message in " ".join(output.split())


def test_no_workers_on_the_command_line_do_not_mean_those_of_the_file(file):
    output = fails("simulate", str(file), "--workers=0", code=2)
    assert "each of the 0 workers" in output
