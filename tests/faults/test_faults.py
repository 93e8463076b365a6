"""A few hundred runs of simulated faults; and the faults of the package they find."""

import dataclasses
import importlib.util
import inspect
import pathlib
import re
import sys
import types

import pytest
from faults import __main__ as command
from faults import scenario
from faults.run import Runner
from helpers import shared

from agn_optax.center import Asynchronous, _core, _ledger
from agn_optax.center.durability import _directory, _keeper, _writer
from agn_optax.worker import _machine

# A module of the package, a text in it, and what replaces the text: one fault each.
FAULTS = {
    "a repeated message is applied again": (
        _ledger,
        "            member.sequence = message.sequence\n",
        "            pass\n",
    ),
    "an ended session leaves its message behind": (
        _ledger,
        "        self._remove_message(worker)\n        self._forget(member)\n",
        "        self._forget(member)\n",
    ),
    "a replaced session may resume": (
        _ledger,
        "if resume and not is_same:",
        "if resume and is_same is None:",
    ),
    "sessions are forgotten when they end": (
        _ledger,
        "return self._registered.get(worker) or self._ended.get(worker)",
        "return self._registered.get(worker) and self._ended.get(worker)",
    ),
    "an answer does not wait for the disk": (
        _core,
        "        self._core._wait_until_kept(kept.recorded)\n",
        "        pass\n",
    ),
    "a join is not recorded": (
        _core,
        'self._record("join", worker, session=session_id, connection=connection)',
        "pass",
    ),
    "a join does not wait for the disk": (
        _core,
        "        if is_open:\n",
        "        if False:\n",
    ),
    "a pull does not wait for the disk": (
        _core,
        "            if kept:\n",
        "            if False:\n",
    ),
    "an answer waits for one record less": (
        _keeper,
        "return recorded <= self._written",
        "return recorded <= self._written + 1",
    ),
    "a restart skips the ledger of the last record": (
        _keeper,
        "        for state in states:",
        "        for state in states[:-1]:",
    ),
    "a restart does not sync the end of the tape": (
        _keeper,
        "                    self._directory.sync_newest()\n",
        "                    pass\n",
    ),
    "a snapshot has the number of the next record": (
        _keeper,
        "                self._attempted = number = self._number\n",
        "                self._attempted = number = self._number + 1\n",
    ),
    "records are not synced": (
        _writer,
        "        _sync(self._file)\n",
        "",
    ),
    "a start on a full disk removes an empty journal": (
        _directory,
        "            if is_new:\n                path.unlink(",
        "            if file:\n                path.unlink(",
    ),
    "a worker keeps the steps of a round that has ended": (
        _machine,
        "        if begins:\n            self._begin_round()",
        "        if resets:\n            self._begin_round()",
    ),
    "a worker does not count an exchange": (
        _machine,
        "        self.completed += 1\n",
        "        pass\n",
    ),
}

# Faults that tools/mutants.py makes, too: a module, a line, and the replacement of a
# piece of the line.
MUTANTS = [
    (_ledger, "if resume and not is_same:", "(resume or not is_same)"),
    (
        _ledger,
        "return self._registered.get(worker) or self._ended.get(worker)",
        "(self._registered.get(worker) and self._ended.get(worker))",
    ),
    (
        _ledger,
        "count = self._at_round.get(rounds, 0) + change",
        "(1)",
    ),
    (_ledger, "self.pending.pop(worker, None)", "pass"),
    (_core, "self._core._wait_until_kept(kept.recorded)", "pass"),
    (_core, "self._wait_until_kept(self._recorded())", "pass"),
    (_core, "del self._messages[worker]", "pass"),
    (
        _core,
        'self._record("join", worker, session=session_id, connection=connection)',
        "pass",
    ),
    (_keeper, "self._directory.sync_newest()", "pass"),
    (_keeper, "return recorded <= self._written", "(recorded < self._written)"),
    (
        _keeper,
        "if keeps and not self._journal.keep:",
        "not (keeps and (not self._journal.keep))",
    ),
    (_machine, "self.completed += 1", "pass"),
    (_machine, "if begins:", "not (begins)"),
    (
        _machine,
        "begins = resets or self.state is _ANSWERED",
        "(resets and self.state is _ANSWERED)",
    ),
]


