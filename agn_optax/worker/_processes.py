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
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import agreement, combinations, trees
from agn_optax.center import (
    Answer,
    Center,
    Pieces,
    Region,
    Session,
    ShardedCenter,
    Share,
    Snapshot,
    Submission,
    Transfer,
    WorkerSession,
    is_finite,
    not_finite,
    plain,
    region_of,
    shares_of,
)
from agn_optax.worker._shardings import ParamShardings

PyTree = Any
Record = TypeVar("Record", Snapshot, Answer)

_SHORT = 4.0  # s; a center says every two seconds which processes are missing
_SHOWN = 300  # characters of a text that the processes compare
_KEPT_QUESTIONS = 256  # a process may be some local steps behind
_joining = threading.Lock()  # workers of one job start one after the other


class ProcessesCenter:
    """A center as a process of a worker uses it: a `Center` for global arrays.

    Args:
      center: the center.
      shardings: the shardings of the worker's parameters.
      settings: what else must be equal in all processes, by name, serializable as JSON.

    Raises:
      InvalidArgumentError: the center takes whole messages only.
    """

    def __init__(
        self, center: Center, shardings: ParamShardings, settings: Mapping[str, Any]
    ) -> None:
        if not getattr(center, "takes_pieces", False):
            combinations.reject(
                "a worker of several processes",
                "a center in this process",
                f"center {center!r}, processes {list(shardings.processes)}",
            )
        self.rule = center.rule
        self._center: Any = center
        self._shardings, self._settings = shardings, settings
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
          InvalidArgumentError: the processes have different centers, settings, names,
            parameters or shardings.
        """
        limit = self._center.timeout
        with _joining:
            processes = agreement.of_job(self._shardings.processes, "start")
            # The first process chooses the session, and the name of the group.
            ids = [resume_token or self._new_token(), uuid.uuid4().hex]
            ended = sorted(processes.ended)
            everyone = _in_all(
                processes,
                "the start",
                lambda: [self._compared(worker, params, resume_token), ids, ended],
                limit,
            )
            _check_equal(worker, [compared for compared, *_ in everyone])
            _, (token, group), _ = everyone[0]
            processes.forget_groups(each for *_, each in everyone)
        share = shares_of(group, params, jax.process_index(), processes.indices)
        joined = agreement.Processes(processes.indices, group)
        sessions: list[Session] = []

        def join() -> None:
            given = Pieces(share, ())
            sessions.append(
                self._center.join(worker, given, timeout=timeout, resume_token=token)
            )

        try:
            # A process that may not join waits until the others have missed it.
            _in_all(joined, "the start", join, limit + 2 * _SHORT)
        except BaseException:
            for session in sessions:  # a resumed session may be resumed again
                (session.disconnect if resume_token else session.leave)()
            processes.ended.add(group)
            raise
        (session,) = sessions
        self._session = ProcessesSession(
            session, self._center, self._shardings, share, joined
        )
        return self._session

    def _compared(
        self, worker: str, params: PyTree, resume_token: Any
    ) -> dict[str, Any]:
        """Return what must be equal in all processes, by name."""
        return {
            **self._settings,
            # Ids and not addresses, which depend on the host and its network.
            "center": self._center.current_ids(),
            "fragments of the center": repr(getattr(self._center, "fragments", None)),
            "worker": worker,
            "session": _ids(resume_token),
            # Not the tree's structure: its text may have addresses of functions.
            "model": _summary(trees.describe(params).leaves),
            "shardings": _summary([str(s.spec) for s in self._shardings.of_leaves]),
        }

    def _new_token(self) -> Any:
        """Return the token of a new session, which all processes join."""
        if isinstance(self._center, ShardedCenter):
            return [["", uuid.uuid4().hex] for _ in self._center.centers]
        return ["", uuid.uuid4().hex]

    def initialize(self, params: PyTree, *, worker: str) -> None:
        """Set the first parameters, in pieces: see `Center.initialize`."""
        session = self._session
        # JAX 0.10 cannot list the shards of an array that `device_put` has replicated.
        pieces = session.pieces_of(self._shardings.jit(lambda arrays: arrays)(params))
        _in_all(
            session.processes,
            "the start",
            lambda: self._center.initialize(
                Pieces(session.share, pieces), worker=worker
            ),
            session.limit,
        )

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Wait for the first parameters, and pull: see `Center.wait`."""
        return self._session.pull(timeout)

    def pull(self) -> Snapshot:
        """Return the current version as global arrays: see `Center.pull`."""
        return self._session.pull(None, is_there=True)

    def describe(self) -> Snapshot:
        """Return the current version without its arrays: see `Center.describe`."""
        return self._center.describe()


