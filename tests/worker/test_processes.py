"""Workers of several processes give what the same worker in one process gives."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ports, sharded_life, sharded_mistakes, sharded_worker
from helpers.network import Proxy
from helpers.sharded_worker import SCENARIOS
from helpers.support import assert_identical
from helpers.waiting import wait_until

import agn_optax
from agn_optax import service
from agn_optax._internal import in_background
from agn_optax.center import Synchronous

LIMIT = 300  # s, generous for a busy machine
ALONE = [name for name, scenario in SCENARIOS.items() if not scenario.together]
QUICK = ["agn", "quantize"]  # the scenarios that `make test` runs
# Encoded by blocks, whose elements are not those of the whole leaf for other layouts.
BY_BLOCKS = {
    "quantize",
    "top_k",
    "sign",
    "chain",
    "shards_quantize",
    "overlap_downpour",
}


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


def start_processes(count, layout, name, given):
    """Start the processes of one worker, which run scenarios."""
    coordinator = ports.free_address()
    return start(
        [sharded_worker.__file__, coordinator, str(count), str(i), layout, name, *given]
        for i in range(count)
    )


def start(commands):
    """Start Python programs with their arguments."""
    return [
        subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-B", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "JAX_PLATFORMS": "cpu",
            },
        )
        for command in commands
    ]


def results_of(processes):
    """Wait for processes; return the results that each prints, in their order."""
    try:
        # All at once: one whose pipe is full would keep the others waiting.
        read = [
            in_background(functools.partial(p.communicate, timeout=LIMIT), "output")
            for p in processes
        ]
        texts = [future.result()[0] for future in read]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(texts), "\n".join(
        texts
    )
    return [
        [
            json.loads(line.removeprefix("RESULT "))
            for line in text.splitlines()
            if line.startswith("RESULT ")
        ]
        for text in texts
    ]


def scenarios_of(processes):
    """Return the results of each process, by scenario."""
    return [{r["scenario"]: r for r in results} for results in results_of(processes)]


def check(count, layout, names):
    """Run scenarios in several processes and in one, and compare the results."""
    with contextlib.ExitStack() as stack:
        centers = {n: stack.enter_context(served(SCENARIOS[n])) for n in names}
        given = [f"{name}={address}" for name, (_, address) in centers.items()]
        results = scenarios_of(start_processes(count, layout, "anna", given))
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
                if scenario.timed:  # it has adopted its own center
                    last = found.params
                else:
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
        index = tuple(slice(i, i + n) for i, n in zip(starts, part.shape, strict=True))
        np.testing.assert_array_equal(part, array[index], err_msg=f"{name} {where}")


def test_worker_of_two_processes_equals_one_of_one_process():
    check(2, "stacked", QUICK)


def run_in_thread(center, name):
    scenario, first = SCENARIOS["rounds"], sharded_worker.params()
    return in_background(
        lambda: sharded_worker.run(scenario, center, name, first), name
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_of_different_shapes_adopt_the_same_center():
    """Anna has four processes, Bert two, and Carl is a thread of this one."""
    scenario = SCENARIOS["rounds"]
    rounds = {"mode": Synchronous(), "barrier": len(sharded_worker.WORKERS)}
    with agn_optax.LocalCenter(scenario.rule, **rounds) as alone:
        threads = [run_in_thread(alone, name) for name in sharded_worker.WORKERS]
        expected = [thread.result(LIMIT)[1] for thread in threads]
        center = alone.pull()
    with service.serve(scenario.rule, **rounds) as server:
        given = [f"rounds={server.address}"]
        processes = [
            *start_processes(4, "fsdp", "anna", given),
            *start_processes(2, "tensor", "bert", given),
        ]
        with service.connect(server.address, scenario.rule) as own:
            carl = run_in_thread(own, "carl")
            results = scenarios_of(processes)
            assert_identical(carl.result(LIMIT)[1], expected[2])
            found = own.pull()
        assert found.version == center.version == scenario.steps // 4
        assert_identical(found.params, center.params)
        for said, layout in zip(results, ["fsdp"] * 4 + ["tensor"] * 2, strict=True):
            compare_pieces(said["rounds"], expected[0], layout, "rounds")
            compare_pieces(said["rounds"], center.params, layout, "rounds")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_rule_codec_and_setting_equals_one_process():
    check(2, "stacked", ALONE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "layout"), [(4, "fsdp"), (4, "tensor"), (2, "both"), (3, "replicated")]
)
def test_every_layout_equals_one_process(count, layout):
    check(count, layout, sorted(set(ALONE) - BY_BLOCKS))


@pytest.mark.slow
def test_worker_survives_an_outage_of_one_of_its_processes(tmp_path):
    rule, coordinator, timeout = sharded_life.RULE, ports.free_address(), 60.0
    with service.serve(rule, direct_address=False) as server, Proxy() as proxy:
        host, _, port = server.address.rpartition(":")
        through = f"{host}:{proxy.forward((host, int(port)))}"
        program = [sharded_life.__file__, coordinator, "2"]
        processes = start(
            [*program, str(i), "anna", address, "4096", tmp_path / "end", str(timeout)]
            for i, address in enumerate([server.address, through])
        )
        center = server.center
        wait_until(lambda: center.core.is_initialized and center.version > 3)
        begin = time.monotonic()
        proxy.cut()
        time.sleep(4.0)  # longer than the two seconds for which a call is retried
        proxy.mend()
        version = center.version
        wait_until(lambda: center.version > version)
        assert time.monotonic() - begin < timeout  # nobody waited for the timeout
        (tmp_path / "end").touch()
        results_of(processes)
        found = center.pull()
    for leaf in found.params.values():
        np.testing.assert_array_equal(leaf, float(found.version))


MISTAKES = {
    "names_differ": "disagree about their worker: ['anna-0', 'anna-1']",
    "shardings_differ": "disagree about their shardings",
    "shapes_differ": "disagree about their model",
    "model_is_another_one": "parameters of another model",
    "some_leaves_are_local": "NamedSharding on one mesh",
    "center_is_in_this_process": "and a center in this process do not go together",
    "codec_reads_the_whole_tree": "a codec that reads the whole tree do not go",
    "one_process_exchanges_more_often": "must make the same calls",
    "steps_differ": "disagree about exchange 1: steps is",
    "weights_differ": "disagree about exchange 1: weight is",
    "exchange_is_traced": "not inside jax.jit",
    "one_process_does_not_start": "must make the same calls",
}


@pytest.mark.slow
def test_mistakes_are_errors_in_every_process_and_move_nothing():
    rule, coordinator = sharded_mistakes.RULE, ports.free_address()
    with service.serve(rule, np.ones((8, 2), np.float32)) as server:
        program = [sharded_mistakes.__file__, coordinator]
        both = start([*program, str(i), server.address] for i in range(2))
        results = results_of(both)
        recoveries = list(sharded_mistakes.RECOVERIES)
        assert server.center.version == len(recoveries)
    for process, said in enumerate(results):
        assert [name for name, *_ in said] == [*MISTAKES, *recoveries]
        for name, error, seconds in said[: len(MISTAKES)]:
            if error.startswith("RuntimeError: the process that"):
                continue
            assert MISTAKES[name] in error, (process, name, error)
            # A process knows who is missing two seconds later, and then waits for four.
            assert seconds < sharded_mistakes.TIMEOUT + 10, (process, name, seconds)