@pytest.fixture
def runner():
    made = Runner()
    yield made
    made.close()


def test_hundreds_of_scenarios_hold(runner):
    for seed in range(150):
        each = scenario.drawn(seed)
        failure = runner.run(each)
        assert not failure, runner.report(each, failure)
    assert runner.processes > 1.2 * runner.scenarios
    assert {*runner.outcomes} >= {"applied", "dropped", "rejected"}


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["before", "after", "torn", "full"])
@pytest.mark.parametrize("power", [False, True])
def test_disk_may_fail_at_any_call(fault, power, runner):
    failure = first_failure_of_disk(runner, fault, power=power)
    assert not failure, failure


def first_failure_of_disk(runner, fault, *, power):
    """Let each call of the disk fail, one in each run; return how the first failed."""
    plan = scenario.Plan(exchanges=2, starts=0.5)
    plain = scenario.Scenario(7, shared.downpour(), Asynchronous(), workers=(plan,))
    plain = dataclasses.replace(plain, kills=(0.3,), power=power)
    for call in range(1, 60):
        failure = runner.run(dataclasses.replace(plain, disk=((call, fault),)))
        if failure:
            return f"call {call}: {failure}"
    return ""


def test_seed_repeats_a_run(runner):
    for seed in (1, 2, 3):
        assert not runner.run(scenario.drawn(seed))
        first = runner.trace
        assert not runner.run(scenario.drawn(seed))
        assert runner.trace == first


@pytest.mark.slow
def test_failing_scenario_is_made_small(runner, monkeypatch):
    monkeypatch.setattr(_core.LocalSession, "wait_until_kept", lambda *_: None)
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
def test_printed_command_repeats_a_failure(monkeypatch, capsys):
    put_in(monkeypatch, *FAULTS["an answer does not wait for the disk"])

    def failure_of(*arguments):
        monkeypatch.setattr(sys, "argv", ["faults", *arguments, "--first"])
        assert command.main()
        return re.search(
            r"seed (\d+): .*\n +repeat it: .* ARGS='(.*)'", capsys.readouterr().out
        )

    first = failure_of("--count", "100")
    assert failure_of(*first[2].split())[0] == first[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_put_in_by_hand_is_found(fault, runner, monkeypatch):
    put_in(monkeypatch, *FAULTS[fault])
    found = (scenario.drawn(seed) for seed in range(3000))
    full = first_failure_of_disk(runner, "full", power=False)
    assert full or any(map(runner.run, found))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "line", "replacement"), MUTANTS)
def test_mutant_is_found(module, line, replacement, runner, monkeypatch):
    mutants = tool_for_mutants()
    path = pathlib.Path(module.__file__)
    source = path.read_bytes()
    lines = source.decode().splitlines()
    [fault] = [
        each
        for each in mutants.faults_of(path)
        if lines[each.line - 1].strip() == line and each.text == replacement
    ]
    put_source_in(monkeypatch, module, mutants.source_with(fault, source).decode())
    assert any(map(runner.run, map(scenario.drawn, range(2000))))


def tool_for_mutants():
    """Return tools/mutants.py as a module."""
    path = pathlib.Path(__file__).parents[2] / "tools/mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


def put_in(patch, module, text, replacement):
    """Replace a text in the source of a module's functions."""
    source = inspect.getsource(module)
    assert source.count(text) == 1
    put_source_in(patch, module, source.replace(text, replacement))


def put_source_in(patch, module, source):
    """Replace the functions of a module by those of a changed source."""
    changed = {"__name__": module.__name__}
    code = compile(source, module.__file__, "exec")
    exec(code, changed)  # noqa: S102 our own
    functions = dict(functions_of(changed, module))
    for name, function in functions_of(vars(module), module):
        patch.setattr(function, "__code__", functions[name].__code__)


def functions_of(namespace, module):
    """Yield the functions and methods in the source of a module, with their names."""
    for each in [*namespace.values()]:
        function = each.fget if isinstance(each, property) else each
        if isinstance(function, types.FunctionType):
            function = inspect.unwrap(function)  # of a context manager
            if function.__code__.co_filename == module.__file__:
                yield function.__qualname__, function
        elif isinstance(each, type) and each.__module__ == module.__name__:
            yield from functions_of(vars(each), module)
