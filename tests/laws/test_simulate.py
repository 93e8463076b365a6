"""Law 16: a schedule, executed, is the run of real workers in its order, bit for bit.

Real workers and a `LocalCenter` are driven by hand, in the order of the schedule.
Executed in batches, the schedule has the same numbers to rounding.
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
from agn_optax import simulate
from agn_optax.center import BoundedStaleness, Limits, MessageLimits, Synchronous
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
    """Real workers at a `LocalCenter`, which exchange in the order of a schedule."""

    def __init__(self, planned, inner, period, mode):
        params = problem.params()
        self.planned, self.inner, self.period = planned, inner, period
        self.center = agn_optax.LocalCenter(
            planned.rule, params, mode=mode, limits=planned.limits
        )
        self.loops, self.made, self.first, self.started = {}, {}, {}, set()
        self.data = jax.jit(data)

    def run(self):
        planned = self.planned
        rows = np.argsort(planned.order)[np.sum(planned.order < 0) :]
        made = planned.version[rows]
        after = np.where(made >= 0, made, planned.answer_version[rows])
        self.start_workers()
        with ThreadPoolExecutor(len(planned.names)) as pool:
            calls = []  # of the messages of a round
            for i, row in enumerate(rows):
                calls.append(pool.submit(self.exchange, row))
                if i + 1 < len(rows) and made[i] >= 0 and made[i] == made[i + 1]:
                    continue
                for each in calls:
                    each.result(LIMIT)
                version = after[i]
                wait_until(lambda version=version: self.center.version == version)
                self.start_workers()
                calls = []
        return self.center.save()

    def start_workers(self):
        """Start the sessions that begin with the center's version."""
        planned = self.planned
        begins = (planned.sequence == 1) & (planned.order >= 0)
        for row in np.flatnonzero(
            begins & (planned.anchor_version == self.center.version)
        ):
            if row in self.started:
                continue
            self.started.add(row)
            index = int(planned.worker[row])
            worker = agn_optax.Worker(
                self.center,
                self.inner,
                period=self.period,
                name=planned.names[index],
                overlap=bool(planned.in_background.any()),
            )
            step = jax.jit(functools.partial(self.step, worker.tx))
            self.made[index] = worker, step
            self.loops[index] = worker.start()
            self.first.setdefault(index, 0)

    @staticmethod
    def step(tx, params, state, batch):
        grads = jax.grad(problem.loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def exchange(self, row):
        """Make the local steps of a message, and send it."""
        planned = self.planned
        index, sequence = int(planned.worker[row]), int(planned.sequence[row])
        worker, _ = self.made[index]
        left = int(planned.steps[row])
        if planned.in_background.any() and sequence > 2:
            same = (planned.worker == index) & (planned.sequence == sequence - 1)
            session = planned.session == planned.session[row]
            late = int(planned.steps_since[same & session][0])
            left -= late
            if left:
                loop = worker.exchange(*self.steps(index, late), steps=late)
                self.loops[index] = worker.receive(*loop)
            else:  # one call receives and sends
                left = late
        loop = self.steps(index, left)
        self.loops[index] = worker.exchange(*loop, steps=left)

    def steps(self, index, count):
        _, step = self.made[index]
        loop, first = self.loops[index], self.first[index]
        for number in range(first, first + count):
            loop = step(*loop, self.data(np.int32(index), np.int32(number)))
        self.first[index] += count
        return loop


def check_law(rule, *, cluster=CLUSTER, exchanges=24, period=3, **settings):
    params, inner = problem.params(), shared.adam(0.05)
    planned = simulate.schedule(
        cluster,
        period=period,
        rule=rule,
        params=params,
        exchanges=exchanges,
        **settings,
    )
    execute = functools.partial(
        simulate.execute, planned, inner, problem.loss, data, params
    )
    exact = execute(exact=True)
    workers = RealWorkers(planned, inner, period, settings.get("mode"))
    assert_identical(exact.center, workers.run())
    fast = execute()
    assert_close(fast.center, exact.center)
    np.testing.assert_allclose(fast.loss, exact.loss, rtol=1e-4, atol=1e-5)
    return planned


@pytest.mark.parametrize("name", RULES)
def test_execution_of_each_rule_is_the_run_of_real_workers(name):
    planned = check_law(RULES[name]())
    assert planned.staleness.max() > 1


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
