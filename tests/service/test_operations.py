"""The commands of docs/operations.md, run as written."""

import contextlib
import json
import pathlib
import re
import shlex
import shutil
import subprocess

import numpy as np
import optax
import pytest
from helpers import children, one_worker, ports
from helpers.commands import PATIENCE, ROOT, python, succeeds
from helpers.waiting import wait_until

import agn_optax
from agn_optax import errors, rules, service

PAGE = (ROOT / "docs/operations.md").read_text()
HERE = pathlib.Path(__file__).parent
UNIT = ROOT / "examples/deploy/agn-optax-center.service"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A current directory for the page's commands; returns their center's address."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return ports.free_address()


def commands_of_the_page(section, address):
    """Return the commands below a heading, with the test's address."""
    _, _, after = PAGE.partition(f"\n## {section}\n")
    assert after, section
    below, _, _ = after.partition("\n## ")
    blocks = re.findall(r"```console\n(.*?)```", below, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    assert lines
    return [shlex.split(line.replace("127.0.0.1:5000", address)) for line in lines]


class CommandRunner(contextlib.AbstractContextManager):
    """Runs commands of the page, and ends the centers that they start."""

    def __init__(self):
        self._processes = []

    def follow(self, section, address):
        """Run the commands below a heading; servers run in the background."""
        outputs = []
        for program, command, *arguments in commands_of_the_page(section, address):
            if program != "agn-optax":
                subprocess.run([program, command, *arguments], check=True)  # noqa: S603 our own page's
            elif command == "serve":
                self._serve(arguments)
            else:
                outputs.append(succeeds(command, *arguments))
                if command == "drain":
                    assert self._processes[-1].wait(PATIENCE) == 0
        return outputs

    def _serve(self, arguments):
        line, environment = python("-m", "agn_optax.ops.cli", "serve", *arguments)
        process = subprocess.Popen(  # noqa: S603 our own program
            line, env=environment, stdout=subprocess.PIPE, text=True
        )
        self._processes.append(process)
        assert process.stdout.readline().startswith("serving")

    def kill(self):
        """Kill the center, as a failing machine would."""
        self._processes[-1].kill()
        self._processes[-1].wait(PATIENCE)

    def __exit__(self, *exception):
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE)
            process.stdout.close()


def version(address):
    return json.loads(succeeds("status", address, "--json"))["version"]


@pytest.mark.slow
def test_workers_continue_through_an_upgrade(place):
    """Every step of every worker is in the center once."""
    names = [f"w{number}" for number in range(3)]
    with (
        CommandRunner() as served,
        children.processes(HERE / "durable_worker.py", 1) as workers,
    ):
        served.follow("A center", place)
        with service.connect(place, rules.downpour(), timeout=PATIENCE) as center:
            center.initialize(np.zeros(3, np.float32), worker="")
            workers[0].ask(do="start", address=place, names=names, elements=[0, 1, 2])
            for _ in range(2):
                before = version(place)
                wait_until(lambda n=before: version(place) > n + 15)
                served.follow("Upgrade", place)
                assert version(place) >= before + 15
            before = version(place)
            wait_until(lambda: version(place) > before + 15)
            present = json.loads(succeeds("status", place, "--json"))["workers"]
            assert {worker["name"] for worker in present} == set(names)
            reply = workers[0].ask(do="stop")
            assert not reply["failures"]
            end = np.asarray(center.pull().params)
    np.testing.assert_array_equal(-end, [reply["steps"][name] for name in names])


@pytest.mark.slow
def test_result_of_a_worker_is_the_same_with_upgrades(place, tmp_path):
    """One worker ends at the same parameters as without upgrades, bit for bit."""
    steps, progress, upgrades = 600, tmp_path / "progress", tmp_path / "upgrades"
    upgrades.write_text("0")
    undisturbed = agn_optax.LocalCenter(one_worker.rule())
    expected = one_worker.train(undisturbed, steps, lambda number: None)
    rule = "--rule=agn", "--center-optimizer=adam", "--learning-rate=0.05"
    serve = [f"--address={place}", *rule, "--journal=center"]
    with (
        CommandRunner() as served,
        children.processes(one_worker.__file__, 1) as workers,
    ):
        served._serve(serve)
        files = {"progress": str(progress), "upgrades": str(upgrades), "parts": 5}
        workers[0].send(do="train", address=place, steps=steps, **files)
        for part in (1, 2, 3):
            wait_until(
                lambda p=part: (
                    progress.exists()
                    and int(progress.read_text() or 0) > p * steps // 5
                )
            )
            assert not workers[0].answers_already()
            succeeds("drain", place)
            assert served._processes[-1].wait(PATIENCE) == 0
            served._serve(serve)
            upgrades.write_text("4" if part == 3 else str(part))
        reply = workers[0].answer()
    assert reply["version"] == reply["exchanges"] == steps // one_worker.PERIOD
    assert reply == expected


@pytest.mark.slow
def test_backup_of_a_running_center_can_be_restored(place):
    """It has all steps acknowledged before; workers get an error about later ones."""
    rule = rules.downpour()
    with CommandRunner() as served:
        served.follow("A center", place)
        with service.connect(place, rule, timeout=PATIENCE) as center:
            worker = agn_optax.Worker(center, optax.sgd(1.0), period=1, name="w")
            params, state = worker.start(np.zeros(2, np.float32), chief=True)
            for _ in range(3):
                params, state = worker.exchange(params - 1, state)
            served.follow("Backup", place)
            params, state = worker.exchange(params - 1, state)
            served.kill()
            shutil.rmtree("center")  # the disk is lost, too
            served.follow("Restore", place)
            assert version(place) == 3
            with pytest.raises(errors.WorkerStateError, match="not the one that work"):
                worker.exchange(params - 1, state)
            params, state = worker.start()
            np.testing.assert_array_equal(params, -3)
            params, state = worker.exchange(params - 1, state)
        assert version(place) == 4


# systemd.


def test_systemd_unit_is_valid(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    own = tmp_path / UNIT.name
    # Any program will do here; its options are checked in the next test.
    true = shutil.which("true")
    own.write_text(UNIT.read_text().replace("/opt/agn-optax/bin/agn-optax", true))
    reply = subprocess.run(  # noqa: S603 the system's own program
        ["systemd-analyze", "verify", own],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in reply.stderr.splitlines() if UNIT.name in line]
    assert not ours
    assert reply.returncode == 0, reply.stderr


def test_systemd_unit_uses_existing_options():
    text = UNIT.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.*)", text, re.MULTILINE)
    _, command, *arguments = shlex.split(line)
    assert command == "serve"
    succeeds(command, *arguments, "--help")  # unknown options are rejected first
    # systemd waits longer than a stop can ever take.
    longest = service.DEFAULT_GRACE
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)", text, re.MULTILINE)
    assert int(stop) > longest + 1
