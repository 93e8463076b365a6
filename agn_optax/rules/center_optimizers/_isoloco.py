"""The center optimizer `isoloco`: Nesterov momentum of messages with equal spectra."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, trees
from agn_optax.rules._combinators import stateless

PyTree = Any

# Newton-Schulz iterations x <- a x + b (x x') x + c (x x')^2 x act on each singular
# value alone. The first kind, of Muon, moves singular values from 1e-4 to near 1; the
# second converges to 1 from there.
_COEFFICIENTS = 6 * [(3.4445, -4.7750, 2.0315)] + 3 * [(15 / 8, -10 / 8, 3 / 8)]


def isoloco(
    learning_rate: float = 0.7, momentum: float = 0.9
) -> optax.GradientTransformation:
    r"""Nesterov momentum of mean messages whose singular values are made equal.

    .. math::
        g = U \Sigma V^\top \text{ (a matrix)}: \quad
            g \leftarrow \frac{\operatorname{tr} \Sigma}{k} U V^\top, \;
            k = \min(\text{rows}, \text{columns}); \qquad
        m \leftarrow \mu m + g, \; c \leftarrow c - \eta (g + \mu m)

    The displacements of workers agree in few directions and differ in the others, where
    their mean is small. Equal singular values give these directions as much weight,
    and the sum of the singular values remains. With many workers, this helps more.

    :math:`U V^\top` comes from nine Newton-Schulz iterations, in float32 or wider,
    instead of a singular value decomposition; singular values below about 1e-4 of the
    matrix's norm stay smaller than the others. Leaves that are not matrices have
    momentum alone. For a mean of several workers it belongs on a mesh or in a
    synchronous center. It reads whole matrices, so a sharded center rejects it.

    Args:
      learning_rate: :math:`\eta`.
      momentum: :math:`\mu`, in [0, 1).

    Returns:
      A center optimizer. Its state is that of ``optax.sgd`` in a chain.

    Raises:
      InvalidArgumentError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> tx = agn_optax.center_optimizers.isoloco(1.0, 0.0)
      >>> message = jnp.diag(jnp.array([3.0, 1.0]))
      >>> print(tx.update(message, tx.init(message))[0].round(2) + 0.0)
      [[-2.  0.]
       [ 0. -2.]]

    References:
      Stefan Horoi, Benjamin Thérien, Guy Wolf, Eugene Belilovsky, *Can Model Merging
      Improve Aggregation in DiLoCo?*, 2026. Only its abstract was read, which has no
      equations: it takes Iso-C for the mean, and adds Nesterov momentum. The formula of
      Iso-C, and its order before momentum, follow another implementation.
    """
    check.rate(learning_rate, "learning_rate", low=0.0, high=math.inf)
    check.rate(momentum, "momentum", low=0.0, high=1.0, high_open=True)

    def equalize(updates: PyTree, params: PyTree, **extra_args: Any) -> PyTree:
        return jax.tree.map(lambda g: _isotropic(g) if jnp.ndim(g) == 2 else g, updates)

    return optax.chain(
        stateless(equalize), optax.sgd(learning_rate, momentum, nesterov=True)
    )


def _isotropic(matrix: jax.Array) -> jax.Array:
    """Return a matrix whose singular values are the mean of those of ``matrix``."""
    wide = trees.widened(matrix)
    if wide.size == 0:
        return matrix
    directions = _orthogonalized(wide)
    mean = jnp.sum(directions * wide) / min(wide.shape)
    return (mean * directions).astype(matrix.dtype)


def _orthogonalized(matrix: jax.Array) -> jax.Array:
    """Return the nearest matrix whose singular values are 1, approximately."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    norm = jnp.linalg.norm(x)  # at least the largest singular value
    x = x / jnp.where(norm > 0, norm, 1)
    # By default, accelerators round the factors of a product to fewer bits.
    product = functools.partial(jnp.matmul, precision="highest")
    for a, b, c in _COEFFICIENTS:
        gram = product(x, x.T)  # [k, k]
        x = a * x + product(b * gram + product(c * gram, gram), x)
    return x.T if is_tall else x
