"""Agreement between the processes of a `jax.distributed` job, without collectives.

The coordination service of the job has a store of keys and values. Unlike collectives
of devices, it can be used on any thread, in any order, and by some of the processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import distributed

from agn_optax import errors

_PREFIX = "agn_optax"


class Processes:
    """The processes that work together, as one of them sees the group.

    All of them must call the same methods with the same keys, once for each key.

    Args:
      indices: indices of the processes in the job, in ascending order.
      name: a name for the keys of this group, the same in all processes.
    """

    def __init__(self, indices: Sequence[int], name: str) -> None:
        self.indices = tuple(indices)
        self.index = self.indices.index(jax.process_index())
        self._name = f"{_PREFIX}/{name}"
        self._old: list[str] = []  # keys that all processes have read, or soon will

    def __len__(self) -> int:
        return len(self.indices)

    def gather(self, key: str, value: Any, timeout: float) -> list[Any]:
        """Return the values of all processes, in their order.

        The first process collects them and publishes the list.

        Args:
          key: a key that has not been used.
          value: this process's value, serializable as JSON.
          timeout: seconds to wait at most, for each of two steps.

        Raises:
          CenterError: another process did not call this in time.
        """
        self._set(f"{key}/{self.index}", value)
        if self.index:
            return self._get(f"{key}/all", key, 0, 2 * timeout)
        values, end, missing = [value], time.monotonic() + timeout, None
        for index in range(1, len(self)):
            try:
                left = max(0.001, end - time.monotonic())
                values.append(self._get(f"{key}/{index}", key, index, left))
            except errors.CenterError as error:
                missing = error
                break
        if missing is not None:  # the others need not wait any longer
            self._set(f"{key}/all", {"missing": str(missing)})
            raise missing
        self._set(f"{key}/all", values)
        self._forget(key)
        return values

    def peek(self, key: str, index: int) -> Any:
        """Return the value that a process has given to `gather`; None if none yet."""
        try:
            return json.loads(
                _client().key_value_try_get(f"{self._name}/{key}/{index}")
            )
        except Exception:  # of the runtime, whose type is not public
            return None

    def share(self, key: str, value: Any, timeout: float) -> Any:
        """Return the first process's value in all processes; others are ignored."""
        if self.index:
            return self._get(f"{key}/all", key, 0, timeout)
        self._set(f"{key}/all", value)
        self._forget(key)
        return value

    def _set(self, key: str, value: Any) -> None:
        _client().key_value_set(f"{self._name}/{key}", json.dumps(value))

    def _get(self, key: str, what: str, index: int, timeout: float) -> Any:
        try:
            text = _client().blocking_key_value_get(
                f"{self._name}/{key}", max(1, round(timeout * 1000))
            )
        except Exception as error:  # of the runtime, whose type is not public
            raise errors.CenterError(
                f"process {self.indices[index]} did not take part in {what!r} within "
                f"{timeout:.1f} s: all processes of a worker must make the same calls "
                f"of start, exchange and flush ({type(error).__name__})"
            ) from error
        value = json.loads(text)
        if isinstance(value, dict) and "missing" in value:
            raise errors.CenterError(value["missing"])
        return value

    def _forget(self, key: str) -> None:
        """Delete the keys of earlier calls, which all processes have read."""
        self._old.append(key)
        if len(self._old) > _KEPT_KEYS:
            _client().key_value_delete(f"{self._name}/{self._old.pop(0)}/")


# Calls whose keys are kept. A process may still be reading the newest ones.
_KEPT_KEYS = 64


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise errors.WorkerStateError(
            "a worker of several processes needs jax.distributed.initialize()"
        )
    return client
