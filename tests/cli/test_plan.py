"""``agn-optax plan``: a table of all built-in rules, or of the user's own rule."""

import contextlib
import io
import json
import re
import types

import pytest
import rich.console
from helpers.commands import fails, succeeds

from agn_optax import errors, rules
from agn_optax.ops import planning, units
from agn_optax.ops.cli import _calibrate, _plan

PLAN = ("plan", "--parameters=1.3e9", "--step-time=0.8", "--bandwidth=1Gbit")


def test_plan_prints_a_table_of_every_rule():
    output = succeeds(*PLAN, "--workers=8")
    for name in rules.__all__:
        if name != "Rule":
            assert f" {name} " in output
    assert " all_reduce " in output
    assert "8 workers, 0.8 s a step; 125 MB/s each, 125 MB/s at the center" in output
    assert "5.2 GB" in output


def test_json_equals_the_plan_of_the_library():
    options = ["--workers=8", "--period=200", "--inner=sgd", "--latency=0.1"]
    rates = ["--center-bandwidth=10Gbit", "--endpoint-rate=2GB", "--apply-rate=3GB"]
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
    inner = _plan._rules.inner("sgd")
    *own, reduced = reply["rules"]
    for row, rule in zip(own, planning.built_in_rules(inner, 8), strict=True):
        cost = planning.plan(
            rule, planning.abstract(1.3e9), cluster, inner=inner, period=200
        )
        assert row == json.loads(json.dumps(_plan._as_dict(cost)))
    assert reduced["rule"] == "all_reduce"


def test_plan_covers_shards_and_journal():
    options = ["--workers=27", "--rule=downpour", "--shards=2"]
    journal = ["--disk=1GB", "--sync=0.01", "--journal-size=2e10"]
    reply = json.loads(succeeds(*PLAN, *options, *journal, "--json"))
    cluster = planning.Cluster(
        step_time=0.8,
        bandwidth=125e6,
        workers=27,
        shards=2,
        disk=planning.Disk(bandwidth=1e9, sync=0.01, size=2e10),
    )
    assert reply["disk"] == vars(cluster.disk)
    cost = planning.plan(
        rules.downpour(),
        planning.abstract(1.3e9),
        cluster,
        inner=_plan._rules.inner("adam"),
    )
    assert reply["rules"][0] == json.loads(json.dumps(_plan._as_dict(cost)))
    assert reply["rules"][0]["journal"]["restart"] == cost.journal.restart
    output = succeeds(*PLAN, *options, *journal)
    assert "at each of the center's 2 shards" in output
    assert output.count("\u2502 downpour ") == 1 + 1 + 1 + 1
    assert "The journal of the center" in output


def test_plan_names_the_bottleneck_and_its_remedies():
    output = succeeds(*PLAN, "--workers=8", "--rule=diloco")
    assert re.search(r"diloco .* center link ", output)
    assert re.search(r"diloco +\u2502 +416 +\u2502 +208 +\u2502 +4 ", output)
    output = succeeds(*PLAN, "--workers=8", "--rule=diloco", "--period=500")
    assert re.search(r"diloco .* nothing ", output)
    output = succeeds(*PLAN, "--workers=8", "--rule=diloco", "--codec=bfloat16")
    assert re.search(r"diloco +\u2502 +208 +\u2502 +- ", output)


def test_plan_gives_codec_time_and_break_even_rate():
    options = ["--rule=diloco", "--codec=int8"]
    rates = ["--encode-rate=1GB", "--decode-rate=5.2GB"]
    reply = json.loads(succeeds(*PLAN, *options, *rates, "--json"))
    coding = reply["rules"][0]["coding"]
    assert coding["encode"] == pytest.approx(5.2)
    assert coding["decode"] == pytest.approx(2.0)
    assert reply["rules"][1]["coding"] is None
    text = succeeds(*PLAN, *options, *rates)
    assert "1 GB/s to encode and 5.2 GB/s to decode" in text
    assert re.search(r"diloco +\u2502 +5.2 GB +\u2502 +5.2 s +\u2502 +2 s ", text)
    assert "pays below" not in succeeds(*PLAN, "--rule=diloco")
    assert "any rate" in succeeds(*PLAN, "--rule=diloco", "--codec=bfloat16")