class ProcessesSession(WorkerSession):
    """A session of all processes, whose contributions and answers are global arrays.

    Args:
      session: the session of this process, which exchanges lists of pieces.
      center: its center.
      shardings: the shardings of the worker's parameters.
      share: the regions of this process.
      processes: the processes.
    """

    def __init__(
        self,
        session: Any,
        center: Any,
        shardings: ParamShardings,
        share: Share,
        processes: agreement.Processes,
    ) -> None:
        self._session, self._center = session, center
        self.worker, self.session_id = session.worker, session.session_id
        self._shardings, self.share, self.processes = shardings, share, processes
        self._dtypes: list[Any] = []  # of the center; unknown until it is initialized
        # The shards of a center must agree about messages that are not finite.
        self._has_shards = len(getattr(center, "centers", ())) > 1
        self._questions = 0  # asked so far whether an exchange is answered
        self._is_encoded = shardings.encodes_pieces(center.rule)
        self.limit: float = center.timeout

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
        number = submission.sequence

        @functools.cache
        def own_pieces() -> list[PyTree]:
            return self.pieces_of(submission.contribution, encoded=self._is_encoded)

        finite = [True]
        if self._has_shards:
            finite = _in_all(
                self.processes,
                f"the numbers of exchange {number}",
                # Pieces may be on several devices.
                lambda: all(map(bool, map(is_finite, own_pieces()))),
                self.limit,
            )

        def attempt(number: int) -> Answer:
            # If this raises, all processes get to know it.
            own = own_pieces() if all(finite) else not_finite(own_pieces())
            sent = submission._replace(contribution=own, attempt=number)
            self._session.submit(sent)
            answer = self._session.collect(submission.sequence)
            assert answer is not None  # there is no timeout
            # Nothing of this process may fail once all have agreed.
            return answer._replace(params=self._whole(answer.params))

        answer = self._agreed(submission.sequence, attempt)
        self._session.acknowledge(submission.sequence)
        return answer

    def pull(self, timeout: float | None, *, is_there: bool = False) -> Snapshot:
        """Return one version of the center in all processes, as global arrays.

        Args:
          timeout: seconds to wait for the first parameters; None for no limit.
          is_there: whether to raise if the center is not initialized yet.
        """

        def attempt(number: int) -> Snapshot:
            if is_there:
                self._center.describe()  # raises if the center is not initialized
            snapshot = self._session.pull(number, timeout)
            return snapshot._replace(params=self._whole(snapshot.params))

        return self._agreed(0, attempt)

    def is_answered(self, done: bool) -> bool:
        """Return whether the first process has its answer, in all processes."""
        number = self._questions
        answered = bool(self.processes.share(f"answered/{number}", done, self.limit))
        self._questions += 1  # not if it has raised: the same one is asked again
        if not self.processes.index and number >= _KEPT_QUESTIONS:
            self.processes.forget(f"answered/{number - _KEPT_QUESTIONS}")
        return answered

    def decide(self, flag: bool) -> bool:
        """Return the first process's flag in all processes."""
        return bool(self.processes.gather(flag, self.limit, "a repetition")[0])

    def disconnect(self) -> None:
        """Close this process's connection: see `Session.disconnect`."""
        self._session.disconnect()
        self._end()

    def leave(self) -> None:
        """End the session of all processes: see `Session.leave`."""
        self._session.leave()
        self._end()

    def _end(self) -> None:
        """Tell the next start that this process needs the session's keys no more."""
        started = agreement.of_job(self.processes.indices, "start")
        started.ended.add(self.share.group)

    def _agreed(self, sequence: int, attempt: Callable[[int], Record]) -> Record:
        """Return what all processes got in one attempt, with the same version."""
        while True:
            own, numbers = self._attempt(sequence, attempt)
            if all(n["version"] == numbers[0]["version"] for n in numbers):
                return own._replace(**{**numbers[0]["answer"], "version": own.version})

    def _attempt(
        self, sequence: int, attempt: Callable[[int], Record]
    ) -> tuple[Record, list[Any]]:
        """Return what this process got, and the numbers that all processes got."""
        begin, got = time.monotonic(), []

        def check(missing: Sequence[int]) -> None:
            """Raise if a process for whose pieces the center waits has failed."""
            for index in missing:
                outcome = self.processes.peek(index)
                if outcome is not None and "error" in outcome:
                    raise errors.CenterError(
                        f"process {self.processes.indices[index]} of this worker has "
                        f"failed: {outcome['error'][1]}"
                    )

        def once() -> Any:
            # The number of the round, which is the same in all processes.
            got.append(attempt(self.processes.round))
            numbers = {k: v for k, v in plain(got[0]).items() if k != "norm"}
            version = numbers.pop("version")
            return {"version": version, "answer": numbers}

        self._session.while_missing = check
        # Another process may receive more, or over a slower connection.
        everyone = _all_results(
            self.processes,
            f"exchange {sequence}",
            once,
            lambda: self.limit + 4 * (time.monotonic() - begin),
        )
        return got[0], everyone

    # Between global arrays and pieces.

    def pieces_of(self, tree: PyTree, *, encoded: bool = False) -> list[PyTree]:
        """Return this process's own pieces of parameters, or of a contribution.

        Encoded arrays have a row for each device: see `ParamShardings.rule`.
        """
        leaves: list[PyTree] = self._shardings.treedef.flatten_up_to(tree)
        owned = set(self.share.owned)
        found: dict[Region, PyTree] = {}
        for region, device in self._places:
            if region in owned and region not in found:
                found[region] = _on_device(leaves[region.leaf], device, encoded)
        return [found[region] for region in self.share.owned]

    def _whole(self, pieces: list[np.ndarray]) -> PyTree:
        """Return the wanted pieces as global arrays, in the dtypes of the center."""
        if not self._dtypes:
            center = jax.tree.leaves(self._center.describe().params)
            self._dtypes = [leaf.dtype for leaf in center]
        by_region = dict(zip(self.share.wanted, pieces, strict=True))
        places = self._places
        placed = jax.device_put(  # all at once, which is much faster
            [by_region[place.region] for place in places],
            [place.device for place in places],
        )
        of_leaves: list[list[jax.Array]] = [[] for _ in self._dtypes]
        for place, array in zip(places, placed, strict=True):
            leaf = place.region.leaf
            dtype = self._dtypes[leaf]
            of_leaves[leaf].append(
                array if array.dtype == dtype else array.astype(dtype)
            )
        whole = map(
            jax.make_array_from_single_device_arrays,
            self._shardings.shapes,
            self._shardings.of_leaves,
            of_leaves,
        )
        return jax.tree.unflatten(self._shardings.treedef, whole)

    @functools.cached_property
    def _places(self) -> list[_Place]:
        """All pieces on this process's devices."""
        return [
            _Place(region_of(index, shape, leaf), device)
            for leaf, shape in enumerate(self._shardings.shapes)
            for device, index in self._shardings.of_leaves[leaf]
            .addressable_devices_indices_map(shape)
            .items()
            if index is not None
        ]


