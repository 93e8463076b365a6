"""Workers that Ray Train's JaxTrainer runs, with a center that is served elsewhere."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess

import optax
import pytest
from helpers.commands import ROOT, python
from helpers.waiting import wait_until

from agn_optax import rules, service

# A cluster of Ray starts within seconds, on a busy machine within a minute.
LIMIT = 240
# No usage statistics and no metrics.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}


@pytest.fixture(autouse=True)
def _ray_train():
    for name in ("ray", "pandas", "pyarrow"):  # of ray[train]
        pytest.importorskip(name)


@pytest.fixture
def server():
    with service.serve(rules.agn(optax.sgd(0.1)), address="127.0.0.1:0") as server:
        yield server


@contextlib.contextmanager
def program(*arguments):
    command, environment = python(*arguments)
    for name in [each for each in environment if each.startswith("AGN_OPTAX_")]:
        del environment[name]
    environment.pop("RAY_ADDRESS", None)
    path = f"{environment['PYTHONPATH']}{os.pathsep}{ROOT / 'examples'}"
    with subprocess.Popen(  # noqa: S603 our own program
        command,
        env=environment | QUIET | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def process_of(worker, center):
    """Return the process that Ray runs this worker in, or None."""
    wanted = {f"AGN_OPTAX_RANK={worker}", f"AGN_OPTAX_CENTER={center}"}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker"):
                variables = (folder / "environ").read_text().split("\0")
                if wanted <= set(variables):
                    return int(folder.name)
    return None


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
def test_killed_worker_of_ray_train_joins_again_under_its_name(tmp_path, server):
    steps = 5000
    example = ROOT / "examples/on_ray_train.py"
    options = ["--center", server.address, "--storage", tmp_path, "--steps", steps]
    with (
        program(example, *options) as process,
        service.Observer(server.address) as seen,
    ):

        def exchanges():
            workers = {each["name"]: each for each in seen.status()["workers"]}
            return workers["worker-0"]["exchanges"] if "worker-0" in workers else 0

        wait_until(lambda: exchanges() > 5, LIMIT)
        os.kill(process_of(0, server.address), signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    # The exchanges since the restart, and those of the worker that went on.
    for rank in range(2):
        assert re.search(rf"^worker-{rank}: {steps // 5} exchanges", output, re.M), (
            output
        )
    assert server.center.pull().version > 2 * steps // 5


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
def test_processes_of_ray_train_are_workers_unless_it_joins_them(tmp_path, server):
    helper = ROOT / "tests/helpers/ray_train_runs.py"
    with program(helper, tmp_path, server.address) as process:
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    for name, processes in (("separate", 1), ("joined", 2)):
        for each in range(2):
            rank = 1 if name == "joined" else each
            found = json.loads((tmp_path / name / f"{each}.json").read_text())
            assert found == {
                "address": server.address,
                "rank": rank,
                "workers": 2,
                "worker": f"worker-{rank}",
                "restarts": 0,
                "distributed": {},
                "processes": processes,
                "process": each if name == "joined" else 0,
                "megascale": [],
            }
    assert server.center.pull().version == 2 * 10  # the exchanges of two workers
