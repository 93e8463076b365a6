"""Workers of several processes give what the same worker in one process gives."""

import contextlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import ports, sharded_worker
from helpers.sharded_worker import SCENARIOS

from agn_optax import service

LIMIT = 300  # s, generous for a busy machine
QUICK = ["agn", "quantize"]  # the scenarios that `make test` runs
# Encoded by blocks, whose elements are not those of the whole leaf for other layouts.
BY_BLOCKS = {"quantize", "top_k", "sign", "chain", "shards_quantize", "overlap_downpour"}


@contextlib.contextmanager
def served(scenario):
    """Serve the shards of a center, and yield the servers and their addresses."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(service.serve(scenario.rule))
            for _ in range(scenario.shards)
        ]
        yield servers, ",".join(server.address for server in servers)


def connect(scenario, address):
    fragments = (scenario.settings or {}).get("fragments")
    return service.connect(address, scenario.rule, fragments=fragments)


def run_processes(count, layout, given):
    """Run the processes of one worker; return what each says of each scenario."""
    coordinator = ports.free_address()
    processes = [
        subprocess.Popen(  # noqa: S603 our own program
            [
                *(sys.executable, "-B", sharded_worker.__file__, coordinator),
                *(str(count), str(process), layout, "anna", *given),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "JAX_PLATFORMS": "cpu",
            },
        )
        for process in range(count)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(texts)
    return [
        {
            said["scenario"]: said
            for line in text.splitlines()
            if line.startswith("RESULT ")
            for said in [json.loads(line.removeprefix("RESULT "))]
        }
        for text in texts
    ]


def check(count, layout, names):
    """Run scenarios in several processes and in one, and compare centers and workers."""
    with contextlib.ExitStack() as stack:
        centers = {n: stack.enter_context(served(SCENARIOS[n])) for n in names}
        given = [f"{name}={address}" for name, (_, address) in centers.items()]
        results = run_processes(count, layout, given)
        for name in names:
            scenario, address = SCENARIOS[name], centers[name][1]
            with (
                served(scenario) as (_, alone),
                connect(scenario, alone) as center,
                connect(scenario, address) as own,
            ):
                worker, last = sharded_worker.run(
                    scenario, center, "anna", sharded_worker.params()
                )
                expected, found = center.pull(), own.pull()
                assert found.version == expected.version, name
                equal = np.testing.assert_array_equal
                for key in expected.params:
                    equal(found.params[key], expected.params[key], err_msg=name)
                for said in results:
                    assert said[name]["exchanges"] == worker.exchanges
                    compare_pieces(said[name], last, layout, name)


def compare_pieces(said, last, layout, name):
    specs = [str(sharded_worker.LAYOUTS[layout][key]) for key in sorted(last)]
    assert said["specs"] == specs, name
    for where, piece in said["pieces"].items():
        key, _, begin = where.partition(" ")
        array, part = np.asarray(last[key]), np.asarray(piece, np.float32)
        starts = json.loads(begin)
        index = tuple(
            slice(i, i + n) for i, n in zip(starts, part.shape, strict=True)
        )
        np.testing.assert_array_equal(part, array[index], err_msg=f"{name} {where}")


def test_worker_of_two_processes_equals_one_of_one_process():
    check(2, "fsdp", QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_rule_codec_and_setting_equals_one_process():
    check(2, "fsdp", list(SCENARIOS))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "layout"), [(4, "fsdp"), (4, "tensor"), (2, "both"), (3, "replicated")]
)
def test_every_layout_equals_one_process(count, layout):
    check(count, layout, sorted(set(SCENARIOS) - BY_BLOCKS))
