"""Golden tapes, made by tests/tapes/make.py: later releases read and replay them."""

import json
import logging
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from helpers.commands import python
from helpers.waiting import LIMIT

from agn_optax import tape
from agn_optax.center import History, Journal, LocalCenter

ROOT = pathlib.Path(__file__).parents[2]
TAPES = ROOT / "tests" / "tapes"
RULES = runpy.run_path(str(TAPES / "make.py"))["RULES"]


def records(folder):
    return list(History(folder).records())


@pytest.mark.parametrize("name", RULES)
def test_golden_tape_is_replayed_within_rounding(name, caplog):
    """Tests compile programs with other flags than the stack in its header."""
    with caplog.at_level(logging.WARNING, logger="agn_optax"):
        *_, (_, store) = tape.read(TAPES / name).run(RULES[name]())
    assert store.current.number == records(TAPES / name)[-1].about["version"]
    apart = [float(x) for x in re.findall("relatively by (.*?):", caplog.text)]
    assert all(each < 1e-5 for each in apart)


def test_golden_tapes_are_replayed_bit_for_bit_on_their_stack():
    arguments, environment = python(TAPES / "replay.py")
    del environment["XLA_FLAGS"]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the tests' helpers
    made = {"env": environment, "stdout": subprocess.PIPE, "timeout": LIMIT}
    replayed = subprocess.run(arguments, check=True, **made)  # noqa: S603 our own program
    others = []
    for line in replayed.stdout.splitlines():
        result = json.loads(line)
        made_on = History(TAPES / result["name"]).snapshot(0).about["stack"]
        if result["stack"] != made_on:
            others.append(f"{result['name']!r} was made on {made_on}")
    if others:
        pytest.skip(f"only compared within rounding: {'; '.join(others)}")


def test_golden_tapes_have_what_their_names_say():
    events = {name: [r.about for r in records(TAPES / name)] for name in RULES}
    for name, expected in (
        ("adam", {"join", "exchange", "leave"}),
        ("rounds", {"join", "exchange", "dropped"}),
        ("rejections", {"join", "exchange", "rejected"}),
    ):
        assert {event["kind"] for event in events[name]} == expected
    messages = [m for event in events["adam"] for m in event.get("messages", [])]
    assert max(message["staleness"] for message in messages) > 1
    assert all("loss" in message["reported"] for message in messages)
    rounds = [e for e in events["rounds"] if e["kind"] == "exchange"]
    assert all(len(event["messages"]) == 2 < event["registered"] for event in rounds)


@pytest.fixture(scope="module")
def read_tape(tmp_path_factory):
    """Return a function that runs the reader of docs/tape.md, with NumPy alone."""
    page = (ROOT / "docs/tape.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", page, re.S)
    assert len(code.splitlines()) <= 60
    program = tmp_path_factory.mktemp("reader") / "read_tape.py"
    program.write_text(code)
    numpy_alone = (
        "import runpy, sys\n"
        "for name in ('jax', 'jaxlib', 'ml_dtypes', 'optax', 'agn_optax'):\n"
        "    sys.modules[name] = None\n"
        f"runpy.run_path({str(program)!r}, run_name='__main__')\n"
    )

    def run(folder):
        return subprocess.run(  # noqa: S603 our own program
            [sys.executable, "-c", numpy_alone, str(folder)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    return run


@pytest.mark.parametrize("name", RULES)
def test_reader_of_the_docs_prints_a_run(name, read_tape):
    result = read_tape(TAPES / name)
    assert not result.stderr
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    for record in records(TAPES / name):
        number, time, kind, *_ = lines.pop(0).split()
        assert (int(number), kind) == (record.number, record.about["kind"])
        assert float(time) == record.about["time"]
    assert sorted(line.split(":")[0] for line in lines) == sorted(
        path.name for path in (TAPES / name).glob("snapshot-*")
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("file", "position", "message"),
    [
        ("journal-000000000000", 100, "record 7 does not continue the chain"),
        ("journal-000000000000", -60, "record 7 does not continue the chain"),
        ("journal-000000000007", 9, "no record of format 2"),
        ("journal-000000000007", -60, "record 11 is incomplete"),
        ("snapshot-000000000007", -60, "record 7 is incomplete"),
        ("journal-000000000000", None, "record 7 does not continue the chain"),
        ("snapshot-000000000007", None, "snapshot-000000000007 is not of this chain"),
    ],
)
def test_reader_of_the_docs_finds_damage(file, position, message, read_tape, tmp_path):
    folder = shutil.copytree(TAPES / "adam", tmp_path / "tape")
    if position is None:  # a file of another run
        shutil.copy(TAPES / "rejections" / file, folder / file)
    else:
        data = bytearray((folder / file).read_bytes())
        data[position] ^= 1
        (folder / file).write_bytes(data)
    result = read_tape(folder)
    assert message in result.stderr


def test_center_continues_a_golden_tape(tmp_path):
    folder = shutil.copytree(TAPES / "adam", tmp_path / "tape")
    journal = Journal(folder, keep="contributions")
    with LocalCenter(RULES["adam"](), durability=journal) as center:
        assert center.version == records(TAPES / "adam")[-1].about["version"]
        center.join("w1")
    assert len(records(folder)) == len(records(TAPES / "adam")) + 1
