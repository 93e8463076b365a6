"""Runs on Ray: planned, and on a cluster of several nodes some of which are killed."""

import asyncio
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import children, waiting
from helpers.commands import ROOT, command, fails, python, succeeds
from orbax.checkpoint import v1

from agn_optax import LocalCenter, errors, rules
from agn_optax.center import Journal
from agn_optax.ops.engines import Ray, Resources, Run
from agn_optax.ops.launch import Outcome

# A node of Ray starts within seconds, on a busy machine within a minute.
LIMIT = 240
pytestmark = pytest.mark.timeout(4 * LIMIT)
wait_until = functools.partial(waiting.wait_until, limit=LIMIT)

HERE = pathlib.Path(__file__).parent
RUN = """
name = "slots"
program = "{program}"
arguments = ["{folder}"]
workers = {workers}
storage = "{folder}/kept"

[rule]
rule = "downpour"

[center]
save = "final"

[ray]
address = "{address}"
center-custom-resources = {{keeps = 0.01}}
"""
ONE = {"num_cpus": 1}
TWO = {"num_cpus": 2, "resources": {"keeps": 1}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(
    folder, address="auto", workers=3, more="", program=HERE / "element_worker.py"
):
    text = RUN.format(program=program, folder=folder, workers=workers, address=address)
    (folder / "run.toml").write_text(more + text)


# Before anything is started.


def test_dry_run_prints_actors_and_commands(here):
    written(here, workers=2)
    output = succeeds("launch", "--dry-run", "run.toml", "--on=ray", "--barrier=2")
    lines = output.splitlines()[1:]
    assert lines[0] == ("# actor slots-center, with {'CPU': 1.0, 'keeps': 0.01}")
    for option in ("--barrier=2", f"--save={here}/final", "--json", "--address=NODE:0"):
        assert option in lines[1].split()
    assert f"--journal={here}/kept/journal" in lines[1]
    assert lines[4] == "# actor slots-worker-1, with {'CPU': 1.0}"
    assert f"AGN_OPTAX_CENTER=file:{here}/kept/center" in lines[5]
    assert "AGN_OPTAX_RANK=1 " in lines[5]
    assert not (here / "kept").exists()


def test_resources_of_a_worker_are_those_of_its_actor(here):
    written(here, more="", workers=1)
    with (here / "run.toml").open("a") as file:
        file.write("[resources.worker]\ngpus = 8\nmemory = '2GiB'\n")
    output = succeeds("launch", "--dry-run", "run.toml", "--on=ray")
    needs = "{'CPU': 1.0, 'GPU': 8.0, 'memory': 2147483648.0}"
    assert f"# actor slots-worker-0, with {needs}" in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": None}, "needs storage, a folder that all nodes reach"),
        ({"worker_resources": Resources(processes=2)}, "is one process, got processes"),
        ({"settings": {"on_failure": "no"}}, "on-failure in [ray] must be one of"),
        (
            {"settings": {"worker_custom_resources": {"GPU": 1.0}}},
            "got GPU = 1; cpus, gpus",
        ),
        (
            {"settings": {"center_custom_resources": {"x": -1.0}}},
            "got x = -1; cpus, gpus",
        ),
    ],
)
def test_bad_settings_are_rejected_before_anything_starts(changes, message):
    settings = {
        "name": "run",
        "program": ["t.py"],
        "workers": 1,
        "rule": {"rule": "downpour"},
        "storage": pathlib.Path("kept"),
    }
    Ray(Run(**settings))
    with pytest.raises(errors.InvalidArgumentError) as caught:
        Ray(Run(**settings | changes))
    assert message in str(caught.value)


def test_ray_table_of_the_run_file_is_checked(here):
    written(here)
    path = here / "run.toml"
    path.write_text(path.read_text() + "runtime-env = {env_vars = {A = 'b'}}\n")
    succeeds("launch", "--dry-run", "run.toml", "--on=ray")
    path.write_text(path.read_text() + "adress = 'auto'\n")
    assert "did you mean 'address'?" in fails("launch", "run.toml", "--on=ray", code=2)


def test_run_with_an_existing_center_needs_no_storage():
    run = Run(
        name="run",
        program=["t.py"],
        workers=1,
        center="192.0.2.1:5",
        worker_resources=Resources(cpus=2),
    )
    (about, line) = Ray(run).commands()
    assert about == "# actor run-worker-0, with {'CPU': 2.0}"
    assert "AGN_OPTAX_CENTER=192.0.2.1:5" in line


class Location(NamedTuple):
    """The location of an actor."""

    node: str
    host: str
    pid: int


