"""A worker of several processes, of which only the first communicates with the center.

All processes run one program with a `Worker` each. These workers make the same calls at
the same time, because the first process broadcasts each answer of the center to the
others. The broadcasts are collectives, like those of the program, and must be called on
the same thread. So only the first process has a message in flight, and it broadcasts
whether the answer has arrived.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from agn_optax import errors
from agn_optax._internal import check, description, in_background, trees
from agn_optax.center import (
    Answer,
    Center,
    Session,
    Snapshot,
    Submission,
    Transfer,
)
from agn_optax.rules import Rule
from agn_optax.worker._flight import Message

PyTree = Any
Record = TypeVar("Record", Snapshot, Answer)

# s between broadcasts while there is no answer yet: on some backends collectives time
# out early.
_PAUSE = 5.0


def from_first_process(connect: Callable[[], Center], rule: Rule) -> Center:
    """Connect a worker of several processes to a center, through the first process.

    This is for a worker whose processes `jax.distributed` has joined, such as
    towers on all hosts of a slice. Each process makes a `Worker` with this center, and
    calls the same methods of both in the same order with the same values. The arguments
    of the first process are sent to the center, and its answer or error is passed to
    all processes, so that all stay identical, bit for bit. In a program with a single
    process the result is ``connect()``.

    Args:
      connect: makes the center, such as ``lambda: service.connect(address, rule)``;
        called in the first process only.
      rule: the center's rule.

    Returns:
      A center. Each process may call its ``close`` and `Worker.leave` at any time,
      because these do not communicate with the other processes.

    Raises:
      InvalidTypeError: ``rule`` is not a rule.

    An error of ``connect`` in the first process is raised in all processes.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.from_first_process(
      ...     lambda: agn_optax.LocalCenter(rule), rule
      ... )
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2)
      >>> params, state = worker.start(jnp.zeros(3), chief=True)
    """
    check.instance(rule, Rule, "rule must be one of agn_optax.rules")
    return connect() if jax.process_count() == 1 else _SharedCenter(connect, rule)


class _SharedCenter(contextlib.AbstractContextManager["_SharedCenter"]):
    """A center whose answers to the first process are passed to all processes."""

    def __init__(self, connect: Callable[[], Center], rule: Rule) -> None:
        self.rule = rule
        self._treedef: Any = None  # structure of the parameters; None until known
        self._center: Any = _run_in_first(connect)  # None in the other processes
        self._name = _broadcast_json(repr(self._center))

    def __repr__(self) -> str:
        """Return a description of the first process's center."""
        return f"{self._name}, for {jax.process_count()} processes"

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        resume_token: Any = None,
    ) -> Any:
        if params is not None:
            self._treedef = jax.tree.structure(params)
        session = _run_in_first(
            lambda: self._center.join(
                worker, params, timeout=timeout, resume_token=resume_token
            )
        )
        return SharedSession(session, self)

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        self._treedef = jax.tree.structure(params)
        return self.shared(
            Snapshot,
            lambda: self._center.initialize(_local_copies(params), worker=worker),
        )

    def wait(self, timeout: float | None = None) -> Snapshot:
        return self.shared(Snapshot, lambda: self._center.wait(timeout))

    def pull(self) -> Snapshot:
        return self.shared(Snapshot, lambda: self._center.pull())

    def close(self) -> None:
        """Close the center that the first process has opened."""
        if hasattr(self._center, "close"):
            self._center.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def shared(self, kind: type[Record], ask: Callable[[], Record]) -> Record:
        """Call a function in the first process; return its record in all processes."""
        record = _run_in_first(ask)
        params = record and record.params
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        structure = trees.describe(params).structure
        plain = record and {**record._asdict(), "params": structure}
        kinds = [(leaf.dtype.name, leaf.shape) for leaf in leaves]
        fields, kinds = _broadcast_json([plain, kinds])
        arrays = map(jnp.asarray, _broadcast_arrays(leaves, kinds))
        if self._treedef is not None:
            fields["params"] = self._treedef.unflatten(arrays)
        else:
            fields["params"] = description.rebuild(fields["params"], arrays)
        if isinstance(version := fields["version"], list):
            fields["version"] = tuple(version)
        return kind(**fields)


