"""Schedules of center optimizers, which count exchanges or local steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import optax

from agn_optax import errors
from agn_optax._internal import check, combinations, trees

PyTree = Any


@functools.cache
def _schedule_states() -> tuple[type, ...]:
    """Return the state classes of optax whose count is the argument of a schedule.

    Adam's state is not one of them: its count is for the bias correction.
    """
    wrapped = optax.schedules.WrappedSchedule(lambda count: 0.1)
    return optax.ScaleByScheduleState, type(jax.eval_shape(wrapped.init))


@dataclasses.dataclass(frozen=True)
class _Init:
    """The ``init`` of a center optimizer whose schedules count local steps.

    The class marks such an optimizer.
    """

    init: Callable[[PyTree], PyTree]

    def __call__(self, params: PyTree) -> PyTree:
        return self.init(params)


def by_local_steps(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Make the schedules of a center optimizer count local steps, not exchanges.

    .. math:: c' = c + \text{center}_{\eta(t - 1)}(m), \quad
        t = \text{local steps that a worker has made, this round's included}

    An optimizer calls its schedules once for each of its updates, and a center has one
    update per exchange. After N local steps with period :math:`\lambda`, a cosine decay
    over N steps would only be at N / :math:`\lambda`, with a rate hardly lower than at
    the start. With this wrapper, the center optimizer uses the rate of a worker's last
    local step. `agn_optax.agn` applies the wrapper if the inner optimizer is also the
    center optimizer.

    Only the counts of schedules are advanced, those of ``scale_by_schedule`` and
    ``inject_hyperparams``. Adam's bias correction still counts updates, as it must.

    Args:
      optimizer: a center optimizer for rules in an optimizer state (drop-in, split or
        round form). The structure of its state does not change.

    Returns:
      An optax transformation, which needs the extra argument ``steps`` (int32 scalar):
      the local steps of the round that ends.

    Raises:
      InvalidTypeError: ``optimizer`` is not an optax optimizer.
      MissingArgumentError: raised by its ``update`` if ``steps`` is missing.

    A center outside the program rejects the wrapped optimizer: its workers are not all
    at the same step, and its schedules count the messages that it has applied.

    Example:
      >>> import optax, agn_optax
      >>> outer = optax.sgd(optax.cosine_decay_schedule(0.7, 10_000), momentum=0.9)
      >>> outer = agn_optax.by_local_steps(outer)
      >>> tx = agn_optax.diloco(optax.adamw(4e-4), period=500, center=outer)
    """
    if isinstance(getattr(optimizer, "init", None), _Init):
        return optimizer  # wrapped already
    optimizer = check.optimizer(optimizer, "optimizer")

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        steps: Any = None,
        outside: Any = False,  # whether the center is outside the program
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        if steps is None:
            raise errors.MissingArgumentError(
                "by_local_steps(optimizer).update needs steps, the local steps of the "
                "round that ends, got steps=None"
            )
        if outside is not False:
            _reject_outside()

        def advance(node: Any) -> Any:
            count = node.count
            return node._replace(count=count + (steps - 1).astype(count.dtype))

        state = trees.map_nodes(advance, state, _schedule_states())
        return optimizer.update(updates, state, params, steps=steps, **extra_args)

    return optax.GradientTransformationExtraArgs(_Init(optimizer.init), update)


def check_outside(optimizer: optax.GradientTransformation) -> None:
    """Raise if ``optimizer`` cannot move a center outside the program."""
    if isinstance(optimizer.init, _Init):
        _reject_outside()


def _reject_outside() -> NoReturn:
    combinations.reject(
        "by_local_steps",
        "a center outside the program",
        "a center optimizer by_local_steps(...)",
    )


def counts_exchanges(optimizer: optax.GradientTransformation, state: PyTree) -> bool:
    """Return whether an optimizer has schedules that count exchanges.

    Args:
      optimizer: the center optimizer.
      state: its state.
    """
    counts_local_steps = isinstance(optimizer.init, _Init)
    return not counts_local_steps and bool(trees.nodes(state, _schedule_states()))
