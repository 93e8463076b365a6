"""The numbers of schedules: the bits of real workers that exchange in that order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared

import agn_optax
from agn_optax import errors, rules, simulate
from agn_optax.center import (
    Asynchronous,
    BoundedStaleness,
    Limits,
    MessageLimits,
    Synchronous,
)
from agn_optax.simulate import Cluster, Failures, Fixed, Link, LogNormal, Outcome

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 40).reshape(8, 5), "b": jnp.zeros(5)}
VARIED = Cluster(workers=3, speed=[Fixed(0.1), Fixed(0.17), LogNormal(0.3, 0.4)])


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["w"] + params["b"]) - batch[1]) ** 2)


def data(worker, step):
    random = np.random.default_rng([worker, step])
    x = random.standard_normal((4, 8), np.float32)
    return x, np.sin(x[:, :5])


def simulated(rule, inner, cluster=VARIED, **arguments):
    arguments = {"period": 3, "exchanges": 60, "seed": 1, **arguments}
    return simulate.run(rule, inner, loss, data, PARAMS, cluster=cluster, **arguments)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


class RealWorkers:
    """Real workers, whose messages an embedded center gets in the scheduled order."""

    def __init__(self, made, rule, inner, mode, overlap=False, limits=None):
        self.made = made
        self.center = agn_optax.LocalCenter(rule, PARAMS, mode=mode, limits=limits)
        self.workers = [
            agn_optax.Worker(self.center, inner, period=3, name=name, overlap=overlap)
            for name in made.names
        ]
        self.loops = [worker.start(PARAMS) for worker in self.workers]
        self.steps = [0] * len(made.names)

        @jax.jit
        def step(params, state, batch):
            grads = jax.grad(loss)(params, batch)
            updates, state = self.workers[0].tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = step

    def make_steps(self, w, count):
        """Make local steps, and exchange when the last one fills the round."""
        for _ in range(count):
            batch = data(w, self.steps[w])
            self.steps[w] += 1
            loop = self.step(*self.loops[w], batch)
            self.loops[w] = self.workers[w].exchange(*loop)

    def run(self):
        rows = np.flatnonzero(self.made.order >= 0)
        for row in rows[np.argsort(self.made.order[rows])]:
            w = self.made.worker[row]
            self.make_steps(w, int(self.made.steps[row]))
            assert self.workers[w].staleness == self.made.staleness[row]
        return self.center


@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        (rules.dynsgd(), Asynchronous()),
        (rules.agn(optax.adam(0.03)), BoundedStaleness(versions=2)),
        (rules.easgd(0.2, rho=0.1), Asynchronous()),
        (rules.downpour(codec=rules.CODECS["int8"]), BoundedStaleness(versions=3)),
    ],
)
def test_run_gives_the_bits_of_real_workers(rule, mode):
    inner = optax.adam(0.02)
    found = simulated(rule, inner, mode=mode)
    assert len(set(found.schedule.staleness)) > 2
    center = RealWorkers(found.schedule, rule, inner, mode).run()
    same(found.center.params, center.pull().params)
    same(found.center.center_state, center.save().center_state)
    assert found.center.version == center.version


def test_rejections_are_those_of_real_workers():
    """A claim of steps beyond the limit does not depend on numbers."""
    rule, inner = rules.dynsgd(), optax.sgd(0.1)
    limits = Limits(messages=MessageLimits(steps=3, in_a_row=1000))
    period = agn_optax.dynamic_period(9, first=3)
    found = simulated(rule, inner, period=period, limits=limits)
    outcomes = set(found.schedule.outcome)
    assert {Outcome.APPLIED, Outcome.REJECTED} <= outcomes
    assert found.center.version == found.schedule.version.max()
    assert np.isfinite(found.losses[found.schedule.order >= 0]).all()


def test_rounds_average_all_workers():
    """A round of equal workers is a step of gradients averaged over all batches."""
    cluster = Cluster(workers=3, speed=Fixed(0.1))
    found = simulated(
        rules.average(), optax.sgd(0.5), cluster, mode=Synchronous(), period=1
    )
    params = PARAMS
    for step in range(20):
        grads = [jax.grad(loss)(params, data(w, step)) for w in range(3)]
        mean = jax.tree.map(lambda *g: sum(g) / 3, *grads)
        params = jax.tree.map(lambda x, g: x - 0.5 * g, params, mean)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found.center.params,
        params,
    )


def test_overlap_keeps_the_steps_that_are_made_meanwhile():
    """One worker alone: every step reaches the center once, as without a link."""
    cluster = Cluster(workers=1, speed=Fixed(0.1), link=Link(latency=0.15))
    rule = shared.downpour()
    found = simulated(rule, optax.sgd(0.1), cluster, overlap=True, exchanges=30)
    assert set(found.schedule.steps_since[:-1]) == {0, 2}
    params = PARAMS
    for step in range(90):
        grads = jax.grad(loss)(params, data(0, step))
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found.center.params,
        params,
    )


def test_failed_workers_start_again_from_the_center():
    cluster = Cluster(
        workers=4,
        speed=LogNormal(0.1, 0.3),
        failures=Failures(every=2.0, down=0.5, together=2),
    )
    found = simulated(rules.dynsgd(), optax.sgd(0.2), cluster, exchanges=200)
    assert found.schedule.session.max() > 3
    early, late = found.losses[:20], found.losses[found.schedule.order >= 0][-20:]
    assert late.mean() < 0.6 * early.mean()


def test_evaluation_sees_every_nth_version():
    found = simulated(
        rules.dynsgd(),
        optax.sgd(0.1),
        evaluate=lambda params: loss(params, data(9, 0)),
        every=10,
    )
    seconds, versions, values = found.evaluated.T
    assert versions.tolist() == [10, 20, 30, 40, 50, 60]
    assert (np.diff(seconds) > 0).all()
    assert values[-1] == loss(found.center.params, data(9, 0))
    assert values[-1] < values[0]


def test_center_goes_on_in_a_real_one():
    rule = rules.agn(optax.adam(0.03))
    found = simulated(rule, optax.sgd(0.1))
    center = agn_optax.LocalCenter.restore(rule, found.center)
    assert center.version == 60
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=1, name="real")
    params, _ = worker.start()
    same(params, found.center.params)


def test_fragments_are_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="run takes no fragments"):
        simulated(rules.dynsgd(), optax.sgd(0.1), fragments=agn_optax.Fragments(2))
