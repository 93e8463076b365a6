"""A few hundred runs of simulated faults; and the faults of the package they find."""

import pathlib
import shutil
import subprocess
import sys

import pytest
from faults import scenario
from faults.run import Runner

from agn_optax.center._core import LocalSession

ROOT = pathlib.Path(__file__).parents[2]
# A file of the package, a text in it, and what replaces the text: one fault each.
FAULTS = {
    "a repeated message is applied again": (
        "center/_ledger.py",
        "            member.sequence = entry.submission.sequence\n",
        "            pass\n",
    ),
    "an ended session leaves its message behind": (
        "center/_ledger.py",
        "        self.pending.pop(worker, None)\n        self._ended[worker]",
        "        self._ended[worker]",
    ),
    "a replaced session may resume": (
        "center/_ledger.py",
        "if resume and not is_same:",
        "if resume and is_same is None:",
    ),
    "a session whose lease has ended stays registered": (
        "center/_ledger.py",
        "if member.expires <= now:",
        "if member.expires < 0:",
    ),
    "sessions are forgotten when they end": (
        "center/_ledger.py",
        "return self._registered.get(worker) or self._ended.get(worker)",
        "return self._registered.get(worker) and self._ended.get(worker)",
    ),
    "an answer does not wait for the disk": (
        "center/_core.py",
        "        self._core._wait_until_kept(kept.recorded)\n",
        "        pass\n",
    ),
    "an answer waits for one record less": (
        "center/durability/_keeper.py",
        "return recorded <= self._written",
        "return recorded <= self._written + 1",
    ),
    "joins are not recorded": (
        "center/_core.py",
        'self._record("join", worker, session=session_id, connection=connection)',
        "pass",
    ),
    "a pull does not wait for the disk": (
        "center/_core.py",
        "                self._wait_until_kept(recorded)\n            yield version",
        "                pass\n            yield version",
    ),
    "a restart skips the ledger of the last record": (
        "center/durability/_keeper.py",
        "        for state in states:",
        "        for state in states[:-1]:",
    ),
    "a restart does not sync the end of the tape": (
        "center/durability/_keeper.py",
        "                    self._directory.sync_newest()\n",
        "                    pass\n",
    ),
    "a snapshot has the number of the next record": (
        "center/durability/_keeper.py",
        "                self._attempted = number = self._number\n",
        "                self._attempted = number = self._number + 1\n",
    ),
    "records are not synced": (
        "center/durability/_writer.py",
        "        _sync(self._file)\n",
        "",
    ),
    "a worker keeps the steps of a round that has ended": (
        "worker/_machine.py",
        "        if begins:\n            self._begin_round()",
        "        if resets:\n            self._begin_round()",
    ),
    "a worker does not count an exchange": (
        "worker/_machine.py",
        "        self.completed += 1\n",
        "        pass\n",
    ),
}


@pytest.fixture
def runner():
    made = Runner()
    yield made
    made.close()


def test_hundreds_of_scenarios_hold(runner):
    for seed in range(300):
        each = scenario.drawn(seed)
        failure = runner.run(each)
        assert not failure, runner.report(each, failure)
    assert runner.processes > 1.5 * runner.scenarios
    assert {*runner.outcomes} >= {"applied", "dropped", "rejected"}


def test_seed_repeats_a_run(runner):
    for seed in (1, 2, 3):
        assert not runner.run(scenario.drawn(seed))
        first = runner.trace
        assert not runner.run(scenario.drawn(seed))
        assert runner.trace == first


def test_failing_scenario_is_made_small(runner, monkeypatch):
    monkeypatch.setattr(LocalSession, "wait_until_kept", lambda *_: None)
    found = (scenario.drawn(seed) for seed in range(1000))
    first = next(each for each in found if runner.run(each))
    small = runner.shrink(first)
    assert runner.run(small)
    assert len(scenario.show(small)) < len(scenario.show(first))
    assert not any(map(runner.run, scenario.smaller(small)))
    text = runner.report(first, "it broke")
    assert f"--seed {first.seed} " in text
    assert scenario.show(small) in text


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_put_in_by_hand_is_found(fault, tmp_path):
    path, text, replacement = FAULTS[fault]
    shutil.copytree(ROOT / "agn_optax", tmp_path / "agn_optax")
    file = tmp_path / "agn_optax" / path
    whole = file.read_text("utf-8")
    assert whole.count(text) == 1
    file.write_text(whole.replace(text, replacement), "utf-8")
    command = [sys.executable, "-B", "-m", "faults", "--count", "3000", "--first"]
    found = subprocess.run(  # noqa: S603 our own
        command,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "repeat it: make faults ARGS='--seed" in found.stdout, found.stderr
    assert found.returncode == 1
