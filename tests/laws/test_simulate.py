"""Law 16: a simulated run is the run of real workers in its order, bit for bit.

Real workers and a `LocalCenter` are driven by hand, in the order of the schedule.
Computed in batches, the run has the same numbers to rounding.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, shared
from helpers.support import RULES, assert_close, assert_identical
from helpers.waiting import LIMIT, wait_until

import agn_optax
from agn_optax import errors, simulate
from agn_optax.center import (
    BoundedStaleness,
    Limits,
    MessageLimits,
    ShardedCenter,
    Synchronous,
)
from agn_optax.round import Fragments
from agn_optax.rules import codecs
from agn_optax.simulate import Cluster, Failure, Failures, Link, LogNormal, Outcome

CLUSTER = Cluster(
    workers=3,
    speed=[LogNormal(0.1, 0.3), LogNormal(0.15, 0.3), LogNormal(0.4, 0.3)],
    link=Link(latency=0.15),
)
FAILS = Failures(
    recorded=[Failure(1.0, ["worker-1"], 0.2), Failure(2.0, ["worker-0"], 1.0)]
)


def data(worker, step):
    key = jax.random.fold_in(jax.random.key(worker), step)
    x = jax.random.normal(key, (8, 3))
    return {"x": x, "y": jnp.sin(x.sum(axis=-1, keepdims=True))}


class RealWorkers:
    """Real workers at `LocalCenter`s, which exchange in the order of a schedule."""

    def __init__(self, planned, inner, period, mode, fragments, batches):
        params = problem.params()
        self.planned, self.inner, self.period = planned, inner, period
        self.fragments, self.data = fragments, jax.jit(batches)
        parts = [params] if fragments is None else fragments.divide(params).cut(params)
        self.centers = [
            agn_optax.LocalCenter(planned.rule, part, mode=mode, limits=planned.limits)
            for part in parts
        ]
        self.center = self.centers[0]
        if fragments is not None:
            self.center = ShardedCenter(self.centers)
        self.loops, self.made, self.first, self.started = {}, {}, {}, set()
        # Local steps of the session, and of them: at the begin of the round of each
        # fragment, and in its last message; and the row of that message.
        self.at, self.began, self.sent, self.last = {}, {}, {}, {}

    def run(self):
        planned = self.planned
        rows = np.argsort(planned.order)[np.sum(planned.order < 0) :]
        made = planned.version[rows]
        after = np.where(made >= 0, made, planned.answer_version[rows])
        keys = np.stack([after, planned.settled[rows], planned.fragment[rows]])
        same = planned.combines & np.all(keys[:, 1:] == keys[:, :-1], axis=0)
        self.start_workers()
        with ThreadPoolExecutor(len(planned.names)) as pool:
            calls = []  # of the messages of a round
            for i, row in enumerate(rows):
                calls.append(pool.submit(self.exchange, row))
                if i + 1 < len(rows) and same[i]:
                    continue
                for each in calls:
                    each.result(LIMIT)
                center = self.centers[planned.fragment[row]]
                wait_until(lambda c=center, version=after[i]: c.version == version)
                self.start_workers()
                calls = []
        return [center.save() for center in self.centers]

    def start_workers(self):
        """Start the sessions that begin with the center's version."""
        planned = self.planned
        begins = (planned.sequence == 1) & (planned.order >= 0)
        begins &= planned.fragment == 0
        version = self.centers[0].version
        for row in np.flatnonzero(begins & (planned.anchor_version == version)):
            if row in self.started:
                continue
            self.started.add(row)
            index = int(planned.worker[row])
            worker = agn_optax.Worker(
                self.center,
                self.inner,
                period=self.period,
                name=planned.names[index],
                fragments=self.fragments,
                overlap=self.overlap,
            )
            step = jax.jit(functools.partial(self.step, worker.tx))
            self.made[index] = worker, step
            self.loops[index] = worker.start()
            self.first.setdefault(index, 0)
            count = len(self.centers)
            self.at[index] = 0
            self.began[index], self.sent[index] = [0] * count, [0] * count
            self.last[index] = [None] * count

    @property
    def overlap(self):
        return self.fragments is None and bool(self.planned.in_background.any())

    @staticmethod
    def step(tx, params, state, batch):
        grads = jax.grad(problem.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def exchange(self, row):
        """Make the local steps of a message, and send it."""
        planned, index = self.planned, int(self.planned.worker[row])
        f, (worker, _) = int(planned.fragment[row]), self.made[index]
        last, began = self.last[index][f], self.began[index]
        if last is not None:
            adopted = self.sent[index][f] + int(planned.steps_since[last])
            is_rejected = planned.outcome[last] == Outcome.REJECTED
            if is_rejected or not planned.in_background[last]:
                began[f] = adopted
            end = began[f] + int(planned.steps[row])
            if self.overlap and planned.in_background[last] and adopted < end:
                late = adopted - self.at[index]
                loop = worker.exchange(*self.steps(index, late), steps=late)
                self.loops[index] = worker.receive(*loop)
        end = self.sent[index][f] = began[f] + int(planned.steps[row])
        began[f] = end if planned.in_background[row] else began[f]
        self.last[index][f] = row
        calls = [end - self.at[index]]
        if self.fragments is not None:  # the worker knows what is due
            calls = [1] * calls[0]
        for steps in calls:
            loop = self.steps(index, steps)
            try:
                self.loops[index] = worker.exchange(*loop, steps=steps)
            except errors.MessageRejectedError:
                worker.leave()

    def steps(self, index, count):
        _, step = self.made[index]
        loop, first = self.loops[index], self.first[index]
        for number in range(first, first + count):
            loop = step(*loop, self.data(np.int32(index), np.int32(number)))
        self.first[index] += count
        self.at[index] += count
        return loop


def check_law(
    rule, *, cluster=CLUSTER, exchanges=24, period=3, batches=data, **settings
):
    params, inner = problem.params(), shared.adam(0.05)
    arguments = inner, problem.loss, batches, params
    run = functools.partial(
        simulate.run,
        rule,
        *arguments,
        cluster=cluster,
        period=period,
        exchanges=exchanges,
        **settings,
    )
    exact = run(exact=True)
    planned, fragments = exact.schedule, settings.get("fragments")
    workers = RealWorkers(
        planned, inner, period, settings.get("mode"), fragments, batches
    )
    assert_identical(exact.center, unpacked(workers.run()))
    fast = run()
    assert fast.schedule.digest == planned.digest
    assert_close(fast.center, exact.center)
    np.testing.assert_allclose(fast.loss, exact.loss, rtol=1e-4, atol=1e-5)
    if fragments is None:  # the schedule by itself has the same numbers
        again = simulate.execute(planned, *arguments, exact=True)
        assert again.digest == exact.digest
    return planned


def unpacked(states):
    return states[0] if len(states) == 1 else tuple(states)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RULES)
