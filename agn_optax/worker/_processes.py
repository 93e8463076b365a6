"""A worker of several processes, each of which exchanges its own pieces.

The processes are those of a `jax.distributed` job that have devices of the parameters'
mesh. Each has a `Worker` with a connection of its own, and calls the same methods with
the same values. A center gets the pieces of all, applies them as one message, and
answers each process with its own pieces; nothing is gathered.

After each exchange the processes agree: only if all have got the same answer do they
adopt it. If one has not, all begin the exchange anew, or raise the same error.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import agreement, combinations, trees
from agn_optax.center import (
    Answer,
    Center,
    Pieces,
    Session,
    ShardedCenter,
    Share,
    Snapshot,
    Submission,
    Transfer,
    is_finite,
    not_finite,
    region_of,
    shares_of,
)
from agn_optax.worker._layout import Layout

PyTree = Any
Record = TypeVar("Record", Snapshot, Answer)

_SHORT = 1.0  # s
# Errors that give way to others, and to those of lower ranks.
_RANKS = {"CenterUnreachableError": 1, "CenterClosedError": 1, "CenterError": 2}
_joins = itertools.count()  # the same in all processes, which make the same calls


class ProcessesCenter:
    """A center as a process of a worker uses it: a `Center` for global arrays.

    Args:
      center: the center.
      layout: the layout of the worker's parameters.

    Raises:
      InvalidArgumentError: the center takes whole messages only.
    """

    def __init__(self, center: Center, layout: Layout) -> None:
        if not getattr(center, "takes_pieces", False):
            combinations.reject(
                "a worker of several processes",
                "a center in this process",
                f"center {center!r}, processes {list(layout.processes)}",
            )
        self.rule = center.rule
        self._center: Any = center
        self._layout = layout
        self._session: Any = None

    def join(
        self,
        worker: str,
        params: PyTree = None,
        *,
        timeout: float | None = None,
        resume_token: Any = None,
    ) -> ProcessesSession:
        """Join with all processes: see `Center.join`.

        Raises:
          InvalidArgumentError: the processes have different names, parameters or
            shardings.
        """
        limit = self._center.timeout
        processes = agreement.Processes(self._layout.processes, f"join{next(_joins)}")
        token, group = processes.share(
            "ids", [resume_token or self._new_token(), uuid.uuid4().hex], limit
        )
        share = shares_of(group, params, jax.process_index(), processes.indices)
        model = trees.describe(share.like)
        specs = json.dumps([str(s.spec) for s in self._layout.shardings])
        own = {
            "worker": worker,
            # Not the tree's structure: its text may have addresses of functions.
            "model": [", ".join(map(str, model.leaves))[:200], model.hash.hex()],
            "shardings": hashlib.sha256(specs.encode()).hexdigest()[:12],
        }
        everyone = processes.gather("who", own, limit)
        for name, value in own.items():
            if any(other[name] != value for other in everyone):
                raise errors.InvalidArgumentError(
                    f"the processes of worker {worker!r} disagree about their {name}: "
                    f"{[other[name] for other in everyone]}"
                )
        session = _in_all(
            processes,
            "joined",
            lambda: self._center.join(
                worker, Pieces(share, ()), timeout=timeout, resume_token=token
            ),
            lambda _: limit,
        )
        self._session = ProcessesSession(
            session, self._center, self._layout, share, processes
        )
        return self._session

    def _new_token(self) -> Any:
        """Return the token of a new session, which all processes join."""
        if isinstance(self._center, ShardedCenter):
            return [["", uuid.uuid4().hex] for _ in self._center.centers]
        return ["", uuid.uuid4().hex]

    def initialize(self, params: PyTree, *, worker: str) -> None:
        """Set the first parameters, in pieces: see `Center.initialize`."""
        session = self._session
        # JAX 0.10 cannot list the shards of an array that `device_put` has replicated.
        pieces = session.pieces_of(self._layout.jit(lambda arrays: arrays)(params))
        _in_all(
            session.processes,
            "initialized",
            lambda: self._center.initialize(
                Pieces(session.share, pieces), worker=worker
            ),
            lambda _: session.limit,
        )

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait for the first parameters, and pull: see `Center.wait`."""
        return self._session.pull(timeout)

    def pull(self) -> Snapshot:
        """Return the current version as global arrays: see `Center.pull`."""
        self._center.describe()  # raises if the center is not initialized
        return self._session.pull(None)

    def describe(self) -> Snapshot:
        """Return the current version without its arrays: see `Center.describe`."""
        return self._center.describe()


