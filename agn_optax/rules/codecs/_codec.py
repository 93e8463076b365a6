"""The record `Codec`, and the codecs that need no arithmetic of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.rules._declared import WIDTHS, Reads

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Codec:
    r"""Three pure functions that encode and decode contributions.

    .. math:: (m, e) \leftarrow \text{encode}(k, e); \qquad
        \hat k = \text{decode}(m)

    where :math:`k` is the contribution, :math:`m` the encoded contribution that is
    sent, :math:`e` the codec's state, which the worker keeps from one exchange to the
    next, and :math:`\hat k` the decoded contribution that the center uses.

    Attributes:
      init: ``params -> state``. Like an optax ``init`` it touches leaves only inside
        ``jax.tree.map``.
      encode: ``(contribution, state) -> (encoded, state)``. ``encoded`` is the tree of
        the contribution, in which a tree of arrays of any dtypes and shapes replaces
        each leaf. The shapes, and the dtypes that are not floating, must depend only on
        the shapes of the contribution.
      decode: ``(encoded, like) -> contribution``, in the structure and shapes of
        ``like``, which is the center or a part of it.
      name: name and settings of the codec, which workers and center compare.
      answers: downlink compression, the form in which the center is sent to a worker
        that adopts it at an exchange: a floating dtype, to which the center is rounded;
        set by `two_way`. With None, the center is sent exactly.
      returned: ``(encoded, state) -> state``, called for a message that the center
        dropped or rejected: it puts the content of the message back into the state, for
        a later message. None if the content is lost.
      of_differences: whether the codec may leave out most elements. That is valid for
        gradients and displacements only: parameters that are left out would look like
        zeros. Rules that send parameters reject such a codec.
      reads: what an element of the decoded contribution depends on: that ``"element"``
        of the contribution alone, its ``"leaf"``, or the whole ``"tree"``. A center in
        shards needs one of the first two.

    Raises:
      InvalidTypeError: ``answers`` is not a dtype.
      InvalidArgumentError: ``reads`` is not one of these, or ``answers`` is not a
        floating dtype.

    Example:
      A codec that sends the signs of a leaf's elements and their mean absolute value:

      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> def encode(tree, state):
      ...     send = lambda x: {"signs": x > 0, "size": jnp.abs(x).mean()}
      ...     return jax.tree.map(send, tree), state
      >>> def decode(encoded, like):
      ...     read = lambda x, sent: jnp.where(sent["signs"], 1, -1) * sent["size"]
      ...     return jax.tree.map(read, like, encoded)
      >>> signs = agn_optax.codecs.Codec(
      ...     lambda params: optax.EmptyState(),
      ...     encode,
      ...     decode,
      ...     name="signs",
      ...     reads="leaf",
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
    # Only the author of a codec knows these two: they are about the numbers that its
    # functions compute. `is_identity` is derived from the functions.
    of_differences: bool = False
    reads: Reads = "tree"

    def __post_init__(self) -> None:
        check.one_of(self.reads, f"reads of codec {self.name!r}", WIDTHS)
        answers = check.float_dtype(self.answers, f"answers of codec {self.name!r}")
        object.__setattr__(self, "answers", answers)

    def __str__(self) -> str:
        return self.name

    @property
    def is_identity(self) -> bool:
        """True if contributions are sent unchanged."""
        return self.encode is _IDENTITY.encode and self.decode is _IDENTITY.decode


def check_codec(value: Any, argument: str) -> None:
    """Raise unless ``value`` is a codec."""
    such_as = "one of agn_optax.codecs, such as codecs.cast('bfloat16')"
    check.instance(value, Codec, f"{argument} must be {such_as}")


_IDENTITY = Codec(
    optax.init_empty_state,
    lambda contribution, state: (contribution, state),
    lambda encoded, like: encoded,
    name="identity",
    reads="element",
)


def identity() -> Codec:
    r"""Return the codec that sends contributions unchanged, the default of rules.

    .. math:: m = k; \qquad \hat k = m

    Returns:
      The codec, the same object at every call.

    Example:
      >>> from agn_optax import codecs, rules
      >>> rules.downpour().codec == codecs.identity()
      True
    """
    return _IDENTITY


def cast(dtype: Any) -> Codec:
    r"""Cast contributions, and the centers that workers adopt, to another dtype.

    .. math:: m = \text{round}(k); \qquad \hat k = m; \qquad
        x \leftarrow \text{adopt}(x, \text{round}(c))

    The center itself keeps its own dtype: messages and adopted centers are rounded, but
    the center never is.

    Args:
      dtype: floating dtype. bfloat16 sends half as many bytes as float32 and has the
        same range. Numbers beyond the range of float16 become infinite: a center
        outside the program rejects such a message, but in an optimizer state nothing
        does.

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
    """Return the codec for a dtype, the same object at every call."""

    def encode(leaf: Any) -> jax.Array:
        # Rounded first, because XLA may remove a cast to the dtype and back.
        return trees.rounded(jnp.asarray(leaf), dtype).astype(dtype)

    return of_leaves(
        f"cast({dtype.name})",
        encode,
        lambda sent, like: sent.astype(like.dtype),
        answers=dtype,
        reads="element",
    )


def cast_dtype(codec: Codec) -> Any:
    """Return the dtype of a `cast`; None for any other codec.

    An all-reduce can only sum numbers that are cast or unchanged.
    """
    dtype = codec.answers
    return dtype if dtype is not None and codec == _cast(dtype) else None


def two_way(codec: Codec, answers: Any) -> Codec:
    r"""Combine a codec for contributions with a dtype for the center's answers.

    .. math:: x \leftarrow \text{adopt}(x, \text{round}(c))

    Args:
      codec: codec of the contributions.
      answers: floating dtype to which the adopted center is rounded; None for the exact
        center.

    Returns:
      ``codec`` with these answers. The center itself keeps its own dtype.

    Raises:
      InvalidTypeError: ``codec`` is not a codec, or ``answers`` is not a dtype.
      InvalidArgumentError: ``answers`` is a dtype that is not floating.

    Example:
      >>> from agn_optax import codecs, rules
      >>> codec = codecs.error_feedback(codecs.quantize(4))
      >>> rule = rules.diloco(codec=codecs.two_way(codec, answers="bfloat16"))
    """
    check_codec(codec, "codec")
    made = dataclasses.replace(codec, answers=answers)
    name = f"two_way({codec}, answers={made.answers})"
    return dataclasses.replace(made, name=name)


def of_leaves(
    name: str,
    encode: Callable[[Any], PyTree],
    decode: Callable[[PyTree, Any], jax.Array],
    *,
    reads: Reads = "leaf",
    **fields: Any,
) -> Codec:
    """Return a codec without state that encodes each leaf separately."""
    return Codec(
        optax.init_empty_state,
        lambda contribution, state: (jax.tree.map(encode, contribution), state),
        _leafwise(decode),
        name=name,
        reads=reads,
        **fields,
    )


def _leafwise(decode: Callable[[PyTree, Any], jax.Array]) -> Callable[..., PyTree]:
    """Return a function that decodes a message, from one that decodes a leaf."""
    return lambda encoded, like: jax.tree.map(
        lambda leaf, sent: decode(sent, leaf), like, encoded
    )
