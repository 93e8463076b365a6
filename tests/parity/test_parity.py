"""Replay trajectories recorded with TensorFlow 1.14 through LocalCenter and Worker."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.parity_records import (
    ADAM,
    RECORDS,
    Participant,
    as_arrays,
    assert_as_recorded,
    load,
    replay,
    rule_of,
)

import agn_optax
from agn_optax import rules


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [n for n in RECORDS if n != ADAM])
def test_replay_matches_the_recorded_trajectory(name):
    record = load(name)
    center = agn_optax.LocalCenter(rule_of(record), as_arrays(record["params_init"]))
    workers = [Participant(center, record, n) for n in range(record["num_worker"])]
    assert_as_recorded(record, replay(record, center, workers))
    assert center.version > 0


class TestAdam:
    """The deliberate difference: which steps the center's bias correction counts.

    In the original, one pair of β-powers belongs to the optimizer object, and every
    apply, local or to the center, advances it. Here the center counts only its own
    steps. A replay in NumPy that supports both shows that nothing else differs.
    """

    @staticmethod
    def adam_step(slots, grads, count, learning_rate, epsilon_hat):
        b1, b2, epsilon = 0.9, 0.999, 1e-8
        updates = {}
        for name, g in grads.items():
            m, v = slots.setdefault(name, [np.zeros_like(g), np.zeros_like(g)])
            m = slots[name][0] = b1 * m + (1 - b1) * g
            v = slots[name][1] = b2 * v + (1 - b2) * g * g
            c1, c2 = 1 - b1**count, 1 - b2**count
            if epsilon_hat:
                step = learning_rate * math.sqrt(c2) / c1 * m / (np.sqrt(v) + epsilon)
            else:
                step = learning_rate * (m / c1) / (np.sqrt(v / c2) + epsilon)
            updates[name] = -step
        return updates

    @classmethod
    def replay(cls, record, *, shared_powers, epsilon_hat):
        as64 = lambda tree: {k: np.asarray(v, np.float64) for k, v in tree.items()}  # noqa: E731
        params, center = as64(record["params_init"]), as64(record["params_init"])
        total = {k: np.zeros_like(v) for k, v in params.items()}
        local, central = {}, {}
        applies = {"local": 0, "center": 0}

        def count(kind):
            applies[kind] += 1
            return sum(applies.values()) if shared_powers else applies[kind]

        lr = record["inner"]["learning_rate"]
        for i, feed in enumerate(record["feeds"], start=1):
            grads = as64(feed)
            updates = cls.adam_step(local, grads, count("local"), lr, epsilon_hat)
            params = {k: params[k] + updates[k] for k in params}
            total = {k: total[k] + grads[k] for k in total}
            if i % record["period"] == 0:
                mean = {k: total[k] / record["period"] for k in total}
                moved = cls.adam_step(central, mean, count("center"), lr, epsilon_hat)
                center = {k: center[k] + moved[k] for k in center}
                params, total = dict(center), {k: 0 * total[k] for k in total}
            yield params, center

    @pytest.fixture
    def record(self):
        return load(ADAM)

    def test_original_shares_the_powers_of_adam(self, record):
        replay = self.replay(record, shared_powers=True, epsilon_hat=True)
        for (params, center), event in zip(replay, record["events"], strict=True):
            for kind, ours in (("local", params), ("center", center)):
                for name, value in as_arrays(event[kind]).items():
                    np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5)

    def test_center_adam_counts_only_the_centers_own_steps(self, record):
        optimizer = optax.adam(record["inner"]["learning_rate"])
        center = agn_optax.LocalCenter(
            rules.agn(optimizer), as_arrays(record["params_init"])
        )
        worker = agn_optax.Worker(center, optimizer, period=record["period"])
        params, state = worker.start()
        replay = self.replay(record, shared_powers=False, epsilon_hat=False)
        furthest = 0.0
        for feed, event, (x, c) in zip(
            record["feeds"], record["events"], replay, strict=True
        ):
            updates, state = worker.tx.update(as_arrays(feed), state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
            ours = center.pull().params
            for name in ours:
                np.testing.assert_allclose(params[name], x[name], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(ours[name], c[name], rtol=1e-4, atol=1e-5)
                expected = np.asarray(event["center"][name])
                furthest = max(furthest, float(np.abs(ours[name] - expected).max()))
        # The difference is of the order of a few center steps of 0.01.
        assert 1e-3 < furthest < 0.1


class TestOriginalTests:
    """The numbers in the tests that came with the originals."""

    @staticmethod
    def drive(worker, loop, gradient=-1.0):
        params, state = loop
        grads = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
        updates, state = worker.tx.update(grads, state, params)
        return worker.exchange(optax.apply_updates(params, updates), state)

    @staticmethod
    def adam():
        return optax.adam(0.1, b1=0.0, b2=0.0, eps=1e-8)

    def test_agn_of_one_worker(self):
        center = agn_optax.LocalCenter(
            rules.agn(self.adam()), {"v0": 0.0, "v1": jnp.float32(0.5)}
        )
        worker = agn_optax.Worker(center, self.adam(), period=4)
        loop = worker.start()
        expected = {
            1: ((0.1, 0.6), (0.0, 0.5)),
            3: ((0.3, 0.8), (0.0, 0.5)),
            4: ((0.1, 0.6), (0.1, 0.6)),
            8: ((0.2, 0.7), (0.2, 0.7)),
        }
        for step in range(1, 9):
            loop = self.drive(worker, loop)
            if step in expected:
                for values, tree in zip(
                    expected[step], (loop[0], center.pull().params), strict=True
                ):
                    np.testing.assert_allclose(
                        [tree["v0"], tree["v1"]], values, rtol=1e-5, atol=1e-6
                    )

    def test_agn_of_two_workers_with_period_1(self):
        center = agn_optax.LocalCenter(
            rules.agn(self.adam()), {"v0": 0.0, "v1": jnp.float32(0.5)}
        )
        workers = [agn_optax.Worker(center, self.adam(), period=1) for _ in range(2)]
        loops = [worker.start() for worker in workers]
        for step in range(6):
            which = step % 2
            loops[which] = self.drive(workers[which], loops[which])
            np.testing.assert_allclose(
                center.pull().params["v0"], 0.1 * (step + 1), rtol=1e-5
            )

    def test_easgd_of_one_worker(self):
        center = agn_optax.LocalCenter(rules.easgd(1.0), {"v0": 0.0, "v1": 1.0})
        worker = agn_optax.Worker(center, optax.sgd(1.0), period=2)
        loop = worker.start()
        expected = [((1, 2), (0, 1)), ((0, 1), (2, 3)), ((1, 2), (2, 3))]
        for local, central in expected:
            loop = self.drive(worker, loop)
            assert (float(loop[0]["v0"]), float(loop[0]["v1"])) == local
            now = center.pull().params
            assert (float(now["v0"]), float(now["v1"])) == central


@pytest.mark.few(1)
@pytest.mark.parametrize("period", [1, 4])
def test_exchange_of_a_large_leaf_is_atomic(period):
    """The original applies sums for means and has torn reads with 1 M elements."""
    center = agn_optax.LocalCenter(rules.agn(optax.sgd(0.5)), jnp.zeros(1_000_000))
    worker = agn_optax.Worker(center, optax.sgd(0.1), period=period)
    params, state = worker.start()
    local = jax.jit(worker.tx.update)
    for exchange in range(1, 16):
        for _ in range(period):
            updates, state = local(jnp.ones(1_000_000), state, params)
            params = optax.apply_updates(params, updates)
            params, state = worker.exchange(params, state)
        now = np.asarray(center.pull().params)
        assert now.min() == now.max() == -0.5 * exchange  # exact in float32