class _Place(NamedTuple):
    """One of the pieces on a device."""

    region: Region
    device: jax.Device


def _on_device(tree: PyTree, device: Any, encoded: bool) -> PyTree:
    """Return what a device has of an array, or of the encoded pieces of all devices."""

    def piece(array: jax.Array) -> Any:
        (data,) = [s.data for s in array.addressable_shards if s.device == device]
        return trees.on_host(data)[0] if encoded else data

    return jax.tree.map(piece, tree)


def _ids(token: Any) -> Any:
    """Return a resume token without its witnesses: each process has seen its own."""
    if not token:
        return token
    return [_ids(shard) for shard in token] if isinstance(token[0], list) else token[:2]


def _check_equal(worker: str, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless all processes have given the same values."""
    for name in everyone[0]:
        values = [given[name] for given in everyone]
        if any(value != values[0] for value in values):
            advice = {
                "center": ". Give all processes all addresses, in the same order; or "
                "a center was restarted meanwhile, then start again",
                "session": ". All processes must start, or restore the same state",
            }
            raise errors.InvalidArgumentError(
                f"the processes of worker {worker!r} disagree about their {name}: "
                f"{values}{advice.get(name, '')}"
            )


def _summary(value: Any) -> str:
    """Return a short text for a value; other values have other texts."""
    text = str(value)
    if len(text) <= _SHOWN:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[:_SHOWN]}... (sha256 {digest[:16]})"


def _in_all(
    processes: agreement.Processes, what: str, call: Callable[[], Any], limit: float
) -> list[Any]:
    """Call a function in all processes; return the results if it raised in none."""
    begin = time.monotonic()
    return _all_results(
        processes, what, call, lambda: limit + 4 * (time.monotonic() - begin)
    )


def _all_results(
    processes: agreement.Processes,
    what: str,
    call: Callable[[], Any],
    limit: Callable[[], float],
) -> list[Any]:
    """Call a function in all processes; return the results of all, or raise in all.

    If several processes raise, an error that ends the exchange comes before a lost
    connection, after which it is repeated, and before a process that was missed. If
    others have results, nobody knows what their message has done: that is a
    `CenterError`.
    """
    failure: Exception | None = None
    try:
        outcome = {"result": call()}
    except Exception as error:
        failure = error
        outcome = {"error": [type(error).__name__, str(error)]}
    # A process that has missed another one does not wait for it again.
    timeout = _SHORT if type(failure) is errors.CenterError else limit()
    try:
        everyone = processes.gather(outcome, timeout, what)
    except errors.CenterError as missed:
        raise missed from failure
    failed = [
        (_rank(other["error"][0]), index, *other["error"])
        for index, other in enumerate(everyone)
        if "error" in other
    ]
    if not failed:
        return [other["result"] for other in everyone]
    rank, index, name, text = min(failed)
    # Another process has an answer, or may have lost it with its connection.
    others_know = len(failed) < len(everyone) or any(r == 1 for r, *_ in failed)
    is_unknown = rank == 0 and others_know
    if index == processes.index and failure is not None and not is_unknown:
        raise failure
    message = f"process {processes.indices[index]} of this worker: {text}"
    kind = errors.CenterError if is_unknown else getattr(errors, name, None)
    raise (kind or errors.CenterError)(message) from failure


def _rank(name: str) -> int:
    """Return the rank of an error: those of lower ranks come first."""
    kind = getattr(errors, name, Exception)
    if issubclass(kind, errors.CenterUnreachableError):
        return 1
    return 2 if kind is errors.CenterError else 0