def test_bfloat16_is_a_remedy_for_a_codec_with_float32_downlink():
    """int8 leaves the downlink in float32, and both directions share the link."""
    link = ["--workers=8", "--rule=diloco", "--encode-rate=1TB", "--decode-rate=1TB"]
    reply = json.loads(succeeds(*PLAN, *link, "--codec=int8", "--json"))
    with_int8 = reply["rules"][0]
    reply = json.loads(succeeds(*PLAN, *link, "--codec=bfloat16", "--json"))
    with_bfloat16 = reply["rules"][0]
    assert with_bfloat16["hidden_period"] < with_int8["hidden_period"]
    assert with_int8["remedies"]["bfloat16"] == with_bfloat16["hidden_period"]
    assert with_bfloat16["remedies"]["bfloat16"] is None


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_headings_and_cells_are_complete_at_any_width(monkeypatch, width):
    file = io.StringIO()
    console = rich.console.Console(file=file, width=width)
    monkeypatch.setattr(_plan._table, "console", lambda: console)
    succeeds(*PLAN, "--workers=8", "--disk=1GB", "--codec=int8")
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\u2026" not in file.getvalue()
    heads = [head.strip() for line in lines for head in line.split("\u2503")]
    titles = [
        *("message", "answer", "exchange", "hidden", "period", "busy", "overlap"),
        *("bottleneck", "with bfloat16", "shards"),
        *("contribution", "encode", "decode", "pays below"),
        *("written", "snapshot", "journal", "read", "replay", "rejoin", "restart"),
        *("model and optimizer", "record, anchor", "worker", "center"),
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
        (["--endpoint-rate=0GB"], "--endpoint-rate must be a positive rate"),
        (["--inner=adamm"], "--inner must be one of adabelief, .*, got 'adamm'"),
        (["--workers=0"], "workers must be a positive int, got 0"),
        (["--period=0"], "period must be a positive int, got 0"),
        (["--step-time=0"], "step_time must be a number in"),
        (["--dtype=int8"], "dtype must be a floating dtype, got int8"),
        (["--rule=ang"], "--rule must be one of"),
        (["--codec=int3"], "--codec must be one of bfloat16, .*, got 'int3'"),
        (["--moving-rate=0.5"], "--moving-rate needs --rule"),
        (["--shards=0"], "shards must be a positive int, got 0"),
        (["--disk=fast"], "--disk must be a positive rate"),
        (["--sync=1"], "--sync needs --disk"),
        (["--journal-size=1e9"], "--journal-size needs --disk"),
        (["--measure", "--overhead=1"], "--overhead does not go with --measure"),
    ],
)
def test_bad_options_are_rejected(options, message):
    output = fails(*PLAN, *options, code=2)
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


@pytest.mark.slow
def test_constants_of_this_machine_are_plausible(monkeypatch):
    machine = _calibrate.calibrate(sizes=(1_000, 4_000_000), repeats=5)
    assert 0 < machine.overhead < 1
    assert 1e7 < machine.endpoint_rate < 1e12
    assert 1e7 < machine.apply_rate < 1e13
    monkeypatch.setattr(_calibrate, "calibrate", lambda codec: machine)
    reply = json.loads(succeeds(*PLAN, "--measure", "--json"))
    assert reply["machine"] == vars(machine)


MACHINE = planning.Machine(overhead=0.003, endpoint_rate=7e8, apply_rate=4e9)


@pytest.fixture
def machine(monkeypatch):
    """Simulated times: those of the model plus ``noise()`` for each measurement."""
    made = types.SimpleNamespace(noise=lambda: 0.0, measured=0)

    def timed(seconds):
        def measure():
            made.measured += 1
            return seconds + made.noise()

        return measure

    def arithmetic(size):
        return timed(0.0002 + 16 * size / MACHINE.apply_rate)  # a call takes time, too

    def exchange(center, size):
        ends = MACHINE.overhead + 8 * size / MACHINE.endpoint_rate
        return timed(ends + 16 * size / MACHINE.apply_rate)

    monkeypatch.setattr(_calibrate, "_server", contextlib.nullcontext)
    monkeypatch.setattr(_calibrate, "_connection", contextlib.nullcontext)
    monkeypatch.setattr(_calibrate, "_arithmetic", arithmetic)
    monkeypatch.setattr(_calibrate, "_exchange", exchange)
    return made


def test_calibration_recovers_the_constants_of_the_model(machine):
    """Times that follow the model exactly give back its constants."""
    assert vars(_calibrate.calibrate()) == pytest.approx(vars(MACHINE))
    assert machine.measured == 4 * _calibrate._REPEATS


def test_calibration_ignores_a_slow_period(machine):
    """One turn of each measurement outside the slow period is enough."""
    machine.noise = lambda: 0.0 if 8 < machine.measured <= 12 else machine.measured
    assert vars(_calibrate.calibrate(repeats=5)) == pytest.approx(vars(MACHINE))


def test_calibration_repeats_measurements_that_fit_no_line(machine):
    def noise():
        first_turns = machine.measured <= 4 * 3
        is_small_there = machine.measured % 4 == 3
        return 1.0 if first_turns and is_small_there else 0.0

    machine.noise = noise
    assert vars(_calibrate.calibrate(repeats=3)) == pytest.approx(vars(MACHINE))
    assert machine.measured == 2 * 4 * 3


@pytest.mark.usefixtures("machine")
def test_calibration_measures_codec_rates(monkeypatch):
    monkeypatch.setattr(_calibrate, "_CODEC_SHAPE", (2, 5_000))
    measured = _calibrate.calibrate(rules.CODECS["int8"], repeats=2)
    assert 1e6 < measured.encode_rate < 1e12
    assert 1e6 < measured.decode_rate < 1e12
    assert measured.encode_rate != MACHINE.encode_rate
    others = vars(measured) | {
        name: getattr(MACHINE, name) for name in ("encode_rate", "decode_rate")
    }
    assert others == pytest.approx(vars(MACHINE))


def test_calibration_fails_when_times_never_fit_a_line(machine):
    machine.noise = lambda: 0.1 * (machine.measured % 2)  # small ones take longer
    with pytest.raises(errors.CenterError, match=r"must grow.*too busy"):
        _calibrate.calibrate(sizes=(1, 2), repeats=3)
    assert machine.measured == _calibrate._ROUNDS * 4 * 3


def test_calibration_fails_when_its_center_does_not_start(monkeypatch):
    monkeypatch.setattr(_calibrate, "_SERVE", ("-c", "pass"))
    with pytest.raises(errors.CenterError, match="did not start"):
        _calibrate.calibrate(sizes=(1, 2))
