"""The commands for tapes, on the tape of a center that `agn-optax serve` ran."""

import io
import json
import pathlib
import re
import shutil
import textwrap

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console
from helpers import shared, tapes
from helpers.commands import command, fails, serve, succeeds
from helpers.tapes import record

import agn_optax
from agn_optax import tape
from agn_optax._internal import trees
from agn_optax.center import Journal, LocalCenter
from agn_optax.ops.cli import _progress

ADAM = ("--rule=agn", "--center-optimizer=adam", "--learning-rate=0.05")
RULE = shared.agn(shared.adam(0.05))
SGD = shared.agn(shared.sgd(0.5))
OTHER = ("--center-optimizer=sgd", "--learning-rate=0.5")
EXCHANGES = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The tape of a served center with a real worker, and what serve has logged."""
    folder = tmp_path_factory.mktemp("served")
    path, address = folder / "tape", f"unix:{folder}/center.sock"

    def train(center):
        with agn_optax.Worker(center, shared.sgd(0.1), period=2, name="w0") as worker:
            params, state = worker.start({"w": jnp.ones(4)}, chief=True)
            for _ in range(2 * EXCHANGES):
                updates, state = worker.tx.update(params, state, params)
                params = optax.apply_updates(params, updates)
                params, state = worker.exchange(params, state)

    options = (*ADAM, f"--journal={path}", "--journal-keep=contributions")
    result = serve(address, RULE, *options, "--open", then=train)
    return path, result.stderr


@pytest.fixture
def path(served, tmp_path):
    """A copy of the served center's tape, in the current directory."""
    return shutil.copytree(served[0], tmp_path / "tape")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
def test_replay_prints_the_hash_that_the_center_has_logged(served):
    path, log = served
    ended = re.search(r"the center ends at version (\d+), hash (\w+)", log)
    assert ended[1] == str(EXCHANGES)
    output = succeeds("replay", path)
    assert re.fullmatch(rf"version {EXCHANGES} at [\d.]+ s, hash {ended[2]}\n", output)
    start = re.search(r"the center starts at version 0, hash (\w+)", log)
    reply = json.loads(succeeds("replay", path, "--at=0", "--whole", "--json"))
    assert (reply["version"], reply["hash"]) == (0, start[1])


def test_replay_at_a_time_is_the_version_then(path):
    events = [each for each in tape.read(path).events() if each.applied]
    reply = json.loads(
        succeeds("replay", path, f"--seconds={events[3].time}", "--json")
    )
    assert (reply["version"], reply["time"]) == (4, events[3].time)


def test_replayed_center_is_served_again(path, tmp_path):
    to, address = tmp_path / "then", f"unix:{tmp_path}/center.sock"
    output = succeeds("replay", path, "--at=3", f"--to={to}")
    assert f"agn-optax serve --journal {to} continues it" in output
    versions = []
    serve(
        address,
        RULE,
        *(*ADAM, f"--journal={to}", "--open"),
        then=lambda center: versions.append(center.pull()),
    )
    assert versions[0].version == 3
    expected = tape.read(path).replay(RULE, 3).params["w"]
    np.testing.assert_array_equal(versions[0].params["w"], expected)


def test_fork_is_served_with_another_center_optimizer(path, tmp_path):
    to, address = tmp_path / "fork", f"unix:{tmp_path}/center.sock"
    reply = json.loads(succeeds("fork", path, to, "--at=5", "--json"))
    assert reply["version"] == 5
    assert reply["parent"] == list(tape.read(to).parent)
    result = serve(
        address,
        SGD,
        *("--rule=agn", *OTHER, f"--journal={to}", "--open", "--mode=synchronous"),
        then=lambda center: center.pull(),
    )
    assert "continuing at version 5" in result.stdout
    assert "the center optimizer begins with a new state" in result.stderr
    assert tape.read(to).center_id == reply["center_id"] != tape.read(path).center_id
    # Its own options are beside its records now.
    assert json.loads(succeeds("replay", to, "--json"))["version"] == 5


