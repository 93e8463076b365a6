"""A small language model on Python's own source text, for several programs.

The model is a decoder that predicts the next character: embedding, layers of causal
attention and a gelu network, and a head. Attention has linear biases (Press, Smith and
Lewis, *Train Short, Test Long*, 2022, arXiv:2108.12409) instead of learned positions,
and norms have no parameters, so that all parameters are matrices. With the default
sizes these are 65,536, and four fragments of the same size. A local step on
4 x 32 characters takes about 2 ms of one core.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax import rules, simulate

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import datasets

PyTree = Any
CHARACTERS = 128


@functools.cache
def text(megabytes: float = 4.0) -> datasets.Text:
    """Return the training and test characters."""
    return datasets.python_source(megabytes)


def init(seed: int, *, width: int = 64, layers: int = 1) -> PyTree:
    """Draw the first parameters.

    Args:
      seed: the seed.
      width: size of the vector of a character; a multiple of 16, the size of a head.
      layers: number of layers.

    Returns:
      The matrices, each in float32 ``[inputs, outputs]``.
    """
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 4 * layers))

    def matrix(inputs: int, outputs: int, scale: float = 1.0) -> jax.Array:
        drawn = jax.random.normal(next(keys), (inputs, outputs))
        return scale * inputs**-0.5 * drawn

    params: dict[str, Any] = {
        "embed": matrix(CHARACTERS, width),
        "head": matrix(width, CHARACTERS),
    }
    for i in range(layers):
        params[f"layer {i}"] = {
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width, 0.5),
            "up": matrix(width, 4 * width),
            "down": matrix(4 * width, width, 0.5),
        }
    return params


def loss(params: PyTree, batch: Any) -> jax.Array:
    """Return the mean cross-entropy, in nats per character.

    Args:
      params: the matrices of `init`.
      batch: characters, uint8 ``[rows, context + 1]``; each predicts the next one.
    """
    batch = jnp.asarray(batch, jnp.int32)
    logits = _logits(params, batch[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return each.mean()


def _logits(params: PyTree, characters: jax.Array) -> jax.Array:
    x = _norm(params["embed"][characters])  # [rows, context, width]
    for i in range(len(params) - 2):
        layer = params[f"layer {i}"]
        x = x + _attention(layer, _norm(x))
        x = x + jax.nn.gelu(_norm(x) @ layer["up"]) @ layer["down"]
    return _norm(x) @ params["head"]


def _attention(layer: PyTree, x: jax.Array) -> jax.Array:
    rows, context, width = x.shape
    heads = width // 16
    qkv = (x @ layer["qkv"]).reshape(rows, context, 3, heads, 16)
    q, k, v = (qkv[:, :, i] for i in range(3))
    scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) / 4.0
    attention = jax.nn.softmax(scores + _biases(context, heads))
    mixed = jnp.einsum("rhqk,rkhd->rqhd", attention, v)
    return mixed.reshape(rows, context, width) @ layer["out"]


def _biases(context: int, heads: int) -> np.ndarray:
    """Return what is added to the scores of each head: less for older characters."""
    distance = np.arange(context)[:, None] - np.arange(context)
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    biases = np.where(distance < 0, -1e9, -slopes[:, None, None] * distance)
    return biases.astype(np.float32)


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class Batches:
    """Random windows of the training text: ``data`` of `agn_optax.simulate.run`.

    It runs on the host, so another ``seed`` may be set without new programs.

    Args:
      rows: rows of a batch.
      context: characters of a row that predict one.
      seed: seed of the windows.
    """

    def __init__(self, rows: int = 4, context: int = 32, seed: int = 0) -> None:
        self.rows, self.context, self.seed = rows, context, seed
        self._windows = np.lib.stride_tricks.sliding_window_view(
            text().train, context + 1
        )

    def __call__(self, worker: int, step: int) -> np.ndarray:
        """Return the batch of a worker's local step: uint8 ``[rows, context + 1]``."""
        rng = np.random.default_rng((self.seed, worker, step))
        return self._windows[rng.integers(len(self._windows), size=self.rows)]


@functools.cache
def held_out(rows: int = 256, context: int = 32) -> np.ndarray:
    """Return windows of the test text, spread evenly: uint8 ``[rows, context + 1]``."""
    test = text().test
    starts = np.linspace(0, len(test) - context - 1, rows).astype(int)
    return np.stack([test[start : start + context + 1] for start in starts])


def held_out_loss(params: PyTree) -> jax.Array:
    """Return the loss on `held_out`: ``evaluate`` of `agn_optax.simulate.run`."""
    return loss(params, held_out())


def trained_alone(
    inner: optax.GradientTransformation,
    batches: Batches,
    seed: int,
    *,
    period: int,
    rounds: int,
) -> PyTree:
    """Return the parameters after the steps of one worker alone.

    Args:
      inner: its optimizer.
      batches: the batches; their seed is changed.
      seed: seed of the first parameters.
      period: local steps of a round.
      rounds: number of rounds.
    """
    batches.seed = seed + 1000
    return simulate.run(
        rules.average(),
        inner,
        loss,
        batches,
        init(seed),
        cluster=simulate.Cluster(workers=1, speed=simulate.Fixed(1.0)),
        period=period,
        exchanges=rounds,
        exact=True,
    ).params
