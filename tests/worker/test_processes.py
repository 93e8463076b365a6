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

from agn_optax import service
from agn_optax._internal import in_background
from agn_optax.center import MessageLimits, Synchronous

LIMIT = 300  # s, generous for a busy machine
TOGETHER = [name for name, scenario in SCENARIOS.items() if scenario.together]
ALONE = [name for name, scenario in SCENARIOS.items() if not scenario.together]
QUICK = ["agn", "quantize"]  # the scenarios that `make test` runs


@contextlib.contextmanager
def served(scenario, **how):
    """Serve the shards of a center, and yield the servers and their addresses."""
    settings = {**(scenario.serving or {}), **how}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(service.serve(scenario.rule, **settings))
            for _ in range(scenario.shards)
        ]
        yield servers, ",".join(server.address for server in servers)


def connect(scenario, address):
    fragments = (scenario.settings or {}).get("fragments")
    return service.connect(address, scenario.rule, fragments=fragments)


def start_processes(count, layout, name, given, idle=0):
    """Start a job with one worker, which runs scenarios, between idle processes."""
    own = [f"{idle}-{idle + count - 1}", layout, name]
    others = [own] * idle
    return start_job([*others, *[[*own, *given]] * count, *others])


def start_job(processes):
    """Start a job, given the arguments of each of its processes after its index."""
    job = [sharded_worker.__file__, ports.free_address(), str(len(processes))]
    return start([*job, str(i), *given] for i, given in enumerate(processes))


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


def check(count, layout, names, *, by_pieces=True, idle=0):
    """Run scenarios in several processes and in one, and compare the results.

    Args:
      count: number of processes.
      layout: name of their layout.
      names: names of the scenarios.
      by_pieces: whether the one process encodes the processes' pieces, not leaves.
      idle: number of further processes before them, and after them.
    """
    with contextlib.ExitStack() as stack:
        centers = {n: stack.enter_context(served(SCENARIOS[n])) for n in names}
        given = [f"{name}={address}" for name, (_, address) in centers.items()]
        job = start_processes(count, layout, "anna", given, idle)
        results = scenarios_of(job)[idle : idle + count]
        for name in names:
            scenario, address = SCENARIOS[name], centers[name][1]
            of_one = scenario
            if by_pieces:
                of_one = sharded_worker.by_pieces(scenario, layout, count)
            with (
                served(of_one) as (_, alone),
                connect(of_one, alone) as center,
                connect(scenario, address) as own,
            ):
                worker, last, _ = sharded_worker.run(
                    of_one, center, "anna", sharded_worker.params()
                )
                numbers = sharded_worker.numbers(worker)
                assert numbers["rejected"] or not name.endswith("rejected")
                assert numbers["dropped"] or name != "dropped"
                expected, found = center.pull(), own.pull()
                assert found.version == expected.version, name
                equal = np.testing.assert_array_equal
                if scenario.timed:  # it has adopted its own center
                    last = found.params
                else:
                    for key in expected.params:
                        equal(found.params[key], expected.params[key], err_msg=name)
                for said in results:
                    assert said[name]["numbers"] == numbers, name
                    compare_pieces(said[name], last, layout, name)
                    if scenario.adds_up:
                        check_sums(said[name], found.params, name)


def check_sums(said, center, name):
    """Check that nothing of a process's updates is lost, but for rounding."""
    assert said["sums"]["residual"].keys() == said["pieces"].keys()
    for where, residual in said["sums"]["residual"].items():
        key, index = part_of(where, residual)
        moved = center[key][index] - sharded_worker.params()[key][index]
        # The rule sends the negative of the updates.
        difference = moved - np.asarray(said["sums"]["updates"][where])
        np.testing.assert_allclose(difference, residual, atol=1e-5, err_msg=name)
    assert max(np.abs(x).max() for x in said["sums"]["residual"].values()) > 1e-2


def part_of(where, piece):
    """Return the leaf of a piece, and the piece's index in it."""
    key, _, begin = where.partition(" ")
    starts = zip(json.loads(begin), np.shape(piece), strict=True)
    return key, tuple(slice(start, start + size) for start, size in starts)