class Output(NamedTuple):
    """A reply of an actor with its program's new output."""

    session: str
    lines: list[str]
    outcome: Outcome | None


@pytest.fixture
def actors(monkeypatch):
    """A table of functions, by the kind of an actor, that make actors without Ray."""
    ray = pytest.importorskip("ray")
    made = {}

    def remote(kind):
        make = types.SimpleNamespace(
            remote=functools.partial(made[kind.__name__], kind)
        )
        return types.SimpleNamespace(options=lambda **options: make)

    monkeypatch.setenv("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # `launch` would set it
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    return made


class LocalActor:
    """A real actor whose methods run in threads of this process."""

    def __init__(self, kind, *arguments):
        self._actor = kind(*arguments)
        self._actor.location = lambda: Location("node", "host", 1)

    def __getattr__(self, name):
        def remote(*arguments):
            loop = asyncio.get_running_loop()
            return loop.run_in_executor(None, getattr(self._actor, name), *arguments)

        return types.SimpleNamespace(remote=remote)


def test_each_line_of_a_worker_is_shown_once(here, actors):
    (here / "lines.py").write_text(
        "import pathlib, time\n"
        "print('line 0', flush=True)\n"
        "while not pathlib.Path('shown').exists(): time.sleep(0.01)\n"
        "print('line 1')\n"
        "print('line 2')\n"
    )
    actors["WorkerActor"] = LocalActor
    lines = []

    def output(name, line):
        if not line.startswith("agn-optax: "):
            lines.append((name, line))
            (here / "shown").touch()

    program, center = [str(here / "lines.py")], "127.0.0.1:5"
    run = Run(name="run", program=program, workers=1, center=center)
    assert Ray(run).launch(output)["returncode"] == 0, lines
    assert lines == [("worker-0", f"line {number}") for number in range(3)]


class Actor:
    """An actor without Ray, whose program prints a line at each start and ends.

    Args:
      line: the line.
      codes: exit codes of the starts; None for a program that runs until it is stopped.
    """

    def __init__(self, line, codes):
        self._line, self._codes = line, iter(codes)
        self._session, self._stopping = "", asyncio.Event()

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=getattr(self, f"do_{name}"))

    async def do_location(self):
        return Location("node", "host", 1)

    async def do_start(self, restarts):
        self._session, self._code = str(restarts), next(self._codes)
        return self._session

    async def do_new_output(self, seconds):
        outcome = None
        if self._code is not None or self._stopping.is_set():
            outcome = Outcome("", self._code or 0, 0, 0.0, stopped=False)
        else:
            await asyncio.sleep(0.01)
        return Output(self._session, [self._line], outcome)

    def do_stop(self):
        self._stopping.set()


def test_center_that_ends_as_soon_as_it_serves_is_started_again(here, actors):
    """One reply of its actor then has the line that it serves, and its end."""
    serving = json.dumps({"event": "serving"})
    actors["CenterActor"] = lambda kind, run: Actor(serving, [1, None])
    actors["WorkerActor"] = lambda kind, run, rank: Actor("works", [0])
    run = Run(
        name="run",
        program=["t.py"],
        workers=1,
        rule={"rule": "downpour"},
        storage=here / "kept",
        center_restarts=1,
    )
    lines = []
    summary = Ray(run).launch(lambda name, line: lines.append((name, line)))
    assert summary["returncode"] == 0, lines
    assert ("center", "agn-optax: starts again (1 of 1)") in lines
    assert ("worker-0", "works") in lines


def test_missing_ray_names_the_extra_to_install(here, monkeypatch):
    written(here)
    monkeypatch.setitem(sys.modules, "ray", None)
    output = command("launch", "--dry-run", "run.toml", "--on=ray").stderr
    assert "pip install 'agn_optax[ray]'" in " ".join(output.split())


# On a cluster.


class Cluster:
    """A cluster in a separate process."""

    def __init__(self, process):
        self._process = process
        self.address = process.ask(do="start")["address"]

    def ask(self, do, **arguments):
        return self._process.ask(do=do, **arguments)

    def where(self, actor):
        return self.ask("where", actor=f"slots-{actor}")

    def kill(self, actor):
        """Kill an actor's process; wait until the actor has another one."""
        pid = self.where(actor)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.where(actor)["pid"] not in (None, pid))


@pytest.fixture(scope="module")
def cluster():
    with children.processes(HERE / "ray_cluster.py", 1) as (process,):
        try:
            yield Cluster(process)
        finally:
            process.ask(do="stop")


