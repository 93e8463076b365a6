"""The model: a small transformer of Flax NNX, whose parameters name mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from config import Config
from data import VOCABULARY
from flax import nnx

PyTree = Any


def _init(*axes: str | None) -> Any:
    """Return an initializer of arrays sharded over these axes of the mesh."""
    return nnx.with_partitioning(nnx.initializers.normal(0.02), axes)


class Block(nnx.Module):
    """Causal attention, and a hidden layer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width = config.width
        self.heads = config.heads
        inward, outward = _init("fsdp", "tensor"), _init("tensor", "fsdp")

        def linear(inputs: int, outputs: int, init: Any) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs
            )

        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.query, self.key, self.value = (
            linear(width, width, inward) for _ in range(3)
        )
        self.mix = linear(width, width, outward)
        self.hidden = linear(width, 4 * width, inward)
        self.out = linear(4 * width, width, outward)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the block's output for ``x`` ``[rows, context, width]``."""
        normed = self.norms[0](x)
        shape = (*x.shape[:2], self.heads, -1)
        heads = (f(normed).reshape(shape) for f in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + self.mix(attended.reshape(x.shape))
        return x + self.out(jax.nn.gelu(self.hidden(self.norms[1](x))))


class Transformer(nnx.Module):
    """A decoder that predicts the next byte at every position."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        def embed(count: int, *axes: str | None) -> nnx.Embed:
            init = _init(*axes)
            return nnx.Embed(count, config.width, embedding_init=init, rngs=rngs)

        self.tokens = embed(VOCABULARY, "tensor", "fsdp")
        self.positions = embed(config.context, None, "fsdp")
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return logits ``[rows, context, 256]`` of bytes ``[rows, context]``."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = jax.lax.with_sharding_constraint(block(x), jax.P("fsdp"))
        return self.tokens.attend(self.norm(x))


def create(config: Config, seed: int = 0) -> tuple[Any, PyTree]:
    """Return the model's graph, and parameters sharded over the current mesh."""

    def make() -> Transformer:
        return Transformer(config, nnx.Rngs(seed))

    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
    return nnx.graphdef(nnx.eval_shape(make)), params


def loss_fn(graph: Any, params: PyTree, rows: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next byte, in nats."""
    rows = rows.astype(jnp.int32)
    logits = nnx.merge(graph, params)(rows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    return losses.mean()
