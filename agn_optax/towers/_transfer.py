"""The reduction of one gradient over all towers: unchanged, cast, or encoded."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, combinations, trees
from agn_optax.round import collectives, messages
from agn_optax.rules import codecs

PyTree = Any
Algorithm = Literal["all_reduce", "reduce_scatter", "hierarchical"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnTheWay:
    """The state of a codec, which differs between towers."""

    # A list with an item for each bucket or gradient: the codec's state for the pieces
    # that this tower sends [pieces, ...], and for the piece that it owns and sums.
    states: PyTree
    axes: collectives.Axes = dataclasses.field(metadata={"static": True})


def check_transfer(
    axes: collectives.Axes,
    algorithm: Algorithm,
    codec: codecs.Codec | None,
    sum_dtype: Any,
) -> Transfer:
    """Return the `Transfer` for options of `all_reduce`, which must be consistent."""
    check.one_of(algorithm, "algorithm", get_args(Algorithm))
    if algorithm == "hierarchical" and len(axes) < 2:
        raise errors.InvalidArgumentError(
            "algorithm='hierarchical' needs two axes, such as ('hosts', 'towers'), got "
            f"{axes if len(axes) > 1 else axes[0]!r}"
        )
    sum_dtype = check.float_dtype(sum_dtype, "sum_dtype")
    if codec is not None:
        codecs.check_codec(codec, "codec")
        if codec.is_identity:
            codec = None
    if sum_dtype is not None and codec is None:
        raise errors.InvalidArgumentError(
            f"sum_dtype={sum_dtype} is the dtype in which encoded gradients are "
            "summed, and needs a codec: give both"
        )
    if codec is not None and _bits(codec, (512, 512)) < 32 <= _bits(
        codec, (512 * 512,)
    ):
        combinations.refuse("a codec for matrices", "all_reduce", f"{codec}")
    return Transfer(axes, algorithm, codec, sum_dtype)


def _bits(codec: codecs.Codec, shape: tuple[int, ...]) -> float:
    """Return the bits that a codec sends per element of a float32 array."""
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    sent, _ = jax.eval_shape(lambda x: codec.encode(x, codec.init(x)), like)
    return 8 * trees.nbytes(sent) / like.size


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The reduction of one array over the axes."""

    axes: collectives.Axes
    algorithm: Algorithm
    codec: codecs.Codec | None
    sum_dtype: Any  # None is the dtype on the wire, or float32 for encoded pieces

    @property
    def dtype(self) -> Any:
        """The dtype on the wire; None is the dtype of the array."""
        return None if self.codec is None else codecs.cast_dtype(self.codec)

    @property
    def is_encoded(self) -> bool:
        """True if collectives cannot sum what is sent."""
        if self.codec is None:
            return False
        return self.dtype is None or self.sum_dtype is not None

    @property
    def has_state(self) -> bool:
        """True if the codec has state."""
        if self.codec is None:
            return False
        like = jax.ShapeDtypeStruct((1,), jnp.float32)
        return bool(jax.tree.leaves(jax.eval_shape(self.codec.init, like)))

    def init(self, x: jax.Array) -> tuple[PyTree, PyTree]:
        """Return the codec's first states for an array: sent pieces, and own piece."""
        assert self.codec is not None
        axes = self.axes
        if self.algorithm == "hierarchical":
            axes, fast = self.axes[:-1], self.axes[-1:]
            x = collectives.cut(x, collectives.size(fast))[0]
        rows = jnp.zeros_like(collectives.cut(x, collectives.size(axes)))
        return _Encoder(self.codec, rows[0]).init(rows)

    def reduce(
        self, x: jax.Array, scale: float, state: Any
    ) -> tuple[jax.Array, PyTree]:
        """Return the sum over all towers times ``scale``, and the codec's state."""
        if not x.size:
            return collectives.psum(x, self.axes), state
        if self.codec is not None and self.dtype is None:
            return self._reduce(x, scale, state)
        wire, factor = self.dtype or x.dtype, jnp.asarray(scale, x.dtype)
        if jnp.finfo(wire).bits > 16:
            reduced, _ = self._reduce(x.astype(wire))
            return reduced.astype(x.dtype) * factor, state
        # Scaled first, because a sum in float16 could overflow.
        reduced, _ = self._reduce((x * factor).astype(wire))
        return reduced.astype(x.dtype), state

    def _reduce(
        self, x: jax.Array, scale: float = 1.0, state: Any = None
    ) -> tuple[jax.Array, PyTree]:
        if self.algorithm == "hierarchical":
            return self._by_pieces(x, self.axes[-1:], scale, state, self.axes[:-1])
        if self.algorithm == "reduce_scatter" or self.is_encoded:
            return self._by_pieces(x, self.axes, scale, state)
        return collectives.psum(x, self.axes), state

    def _by_pieces(
        self,
        x: jax.Array,
        axes: collectives.Axes,
        scale: float,
        state: Any,
        others: collectives.Axes = (),
    ) -> tuple[jax.Array, PyTree]:
        """Reduce-scatter over ``axes``, reduce pieces over ``others``, and gather."""
        count = collectives.size(axes)
        rows = collectives.cut(x, count)
        # A codec that is not a cast is used on the slow axes only.
        encodes = self.is_encoded and not (others and self.dtype is None)
        if encodes:
            assert self.codec is not None
            wide = self.sum_dtype or trees.wider(x.dtype, jnp.float32)
            encoder = _Encoder(self.codec, jnp.zeros(rows.shape[1], wide))
            sender, owner = encoder.init(rows) if others or state is None else state
            piece, sender = encoder.sum(rows, axes, sender)
        else:
            piece = collectives.scatter(rows.reshape(-1), axes)
        if not others:
            piece = piece if scale == 1.0 else piece * jnp.asarray(scale, piece.dtype)
        elif self.is_encoded:
            piece, state = self._by_pieces(piece, others, scale, state)
        else:
            piece = collectives.psum(piece, others)
        if encodes:
            whole, owner = encoder.gather(piece, axes, owner)
            state = state if others else (sender, owner)
        else:
            whole = collectives.gather(piece, axes, same=True)
        return whole.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype), state


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """The encoded reduce-scatter (`sum`) and all-gather (`gather`) of an array."""

    codec: codecs.Codec
    like: jax.Array  # a piece, in the dtype of the sum

    def init(self, rows: jax.Array) -> tuple[PyTree, PyTree]:
        """Return the codec's first states for the sent pieces and the own piece."""
        return jax.vmap(self.codec.init)(rows), self.codec.init(rows[0])

    def sum(
        self, rows: jax.Array, axes: collectives.Axes, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """Return this tower's piece of the sum, and the codec's state.

        ``rows`` are the pieces of this tower's array, one for each tower.
        """
        sent, state = jax.vmap(self.codec.encode)(rows, state)
        sent = jax.tree.map(lambda x: collectives.all_to_all(x, axes), sent)

        def message(member: Any) -> jax.Array:
            own = jax.tree.map(lambda x: x[member], sent)
            return self.codec.decode(own, self.like)

        total = messages.summed(message, collectives.size(axes))
        return total.astype(self.like.dtype), state

    def gather(
        self, piece: jax.Array, axes: collectives.Axes, state: PyTree
    ) -> tuple[jax.Array, PyTree]:
        """Return the pieces of all towers [towers, elements], equal on all towers."""
        sent, state = self.codec.encode(piece, state)
        sent = jax.tree.map(
            lambda x: collectives.gather(x[None], axes, same=True), sent
        )
        return jax.vmap(lambda own: self.codec.decode(own, self.like))(sent), state
