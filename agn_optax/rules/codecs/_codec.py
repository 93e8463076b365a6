"""The record, and the codecs that need no arithmetic of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Codec:
    r"""How contributions are encoded: three pure functions.

    .. math:: (m, e) \leftarrow \text{encode}(k, e); \qquad
        \hat k = \text{decode}(m)

    where :math:`k` is the contribution, :math:`m` what is sent, :math:`e` the codec's
    state, which stays with the worker from one exchange to the next, and
    :math:`\hat k` what the center takes for the contribution.

    Attributes:
      init: ``params -> state``. Like an optax ``init`` it touches leaves only inside
        ``jax.tree.map``.
      encode: ``(contribution, state) -> (encoded, state)``. ``encoded`` is the tree of
        the contribution with a tree of arrays, of any dtypes and shapes, in place of
        each leaf. The shapes, and the dtypes that are not floating, follow from the
        shapes of the contribution.
      decode: ``(encoded, like) -> contribution``, in the structure and shapes of
        ``like``, which is the center or a piece of it.
      name: what it is, with its settings, as workers and center compare it.
      answers: how the center travels back to a worker that adopts it at an exchange;
        `two_way` sets it. A floating dtype: it is rounded to that. A codec: workers
        adopt a public center, which follows the exact one by encoded differences. None
        leaves it exact.
      returned: ``(encoded, state) -> state``, of a message that the center has dropped
        or refused: what it had goes into a later one. None where it is lost.
      of_differences: whether it may leave out most of what it is given, which is right
        for gradients and displacements alone: of parameters a worker would seem to have
        zeros. Rules that send parameters refuse it.
      is_exact: whether all programs that decode a message get the same bits.

    Raises:
      InvalidTypeError: ``answers`` is neither a codec nor a dtype.
      InvalidArgumentError: ``answers`` is not a floating dtype, or a codec whose public
        centers would not be the same everywhere, or would count what it loses twice.

    Example:
      A codec that sends signs, and the mean size of a leaf's elements:

      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> def encode(tree, state):
      ...     send = lambda x: {"signs": x > 0, "size": jnp.abs(x).mean()}
      ...     return jax.tree.map(send, tree), state
      >>> def decode(encoded, like):
      ...     read = lambda x, sent: jnp.where(sent["signs"], 1, -1) * sent["size"]
      ...     return jax.tree.map(read, like, encoded)
      >>> signs = agn_optax.codecs.Codec(
      ...     lambda params: optax.EmptyState(), encode, decode, name="signs"
      ... )
      >>> rule = agn_optax.rules.downpour(codec=signs)

    References:
      Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, *1-Bit Stochastic Gradient
      Descent and its Application to Data-Parallel Distributed Training of Speech DNNs*,
      2014.
    """

    init: Callable[[PyTree], PyTree]
    encode: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    decode: Callable[[PyTree, PyTree], PyTree]
    _: dataclasses.KW_ONLY
    name: str
    answers: Any = None
    returned: Callable[[PyTree, PyTree], PyTree] | None = None
    of_differences: bool = False
    is_exact: bool = True

    def __post_init__(self) -> None:
        argument = f"answers of codec {self.name!r}"
        if isinstance(self.answers, Codec):
            _check_answers(self.answers, argument)
        else:
            answers = check.float_dtype(self.answers, argument)
            object.__setattr__(self, "answers", answers)

    def __str__(self) -> str:
        return self.name

    @property
    def is_identity(self) -> bool:
        """Whether contributions travel as they are."""
        return self.encode is _IDENTITY.encode and self.decode is _IDENTITY.decode

    @property
    def is_cast(self) -> bool:
        """Whether contributions travel in another dtype, and else as they are.

        Only what is sent by such a codec, or as it is, may be added up on its way.
        """
        return self.answer_dtype is not None and self == _cast(self.answer_dtype)

    @property
    def answer_dtype(self) -> Any:
        """To which the center is rounded as it is adopted; None if to none."""
        return None if isinstance(self.answers, Codec) else self.answers

    @property
    def answer_codec(self) -> Codec | None:
        """Of the differences between public centers; None if there are none."""
        return self.answers if isinstance(self.answers, Codec) else None


def _check_answers(codec: Codec, argument: str) -> None:
    """Differences between public centers can travel by ``codec``."""
    why = ""
    if codec.returned is not None:
        why = (
            "a difference is taken from the exact center every time, and so has all "
            "that was lost before: give the codec without error_feedback"
        )
    elif not codec.is_exact:
        why = (
            "programs decode it alike only to the last place, and the public center "
            "must be the same bits at every worker: take another codec"
        )
    elif codec.answer_codec is not None:
        why = "nothing comes back for an answer: give a codec that has no answers"
    if why:
        raise errors.InvalidArgumentError(f"{argument} cannot be {codec}: {why}")


def check_codec(value: Any, argument: str) -> None:
    """``value`` is a codec."""
    such_as = "one of agn_optax.codecs, such as codecs.cast('bfloat16')"
    check.instance(value, Codec, f"{argument} must be {such_as}")


_IDENTITY = Codec(
    optax.init_empty_state,
    lambda contribution, state: (contribution, state),
    lambda encoded, like: encoded,
    name="identity",
)


def identity() -> Codec:
    r"""Contributions travel as they are: what a rule does that is not told otherwise.

    .. math:: m = k; \qquad \hat k = m

    Returns:
      The codec, always the same one.

    Example:
      >>> from agn_optax import codecs, rules
      >>> rules.downpour().codec == codecs.identity()
      True
    """
    return _IDENTITY


def cast(dtype: Any) -> Codec:
    r"""Contributions, and the centers that workers adopt, travel in another dtype.

    .. math:: m = \text{round}(k); \qquad \hat k = m; \qquad
        x \leftarrow \text{adopt}(x, \text{round}(c))

    The center itself keeps its own dtype: what it loses in rounding is what it is told,
    and never what it is.

    Args:
      dtype: floating; bfloat16 halves what float32 sends, and keeps its range. What is
        beyond that of float16 becomes infinite: a center outside the program refuses
        it, and within one nobody does.

    Returns:
      A codec without state.

    Raises:
      InvalidTypeError: ``dtype`` is not a dtype.
      InvalidArgumentError: ``dtype`` is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec = codecs.cast("bfloat16")
      >>> sent, _ = codec.encode(jnp.array([1.0, 0.1]), codec.init(jnp.zeros(2)))
      >>> print(codec.decode(sent, jnp.zeros(2)))
      [1.         0.10009766]

    References:
      Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic, *QSGD:
      Communication-Efficient SGD via Gradient Quantization and Encoding*, 2017.
    """
    if dtype is None:
        raise errors.InvalidTypeError("dtype must be a floating dtype, got None")
    return _cast(check.float_dtype(dtype, "dtype"))


@functools.cache
def _cast(dtype: Any) -> Codec:
    """Always the same one for a dtype."""

    def encode(leaf: Any) -> jax.Array:
        # Rounded first: XLA may leave out a cast there and back.
        return trees.rounded(jnp.asarray(leaf), dtype).astype(dtype)

    return of_leaves(
        f"cast({dtype.name})",
        encode,
        lambda sent, like: sent.astype(like.dtype),
        answers=dtype,
    )


def two_way(codec: Codec, answers: Codec | Any) -> Codec:
    r"""Contributions travel by one codec, and the center back by another.

    .. math:: d = \text{encode}(c_v - p_{v-1}); \qquad
        p_v = p_{v-1} + \text{decode}(d); \qquad x \leftarrow \text{adopt}(x, p_v)

    where :math:`c_v` is the center after its :math:`v`-th update and :math:`p_v` the
    *public* center, which all workers have alike, bit for bit; :math:`p_0 = c_0`. What
    a difference loses is in the next one, for each is taken from the exact center, so
    this is error feedback by itself. The exact center is what is saved and evaluated.

    A worker gets the differences since the public center that it has, or the whole
    public center where that is less. In a round of all workers that is one difference;
    a worker of n that exchange in turns has missed n.

    Args:
      codec: of the contributions.
      answers: of the differences: a codec that is not `error_feedback`, such as
        `quantize`. Or a floating dtype, to which the center is rounded as it is
        adopted; None for the exact center.

    Returns:
      ``codec`` with other answers. By differences, the center keeps the public center
      besides the exact one, and the last differences, which take less than one more. A
      worker keeps the public center that it adopted last, as rules that read the anchor
      do anyway.

    Raises:
      InvalidTypeError: ``codec`` is not a codec, or ``answers`` none and no dtype.
      InvalidArgumentError: ``answers`` is a dtype that is not floating, or a codec that
        does not decode to the same bits everywhere or has an `error_feedback`.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> from agn_optax import codecs
      >>> from agn_optax.center import Submission
      >>> rule = agn_optax.rules.downpour(
      ...     codec=codecs.two_way(codecs.identity(), answers=codecs.quantize(2))
      ... )
      >>> center = agn_optax.LocalCenter(rule, jnp.zeros(2))
      >>> session = center.join("worker-0")
      >>> answer = session.exchange(Submission(1, jnp.array([-1.0, -0.375]), 0))
      >>> print(answer.params, center.pull().params, center.pull(public=True).params)
      [1. 0.] [1.    0.375] [1. 0.]
      >>> print(session.exchange(Submission(2, jnp.zeros(2), 1)).params)
      [1.  0.5]
      >>> print(session.exchange(Submission(3, jnp.zeros(2), 2)).params)
      [1.    0.375]

    References:
      Hanlin Tang, Chen Yu, Xiangru Lian, Tong Zhang, Ji Liu, *DoubleSqueeze: Parallel
      Stochastic Gradient Descent with Double-Pass Error-Compensated Compression*, 2019.
      Peter Richtárik, Igor Sokolov, Ilyas Fatkhullin, *EF21: A New, Simpler,
      Theoretically Better, and Practically Faster Error Feedback*, 2021, for
      differences from a copy that both ends have.
    """
    check_codec(codec, "codec")
    made = dataclasses.replace(codec, answers=answers)
    name = f"two_way({codec}, answers={made.answers})"
    return dataclasses.replace(made, name=name)


def of_leaves(
    name: str,
    encode: Callable[[Any], PyTree],
    decode: Callable[[PyTree, Any], jax.Array],
    **fields: Any,
) -> Codec:
    """A codec without state that treats every leaf alike, and for itself."""
    return Codec(
        optax.init_empty_state,
        lambda contribution, state: (jax.tree.map(encode, contribution), state),
        _leafwise(decode),
        name=name,
        **fields,
    )


class StochasticState(NamedTuple):
    """State of a codec that draws random numbers."""

    encoded: jax.Array  # int32 scalar: how many contributions


def of_random_leaves(name: str, encode: Any, decode: Any, **fields: Any) -> Codec:
    """A codec that treats every leaf for itself, each with a random key of its own."""

    def encode_all(
        contribution: PyTree, state: StochasticState
    ) -> tuple[PyTree, StochasticState]:
        leaves, treedef = jax.tree.flatten(contribution)
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), state.encoded)
        # Workers draw other numbers, for they have other contributions. By the number
        # of a worker they would not be the same in every placement: docs/notes.md.
        encoded = [
            encode(leaf, jax.random.fold_in(jax.random.fold_in(key, i), _digest(leaf)))
            for i, leaf in enumerate(leaves)
        ]
        state = StochasticState(optax.safe_increment(state.encoded))
        return jax.tree.unflatten(treedef, encoded), state

    return Codec(
        lambda params: StochasticState(jnp.zeros((), jnp.int32)),
        encode_all,
        _leafwise(decode),
        name=name,
        **fields,
    )


def _digest(leaf: Any) -> jax.Array:
    """A number that depends on the bits of all elements, in whatever order."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(leaf, jnp.float32), jnp.uint32)
    return bits.sum(dtype=jnp.uint32)


def _leafwise(decode: Callable[[PyTree, Any], jax.Array]) -> Callable[..., PyTree]:
    """Decodes a whole message, leaf by leaf."""
    return lambda encoded, like: jax.tree.map(
        lambda leaf, sent: decode(sent, leaf), like, encoded
    )