def compare_pieces(said, last, layout, name):
    specs = [str(sharded_worker.LAYOUTS[layout][key]) for key in sorted(last)]
    assert said["specs"] == specs, name
    for where, piece in said["pieces"].items():
        key, index = part_of(where, piece)
        part, expected = np.asarray(piece, np.float32), np.asarray(last[key])[index]
        np.testing.assert_array_equal(part, expected, err_msg=f"{name} {where}")


@pytest.mark.slow
def test_worker_of_two_processes_equals_one_of_one_process():
    check(2, "stacked", QUICK, by_pieces=False)


def run_in_threads(names, addresses, scenario_names):
    """Run scenarios by workers of one process; return what each adopted last."""

    def run(name):
        found = {}
        for key in scenario_names:
            scenario, first = SCENARIOS[key], sharded_worker.params()
            with connect(scenario, addresses[key]) as center:
                found[key] = sharded_worker.run(scenario, center, name, first)[1]
        return found

    return [in_background(functools.partial(run, name), name) for name in names]


def pulled(addresses):
    """Return the center at the address of each scenario."""
    found = {}
    for name, address in addresses.items():
        with connect(SCENARIOS[name], address) as center:
            found[name] = center.pull()
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_of_different_shapes_adopt_the_same_center():
    """Anna has four processes, Bert two, and the others are threads of this one."""
    rounds = {"mode": Synchronous(), "barrier": len(sharded_worker.WORKERS)}
    with contextlib.ExitStack() as stack:

        def serve():
            served_all = {
                name: stack.enter_context(served(SCENARIOS[name], **rounds))
                for name in TOGETHER
            }
            return {name: address for name, (_, address) in served_all.items()}

        alone, addresses = serve(), serve()
        threads = run_in_threads(sharded_worker.WORKERS, alone, TOGETHER)
        expected = [thread.result(LIMIT) for thread in threads]
        given = [f"{name}={address}" for name, address in addresses.items()]
        processes = [
            *start_processes(4, "fsdp", "anna", given),
            *start_processes(2, "tensor", "bert", given),
        ]
        others = list(sharded_worker.WORKERS)[2:]
        threads = run_in_threads(others, addresses, TOGETHER)
        results = scenarios_of(processes)
        assert_identical([thread.result(LIMIT) for thread in threads], expected[2:])
        centers, found = pulled(alone), pulled(addresses)
        for name in TOGETHER:
            center = centers[name]
            rounds_made = SCENARIOS[name].steps // 4
            assert np.all(np.equal(found[name].version, rounds_made)), name
            assert_identical(found[name].params, center.params)
            layouts = ["fsdp"] * 4 + ["tensor"] * 2
            for said, layout in zip(results, layouts, strict=True):
                compare_pieces(said[name], expected[0][name], layout, name)
                compare_pieces(said[name], center.params, layout, name)
        # The bad messages move the mean, and not the median or the chosen messages.
        far = {n: np.abs(center.params["w"]).max() > 10 for n, center in found.items()}
        assert [name for name, is_far in far.items() if is_far] == [
            "rounds",
            "rounds_radial",
        ]


@pytest.mark.slow
def test_workers_of_parts_of_one_job_adopt_the_same_center():
    """Anna has processes 0 and 1 of a job, and Bert 2 and 3, at the same time."""
    scenario, names = SCENARIOS["rounds"], ["anna", "bert"]
    rounds = {"mode": Synchronous(), "barrier": len(names)}
    with (
        served(scenario, **rounds) as (_, alone),
        served(scenario, **rounds) as (_, address),
    ):
        threads = run_in_threads(names, {"rounds": alone}, ["rounds"])
        expected = [thread.result(LIMIT)["rounds"] for thread in threads]
        anna = ("0-1", "fsdp", "anna", f"rounds={address}")
        bert = ("2-3", "tensor", "bert", f"rounds={address}")
        results = scenarios_of(start_job([anna, anna, bert, bert]))
        center, found = (pulled({"rounds": a})["rounds"] for a in (alone, address))
    assert found.version == center.version == scenario.steps // 4
    assert_identical(found.params, center.params)
    for said in results[:2]:
        compare_pieces(said["rounds"], expected[0], "fsdp", "rounds")
    for said in results[2:]:
        compare_pieces(said["rounds"], expected[1], "tensor", "rounds")


