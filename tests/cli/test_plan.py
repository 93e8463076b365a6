"""``agn-optax plan``: a table for a rule of the library, or of the user."""

import io
import json
import pathlib
import re
import shlex

import optax
import pytest
import rich.console
from helpers.commands import fails, succeeds

from agn_optax import errors, rules
from agn_optax.ops import planning, units
from agn_optax.ops.cli import _plan

PLAN = ("plan", "--parameters=1.3e9", "--step-time=0.8", "--bandwidth=1Gbit")
ADAM = ("--center-optimizer=adam", "--learning-rate=1e-3")
DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["planning", "scale"])
def test_commands_of_the_pages_run(page):
    text = (DOCS / f"{page}.md").read_text().replace("\\\n", "")
    command = re.search(r"```console\nagn-optax (plan .*?)```", text, re.DOTALL)
    assert "diloco" in succeeds(*shlex.split(command.group(1)))


def test_plan_prints_a_table_of_a_rule():
    output = succeeds(*PLAN, "--workers=8", "--rule=diloco")
    assert re.search(r" diloco .* all_reduce ", output)
    assert "8 workers, 0.8 s a step; 125 MB/s each, 125 MB/s at the center" in output
    assert "5.2 GB" in output


def test_json_equals_the_plan_of_the_library():
    options = ["--workers=8", "--period=200", "--inner=sgd", "--latency=0.1"]
    options.append("--rule=downpour")
    rates = ["--center-bandwidth=10Gbit", "--endpoint-rate=2e9", "--apply-rate=3e9"]
    reply = json.loads(succeeds(*PLAN, *options, *rates, "--overhead=0.5", "--json"))
    machine = planning.Machine(overhead=0.5, endpoint_rate=2e9, apply_rate=3e9)
    assert reply["machine"] == vars(machine)
    assert reply["bandwidth"] == 125e6
    cluster = planning.Cluster(
        step_time=0.8,
        bandwidth=125e6,
        workers=8,
        latency=0.1,
        center_bandwidth=1.25e9,
        machine=machine,
    )
    inner = optax.sgd(1e-3)
    row, reduced = reply["rules"]
    model = planning.abstract(1.3e9)
    cost = planning.plan(rules.downpour(), model, cluster, inner=inner, period=200)
    assert row == json.loads(json.dumps(_plan._as_dict(cost)))
    assert reduced["rule"] == "all_reduce"


def test_plan_covers_shards():
    options = ["--workers=27", "--rule=downpour", "--shards=2"]
    reply = json.loads(succeeds(*PLAN, *options, "--json"))
    cluster = planning.Cluster(step_time=0.8, bandwidth=125e6, workers=27, shards=2)
    assert reply["shards"] == 2
    cost = planning.plan(
        rules.downpour(),
        planning.abstract(1.3e9),
        cluster,
        inner=optax.adam(1e-3),
    )
    assert reply["rules"][0] == json.loads(json.dumps(_plan._as_dict(cost)))
    output = succeeds(*PLAN, *options)
    assert "at each of the center's 2 shards" in output


def test_plan_names_the_bottleneck():
    output = succeeds(*PLAN, "--workers=8", "--rule=diloco")
    assert re.search(r"bottleneck .* center link ", output)
    output = succeeds(*PLAN, "--workers=8", "--rule=diloco", "--period=500")
    assert re.search(r"bottleneck .* nothing ", output)


def test_plan_includes_the_time_of_a_codec():
    options = ["--rule=diloco", "--codec=int8"]
    free = ["--encode-rate=1e30", "--decode-rate=1e30"]
    reply = json.loads(succeeds(*PLAN, *options, *free, "--json"))
    without = reply["rules"][0]["exchange"]
    rates = ["--encode-rate=1e9", "--decode-rate=5.2e9"]
    reply = json.loads(succeeds(*PLAN, *options, *rates, "--json"))
    assert reply["rules"][0]["exchange"] == pytest.approx(without + 5.2 + 2.0)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_headings_and_cells_are_complete_at_any_width(monkeypatch, width):
    file = io.StringIO()
    console = rich.console.Console(file=file, width=width)
    monkeypatch.setattr(_plan._table, "console", lambda: console)
    succeeds(*PLAN, "--workers=8", "--rule=agn", *ADAM, "--codec=int8")
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\u2026" not in file.getvalue()
    heads = [line.split("\u2502")[1].strip() for line in lines if "\u2502" in line]
    titles = [
        *("message", "answer", "exchange", "hidden", "period", "busy", "overlap"),
        *("bottleneck", "model and optimizer", "record, anchor", "worker", "center"),
    ]
    assert set(titles) <= set(heads)


def test_plan_of_one_rule_with_settings():
    options = ["--rule=easgd", "--moving-rate=0.5", "--rho=0.1", "--dtype=bfloat16"]
    reply = json.loads(succeeds(*PLAN, *options, "--codec=float16", "--json"))
    easgd, reduced = reply["rules"]
    assert easgd["worker"]["anchor"] == easgd["message"] == 2_600_000_000
    assert reduced["hidden_period"] == 1  # one worker has nothing to reduce


