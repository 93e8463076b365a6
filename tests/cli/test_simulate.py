"""``agn-optax simulate run.toml``: a run's file with a table [cluster]."""

import json
import re

import pytest
from helpers.commands import fails, succeeds

from agn_optax import rules, simulate
from agn_optax.center import Synchronous
from agn_optax.ops import planning

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


def test_launch_ignores_the_cluster(file):
    (file.parent / "train.py").touch()
    assert "train.py" in succeeds("launch", "--dry-run", str(file))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("period = 10", "", "--period is missing"),
        ("step-times", "step-time = 0.1\nstep-times", "give the seconds of a local"),
        ("sigma = 0.2", "memory = 0.2", "--memory needs --sigma"),
        ("[0.1, 0.1, 0.4]", "[0.1]", "speed must be one for all 3 workers"),
        ("seconds = 60", "", "give exchanges= or seconds="),
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
