"""The planner: its equations in cases that can be done by hand, and measured runs."""

import dataclasses
import itertools
import statistics
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import optax
import pytest
from network import Network
from support import RULES, step, tree

import agn_optax
from agn_optax import errors, planning, rules, service
from agn_optax.planning import Cluster, Machine
from agn_optax.rules import codecs

PATIENCE = 60.0  # seconds

# Ends that take no time worth counting.
FREE = Machine(overhead=0.0, endpoint_rate=1e30, apply_rate=1e30)
LINK = Cluster(step_time=0.5, bandwidth=1e6, machine=FREE)
MODEL = planning.abstract(1_000_000)  # 4 MB
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)


def plan(rule=None, cluster=LINK, inner=SGD, params=MODEL, **settings):
    rule = rules.downpour() if rule is None else rule
    return planning.plan(rule, params, cluster, inner=inner, **settings)


def test_one_worker_by_hand():
    cost = plan(period=8)
    assert (cost.message, cost.answer) == (4_000_000, 4_000_000)
    assert cost.exchange == pytest.approx(8.0)  # 4 s there, 4 s back
    assert cost.service == pytest.approx(4.0)  # both ways at once
    assert cost.hidden_period == 16
    assert cost.utilization == pytest.approx(4 / (4 + 8))
    assert cost.utilization_overlapping == pytest.approx(4 / 8)


def test_the_hidden_period_is_the_shortest_that_hides():
    cost = plan()
    assert cost.period == cost.hidden_period == 16
    assert cost.utilization_overlapping == 1.0
    assert plan(period=15).utilization_overlapping < 1.0
    fast = dataclasses.replace(LINK, bandwidth=1e12)
    assert plan(cluster=fast).hidden_period == 1


def test_workers_share_the_center():
    eight = dataclasses.replace(LINK, workers=8)
    cost = plan(cluster=eight, period=16)
    assert cost.hidden_period == 8 * 4 / 0.5
    # A round takes as long as the center takes to serve everybody.
    assert cost.utilization == cost.utilization_overlapping == pytest.approx(8 / 32)
    wide = plan(cluster=dataclasses.replace(eight, center_bandwidth=8e6))
    assert wide.exchange == pytest.approx(8.0)  # the worker's link is the slower one
    assert wide.hidden_period == 16
    narrow = plan(cluster=dataclasses.replace(LINK, center_bandwidth=0.5e6))
    assert narrow.exchange == pytest.approx(16.0)


def test_every_constant_counts():
    machine = Machine(overhead=0.25, endpoint_rate=4e6, apply_rate=8e6)
    cost = plan(cluster=dataclasses.replace(LINK, latency=0.5, machine=machine))
    # The message twice, the center there and back.
    assert cost.applied == 16_000_000
    assert cost.exchange == pytest.approx(0.5 + 8 + 0.25 + 8 / 4 + 16 / 8)
    assert cost.service == pytest.approx(max(4, (0.25 + 8 / 4) / 2 + 16 / 8))
    slow = dataclasses.replace(machine, apply_rate=2e6)
    cost = plan(cluster=dataclasses.replace(LINK, machine=slow))
    assert cost.service == pytest.approx((0.25 + 8 / 4) / 2 + 16 / 2)