@contextlib.contextmanager
def launched(folder, *options):
    """Run a driver, with its output in files."""
    command, environment = python(
        *(
            "-m",
            "agn_optax.ops.cli",
            "launch",
            "run.toml",
            "--on=ray",
            "--json",
            *options,
        )
    )
    with (
        (folder / "output").open("ab") as output,
        (folder / "summary").open("wb") as out,
    ):
        process = subprocess.Popen(  # noqa: S603 our own program
            command, stdout=out, stderr=output, cwd=folder, env=environment
        )
        try:
            yield process
        except BaseException:
            print((folder / "output").read_text())  # noqa: T201 of a test that fails
            raise
        finally:
            process.kill()
            process.wait(LIMIT)


class Progress:
    """The progress of a run, read from the files of its workers."""

    def __init__(self, folder):
        self._folder = folder

    def printed(self, text):
        return text in (self._folder / "output").read_text()

    def check_lines_are_unique(self):
        """Check that no line of the center's program was shown twice."""
        lines = (self._folder / "output").read_text().splitlines()
        own = [line for line in lines if line.startswith("center") and "|" in line]
        served = [line for line in own if "| serving at" in line]
        assert served
        assert len(set(served)) == len(served)

    def summary(self):
        return json.loads((self._folder / "summary").read_text())

    def done(self, rank):
        """Return the acknowledged slots of a worker."""
        path = self._folder / f"done-{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def tried(self, rank):
        return len((self._folder / f"tried-{rank}").read_bytes())

    def wait_for_more(self, *ranks):
        """Wait until all these workers have made more exchanges."""
        before = {rank: len(self.done(rank)) for rank in ranks}
        wait_until(lambda: all(len(self.done(r)) > n + 2 for r, n in before.items()))

    def pids(self):
        return [int(path.read_text()) for path in self._folder.glob("pid-*")]

    def check(self, workers):
        """Check that every acknowledged step counts once, and none counts twice."""
        kept = self._folder / "kept" / "journal"
        with LocalCenter(rules.downpour(), durability=Journal(kept)) as center:
            params = jnp.asarray(center.pull().params)
        as_saved = jax.ShapeDtypeStruct(
            params.shape, params.dtype, sharding=params.sharding
        )
        assert jnp.array_equal(params, v1.load(self._folder / "final", as_saved))
        found = -np.asarray(params)
        for rank in range(workers):
            done, row = self.done(rank), found[rank]
            assert len(done) == len(set(done)) > 5
            assert np.all(row[done] == 1)
            assert set(np.unique(row)) <= {0, 1}
            assert not np.any(row[self.tried(rank) :])


def center_process(cluster):
    """Return the id of the process that serves, a child of the center's actor."""
    actor = cluster.where("center")["pid"]
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if (
                parent == actor
                and b"\0serve\0" in path.with_name("cmdline").read_bytes()
            ):
                return int(path.parent.name)
    raise AssertionError("no center serves")


def is_running(pid):
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_acknowledged_steps_survive_lost_actors_and_nodes(here, cluster):
    cluster.ask("nodes", wanted={"a": TWO, "b": ONE})
    written(here, cluster.address)
    watch = Progress(here)
    with launched(here) as driver:
        # There is room for the center and two workers.
        wait_until(lambda: watch.printed("waits for a node with 1 CPU"))
        watch.wait_for_more(0, 1)
        assert not watch.done(2)
        cluster.ask("add", name="c", num_cpus=3, resources={"keeps": 1})
        watch.wait_for_more(0, 1, 2)

        cluster.kill("worker-0")
        watch.wait_for_more(0, 1, 2)
        cluster.kill("center")
        watch.wait_for_more(0, 1, 2)

        assert cluster.where("center")["node"] in ("a", "c")
        lost = cluster.where("center")["node"]
        cluster.ask("remove", name=lost)
        if lost == "c":  # without it there is not enough room for all
            cluster.ask("add", name="d", num_cpus=3)
        wait_until(lambda: cluster.where("center")["node"] not in (None, lost))
        watch.wait_for_more(0, 1, 2)
        (here / "stop").touch()
        assert driver.wait(LIMIT) == 0
    summary = watch.summary()
    assert summary["returncode"] == 0
    watch.check_lines_are_unique()
    programs = {each["name"]: each for each in summary["programs"]}
    assert programs["worker-0"]["restarts"] >= 1
    watch.check(3)
    assert watch.printed("start 1 of worker-0")
    assert not any(map(is_running, watch.pids()))
    assert cluster.where("center")["pid"] is None
    key = here / "kept/keys/operator.token"
    assert key.stat().st_mode & 0o777 == 0o600
    assert not watch.printed(key.read_text().strip())


