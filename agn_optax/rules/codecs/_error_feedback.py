"""Error feedback: the losses of a codec are kept and sent later."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agn_optax._internal import check, trees
from agn_optax.rules.codecs._codec import Codec, check_codec

PyTree = Any


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`."""

    residual: PyTree  # shapes of the parameters, float32 or wider: not yet sent
    codec_state: PyTree  # state of the wrapped codec


def error_feedback(codec: Codec, *, decay: float = 1.0) -> Codec:
    r"""Keep the losses of a codec in a residual, and add it to the next contribution.

    .. math:: m = \text{encode}(k + \beta e); \qquad
        e \leftarrow k + \beta e - \text{decode}(m)

    With :math:`\beta = 1` nothing is lost for good: the sum of all sent messages and
    the residual :math:`e` equals the sum of all contributions. The residual is computed
    from the message in float32 or wider. A center of a narrower dtype rounds each
    decoded element to its dtype, by at most half a unit in the last place
    (:math:`2^{-8}` of an element in bfloat16, :math:`2^{-11}` in float16). This
    rounding is lost, and so is the rounding when the center adds the message. The
    numbers that ``quantize`` sends are exact in bfloat16, except with the format
    ``"codebook"``. Elements that are not finite never enter the residual. A message
    that the center dropped or rejected as a whole is added to the residual again.

    The residual of a lost worker is lost too.

    Args:
      codec: a lossy codec, such as `quantize`.
      decay: :math:`\beta`, in (0, 1]; below 1, older losses count less.

    Returns:
      A codec with `ErrorFeedbackState`, which keeps a float32 or wider number for each
      parameter.

    Raises:
      InvalidTypeError: ``codec`` is not a codec, or ``decay`` is not a number.
      InvalidArgumentError: ``decay`` is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec, like = codecs.error_feedback(codecs.quantize(2)), jnp.zeros(2)
      >>> state = codec.init(like)
      >>> for _ in range(3):
      ...     sent, state = codec.encode(jnp.array([1.0, 0.375]), state)
      ...     print(codec.decode(sent, like), state.residual)
      [1. 0.] [0.    0.375]
      [1. 1.] [ 0.   -0.25]
      [1. 0.] [0.    0.125]

    References:
      Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, *1-Bit Stochastic Gradient
      Descent and its Application to Data-Parallel Distributed Training of Speech DNNs*,
      2014.
      Sai Praneeth Karimireddy, Quentin Rebjock, Sebastian U. Stich, Martin Jaggi,
      *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*, 2019.
    """
    check_codec(codec, "codec")
    check.rate(decay, "decay", low=0.0, high=1.0, low_open=True)

    def init(params: PyTree) -> ErrorFeedbackState:
        residual = jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf, dtype=trees.wide(leaf)), params
        )
        return ErrorFeedbackState(residual, codec.init(params))

    def encode(contribution: PyTree, state: ErrorFeedbackState) -> tuple[PyTree, Any]:
        old = state.residual
        if decay != 1.0:
            old = jax.tree.map(lambda e: decay * e, old)
        total = jax.tree.map(
            lambda e, k: e + jnp.asarray(k, e.dtype), old, contribution
        )
        encoded, codec_state = codec.encode(total, state.codec_state)
        sent = codec.decode(encoded, total)
        residual = jax.tree.map(
            lambda t, s, e: _where_finite(t - s.astype(t.dtype), e),
            *(total, sent, state.residual),
        )
        return encoded, ErrorFeedbackState(residual, codec_state)

    def returned(encoded: PyTree, state: ErrorFeedbackState) -> ErrorFeedbackState:
        sent = codec.decode(encoded, state.residual)
        residual = jax.tree.map(
            lambda e, s: _where_finite(e + s.astype(e.dtype), e), state.residual, sent
        )
        return state._replace(residual=residual)

    own_decay = "" if decay == 1.0 else f", decay={decay:g}"
    return dataclasses.replace(
        codec,
        init=init,
        encode=encode,
        name=f"error_feedback({codec}{own_decay})",
        returned=returned,
    )


def _where_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return ``new`` where it is finite, else ``old``: the residual stays finite."""
    return jnp.where(jnp.isfinite(new), new, old)