def test_execution_of_each_rule_is_the_run_of_real_workers(name):
    planned = check_law(RULES[name]())
    assert planned.staleness.max() > 1


@pytest.mark.slow
def test_execution_of_ringleader_is_the_run_of_real_workers():
    """Its center optimizer gets the index of each message's worker."""
    outer = agn_optax.center_optimizers.ringleader(optax.sgd(0.5), workers=3)
    planned = check_law(agn_optax.rules.diloco(outer))
    assert set(planned.index[planned.applied]) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agn", "agn_window", "diloco", "easgd", "easgd_rho"])
def test_execution_with_overlap_is_the_run_of_real_workers(name):
    planned = check_law(RULES[name](), overlap=True)
    assert planned.steps_since.max() > 1


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["agn", "average", "easgd"])
def test_execution_in_rounds_is_the_run_of_real_workers(name):
    planned = check_law(RULES[name](), mode=Synchronous())
    assert np.bincount(planned.version[planned.version >= 0]).max() == 3


def test_execution_with_late_messages_is_the_run_of_real_workers():
    mode = Synchronous(quorum=2, late="weighted")
    planned = check_law(RULES["diloco"](), mode=mode, exchanges=60)
    assert planned.weight.min() < 1


@pytest.mark.slow
def test_execution_with_bounded_staleness_is_the_run_of_real_workers():
    rule = agn_optax.rules.agn(
        optax.sgd(0.3), codec=codecs.error_feedback(codecs.quantize(4))
    )
    planned = check_law(rule, mode=BoundedStaleness(versions=2))
    assert np.any(planned.outcome == Outcome.DROPPED)


