"""Methods that are a rule and the mode of its center together."""

from __future__ import annotations

from typing import NamedTuple

import optax

from agn_optax._internal import check
from agn_optax.center._modes import BoundedStaleness, Synchronous
from agn_optax.round import Fragments
from agn_optax.rules import Rule, codecs, downpour
from agn_optax.rules import decoupled_diloco as decoupled_rule


class DecoupledDiloco(NamedTuple):
    """The settings of a run; made by `decoupled_diloco`."""

    rule: Rule  # of the center and of all workers
    mode: Synchronous  # of the center, and of each shard
    fragments: Fragments  # of all workers


def decoupled_diloco(
    fragments: Fragments,
    *,
    quorum: int,
    center: optax.GradientTransformation | None = None,
    codec: codecs.Codec | None = None,
    slack_share: float = 1.0,
    sync_time: float = 0.0,
    grace: float = 0.0,
) -> DecoupledDiloco:
    r"""Return the rule, mode and fragments of Decoupled DiLoCo.

    .. math::
        w_i = t_i^2 / s_i; \qquad m_p = \text{radial}_{i \in M_p}(a_p - x_{i,p}; w_i);
        \qquad c_p' = c_p + \text{center}(m_p)

    Each fragment :math:`p` has rounds of its own. A round ends when all workers have
    sent the fragment, or a quorum of them has, once the grace period is over:
    :math:`M_p` are the workers whose messages are there. The messages of slower workers
    count in the next round. The grace period is the slack of the fastest worker: its
    ``fragments.delay`` local steps, less the time of a synchronization. Give workers
    a ``patience`` of a period, so that those that missed a round do not wait for the
    next one.

    Args:
      fragments: the parts of the parameters that are exchanged in turns. Without a
        ``delay`` there is no slack, and the grace period is ``grace``.
      quorum: number of messages that end a round once the grace period is over.
      center: the outer optimizer; see `agn_optax.rules.decoupled_diloco`.
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.
      slack_share: fraction of the slack that the grace period takes, in [0, 1].
      sync_time: seconds of the slack that the answer needs to reach the workers.
      grace: grace period in seconds until the speed of a worker is known.

    Returns:
      The rule, the mode and the fragments.

    Raises:
      InvalidArgumentError: an argument is out of range.
      InvalidTypeError: ``fragments`` or ``center`` has another type.

    Example:
      >>> import agn_optax
      >>> fragments = agn_optax.Fragments(4, delay=5)
      >>> run = agn_optax.center.decoupled_diloco(fragments, quorum=3)
      >>> print(run.rule.combine, run.mode.quorum, run.mode.slack_steps)
      radial 3 5

    References:
      Arthur Douillard et al., *Decoupled DiLoCo for Resilient Distributed
      Pre-training*, 2026. Abstract and summaries were read; the grace period is that
      of `Synchronous`, and the weights follow public implementations.
    """
    such_as = "an agn_optax.Fragments, such as Fragments(4, delay=5)"
    check.instance(fragments, Fragments, f"fragments must be {such_as}")
    return DecoupledDiloco(
        decoupled_rule(center, codec=codec),
        Synchronous(
            quorum=quorum,
            grace=grace,
            slack_steps=fragments.delay or None,
            slack_share=slack_share,
            sync_time=sync_time,
        ),
        fragments,
    )


class Ringmaster(NamedTuple):
    """The settings of a run; made by `ringmaster`."""

    rule: Rule  # of the center and of all workers
    mode: BoundedStaleness  # of the center


def ringmaster(threshold: int, *, codec: codecs.Codec | None = None) -> Ringmaster:
    r"""Return the rule and mode of Ringmaster ASGD.

    .. math::
        c_{k+1} = c_k - \gamma\, \nabla f(c_{k - \delta}; \xi)
        \quad\text{if } \delta < R, \text{ else the gradient is dropped}

    A gradient has the delay :math:`\delta` if the center made so many steps since its
    worker adopted :math:`c_{k-\delta}`. Workers have ``period=1`` and ``optax.sgd``
    with the learning rate :math:`\gamma`, and data that is alike.

    Args:
      threshold: the smallest delay that is dropped, :math:`R`, at least 1. With the
        variance :math:`\sigma^2` of a gradient, :math:`\max(1, \lceil \sigma^2 /
        \varepsilon \rceil)` reaches a squared norm of the gradient of
        :math:`\varepsilon` in a time that is optimal up to a constant factor. Begin
        with the number of workers if these numbers are not known.
      codec: how contributions are encoded, one of `agn_optax.codecs`; None sends them
        unchanged.

    Returns:
      The rule and the mode.

    Raises:
      InvalidArgumentError: the threshold is below 1.
      InvalidTypeError: the threshold is not an int.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> run = agn_optax.center.ringmaster(8)
      >>> print(run.rule.name, run.mode.versions)
      downpour 7
      >>> center = agn_optax.LocalCenter(run.rule, jnp.ones(2), mode=run.mode)

    References:
      Artavazd Maranjyan, Alexander Tyurin, Peter Richtárik, *Ringmaster ASGD: The First
      Asynchronous SGD with Optimal Time Complexity*, 2025.
    """
    check.whole_number(threshold, "threshold", least=1, optional=False)
    return Ringmaster(downpour(codec=codec), BoundedStaleness(versions=threshold - 1))