@pytest.mark.slow
def test_driver_resumes_after_a_kill_and_an_interrupt_ends_all(here, cluster):
    cluster.ask("nodes", wanted={"a": TWO})
    written(here, cluster.address, workers=1)
    watch = Progress(here)
    with launched(here) as driver:
        watch.wait_for_more(0)
        (first,) = watch.pids()
        served = center_process(cluster)
        driver.kill()
        wait_until(lambda: not (is_running(first) or is_running(served)))
    with launched(here) as driver:
        watch.wait_for_more(0)
        (second,) = watch.pids()
        driver.send_signal(signal.SIGINT)
        assert driver.wait(LIMIT) == 130
    summary = watch.summary()
    assert summary["returncode"] == 130
    assert [each["stopped"] for each in summary["programs"]] == [True, True]
    watch.check_lines_are_unique()
    assert not is_running(second)
    assert cluster.where("center")["pid"] is None
    watch.check(1)


@pytest.mark.slow
@pytest.mark.parametrize("other", [(), ("--barrier=2",)], ids=["same", "changed"])
def test_second_launch_is_rejected_and_changes_nothing(here, cluster, other):
    cluster.ask("nodes", wanted={"a": {**TWO, "num_cpus": 3}})
    written(here, cluster.address, workers=1)
    watch, second = Progress(here), here / "second"
    second.mkdir()
    (second / "run.toml").write_text((here / "run.toml").read_text())
    with launched(here) as driver:
        watch.wait_for_more(0)
        served = center_process(cluster)
        with launched(second, *other) as rejected:
            assert rejected.wait(LIMIT) == 2
        assert "another driver runs 'slots'" in (second / "output").read_text()
        watch.wait_for_more(0)
        assert center_process(cluster) == served
        assert not watch.printed("start 1 of worker-0")
        (here / "stop").touch()
        assert driver.wait(LIMIT) == 0
    watch.check(1)


@pytest.mark.slow
def test_drained_center_serves_again(here, cluster):
    cluster.ask("nodes", wanted={"a": TWO})
    written(here, cluster.address, workers=1)
    watch = Progress(here)
    with launched(here) as driver:
        watch.wait_for_more(0)
        os.kill(center_process(cluster), signal.SIGTERM)
        wait_until(lambda: watch.printed("it serves again"))
        watch.wait_for_more(0)
        (here / "stop").touch()
        assert driver.wait(LIMIT) == 0
    watch.check_lines_are_unique()
    watch.check(1)
    assert (here / "final-1").is_dir()  # saved as it was drained


@pytest.mark.slow
def test_waiting_workers_run_as_room_comes_free(here, cluster):
    cluster.ask("nodes", wanted={"a": TWO, "b": ONE})  # the center, and two workers
    program = here / "short.py"
    program.write_text("import os; print('done by', os.environ['AGN_OPTAX_WORKER'])")
    written(here, cluster.address, workers=5, program=program)
    with launched(here) as driver:
        assert driver.wait(LIMIT) == 0
    output = (here / "output").read_text()
    assert [output.count(f"done by worker-{rank}") for rank in range(5)] == 5 * [1]
    programs = Progress(here).summary()["programs"]
    assert not any(each["returncode"] or each["stopped"] for each in programs[:5])


@pytest.mark.slow
def test_program_that_fails_for_good_ends_all(here, cluster):
    cluster.ask("nodes", wanted={"a": {**TWO, "num_cpus": 3}})
    program = here / "fails.py"
    program.write_text(
        "import os, time\n"
        "if os.environ['AGN_OPTAX_RANK'] == '1': raise SystemExit(3)\n"
        "time.sleep(600)"
    )
    written(here, cluster.address, workers=2, program=program)
    with launched(here) as driver:
        assert driver.wait(LIMIT) == 3
    programs = {each["name"]: each for each in Progress(here).summary()["programs"]}
    assert programs["worker-1"]["returncode"] == 3
    assert programs["worker-0"]["stopped"]
    assert programs["center"]["stopped"]
    assert cluster.where("center")["pid"] is None


@pytest.mark.slow
def test_example_with_its_own_actors_runs(here, cluster):
    cluster.ask("nodes", wanted={"a": {"num_cpus": 3}})
    command, environment = python(ROOT / "examples/on_ray.py", "--folder", here)
    environment["RAY_ADDRESS"] = cluster.address
    result = subprocess.run(  # noqa: S603 our own program
        command, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert result.returncode == 0, result.stderr
    assert "80 exchanges; the center is {'w':" in result.stdout
