"""Numbers of past versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.rules import Rule
from agn_optax.tape._tape import Tape

PyTree = Any


class Measured(NamedTuple):
    """Numbers of one version."""

    version: int
    time: float  # s, since the center began
    numbers: Mapping[str, float]


def measure(
    function: Callable[[PyTree], Any], version: int, time: float, params: PyTree
) -> Measured:
    """Call a function of parameters, and return its numbers.

    Raises:
      InvalidTypeError: the function returns neither a number nor a dict of numbers.
    """
    found = function(params)
    by_name = found if isinstance(found, Mapping) else {"value": found}
    try:
        numbers = {str(name): float(value) for name, value in by_name.items()}
    except (TypeError, ValueError):
        raise errors.InvalidTypeError(
            "a function of parameters must return a number or a dict of numbers, got "
            f"{check.show(found)}"
        ) from None
    return Measured(version, time, numbers)


def evaluate(
    tape: Tape,
    rule: Rule,
    function: Callable[[PyTree], Any],
    *,
    every: int = 1,
    params: PyTree = None,
    progress: Callable[[int], None] | None = None,
) -> list[Measured]:
    """Return numbers of past versions, after a run or beside it.

    Args:
      tape: the tape.
      rule: the center's rule.
      function: function from parameters to a number, or to a dict of numbers.
      every: versions from one call of the function to the next; the newest version is
        measured, too.
      params: parameters with the containers to use, see `Tape.replay`.
      progress: called with the number of each record.

    Raises:
      DurabilityError, RuleMismatchError: see `Tape.replay`.
      InvalidTypeError: the function returns something else.

    Example:
      >>> import tempfile, jax.numpy as jnp, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     journal = agn_optax.center.Journal(folder, keep="contributions")
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=journal)
      ...     session = center.join("worker-0")
      ...     for i in range(3):
      ...         sent = agn_optax.center.Submission(i + 1, jnp.ones(2), i)
      ...         _ = session.exchange(sent)
      ...     center.close()
      ...     tape = agn_optax.tape.read(folder)
      ...     for each in agn_optax.tape.evaluate(tape, rule, jnp.sum, every=2):
      ...         print(each.version, each.numbers)
      0 {'value': 2.0}
      2 {'value': -2.0}
      3 {'value': -4.0}
    """
    check.whole_number(every, "every", least=1, optional=False)
    first, newest = tape.snapshots[0], tape.find()
    versions = {*range(first.version, newest.version + 1, every), newest.version}
    begin = first.number
    measured = []
    for event, state in tape.states(
        rule, versions, begin=begin, params=params, progress=progress
    ):
        time = 0.0 if event is None else event.time
        measured.append(measure(function, int(state.version), time, state.params))
    return measured
