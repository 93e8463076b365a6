"""Make the golden tapes: `PYTHONPATH=.:tests python tests/tapes/make.py`.

A tape that later releases must replay is made once. Make it anew only together with a
new format, and say so in CHANGELOG.md.
"""

import contextlib
import functools
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.waiting import wait_until

import agn_optax
from agn_optax import errors, rules
from agn_optax.center import (
    Asynchronous,
    Journal,
    Limits,
    LocalCenter,
    MessageLimits,
    Submission,
    Synchronous,
)
from agn_optax.rules import codecs

FOLDER = pathlib.Path(__file__).parent
PARAMS = {"a": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": (jnp.zeros(2), None)}
RULES = {
    "adam": lambda: rules.agn(optax.adam(0.1)),
    "rounds": lambda: rules.diloco(optax.sgd(0.7, momentum=0.9, nesterov=True)),
    "rejections": lambda: rules.dynsgd(codec=codecs.quantize(8)),
}


def _center(name, folder, mode=None, limits=None):
    """Return a center whose snapshots replace the journal after a few records."""
    durability = Journal(folder, size=6000, keep="contributions")
    mode = mode or Asynchronous()
    return LocalCenter(
        RULES[name](), PARAMS, mode=mode, limits=limits, durability=durability
    )


def _wait(center):
    """Wait until no snapshot is due or being written: segments are then the same."""
    keeper = center.core.keeper

    def is_idle():
        with center.core.atomically():
            return not keeper._is_due and keeper._saved[0] == keeper._attempted

    wait_until(is_idle)


def _local_step(worker, loop):
    params, state = loop
    grads = jax.tree.map(lambda p: p - 0.5, params)
    updates, state = worker.tx.update(grads, state, params)
    worker.report(loss=float(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))))
    return worker.exchange(optax.apply_updates(params, updates), state)


def adam(folder):
    """Two asynchronous workers, one of which is slower and leaves."""
    with _center("adam", folder) as center:
        workers = [
            agn_optax.Worker(center, optax.sgd(0.1), period=p, name=f"w{p}")
            for p in (1, 2)
        ]
        loops = [worker.start() for worker in workers]
        for _ in range(6):
            for i, worker in enumerate(workers):
                loops[i] = _local_step(worker, loops[i])
                _wait(center)
        workers[1].leave()


def rounds(folder):
    """Rounds of two of three workers; the third is late, and dropped."""
    mode = Synchronous(quorum=2, grace=0.0, late="drop")
    with _center("rounds", folder, mode) as center:
        sessions = {name: center.core.join(name) for name in "abc"}
        sequence = dict.fromkeys("abc", 0)
        for members in ("ab", "c", "ac", "ab", "bc", "a", "ab"):
            for name in members:
                sequence[name] += 1
                value = 0.1 * sequence[name] * (1 + "abc".index(name))
                message = jax.tree.map(functools.partial(_full, value), PARAMS)
                version = center.version if name != "c" else 0
                sent = Submission(
                    sequence[name], message, version, steps=10, weight=value
                )
                sessions[name].submit(sent)
            for name in members:
                kept = sessions[name].answer(sequence[name], timeout=0.0)
                if kept is not None:
                    sessions[name].wait_until_kept(kept)
                    sessions[name].acknowledge(sequence[name])
                else:
                    sequence[name] -= 1
            _wait(center)


def _full(value, leaf):
    return np.full(leaf.shape, value, leaf.dtype)


def rejections(folder):
    """Quantized messages, some of which are too large."""
    limits = Limits(messages=MessageLimits(norm=3.0, in_a_row=2))
    with _center("rejections", folder, limits=limits) as center:
        workers = [
            agn_optax.Worker(center, optax.sgd(rate), period=period, name=name)
            for name, rate, period in (
                ("calm", 0.1, 1),
                ("slow", 0.1, 3),
                ("wild", 30.0, 2),
            )
        ]
        loops = [worker.start() for worker in workers]
        for _ in range(6):
            for i, worker in enumerate(workers):
                with contextlib.suppress(errors.MessageRejectedError):
                    loops[i] = _local_step(worker, loops[i])
                _wait(center)


def main() -> None:
    for name, make in (
        ("adam", adam),
        ("rounds", rounds),
        ("rejections", rejections),
    ):
        with tempfile.TemporaryDirectory() as folder:
            make(folder)
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            shutil.copytree(folder, FOLDER / name)


if __name__ == "__main__":
    main()
