"""`reduce_loss`: losses of towers whose mean is the loss of the whole batch."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import collectives

SCOPE = "reduce_loss"
_Reduction = Literal["mean", "sum", "sum_over_batch_size", "sum_by_nonzero_weights"]


def reduce_loss(
    losses: Any,
    weights: Any = None,
    *,
    reduction: _Reduction = "mean",
    axis_name: Any = None,
) -> jax.Array:
    r"""Return a tower's share of the loss of a batch that is sharded over towers.

    With losses :math:`\ell_j` and weights :math:`w_j` of the whole batch (over all
    towers), the shares :math:`L_i` of the n towers satisfy

    .. math:: \frac1n \sum_{i=1}^n L_i = \frac{\sum_j w_j \ell_j}{D}, \qquad
        D = \sum_j w_j, \; 1, \; \sum_j 1 \;\text{or}\; \#\{j : w_j \ne 0\}

    for "mean", "sum", "sum_over_batch_size" and "sum_by_nonzero_weights". Therefore the
    mean of the towers' gradients, as computed by `all_reduce`, is the gradient of the
    whole batch, even if weights (such as a mask of padding) are distributed unevenly
    over the towers. Without ``axis_name``, the result is the loss of this batch.

    Args:
      losses: floating array ``[rows, ...]``, one loss per example (or per token).
      weights: real array ``[rows, ...]`` with the leading dimensions of ``losses``;
        None for ones. No gradient flows into them.
      reduction: one of the above. "none" is not among them, because a gradient needs
        one number.
      axis_name: axis of the towers that share the batch, bound by shard_map, pmap or
        vmap; None for one tower.

    Returns:
      A scalar of the dtype of ``losses``; 0 if D is 0.

    Raises:
      InvalidArgumentError: the reduction is unknown, or ``weights`` has a shape that
        does not match ``losses`` or a dtype that is not real.
      UnboundAxisError: ``axis_name`` is not bound here.

    Example:
      >>> import jax, jax.numpy as jnp, agn_optax
      >>> losses = jnp.array([[1.0, 3.0], [5.0, 0.0]])  # two towers
      >>> mask = jnp.array([[1.0, 1.0], [1.0, 0.0]])  # the last row is padding
      >>> share = lambda l, w: agn_optax.reduce_loss(l, w, axis_name="towers")
      >>> shares = jax.vmap(share, axis_name="towers")(losses, mask)
      >>> print(shares.mean())
      3.0
    """
    hint = "; a gradient needs one number"
    check.one_of(reduction, "reduction", get_args(_Reduction), hint)
    check.axis_bound(axis_name)
    axes = collectives.names(axis_name)
    losses = jnp.asarray(losses)
    check.float_leaves(losses, "losses")
    if weights is None:
        weights = jnp.ones(losses.shape[:1], losses.dtype)
    weights = jax.lax.stop_gradient(jnp.asarray(weights))
    if not (check.is_real(weights.dtype) or weights.dtype == bool):
        raise errors.InvalidArgumentError(
            f"weights must be real numbers, got {weights.dtype}"
        )
    if weights.shape != losses.shape[: weights.ndim]:
        raise errors.InvalidArgumentError(
            f"weights has shape {list(weights.shape)}; leading dimensions of losses, "
            f"{list(losses.shape)}, are expected"
        )
    per_weight = losses.size // max(weights.size, 1)
    weights = weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    # In float32 or wider, because float16 overflows at 65504.
    wide = trees.wider(losses.dtype, jnp.float32)
    weights = weights.astype(wide)
    # A row of weight 0 does not count, even if its loss is infinite.
    counts = weights != 0
    numerator = jnp.where(counts, losses.astype(wide) * weights, 0).sum()
    divisor = {
        "mean": weights.sum() * per_weight,
        "sum": jnp.ones((), wide) / collectives.size(axes),
        "sum_over_batch_size": jnp.asarray(losses.size, wide),
        "sum_by_nonzero_weights": counts.astype(wide).sum() * per_weight,
    }[reduction]
    # The name tells `call_checked` that this collective reduces no gradients.
    with jax.named_scope(SCOPE):
        total = collectives.psum(divisor, axes)
    # Multiply by the number of towers, because the mean over the towers divides by it.
    share = numerator * collectives.size(axes) / jnp.where(total != 0, total, 1)
    return jnp.where(total != 0, share, 0).astype(losses.dtype)
