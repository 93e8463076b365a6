"""The caller's choice of a place for the center."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from agn_optax import errors
from agn_optax._internal import check, combinations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    r"""Placement of a center that is part of an optimizer state.

    With ``shard_axis``, each of the n towers of that axis keeps 1/n of the center and
    of the center optimizer's state, and updates only that part. If this is the axis of
    the workers, messages are reduce-scattered and the new center is all-gathered, which
    together send as much data as the all-reduce of a whole center. Rules that read the
    anchor or the current center gather the center once more before the exchange. If it
    is the axis of the towers of a data-parallel worker, which have the same gradients,
    each tower also keeps only 1/n of the record, and no reduction is needed.

    The center optimizer and the rule must then work element by element. A rule or
    optimizer that reads a whole tree or a whole leaf (global-norm clipping, trust
    ratios, matrix orthogonalization) raises an error when the state is made.

    With ``gossip``, there is no common center. Every worker i keeps its own center, and
    exchanges with one other worker j at a time:

    .. math::
        m_i = \tfrac12 (m(x_i, c_i) + m(x_j, c_j))
            + \gamma \left(c_i - \tfrac12 (c_i + c_j)\right); \qquad
        c_i' = c_i + \text{center}(m_i); \qquad x_i \leftarrow c_i'

    (for a rule that sums, the sum of the two messages takes the place of their mean).
    No collective has more than two workers, and each worker sends one model in float32,
    or in the center's dtype if that is wider, whatever the number of workers. With
    ``rules.average()`` and a gossip of 1 this is gossip averaging,
    :math:`c_i' = (x_i + x_j) / 2`. With a gossip of 1 and DiLoCo's rule with plain
    momentum, ``rules.diloco(optax.sgd(0.7, momentum=0.5))``, it is NoLoCo. Partners
    change in a fixed order: with n = 2, 4, 8, ... workers, information from each worker
    has reached all others after log2(n) exchanges, and with other numbers it has
    reached most of them. (With an odd number, one worker at a time has no partner.)
    NoLoCo draws its pairs at random. The fixed order needs only about log2(n) different
    permutations in the program instead of n - 1.

    The pull (the term with :math:`\gamma`) goes through the center optimizer, as in
    NoLoCo, so momentum can drive the centers apart. With a momentum of 0.9 and a rate
    of 0.7, a gossip of 1 drives 5 or more workers apart (with random pairs, 6 or more),
    and a gossip of 0.3 keeps 64 workers together. With a momentum of 0.5, a gossip of 1
    keeps 96 workers together, the most that were tried. Without momentum, any gossip
    below 2 keeps them together, at rates up to 1.

    The centers stay different, and so do parameters and states: keep them with a row
    for each worker, as `Towers` does. A checkpoint of the rows restores them exactly.
    `Towers.center_params` gives the mean of the centers. `Towers.unreplicate` gives
    the means of the centers and of their optimizers' states.

    Args:
      shard_axis: mesh axis, or tuple of axes, over which the center is divided; None
        keeps it whole on every tower. Leaves with fewer elements than towers stay
        whole.
      memory: ``"device"`` or ``"host"``. On the host, the center and the center
        optimizer's state are kept in pinned memory and copied to the device for an
        exchange.
      gossip: :math:`\gamma > 0`, the strength of the pull between the centers of two
        partners, as part of the message; None for one center common to all workers.

    Raises:
      InvalidArgumentError: ``memory`` has another value, or ``gossip`` is out of range
        or given with ``shard_axis``.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> tx = agn_optax.exchange_every(
      ...     optax.adam(1e-3),
      ...     agn_optax.rules.agn(optax.adam(1e-3)),
      ...     period=10,
      ...     axis_name="workers",
      ...     placement=agn_optax.Placement(shard_axis="workers"),
      ... )
      >>> towers = agn_optax.Towers(workers=4)
      >>> state = towers.create(tx.init, {"w": jnp.ones(10)})
      >>> towers.center_params(state)["w"].shape
      (10,)

    References:
      Samyam Rajbhandari, Jeff Rasley, Olatunji Ruwase, Yuxiong He, *ZeRO: Memory
      Optimizations Toward Training Trillion Parameter Models*, 2020.

      Jari Kolehmainen et al., *NoLoCo: No-all-reduce Low Communication Training Method
      for Large Models*, 2025 (the equation as in its authors' program, where the pull
      of the centers goes through the center optimizer with the message).

      Bicheng Ying, Kun Yuan, Yiming Chen, Hanbin Hu, Pan Pan, Wotao Yin, *Exponential
      Graph is Provably Efficient for Decentralized Deep Training*, 2021 (the order of
      partners).
    """

    shard_axis: Any = None
    memory: Literal["device", "host"] = "device"
    gossip: float | None = None

    def __post_init__(self) -> None:
        if self.gossip is not None:
            check.rate(self.gossip, "gossip", low=0.0, high=math.inf, low_open=True)
            if self.shard_axis is not None:
                combinations.reject(
                    "gossip",
                    "a center in shards",
                    f"gossip={self.gossip}, shard_axis={self.shard_axis!r}",
                )
        if self.memory not in ("device", "host"):
            raise errors.InvalidArgumentError(
                f"memory must be 'device' or 'host', got {check.show(self.memory)}"
            )
