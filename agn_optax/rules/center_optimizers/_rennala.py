"""The center optimizer `rennala`: one step for several messages to one center."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check
from agn_optax.rules.center_optimizers._buffered import buffered

PyTree = Any


class RennalaState(NamedTuple):
    """State of `rennala`."""

    inner_state: PyTree  # `BufferedState`, with the state of the wrapped optimizer
    versions: jax.Array  # int32 scalar: number of versions since the last step


def rennala(
    optimizer: optax.GradientTransformation, size: int
) -> optax.GradientTransformationExtraArgs:
    r"""Step along the mean of several messages to the current center (Rennala SGD).

    .. math::
        \text{if } g \text{ was computed at } c: \; D \leftarrow D + g; \qquad
        \text{each } S\text{-th time:} \; c \leftarrow c + \text{optimizer}(D / S), \;
            D \leftarrow 0

    Workers exchange one by one and never wait. Fast workers contribute several messages
    to a step; a message whose anchor is from before the last step is ignored. A step
    then has as little bias as a round of a synchronous center, but no slow worker
    delays it: with equally distributed data, the time is optimal up to a constant, for
    any speeds. With unlike data, use `ringleader`.

    Each message still makes a new version, also an ignored one, so the staleness that
    answers report, and that a transformation before it in the chain gets, counts
    messages. The inner optimizer gets the staleness in steps of the center, which is 0.
    A combined message of a round, or of a mesh, is always current.

    Use it with ``period=1``, or with any period, and a rule that sends whole
    displacements or gradients. A worker is not told that its message was ignored, so a
    codec with error feedback loses it.

    Args:
      optimizer: the center optimizer. It also runs at the messages in between, but its
        results are discarded.
      size: :math:`S`, messages of a step, such as
        :math:`\max(1, \lceil \sigma^2 / \varepsilon \rceil)`, where :math:`\sigma^2` is
        the variance of a message and :math:`\varepsilon` the square of the norm of the
        gradient that is to be reached: their mean then has a variance of at most
        :math:`\varepsilon`.

    Returns:
      A center optimizer with `RennalaState`, which needs the extra argument
      ``staleness``. Its inner optimizer gets the other extra arguments of the last
      message.

    Raises:
      InvalidArgumentError: ``size`` is not a positive int.
      InvalidTypeError: ``optimizer`` is not an optax optimizer.
      MissingArgumentError: ``update`` is called without ``staleness``.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> from agn_optax.center import Submission
      >>> outer = agn_optax.center_optimizers.rennala(optax.sgd(1.0), 2)
      >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(outer), jnp.zeros(1))
      >>> session = center.join("worker-0")
      >>> for sequence, (message, anchor) in enumerate(
      ...     [(1.0, 0), (3.0, 0), (5.0, 1), (5.0, 2), (7.0, 2)], start=1
      ... ):  # the third was computed before the step that made version 2
      ...     sent = Submission(sequence, jnp.full(1, message), anchor)
      ...     print(session.exchange(sent).params)
      [0.]
      [-2.]
      [-2.]
      [-2.]
      [-8.]

    References:
      Alexander Tyurin, Peter Richtárik, *Optimal Time Complexities of Parallel
      Stochastic Optimization Methods Under a Fixed Computation Model*, 2023. The
      listing was read in a later paper, which restates it.
    """
    buffer = buffered(optimizer, size)

    def init_fn(params: PyTree) -> RennalaState:
        return RennalaState(buffer.init(params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree,
        state: RennalaState,
        params: PyTree = None,
        *,
        staleness: Any = None,
        since: Any = 0,
        **extra_args: Any,
    ) -> tuple[PyTree, RennalaState]:
        check.extra_argument_given(staleness, "staleness=0", "rennala")
        is_current = jnp.asarray(staleness <= state.versions)
        new_updates, inner_state = buffer.update(
            updates,
            state.inner_state,
            params,
            staleness=jnp.zeros((), jnp.int32),
            since=since + staleness,
            **extra_args,
        )

        where, zeros = optax.tree.where, optax.tree.zeros_like
        has_stepped = is_current & (inner_state.buffered == 0)
        return where(is_current, new_updates, zeros(new_updates)), RennalaState(
            where(is_current, inner_state, state.inner_state),
            jnp.where(has_stepped, 0, optax.safe_increment(state.versions)),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
