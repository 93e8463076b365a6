"""Trajectories recorded with TensorFlow 1.14, and functions that replay them."""

import functools
import json
import pathlib

import jax
import numpy as np
import optax

import agn_optax
from helpers import shared

FOLDER = pathlib.Path(__file__).parents[1] / "parity"
RECORDS = sorted(path.stem for path in FOLDER.glob("*.json"))
ADAM = "agn_adam_p3_w1"  # the one deliberate difference; see parity/test_parity.py


def load(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def as_arrays(tree):
    return {name: np.asarray(value, np.float32) for name, value in tree.items()}


def inner_optimizer(record):
    inner = record["inner"]
    if inner["name"] == "sgd":
        return shared.sgd(inner["learning_rate"])
    assert inner["name"] == "momentum"
    return shared.sgd(
        inner["learning_rate"],
        inner["momentum"],
        nesterov=inner.get("use_nesterov", False),
    )


def rule_of(record):
    if record["algorithm"] == "AGN":
        return shared.agn(inner_optimizer(record))
    assert record["algorithm"] == "EASGD"
    return shared.easgd(record["moving_rate_effective"], rho=record["rho_effective"])


def curvature_of(record):
    """Return the curvature of the loss; 0 if it is linear."""
    if record["loss"]["kind"] == "linear":
        return 0.0
    assert record["loss"]["kind"] == "quadratic"
    return record["loss"]["curvature"]


@functools.cache
def local_step(tx, curvature):
    """Compile a step once for all workers of one rule and inner optimizer."""

    def gradient(x, feed):
        return curvature * (x - feed) if curvature else feed

    @jax.jit
    def step(params, state, feed):
        grads = jax.tree.map(gradient, params, feed)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


class Participant:
    """One worker of a record, with its training loop."""

    def __init__(self, center, record, number):
        self.worker = agn_optax.Worker(
            center,
            inner_optimizer(record),
            period=record["period"],
            name=f"worker-{number}",
        )
        self._feeds = [as_arrays(feed) for feed in record["feeds"]]
        self._loop = None
        self._local_step = local_step(self.worker.tx, curvature_of(record))

    def start(self):
        self._loop = self.worker.start()

    def step(self, event):
        """Return the params after an event's local step, and its exchange if due."""
        loop = self._local_step(*self._loop, self._feeds[event])
        self._loop = self.worker.exchange(*loop)
        return jax.tree.map(np.array, self._loop[0])  # the next exchange donates them


def replay(record, center, workers):
    """Yield, after every event, the parameters of its worker and the center."""
    join_at = record.get("join_at", [0] * len(workers))
    for event, number in enumerate(record["order"]):
        for worker, begin in zip(workers, join_at, strict=True):
            if begin == event:
                worker.start()
        params = workers[number].step(event)
        yield params, center.pull()


def assert_as_recorded(record, replayed):
    """Compare to 1e-5; the message names the event that differs."""
    for i, ((params, center), event) in enumerate(
        zip(replayed, record["events"], strict=True)
    ):
        assert event["worker"] == record["order"][i]
        assert event["exchanges"] == center.version, f"event {i}"
        for kind, ours in (("local", params), ("center", center.params)):
            for name, value in as_arrays(event[kind]).items():
                np.testing.assert_allclose(
                    ours[name],
                    value,
                    rtol=1e-5,
                    atol=1e-5,
                    err_msg=f"event {i}, {kind} {name}",
                )