def test_plan_of_a_user_defined_rule(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import dataclasses, agn_optax\n"
        "rule = dataclasses.replace(agn_optax.rules.average(), name='mine')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    reply = json.loads(succeeds(*PLAN, "--rule-from=mine:rule", "--json"))
    assert [row["rule"] for row in reply["rules"]] == ["mine", "all_reduce"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bandwidth=125e6"], "--bandwidth must be a positive rate with its unit"),
        (["--center-bandwidth=fast"], "--center-bandwidth must be a positive rate"),
        (["--endpoint-rate=0"], "endpoint_rate must be a number in"),
        (["--inner=adamm"], "--inner must be one of adabelief, .*, got 'adamm'"),
        (["--workers=0"], "workers must be a positive int, got 0"),
        (["--period=0"], "period must be a positive int, got 0"),
        (["--step-time=0"], "step_time must be a number in"),
        (["--dtype=int8"], "dtype must be a floating dtype, got int8"),
        (["--rule=ang"], "--rule must be one of"),
        (["--codec=int3"], "--codec must be one of bfloat16, .*, got 'int3'"),
        (["--rule="], "--rule"),
        (["--shards=0"], "shards must be a positive int, got 0"),
    ],
)
def test_bad_options_are_rejected(options, message):
    output = fails(*PLAN, "--rule=downpour", *options, code=2)
    assert re.search(message, output), output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("text", "bytes_a_second"),
    [
        ("1Gbit", 125e6),
        ("1gbit/s", 125e6),
        ("1 Gbps", 125e6),
        ("100Mb", 12.5e6),
        ("100mb/s", 12.5e6),
        ("100MB", 100e6),
        ("1.2GB/s", 1.2e9),
        ("1.2 GBps", 1.2e9),
        ("3e2 kBytes", 3e5),
        ("800bits", 100),
        ("1MiB", 1 << 20),
        ("8Kibit", 1024),
        ("1TB", 1e12),
    ],
)
def test_rate_is_parsed_with_its_unit(text, bytes_a_second):
    assert units.rate(text, "it") == pytest.approx(bytes_a_second)


@pytest.mark.parametrize(
    "text", ["", "1", "1G", "Gbit", "-1Gbit", "0Mbit", "1.2.3MB", "1e999MB", "5iB"]
)
def test_text_that_is_not_a_rate_is_rejected(text):
    with pytest.raises(errors.InvalidArgumentError, match="it must be a positive rate"):
        units.rate(text, "it")


def test_plan_gives_the_advice_of_the_nearest_simulated_setting():
    options = ["--workers=6", "--rule=diloco", "--codec=int8", "--spread=3"]
    options += ["--failures-every=200", "--parameters=1e6"]
    output = succeeds(*PLAN, *options)
    bare = planning.plan(
        rules.diloco(),
        planning.abstract(1e6),
        planning.Cluster(step_time=0.8, bandwidth=125e6, workers=6),
        inner=optax.adam(1e-3),
    )
    exchange = max(bare.exchange, 6 * bare.service) / 0.8
    advice = planning.advise(
        workers=6, exchange=exchange, spread=3.0, failures=0.8 / 200
    )
    assert "from simulated training of a small model" in output
    assert "8 workers, an exchange as long as 0.1 steps, speeds 1 to 4" in output
    assert str(advice.best[0]) in output
    assert f"{advice.best[0].loss.mean:.2f} (" in output
    assert "Outside" not in output
    reply = json.loads(succeeds(*PLAN, *options, "--json"))["advice"]
    assert reply == json.loads(json.dumps(_plan._advice_as_dict(advice)))
    assert reply["nearest"]["workers"] == 8


def test_planning_page_has_the_advice_of_its_command():
    text = (DOCS / "planning.md").read_text().replace("\\\n", "")
    command, printed = re.search(
        r"## Advice.*?agn-optax (plan .*?)```.*?```text\n(.*?)```", text, re.DOTALL
    ).groups()
    assert printed in succeeds(*shlex.split(command))


def test_plan_says_what_is_outside_of_the_simulated_range():
    output = succeeds(*PLAN, "--workers=8", "--rule=diloco")
    assert "Outside of the simulated range: exchange 416, not 0.1 to 100." in output


def test_plan_of_one_worker_has_no_advice():
    assert "Advice" not in succeeds(*PLAN, "--rule=diloco")
    assert json.loads(succeeds(*PLAN, "--rule=diloco", "--json"))["advice"] is None


def test_impossible_spread_and_failures_are_rejected():
    assert "--spread" in fails(*PLAN, "--rule=diloco", "--spread=0.5", code=2)
    wrong = "--failures-every=0"
    assert "--failures-every" in fails(*PLAN, "--rule=diloco", wrong, code=2)