class ProcessesSession(Session):
    """A session of all processes, whose contributions and answers are global arrays.

    Args:
      session: the session of this process, which exchanges lists of pieces.
      center: its center.
      layout: the layout of the worker's parameters.
      share: the regions of this process.
      processes: the processes.
    """

    def __init__(
        self,
        session: Any,
        center: Any,
        layout: Layout,
        share: Share,
        processes: agreement.Processes,
    ) -> None:
        self._session, self._center = session, center
        self.worker, self.session_id = session.worker, session.session_id
        self._layout, self.share, self.processes = layout, share, processes
        self._dtypes: list[Any] = []  # of the center; unknown until it is initialized
        # The shards of a center must agree about messages that are not finite.
        self._has_shards = len(getattr(center, "centers", ())) > 1
        self.limit: float = center.timeout
        self._attempts = (0, -1)  # number of an exchange, and its last attempt
        # Numbers of agreements: of exchanges, and of questions whether one is answered,
        # which another thread asks meanwhile.
        self._agreements, self._questions = itertools.count(), itertools.count()

    @property
    def resume_token(self) -> Any:
        """The token of this session: see `Session.resume_token`."""
        return self._session.resume_token

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The transfers of this process: see `Session.transfers`."""
        return tuple(self._session.transfers)

    def exchange(self, submission: Submission) -> Answer:
        """Exchange with all processes: see `Session.exchange`."""
        own = self.pieces_of(submission.contribution)
        if self._has_shards:
            key = f"finite{next(self._agreements)}"
            # Pieces may be on several devices.
            is_own_finite = all(map(bool, map(is_finite, own)))
            finite = self.processes.gather(key, is_own_finite, 2 * self.limit)
            own = own if all(finite) else not_finite(own)
        submission = submission._replace(contribution=own)

        def attempt(number: int) -> Answer:
            self._session.submit(submission._replace(attempt=number))
            answer = self._session.collect(submission.sequence)
            assert answer is not None  # there is no timeout
            return answer

        answer = self._agreed(submission.sequence, attempt)
        self._session.acknowledge(submission.sequence)
        return answer._replace(params=self._whole(answer.params))

    def pull(self, timeout: float | None) -> Snapshot:
        """Return one version of the center in all processes, as global arrays."""
        snapshot = self._agreed(0, lambda number: self._session.pull(number, timeout))
        return snapshot._replace(params=self._whole(snapshot.params))

    def is_answered(self, done: bool) -> bool:
        """Return whether the first process has its answer, in all processes."""
        key = f"answered{next(self._questions)}"
        return bool(self.processes.share(key, done, self.limit))

    def submit(self, submission: Submission) -> None:
        raise NotImplementedError("the processes agree in `exchange`")

    def collect(self, sequence: int, timeout: float | None = None) -> Answer | None:
        raise NotImplementedError("the processes agree in `exchange`")

    def acknowledge(self, sequence: int) -> None:
        """Confirm an answer: see `Session.acknowledge`."""
        self._session.acknowledge(sequence)

    def disconnect(self) -> None:
        """Close this process's connection: see `Session.disconnect`."""
        self._session.disconnect()

    def leave(self) -> None:
        """End the session of all processes: see `Session.leave`."""
        self._session.leave()

    def _agreed(self, sequence: int, attempt: Callable[[int], Record]) -> Record:
        """Return what all processes got in one attempt, with the same version."""
        while True:
            last_sequence, last = self._attempts
            number = last + 1 if last_sequence == sequence else 0
            self._attempts = sequence, number
            record, versions = self._attempt(
                sequence, functools.partial(attempt, number)
            )
            if all(version == versions[0] for version in versions):
                return record

    def _attempt(
        self, sequence: int, attempt: Callable[[], Record]
    ) -> tuple[Record, list[Any]]:
        """Return what this process got, and the versions that all processes got."""
        begin, got = time.monotonic(), []
        key = f"exchange {sequence}, agreement {next(self._agreements)}"

        def check(missing: Sequence[int]) -> None:
            """Raise if a process for whose pieces the center waits has failed."""
            for index in missing:
                outcome = self.processes.peek(key, index)
                if outcome is not None and "error" in outcome:
                    raise errors.CenterError(
                        f"process {self.processes.indices[index]} of this worker has "
                        f"failed: {outcome['error'][1]}"
                    )

        self._session.while_missing = check

        def once() -> Any:
            got.append(attempt())
            return got[0].version

        versions = _all_results(
            self.processes,
            key,
            once,
            # Another process may receive more, or over a slower connection.
            lambda failure: (
                2 * self.limit if failure else self.limit + 4 * _since(begin)
            ),
        )
        return got[0], versions

    # Between global arrays and pieces.

    def pieces_of(self, tree: PyTree) -> list[PyTree]:
        """Return this process's own pieces of parameters, or of a contribution."""
        leaves: list[PyTree] = self._layout.treedef.flatten_up_to(tree)
        found: dict[tuple[int, Any], PyTree] = {}
        needed = {region.leaf for region in self.share.owned}
        for leaf in needed:
            shape = self._layout.shapes[leaf]
            indices = self._layout.shardings[leaf].addressable_devices_indices_map(
                shape
            )
            for device, index in indices.items():
                assert index is not None
                region = region_of(index, shape, leaf)
                found.setdefault(
                    (leaf, region), _on_device(leaves[leaf], device, shape)
                )
        return [found[region.leaf, region] for region in self.share.owned]

    def _whole(self, pieces: list[np.ndarray]) -> PyTree:
        """Return the wanted pieces as global arrays, in the dtypes of the center."""
        if not self._dtypes:
            leaves = jax.tree.leaves(self._center.describe().params)
            self._dtypes = [leaf.dtype for leaf in leaves]
        by_region = dict(zip(self.share.wanted, pieces, strict=True))
        leaves = []
        for leaf, shape in enumerate(self._layout.shapes):
            sharding = self._layout.shardings[leaf]
            indices = sharding.addressable_devices_indices_map(shape)
            arrays = [
                jax.device_put(by_region[region_of(index, shape, leaf)], device).astype(
                    self._dtypes[leaf]
                )
                for device, index in indices.items()
                if index is not None
            ]
            leaves.append(
                jax.make_array_from_single_device_arrays(shape, sharding, arrays)
            )
        return jax.tree.unflatten(self._layout.treedef, leaves)