@pytest.mark.slow
def test_execution_with_rejections_is_the_run_of_real_workers():
    rule = agn_optax.rules.agn(
        optax.sgd(0.3), codec=codecs.error_feedback(codecs.quantize(4))
    )
    limits = Limits(messages=MessageLimits(steps=3))
    planned = check_law(
        rule, period=lambda k: 4 if k % 4 in (1, 2) else 3, limits=limits
    )
    assert np.sum(planned.outcome == Outcome.REJECTED) > 5


@pytest.mark.slow
def test_execution_with_failures_is_the_run_of_real_workers():
    cluster = Cluster(workers=3, speed=CLUSTER.speed, link=CLUSTER.link, failures=FAILS)
    planned = check_law(RULES["agn"](), cluster=cluster)
    assert planned.session.max() == 2


QUANTIZED = agn_optax.rules.agn(
    optax.sgd(0.3), codec=codecs.error_feedback(codecs.quantize(4))
)


def spoiled(worker, step):
    """Return the batches of `data`, of which two have numbers that are not finite."""
    batch = data(worker, step)
    is_bad = (worker == 1) & ((step == 4) | (step == 13))
    return {**batch, "y": jnp.where(is_bad, jnp.nan, batch["y"])}


def limit(norm, **limits):
    return {"limits": Limits(messages=MessageLimits(norm=norm, **limits))}


@pytest.mark.slow
def test_rejections_for_a_norm_are_those_of_real_workers():
    planned = check_law(QUANTIZED, **limit(1.15))
    rejected = planned.outcome == Outcome.REJECTED
    assert 2 < np.sum(rejected) < 20
    assert np.any(rejected & (planned.staleness > 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norm", "settings"),
    [
        ("agn", 1.3, {"overlap": True}),
        ("diloco", 0.5, {"mode": Synchronous()}),
        ("easgd", 0.6, {}),
        ("average", 0.45, {"mode": Synchronous(quorum=2)}),
    ],
)
def test_rejections_of_each_kind_are_those_of_real_workers(name, norm, settings):
    planned = check_law(RULES[name](), **limit(norm), **settings)
    assert 0 < np.sum(planned.outcome == Outcome.REJECTED) < 22


@pytest.mark.slow
def test_messages_that_are_not_finite_are_rejected_as_those_of_real_workers():
    planned = check_law(RULES["agn"](), batches=spoiled)
    assert np.sum(planned.outcome == Outcome.REJECTED) == 2


@pytest.mark.slow
def test_worker_that_is_rejected_too_often_leaves_as_a_real_one():
    planned = check_law(QUANTIZED, exchanges=12, **limit(1.41, in_a_row=1))
    assert np.any(planned.sessions["event"] == simulate.SessionEvent.LEFT)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["agn", "diloco"])
def test_fragments_are_exchanged_as_by_real_workers(name):
    planned = check_law(RULES[name](), fragments=Fragments(2), period=4)
    assert set(planned.fragment) == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["agn", "agn_window", "diloco", "easgd"])
def test_fragments_with_a_delay_are_exchanged_as_by_real_workers(name):
    mixing = 0.0 if name == "easgd" else 0.5
    planned = check_law(
        RULES[name](), fragments=Fragments(2, delay=2, mixing=mixing), period=6
    )
    assert np.any(planned.steps_since == 2)


@pytest.mark.slow
def test_fragments_of_random_elements_are_exchanged_as_by_real_workers():
    check_law(RULES["diloco"](), fragments=Fragments(2, seed=3), period=4)


@pytest.mark.slow
def test_fragments_in_rounds_are_exchanged_as_by_real_workers():
    check_law(RULES["agn"](), fragments=Fragments(2), period=4, mode=Synchronous())


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_fragments_that_are_rejected_are_those_of_real_workers(delay):
    fragments = Fragments(2, delay=delay)
    planned = check_law(QUANTIZED, fragments=fragments, period=4, batches=spoiled)
    assert np.any(planned.outcome == Outcome.REJECTED)