@pytest.mark.parametrize(
    ("params", "center", "wire", "message", "answer"),
    [
        ("float32", None, None, 4, 4),
        ("bfloat16", None, None, 2, 2),
        ("bfloat16", "float32", None, 4, 4),
        ("float32", None, "bfloat16", 2, 2),
        ("bfloat16", "float32", "float16", 2, 2),
    ],
)
def test_bytes_on_the_wire(params, center, wire, message, answer):
    model = planning.abstract(1000, params)
    codec = codecs.cast(wire) if wire else None
    cost = plan(rules.downpour(codec=codec), params=model, center_dtype=center)
    assert (cost.message, cost.answer) == (1000 * message, 1000 * answer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_narrow_message_travels_as_it_is(dtype):
    """As over a real wire, where a gradient sum stays as narrow as it was made."""
    params = jnp.zeros(1000, dtype)
    rule = rules.agn(SGD)
    cost = plan(rule, params=params, center_dtype="float32")
    with (
        service.serve(rule, params, dtype="float32") as server,
        service.connect(server.address, rule) as center,
    ):
        worker = agn_optax.Worker(center, SGD, period=1)
        loop = worker.start(params)
        worker.exchange(*step(worker.tx, *loop, params))
        (said,) = center.status()["workers"]
        assert said["bytes_received"] == cost.message == 1000 * params.dtype.itemsize
        assert cost.answer <= said["bytes_sent"] <= cost.answer + 1000


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("center_dtype", [None, "float32"])
def test_memory_is_that_of_a_real_worker_and_center(name, center_dtype):
    params = tree("bfloat16" if center_dtype else "float32")
    rule = RULES[name]()
    cost = plan(rule, inner=ADAM, params=params, center_dtype=center_dtype)
    center = agn_optax.LocalCenter(rule, params, dtype=center_dtype)
    worker = agn_optax.Worker(center, ADAM, period=3)
    loop = worker.start(params)
    saved, kept = worker.save(*loop), center.save()

    def nbytes(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert cost.worker.params == nbytes(saved.params)
    assert cost.worker.inner_state == nbytes(saved.state.inner_state)
    assert cost.worker.record == nbytes(saved.state.record)
    assert cost.worker.codec_state == nbytes(saved.state.codec_state)
    assert cost.worker.anchor == nbytes((saved.anchor, saved.state.anchor))
    assert cost.center.center == cost.center.version == nbytes(kept.params)
    assert cost.center.center_state == nbytes(kept.center_state)


def test_a_new_rule_is_planned_as_it_is():
    """One that keeps a trace of its gradients, wider than they are, and sends it."""
    rule = rules.agn(optax.adam(0.1))
    wide = dataclasses.replace(
        rule, name="wide", record=optax.trace(0.9, accumulator_dtype="float32")
    )
    wide = dataclasses.replace(wide, contribution=lambda r, x, a, n: r.trace)
    cost = plan(wide, params=planning.abstract(1000, "bfloat16"))
    assert cost.rule == "wide"
    assert cost.worker.record == 4000
    assert cost.worker.anchor == 0
    assert cost.center.center_state == 2 * 2000 + 4
    assert cost.center.total == 2000 + 4004 + 2000 + cost.message


def test_totals():
    cost = plan(rules.diloco(), cluster=dataclasses.replace(LINK, workers=3))
    assert cost.worker.waiting == (1 + 1 + 2) * 4_000_000  # x, a, message and answer
    assert cost.worker.overlapping == cost.worker.waiting + 4_000_000
    assert cost.center.total == (1 + 1 + 1 + 3) * 4_000_000


def test_all_reduce_by_hand():
    four = dataclasses.replace(LINK, workers=4, latency=0.1)
    cost = planning.all_reduce(MODEL, four, inner=ADAM)
    assert cost.message == cost.answer == 6_000_000
    assert cost.exchange == pytest.approx(3 * 0.1 + 6)
    assert cost.hidden_period is None
    assert cost.period == 1
    assert cost.utilization == pytest.approx(0.5 / 6.8)
    assert cost.utilization_overlapping == pytest.approx(0.5 / 6.3)
    assert cost.worker.waiting == cost.worker.overlapping == 3 * 4_000_000 + 4
    alone = planning.all_reduce(MODEL, LINK, inner=ADAM)
    assert (alone.exchange, alone.hidden_period, alone.utilization) == (0, 1, 1)
    half = planning.all_reduce(MODEL, four, inner=ADAM, wire_dtype="bfloat16")
    assert half.message == 3_000_000


def test_every_rule_of_the_library_is_built_in():
    made = planning.built_in_rules(ADAM, 8)
    assert {rule.name for rule in made} == set(rules.__all__) - {"Rule"}


def test_large_models_are_trees_of_leaves_that_arrays_can_have():
    model = planning.abstract(1.75e11)
    assert sum(leaf.size for leaf in model) == 175_000_000_000
    assert max(leaf.size for leaf in model) < 2**31
    assert plan(rules.agn(ADAM), params=model).message == 700_000_000_000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: planning.abstract(0), "parameters must be a number in"),
        (lambda: planning.abstract(1.5), "parameters must be a whole number, got 1.5"),
        (lambda: planning.abstract(5, "int8"), "dtype must be a floating dtype"),
        (lambda: Machine(endpoint_rate=0.0), "endpoint_rate must be a number in"),
        (lambda: Machine(overhead=-1.0), "overhead must be a number in"),
        (lambda: Cluster(step_time=0, bandwidth=1), "step_time must be a number in"),
        (lambda: Cluster(step_time=1, bandwidth=-1), "bandwidth must be a number in"),
        (lambda: dataclasses.replace(LINK, workers=0), "workers must be a positive"),
        (lambda: dataclasses.replace(LINK, latency=-1), "latency must be a number in"),
        (
            lambda: dataclasses.replace(LINK, center_bandwidth=0),
            "center_bandwidth must be a number in",
        ),
        (lambda: plan(rules.downpour), "rule must be a record"),
        (lambda: plan(inner=optax.sgd), "inner must be an optax.Gradient"),
        (lambda: plan(period=0), "period must be a positive int, got 0"),
        (lambda: planning.built_in_rules(SGD, 0), "workers must be a positive int"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        call()


def test_parameters_that_are_not_floating():
    with pytest.raises(errors.TreeMismatchError, match="int32"):
        plan(params={"w": jnp.zeros(3, jnp.int32)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "period", "overlap"),
    [(1, 2, False), (1, 2, True), (1, 6, True), (4, 2, False)],
)
def test_a_measured_run_is_as_planned(workers, period, overlap):
    """Over a link so slow that the rest of this machine does not matter."""
    rule, params = rules.downpour(), jnp.zeros(250_000)
    cluster = Cluster(step_time=0.05, bandwidth=10e6, workers=workers)
    cost = plan(rule, cluster, params=params, period=period)

    def rounds(loop, worker, count):
        """The seconds of each."""
        seconds = []
        for _ in range(count):
            begin = time.monotonic()
            for _ in range(period):
                time.sleep(cluster.step_time)  # a local step, as far as time goes
                loop = worker.exchange(*loop)
            seconds.append(time.monotonic() - begin)
        return loop, seconds

    def measure(network):
        with (
            service.connect(network.address, rule, timeout=PATIENCE) as center,
            agn_optax.Worker(center, SGD, period=period, overlap=overlap) as worker,
        ):
            # All is compiled, and everybody there and on the way.
            loop, _ = rounds(worker.start(), worker, 2)
            loop, seconds = rounds(loop, worker, 5)
            rounds(loop, worker, 1)  # while others still measure
        return seconds

    def utilization():
        with (
            service.serve(rule, params) as server,
            Network(server, bandwidth=cluster.bandwidth) as network,
            futures.ThreadPoolExecutor(workers) as pool,
        ):
            measured = pool.map(measure, [network] * workers)
            seconds = list(itertools.chain.from_iterable(measured))
        # The median leaves out what this machine did beside.
        return period * cluster.step_time / statistics.median(seconds)

    planned = cost.utilization_overlapping if overlap else cost.utilization
    expected = pytest.approx(planned, rel=0.2)
    # A machine that is busy with something else is slower, but not all the time.
    assert any(utilization() == expected for _ in range(3))
