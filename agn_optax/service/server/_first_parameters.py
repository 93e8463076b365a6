"""The first parameters of a center, from a chief of several processes."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np

from agn_optax import errors
from agn_optax.center import Region, Share
from agn_optax.service.security._call_limits import CHIEF_TIMEOUT
from agn_optax.service.server._whole import WholeTree, check_cover
from agn_optax.service.wire import _trees
from agn_optax.service.wire._buffers import Buffers
from agn_optax.service.wire._schema import Schema

PyTree = Any


class FirstParameters:
    """The first parameters of a center, while a chief's processes send their pieces.

    Args:
      buffers: buffers.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._changed = threading.Lock()
        self._group = ""  # id of the chief's processes
        self._received = -math.inf  # time when its last pieces came; monotonic seconds
        self._whole: WholeTree | None = None
        self._owned: dict[int, tuple[Region, ...]] = {}  # by process

    @property
    def is_empty(self) -> bool:
        """True if no process waits for others of its chief."""
        return self._whole is None

    def forget(self) -> None:
        """Release the pieces of a chief that has failed."""
        with self._changed:
            self._whole = None

    def places(self, share: Share, schema: Schema) -> list[np.ndarray]:
        """Return the arrays into which a process's pieces are received.

        Raises:
          CenterBusyError: another chief is sending its first parameters.
          InvalidArgumentError: other processes have parameters of another schema.
        """
        now = time.monotonic()
        with self._changed:
            if self._group != share.group or self._whole is None:
                if self._whole is not None and now - self._received < CHIEF_TIMEOUT:
                    raise other_chief()
                self._group, self._owned = share.group, {}
                self._whole = WholeTree(schema, self._buffers)
            if difference := schema.difference(
                self._whole.schema,
                f"process {share.process} has",
                "another process has",
            ):
                self._whole = None
                raise errors.InvalidArgumentError(
                    "the processes of a chief disagree about the parameters: "
                    f"{difference}"
                )
            self._received = now
            return self._whole.places(share.owned)

    def add(self, share: Share) -> PyTree:
        """Record that a process's pieces are there; return the parameters once all are.

        Raises:
          InvalidArgumentError: the shares do not cover each leaf once.
        """
        with self._changed:
            whole, self._received = self._whole, time.monotonic()
            if self._group != share.group or whole is None:
                return None
            self._owned[share.process] = share.owned
            if len(self._owned) < share.processes:
                return None
            self._whole = None
            check_cover(self._owned.values(), whole.schema)
        return _trees.build(whole.schema, whole.views)


def other_chief() -> errors.CenterBusyError:
    """Return the error of a chief that comes while another one sends.

    The client retries until its timeout, because the other chief may fail.
    """
    return errors.CenterBusyError(
        "another worker is initializing this center; try again"
    )
