"""A process of one worker whose numbers are deterministic, run by test_operations.

It is the only worker and repeats each exchange until a center responds, so its result
depends only on what the center applied, and not on when the center was reachable.
"""

import pathlib

import jax
import jax.numpy as jnp
import optax

import agn_optax
from agn_optax import errors, rules, service
from helpers import children
from helpers.waiting import wait_until

PERIOD = 3


def rule():
    return rules.agn(optax.adam(0.05))


def params():
    return {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "b": jnp.zeros(8)}


def train(center, steps, seen):
    """Return the last parameters of worker and center; ``seen(step)`` may wait."""
    worker = agn_optax.Worker(
        center, optax.adam(0.02), period=PERIOD, name="w", patience=0
    )

    @jax.jit
    def step(number, params, state):
        def loss(params):
            x = jnp.sin(jnp.arange(8.0) * (1 + number))
            return jnp.sum((jnp.tanh(params["w"] @ x + params["b"]) - x) ** 2)

        updates, state = worker.tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    own, state = worker.start(params(), chief=True)
    for number in range(steps):
        own, state = step(number, own, state)
        while True:
            try:
                own, state = worker.exchange(own, state)
                break
            except errors.CenterUnreachableError:  # with patience 0, retry here
                continue
        seen(number)
    last = center.pull()
    return {
        "params": children.as_hex(own),
        "center": children.as_hex(last.params),
        "version": last.version,
        "exchanges": worker.exchanges,
    }


class Commands:
    """The commands that the test can send."""

    def train(self, address, steps, progress, upgrades, parts):
        """Train in parts; a part begins after the upgrade of the part before it."""
        upgrades = pathlib.Path(upgrades)

        def seen(number):
            pathlib.Path(progress).write_text(str(number))
            part = number * parts // steps
            wait_until(lambda: int(upgrades.read_text() or 0) >= part - 1)

        with service.connect(address, rule(), timeout=60) as center:
            return train(center, steps, seen)


if __name__ == "__main__":
    children.serve_commands({"train": Commands().train})