def _on_device(tree: PyTree, device: Any, shape: tuple[int, ...]) -> PyTree:
    """Return what a device has of an array like a leaf, or of its encoded pieces."""

    def piece(array: jax.Array) -> Any:
        (data,) = [s.data for s in array.addressable_shards if s.device == device]
        # Encoded pieces have a row for each device.
        return data if array.shape == shape else np.asarray(data)[0]

    return jax.tree.map(piece, tree)


def _in_all(
    processes: agreement.Processes,
    key: str,
    call: Callable[[], Any],
    limit: Callable[[Any], float],
) -> Any:
    """Call a function in all processes; return its result if it raised in none."""
    results = []
    _all_results(processes, key, lambda: results.append(call()), limit)
    return results[0]


def _all_results(
    processes: agreement.Processes,
    key: str,
    call: Callable[[], Any],
    limit: Callable[[Any], float],
) -> list[Any]:
    """Call a function in all processes; return the results of all, or raise in all.

    If several processes raise, an error that ends the exchange comes before a lost
    connection, after which it is repeated, and before a process that was missed.
    """
    failure: BaseException | None = None
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = call()
    except errors.AgnOptaxError as error:
        failure = error
        outcome["error"] = [type(error).__name__, str(error)]
    # A process that has missed another one does not wait for it again.
    has_missed = type(failure) is errors.CenterError
    everyone = processes.gather(key, outcome, _SHORT if has_missed else limit(failure))
    failed = [
        (_RANKS.get(name, 0), index, name, text)
        for index, other in enumerate(everyone)
        for name, text in [other.get("error", ("", ""))]
        if name
    ]
    if not failed:
        return [_tuples(other["result"]) for other in everyone]
    _, index, name, text = min(failed)
    if index == processes.index and failure is not None:
        raise failure
    message = f"process {processes.indices[index]} of this worker: {text}"
    raise getattr(errors, name, errors.CenterError)(message) from failure


def _since(begin: float) -> float:
    return time.monotonic() - begin


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
