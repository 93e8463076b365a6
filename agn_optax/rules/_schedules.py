"""What the schedules of a center optimizer count: exchanges, or local steps."""

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
def _scheduled() -> tuple[type, ...]:
    """The states of optax whose count is what a schedule is asked for.

    Adam's is none of them: it tells of how many updates its moments are made.
    """
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda count: 0.1)
    state = jax.eval_shape(sgd.init, ())
    return optax.ScaleByScheduleState, type(state.hyperparams_states["learning_rate"])


@dataclasses.dataclass(frozen=True)
class _Init:
    """The init of a center optimizer whose schedules count local steps."""

    init: Callable[[PyTree], PyTree]

    def __call__(self, params: PyTree) -> PyTree:
        return self.init(params)


def by_local_steps(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""A center optimizer whose schedules count local steps, not exchanges.

    .. math:: c' = c + \text{center}_{\eta(t - 1)}(m), \quad
        t = \text{local steps that a worker has made, this round's included}

    An optimizer asks its schedules once for each of its updates, and a center has one
    update an exchange: after N local steps with period :math:`\lambda`, a cosine of N
    steps would be at N / :math:`\lambda`, and its rate hardly lower than at first. So
    wrapped, a center optimizer takes the rate that a worker's last local step had.
    `agn_optax.agn` wraps the inner optimizer so, where it is also the center's.

    Only the counts of schedules are moved on, in ``scale_by_schedule`` and
    ``inject_hyperparams``; Adam's bias correction counts updates, as it must.

    Args:
      optimizer: a center optimizer for rules in an optimizer state: drop-in, split or
        round. Its state stays what it was.

    Returns:
      An optax transformation, which needs the extra argument ``steps`` (int32 scalar):
      the local steps of the round that ends.

    Raises:
      InvalidTypeError: ``optimizer`` is not an optax optimizer.
      MissingArgumentError: by its ``update``, without ``steps``.

    A center outside the program refuses it: workers there are not at the same step, and
    schedules count the messages that the center has applied.

    Example:
      >>> import optax, agn_optax
      >>> outer = optax.sgd(optax.cosine_decay_schedule(0.7, 10_000), momentum=0.9)
      >>> outer = agn_optax.by_local_steps(outer)
      >>> tx = agn_optax.diloco(optax.adamw(4e-4), period=500, center=outer)
    """
    if isinstance(getattr(optimizer, "init", None), _Init):
        return optimizer  # it does
    optimizer = check.optimizer(optimizer, "optimizer")

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        steps: Any = None,
        outside: Any = False,  # whether it moves a center outside the program
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        if steps is None:
            raise errors.MissingArgumentError(
                "by_local_steps(optimizer).update needs steps, the local steps of the "
                "round that ends, got steps=None"
            )
        if outside is not False:
            _refuse_outside()

        def move_on(node: Any) -> Any:
            count = node.count
            return node._replace(count=count + (steps - 1).astype(count.dtype))

        state = trees.map_nodes(move_on, state, _scheduled())
        return optimizer.update(updates, state, params, steps=steps, **extra_args)

    return optax.GradientTransformationExtraArgs(_Init(optimizer.init), update)


def check_outside(optimizer: optax.GradientTransformation) -> None:
    """It may move a center outside the program."""
    if isinstance(optimizer.init, _Init):
        _refuse_outside()


def _refuse_outside() -> NoReturn:
    combinations.refuse(
        "by_local_steps",
        "a center outside the program",
        "a center optimizer by_local_steps(...)",
    )


def counts_exchanges(optimizer: optax.GradientTransformation, state: PyTree) -> bool:
    """Whether it, of which ``state`` is, has a schedule asked once an exchange."""
    is_told_steps = isinstance(optimizer.init, _Init)
    return not is_told_steps and bool(trees.nodes(state, _scheduled()))