def test_fork_into_its_own_tape_is_an_error(path):
    before = {each.name: each.read_bytes() for each in path.iterdir()}
    for arguments in (("fork", path, path), ("replay", path, f"--to={path}")):
        assert "new or an empty directory" in fails(*arguments, code=2)
    assert {each.name: each.read_bytes() for each in path.iterdir()} == before


def test_audit_shows_each_worker(path):
    output = succeeds("audit", path)
    assert re.search(rf"│ w0 +│ +{EXCHANGES} │ +0 │ +0 │ +{2 * EXCHANGES} │", output)
    assert "the records lead to the snapshots" in output
    reply = json.loads(succeeds("audit", path, "--json"))
    found = tape.audit(tape.read(path), RULE)
    assert reply["version"] == EXCHANGES
    assert reply["checked"]["contributions"] == EXCHANGES
    assert reply["workers"][0]["moved"] == found.workers[0].moved > 0


def test_audit_of_a_damaged_tape_is_an_error(path):
    journal = min(path.glob("journal-*"))
    raw = bytearray(journal.read_bytes())
    raw[max(i for i, byte in enumerate(raw) if byte)] ^= 1
    journal.write_bytes(raw)
    assert journal.name in fails("audit", path, code=1)


def test_diff_has_an_exit_code(path, tmp_path):
    assert succeeds("diff", path, path) == "the runs are the same\n"
    for seed in (0, 1):
        record(tmp_path / str(seed), RULE, exchanges=3, workers=1, seed=seed)
    result = command("diff", tmp_path / "0", tmp_path / "1")
    assert result.exit_code == 1
    assert (
        "the runs part after version 0: a worker sent something else" in result.stdout
    )
    result = command("diff", tmp_path / "0", tmp_path / "1", "--json")
    reply = json.loads(result.stdout)
    assert (reply["kind"], reply["record"], reply["same"]) == ("content", 1, False)


def write_functions(folder):
    text = """
        import jax.numpy as jnp
        def norm(params):
            return {"norm": jnp.linalg.norm(params["w"])}
        number = 1
        """
    (folder / "measures.py").write_text(textwrap.dedent(text))


@pytest.mark.slow
def test_what_if_shows_where_workers_part(path, tmp_path):
    write_functions(tmp_path)
    options = (*OTHER, "--loss=measures:norm", "--every=4", "--plot=what_if.png")
    output = succeeds("what-if", path, *options)
    assert "from version 1 on" in output
    assert "From there on only the schedule is real" in output
    assert (tmp_path / "what_if.png").read_bytes()[1:4] == b"PNG"
    reply = json.loads(succeeds("what-if", path, *options[:4], "--json"))
    found = tape.what_if(tape.read(path), RULE, SGD)
    assert reply["hash"] == trees.digest(found.state.params)
    assert reply["parted"]["version"] == found.parted.version == 1
    assert [each["version"] for each in reply["measured"]] == [0, 4, 8]


def test_what_if_without_changes_repeats_the_run(path):
    reply = json.loads(succeeds("what-if", path, "--json"))
    assert reply["parted"] is None
    replayed = json.loads(succeeds("replay", path, "--json"))
    assert reply["hash"] == replayed["hash"]


def test_what_if_takes_mode_and_limits(path):
    options = ("--mode=bounded", "--max-versions-behind=0", "--reject-norm=1e-9")
    reply = json.loads(succeeds("what-if", path, *options, "--json"))
    assert reply["version"] == 0
    assert reply["workers"]["w0"]["rejected"] == EXCHANGES
    error = fails("what-if", path, "--max-versions-behind=0", code=2)
    assert "applies to --mode bounded" in error


def test_what_if_of_a_rule_that_does_not_fit_is_an_error(path):
    error = fails("what-if", path, "--rule=downpour", code=1)
    assert "what workers do" in error


