"""Agreement between the processes of a `jax.distributed` job, without collectives.

The coordination service of the job has a store of keys and values. Unlike collectives
of devices, it can be used on any thread, in any order, and by some of the processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from agn_optax import errors

_PREFIX = "agn_optax"
_FIRST_IS_MISSING = [None]  # in place of the calls of all
_GRACE = 1.0  # s that the others wait longer than the first process


class Processes:
    """The processes that work together, as one of them sees the group.

    They agree in rounds, which the first process ends: it publishes the values of all,
    or that some are missing. A process that has missed rounds goes on with the newest
    one, so that an error in one process does not put it out of step. Use an object on
    one thread at a time, but for `share`.

    The first process deletes the keys of a round once all have called the next one.

    Args:
      indices: indices of the processes in the job, in ascending order.
      name: a name for the keys of this group, the same in all processes.

    Raises:
      WorkerStateError: this process is not one of them.
    """

    def __init__(self, indices: Sequence[int], name: str) -> None:
        self.indices = tuple(indices)
        own = jax.process_index()
        if own not in self.indices:
            raise errors.WorkerStateError(
                f"process {own} has no device of the worker's mesh, which has those of "
                f"processes {list(self.indices)}"
            )
        self.index = self.indices.index(own)
        self._parent = f"{_PREFIX}/{'-'.join(map(str, self.indices))}"
        self._name = f"{self._parent}/{name}"
        self._round = 0
        self._first_kept = 0  # number of the oldest round with keys
        self._all_called = False  # whether all processes called in the last round
        # Names of groups of the same processes whose keys this process needs no more.
        self.ended: set[str] = set()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def round(self) -> int:
        """The number of the next round, after those that this process has missed."""
        while self._try_get(f"{self._round}/all") is not None:
            self._round += 1
        return self._round

    def gather(self, value: Any, timeout: float, what: str) -> list[Any]:
        """Return the values of all processes, in their order.

        Args:
          value: this process's value, serializable as JSON.
          timeout: seconds for which the first process waits for the others, and these
            for the first one, and a second more.
          what: a name of the round for errors.

        Raises:
          CenterError: a process did not call this in time.
        """
        end = time.monotonic() + timeout + (_GRACE if self.index else 0.0)
        # A name for this call: an earlier one may have left its value in this round.
        # As JSON has it, so that it compares with the values of the others.
        own = json.loads(json.dumps([uuid.uuid4().hex, what, value]))
        while True:
            # Others find at once how a round has ended; the first would wait for them.
            number = self._round if self.index else self.round
            self._set(f"{number}/{self.index}", own)
            if not self.index:
                calls = self._end_round(number, own, end)
            elif (calls := self._get(f"{number}/all", end)) is None:
                calls = self._publish(number, _FIRST_IS_MISSING)
                if calls == _FIRST_IS_MISSING:
                    raise self._missed([0], what, timeout)
            self._round += 1
            # Others may have ended the round without this call, or long before it.
            if calls != _FIRST_IS_MISSING and (calls[self.index] or [""])[0] == own[0]:
                break
        if missing := [i for i, call in enumerate(calls) if call is None]:
            given = [call[-1] for call in calls if call is not None]
            failed = [v["error"] for v in given if isinstance(v, dict) and "error" in v]
            raise self._missed(missing, what, timeout, failed)
        if len({name for _, name, _ in calls}) > 1:
            raise errors.CenterError(
                "the processes of a worker are at different calls: "
                f"{[name for _, name, _ in calls]}"
            )
        return [given for *_, given in calls]

    def _end_round(self, number: int, own: Any, end: float) -> Any:
        """Collect the calls of all processes, None for missing ones, and publish them.

        Once one is missing, the others are not waited for.
        """
        if self._all_called:  # nobody will look for an earlier round than the last
            for old in range(self._first_kept, self._round - 1):
                self.forget(str(old))
            self._first_kept = max(0, self._round - 1)
        calls = [own]
        for index in range(1, len(self)):
            key = f"{number}/{index}"
            is_over = None in calls
            calls.append(self._try_get(key) if is_over else self._get(key, end))
        self._all_called = None not in calls
        return self._publish(number, calls)

    def _publish(self, number: int, calls: Any) -> Any:
        """End a round, unless another process has; return how it has ended."""
        key = f"{number}/all"
        return calls if self._set(key, calls, is_new=True) else self._try_get(key)

    def peek(self, index: int) -> Any:
        """Return what a process has given to `gather` in this round, or None."""
        call = self._try_get(f"{self._round}/{index}")
        return None if call is None else call[-1]

    def share(self, key: str, value: Any, timeout: float) -> Any:
        """Return the first process's value in all processes; others are ignored.

        Raises:
          CenterError: the first process did not call this in time.
        """
        if not self.index:
            self._set(key, value)
            return value
        shared = self._get(key, time.monotonic() + timeout)
        if shared is None:
            raise self._missed([0], key, timeout)
        return shared

    def forget(self, key: str) -> None:
        """Delete a key, or the keys of a round, which no process will read any more."""
        _delete(f"{self._name}/{key}")

    def forget_groups(self, ended: Iterable[Sequence[str]]) -> None:
        """Delete the keys of the groups that have ended in all processes.

        Args:
          ended: the attribute `ended` of every process.
        """
        for name in set.intersection(*map(set, ended)):
            self.ended.discard(name)
            if not self.index:
                _delete(f"{self._parent}/{name}")

    def _missed(
        self,
        positions: Sequence[int],
        what: str,
        timeout: float,
        failed: Sequence[Any] = (),
    ) -> errors.CenterError:
        missing = [self.indices[i] for i in positions]
        others = "".join(f". Another one has failed: {error}" for error in failed)
        return errors.CenterError(
            f"processes {missing} did not take part in {what} within {timeout:.1f} s: "
            "all processes of a worker must make the same calls of start, exchange and "
            f"flush{others}"
        )

    def _set(self, key: str, value: Any, *, is_new: bool = False) -> bool:
        """Set a value; return False if it must be new, and there is one already."""
        text = json.dumps({"value": value})
        set_value = _client().key_value_set
        with _unless("ALREADY_EXISTS"):
            set_value(f"{self._name}/{key}", text, allow_overwrite=not is_new)
            return True
        return False

    def _get(self, key: str, end: float) -> Any:
        """Return a value, or None if there is none at the time ``end``."""
        milliseconds = max(1, round((end - time.monotonic()) * 1000))
        with _unless("DEADLINE_EXCEEDED"):
            text = _client().blocking_key_value_get(f"{self._name}/{key}", milliseconds)
            return json.loads(text)["value"]
        return None

    def _try_get(self, key: str) -> Any:
        with _unless("NOT_FOUND"):
            text = _client().key_value_try_get(f"{self._name}/{key}")
            return json.loads(text)["value"]
        return None


def _delete(key: str) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # it only takes memory
        _client().key_value_delete(key)


@contextlib.contextmanager
def _unless(status: str) -> Iterator[None]:
    """Leave the block on an error of this status of the coordination service.

    Raises:
      CenterError: an error of another status, such as of a job that is over.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith(status):
            text = f"cannot reach the other processes of the job: {error}"
            raise errors.CenterError(text) from error


@functools.cache
def of_job(indices: tuple[int, ...], name: str) -> Processes:
    """Return the one object of this process for a group that lasts as long as the job.

    Arguments are those of `Processes`.
    """
    return Processes(indices, name)


def _client() -> Any:
    from jax._src import distributed  # noqa: PLC0415 not needed by one process

    client = distributed.global_state.client
    if client is None:
        raise errors.WorkerStateError(
            "a worker of several processes needs jax.distributed.initialize()"
        )
    return client
