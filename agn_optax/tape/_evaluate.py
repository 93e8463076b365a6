"""Numbers of past versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.rules import Rule
from agn_optax.tape._tape import Tape

PyTree = Any
_BLOCK = 64  # results of a function that are read at a time


class Measured(NamedTuple):
    """Numbers of one version."""

    version: int
    time: float  # s, since the center began
    numbers: Mapping[str, float]


class Measurements:
    """The numbers of every few versions, and of the newest one.

    Numbers are read many at a time, because reading waits for the device.

    Args:
      function: function of parameters; None measures nothing.
      every: versions from one call of the function to the next.
    """

    def __init__(self, function: Callable[[PyTree], Any] | None, every: int) -> None:
        check.whole_number(every, "every", least=1, optional=False)
        self._function, self._every = function, every
        self._found: list[Measured] = []
        self._unread: list[tuple[int, float, Any]] = []  # results of the function
        self._next: int | None = None  # version
        # The newest version, if it is not measured.
        self._last: tuple[int, float, Callable[[], PyTree]] | None = None

    def add(self, version: int, time: float, params: Callable[[], PyTree]) -> None:
        """Measure a version, if it is its turn.

        Args:
          version: number of the version.
          time: its time, in s.
          params: returns its parameters; called before there is another version.
        """
        if self._next is None or version >= self._next:
            self._next, self._last = version + self._every, None
            self._measure(version, time, params)
        else:
            self._last = version, time, params

    def finished(self) -> list[Measured]:
        """Measure the newest version, and return all numbers."""
        if self._last is not None:
            self._measure(*self._last)
        self._read()
        return self._found

    def _measure(self, version: int, time: float, params: Callable[[], PyTree]) -> None:
        if self._function is not None:
            self._unread.append((version, time, self._function(params())))
            if len(self._unread) >= _BLOCK:
                self._read()

    def _read(self) -> None:
        self._found += [Measured(v, t, _numbers(found)) for v, t, found in self._unread]
        self._unread.clear()


def _numbers(found: Any) -> Mapping[str, float]:
    by_name = found if isinstance(found, Mapping) else {"value": found}
    try:
        return {str(name): float(value) for name, value in by_name.items()}
    except (TypeError, ValueError):
        raise errors.InvalidTypeError(
            "a function of parameters must return a number or a dict of numbers, got "
            f"{check.show(found)}"
        ) from None


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
    measured = Measurements(function, every)
    for event, store in tape.run(rule, None, params, progress):
        if event is None or event.applied:
            time = 0.0 if event is None else event.time
            measured.add(store.current.number, time, store.current_params)
    return measured.finished()
