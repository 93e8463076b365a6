"""What a codec loses is kept, and sent later."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agn_optax._internal import check, trees
from agn_optax.rules.codecs._codec import Codec, check_codec

PyTree = Any


class ErrorFeedbackState(NamedTuple):
    """State of `error_feedback`."""

    residual: PyTree  # as the parameters, float32 or wider: what has not been sent yet
    codec_state: PyTree  # of the codec inside


def error_feedback(codec: Codec, *, decay: float = 1.0) -> Codec:
    r"""What a codec loses is kept, and goes into the next contribution.

    .. math:: m = \text{encode}(k + \beta e); \qquad
        e \leftarrow k + \beta e - \text{decode}(m)

    So nothing is lost for good where :math:`\beta = 1`: what has been sent and the
    residual :math:`e` are together all that was contributed. The residual is of the
    message in float32 or wider. A center of fewer bits rounds what it decodes to its
    own dtype, by half a last place at most (:math:`2^{-8}` of an element in bfloat16,
    :math:`2^{-11}` in float16), and that is lost, as is what it rounds when it adds
    the message; ``quantize`` with other levels than a codebook sends numbers that
    bfloat16 has. What is not finite never enters the residual, and a message that the
    center has dropped or refused whole goes into it again.

    A worker that is lost takes its residual with it.

    Args:
      codec: loses something, such as `quantize`.
      decay: :math:`\beta`, in (0, 1]; what was owed for long counts for less.

    Returns:
      A codec with `ErrorFeedbackState`, which takes float32 or more for each parameter.

    Raises:
      InvalidTypeError: ``codec`` is not a codec, or ``decay`` no number.
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
        def zeros(leaf: Any) -> jax.Array:
            dtype = trees.wider(jnp.result_type(leaf), jnp.float32)
            return jnp.zeros_like(leaf, dtype=dtype)

        return ErrorFeedbackState(jax.tree.map(zeros, params), codec.init(params))

    def encode(contribution: PyTree, state: ErrorFeedbackState) -> tuple[PyTree, Any]:
        old = state.residual
        if decay != 1.0:
            old = jax.tree.map(lambda e: decay * e, old)
        owed = jax.tree.map(lambda e, k: e + jnp.asarray(k, e.dtype), old, contribution)
        encoded, codec_state = codec.encode(owed, state.codec_state)
        sent = codec.decode(encoded, owed)
        residual = jax.tree.map(
            lambda o, s, e: _where_finite(o - s.astype(o.dtype), e),
            *(owed, sent, state.residual),
        )
        return encoded, ErrorFeedbackState(residual, codec_state)

    def returned(encoded: PyTree, state: ErrorFeedbackState) -> ErrorFeedbackState:
        sent = codec.decode(encoded, state.residual)
        residual = jax.tree.map(
            lambda e, s: _where_finite(e + s.astype(e.dtype), e), state.residual, sent
        )
        return state._replace(residual=residual)

    return Codec(
        init,
        encode,
        codec.decode,
        name=f"error_feedback({codec}{'' if decay == 1.0 else f', decay={decay:g}'})",
        answers=codec.answers,
        returned=returned,
        of_differences=codec.of_differences,
        is_exact=codec.is_exact,
    )


def _where_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    """What is not finite stays as it was: its message will be refused."""
    return jnp.where(jnp.isfinite(new), new, old)