@pytest.mark.slow
def test_worker_of_some_processes_equals_one_of_one_process():
    check(2, "stacked", QUICK, by_pieces=False, idle=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_rule_codec_and_setting_equals_one_process():
    check(2, "stacked", ALONE, by_pieces=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("count", "layout"), [(4, "fsdp"), (4, "tensor"), (2, "both"), (3, "replicated")]
)
def test_every_layout_equals_one_process(count, layout):
    """With codecs that work by blocks, those of the pieces are not those of a leaf."""
    check(count, layout, ALONE)


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
    "messages_are_rejected_too_often": "MessageRejectedError",
    "model_is_another_one": "parameters of another model",
    "rule_differs": ("must make the same calls", "RuleMismatchError"),
    "period_differs": "disagree about their period: [2, 3]",
    "overlap_differs": "disagree about their overlap: [False, True]",
    "patience_differs": "disagree about their patience: [None, 3]",
    "chief_differs": "disagree about their chief: [True, False]",
    "one_process_resumes": "disagree about their session",
    "token_is_wrong": ("must make the same calls", "NotAllowedError"),
    "token_is_of_another_worker": "only worker 'anna' itself may make this call",
    "shards_are_in_another_order": "Give all processes all addresses",
    "number_of_shards_differs": "Give all processes all addresses",
    "centers_differ": "Give all processes all addresses",
    "one_process_has_fragments": "disagree about their fragments: ['None', ",
    "fragments_have_other_delays": "disagree about their fragments: ['Frag",
    "fragments_of_the_center_differ": "disagree about their fragments of the center",
    "some_leaves_are_local": "NamedSharding on one mesh",
    "center_is_in_this_process": "and a center in this process do not go together",
    "codec_reads_the_whole_tree": "a codec that reads the whole tree do not go",
    "one_process_exchanges_more_often": "must make the same calls",
    "one_process_exchanges_alone_with_a_residual": "must make the same calls",
    "steps_differ": "disagree about exchange 1: steps is",
    "weights_differ": "disagree about exchange 1: weight is",
    "exchange_is_traced": "not inside jax.jit",
    "one_process_does_not_start": "must make the same calls",
}


@pytest.mark.slow
def test_mistakes_are_errors_in_every_process_and_move_nothing():
    rule, coordinator = sharded_mistakes.RULE, ports.free_address()
    lines = [f"chief {name} {token}" for name, token in sharded_mistakes.TOKENS.items()]
    messages = MessageLimits(norm=0.5, in_a_row=2)
    strict_limits = service.Limits(messages=messages)
    access = service.Access("\n".join(lines).encode())
    first, half = np.ones((8, 2), np.float32), np.ones((4, 2), np.float32)
    with (
        service.serve(rule, first) as server,
        service.serve(rule, first, security=service.Security(access=access)) as guarded,
        service.serve(rule, first, limits=strict_limits) as strict,
        service.serve(sharded_mistakes.FEEDBACK, first) as feedback,
        service.serve(rule, half) as upper,
        service.serve(rule, half) as lower,
    ):
        shards = f"{upper.address},{lower.address}"
        addresses = [server.address, shards, guarded.address, strict.address]
        addresses.append(feedback.address)
        program = [sharded_mistakes.__file__, coordinator]
        both = start([*program, str(i), *addresses] for i in range(2))
        results = results_of(both)
        recoveries = list(sharded_mistakes.RECOVERIES)
        assert guarded.center.version == recoveries.count("token_is_right") == 1
        assert feedback.center.version == 1
        assert server.center.version == len(recoveries) - 2
        for other in (strict, upper, lower):
            assert other.center.version == 0
    for process, said in enumerate(results):
        assert [name for name, *_ in said] == [*MISTAKES, *recoveries]
        for name, error, seconds in said[: len(MISTAKES)]:
            if error.startswith("RuntimeError: the process that"):
                continue
            expected = MISTAKES[name]
            if isinstance(expected, tuple):  # of each process
                expected = expected[process]
            assert expected in error, (process, name, error)
            # A process knows who is missing two seconds later, and then waits for four.
            assert seconds < sharded_mistakes.TIMEOUT + 10, (process, name, seconds)