def test_past_versions_are_evaluated_and_drawn(path, tmp_path):
    write_functions(tmp_path)
    output = succeeds("evaluate", path, "measures:norm", "--every=3", "--plot=norm.svg")
    rows = re.findall(r"│ (\d+) +│ +[\d.e-]+ s │ +([\d.]+) │", output)
    assert [row[0] for row in rows] == ["0", "3", "6", "8"]
    assert float(rows[0][1]) == 2.0
    assert "<svg" in (tmp_path / "norm.svg").read_text()
    reply = json.loads(succeeds("evaluate", path, "measures:norm", "--json"))
    assert [each["version"] for each in reply] == [0, 8]
    end = tape.read(path).replay(RULE).params["w"]
    norm = float(jnp.linalg.norm(end))
    assert reply[-1]["numbers"]["norm"] == pytest.approx(norm)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("evaluate", "measures:missing"), "has no attribute 'missing'"),
        (("evaluate", "measures:number"), "must name a function of parameters"),
        (("evaluate", "measures:norm", "--plot=norm.txt"), "--plot must be a file"),
        (("evaluate", "measures:norm", "--every=0"), "every must be"),
        (("what-if", "--plot=a.png"), "--plot needs --loss"),
        (("replay", "--at=99"), r"version must be in \[0, 8\]"),
        (("replay", "--at=1", "--seconds=1"), "not both"),
        (("fork", "new", "--at=99"), r"version must be in \[0, 8\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_usage_is_an_error_before_anything_is_written(
    arguments, words, path, tmp_path
):
    write_functions(tmp_path)
    before = {each.name for each in tmp_path.iterdir()}
    name, *rest = arguments
    assert re.search(words, fails(name, path, *rest, code=2))
    assert {each.name for each in tmp_path.iterdir()} - before <= {"__pycache__"}


def test_tape_of_an_embedded_center_needs_the_options_of_its_rule(tmp_path):
    record(tmp_path / "a", RULE, exchanges=2)
    error = fails("replay", tmp_path / "a", code=2)
    assert "give the rule's options" in error
    assert "version 2" in succeeds("replay", tmp_path / "a", *ADAM)
    (tmp_path / "options.toml").write_text(
        'rule = "agn"\ncenter-optimizer = "adam"\nlearning-rate = 0.05\n'
    )
    config = "--config=options.toml"
    assert "version 2" in succeeds("replay", tmp_path / "a", config)
    reply = json.loads(succeeds("what-if", tmp_path / "a", config, *OTHER, "--json"))
    assert reply["parted"]["version"] == 1
    # Without the rule, an audit checks what it can.
    assert "not replayed" in succeeds("audit", tmp_path / "a")


def test_center_continues_beside_the_options_of_its_rule(path):
    """The file of options is no file of the center."""
    assert (path / "options.toml").exists()
    with LocalCenter(RULE, durability=Journal(path, keep="contributions")) as center:
        assert center.version == EXCHANGES


@pytest.mark.slow
def test_progress_is_shown_in_a_terminal_when_work_takes_long(path, monkeypatch):
    shown = io.StringIO()
    console = rich.console.Console(file=shown, force_terminal=True)
    monkeypatch.setattr(_progress, "_AFTER", -1.0)
    succeeds("replay", path)  # where nobody looks, nothing is shown
    monkeypatch.setattr(_progress._table, "console", lambda **_: console)
    command("replay", path)
    assert "record " in shown.getvalue()


def test_commands_of_the_page_are_commands():
    text = (pathlib.Path(tapes.__file__).parents[2] / "docs/repeat.md").read_text()
    used = set(re.findall(r"^(?:\$ )?agn-optax ([\w-]+)", text, re.MULTILINE))
    assert {"replay", "audit", "diff", "fork", "what-if", "evaluate"} <= used