class SharedSession:
    """A session of the first process, whose ids all processes have."""

    def __init__(self, session: Session | None, center: _SharedCenter) -> None:
        self._session: Any = session  # None in the other processes
        self.center = center
        ids = session and [session.worker, session.session_id, session.resume_token]
        self.worker, self.session_id, self.resume_token = _broadcast_json(ids)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers of the first process; none in the others."""
        return () if self._session is None else tuple(self._session.transfers)

    def exchange(self, submission: Submission) -> Answer:
        """Exchange in the first process, on any thread, without the other processes."""
        return cast(Answer, self._session.exchange(_local_copies(submission)))

    def leave(self) -> None:
        if self._session is not None:
            self._session.leave()


@dataclasses.dataclass(eq=False)
class SharedMessage(Message):
    """A message that the first process sends, and whose answer all processes get."""

    session: SharedSession

    def exchange(self) -> Answer:
        return self.session.center.shared(Answer, self.send_once)

    def send_in_background(self, give_up: float) -> None:
        if _is_first():
            super().send_in_background(give_up)
        else:
            self.flight = concurrent.futures.Future()  # never done in this process

    def is_answered(self) -> bool:
        is_done = np.int32(super().is_answered())
        return bool(multihost_utils.broadcast_one_to_all(is_done))

    def receive(self) -> Answer:
        return self.session.center.shared(Answer, super().receive)


def _is_first() -> bool:
    return jax.process_index() == 0


def _run_in_first(call: Callable[[], Any]) -> Any:
    """Call a function in the first process; return its result, or None in the others.

    All processes wait for the function, and all raise its error.
    """
    future = in_background(call, "agn-optax first process") if _is_first() else None
    while (failure := _broadcast_json(_outcome(future))) is None:
        pass
    if future is not None:
        return future.result()
    if not failure:
        return None
    name, text = failure
    if name in errors.__all__:
        raise getattr(errors, name)(text)
    raise errors.CenterError(f"the first process of this worker: {name}: {text}")


def _outcome(future: Any) -> list[str] | None:
    """Return the type and text of a future's error, or [] without an error.

    Return None if there is no future, or if it is not done after a pause.
    """
    if future is None or not concurrent.futures.wait([future], _PAUSE).done:
        return None
    error = future.exception()
    return [] if error is None else [type(error).__name__, str(error)]


def _broadcast_json(value: Any) -> Any:
    """Broadcast the first process's value, which must be serializable as JSON."""
    # A norm is an array, which becomes a float.
    text = np.frombuffer(json.dumps(value, default=float).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    # Round the size up to a power of two, because each size is compiled.
    buffer = np.zeros(1 << size.bit_length(), np.uint8)
    if _is_first():
        buffer[:size] = text
    return json.loads(multihost_utils.broadcast_one_to_all(buffer).tobytes()[:size])


def _broadcast_arrays(
    leaves: list[np.ndarray], kinds: list[tuple[str, list[int]]]
) -> Any:
    """Broadcast the first process's arrays as bits: sums would lose signs of zeros."""
    if not _is_first():
        leaves = [np.zeros(shape, jnp.dtype(dtype)) for dtype, shape in kinds]
    bits = multihost_utils.broadcast_one_to_all([_as_bits(leaf) for leaf in leaves])
    return [
        array.view(leaf.dtype).reshape(leaf.shape)
        for array, leaf in zip(bits, leaves, strict=True)
    ]


def _as_bits(leaf: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
    return flat if flat.size % 4 else flat.view(np.uint32)


def _local_copies(tree: PyTree) -> PyTree:
    """Replace arrays that every process has in full by this process's copies."""

    def local_copy(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf.addressable_data(0)
        return leaf

    return jax.tree.map(local_copy, tree)
