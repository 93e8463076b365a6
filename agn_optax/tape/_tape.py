"""A tape: the records of a center on disk, and the center at any recorded version."""

from __future__ import annotations

import logging
import math
import os
import pathlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import trees
from agn_optax.center import CenterState, History, Store, stack, state_in
from agn_optax.rules import Rule
from agn_optax.tape._events import Event, event_of

PyTree = Any

_log = logging.getLogger("agn_optax")
# Relative to the largest element: beyond it, two centers differ by more than rounding.
_ROUNDING = 1e-3


class Found(NamedTuple):
    """A version on a tape."""

    number: int  # number of records that lead to it
    version: int
    time: float  # s, since the center began
    digest: bytes  # of the last record that leads to it
    end: int  # number of records before the next version


class TapeSnapshot(NamedTuple):
    """A saved version of the center."""

    number: int  # number of records before it
    version: int
    path: pathlib.Path


class Checked(NamedTuple):
    """The result of `Tape.check`: how much it has read."""

    records: int
    contributions: int  # contributions that were compared with their hashes
    hashes: int  # contributions of which only the hashes are left
    snapshots: int


class Tape:
    """The tape of a center, which may be running: nothing is locked or written.

    Made by `read`.

    Attributes:
      path: path of the directory.
      segments: the files of records, sorted; all records, unless the center keeps only
        those since its newest snapshot.
      snapshots: the saved versions, sorted.
      center_id: the id of the center.
      parent: for a fork, the number of records that its parent has, too, and the digest
        of the last one in hex (the parent's center id if there are none); else None.
      fingerprint: the fingerprint of the center's rule.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        history = self._history = History(path)
        self.path = history.path
        self.segments = history.segments
        self._snapshots = {
            number: history.snapshot(number, with_arrays=False)
            for number in history.snapshots
        }
        self.snapshots = [
            TapeSnapshot(number, record.about["version"], history.snapshot_file(number))
            for number, record in self._snapshots.items()
        ]
        newest = self._snapshots[history.snapshots[-1]].about
        self.center_id: str = newest["center_id"]
        self.fingerprint: dict[str, Any] = newest["rule"]
        parent = newest.get("parent")
        self.parent = None if parent is None else (int(parent[0]), str(parent[1]))

    @property
    def begin(self) -> int:
        """Number of the first record."""
        return min(each[0].number for each in (self.segments, self.snapshots) if each)

    def events(
        self,
        begin: int | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[Event]:
        """Yield the events from a record on, in their order.

        Args:
          begin: number of the first record; None for the first one on the tape.
          progress: called with the number of each record.

        Raises:
          DurabilityError: a record is damaged or missing.
        """
        begin = self.begin if begin is None else begin
        return self._events(begin, progress, with_arrays=False)

    def _events(
        self,
        begin: int,
        progress: Callable[[int], None] | None,
        *,
        with_arrays: bool = True,
    ) -> Iterator[Event]:
        for record in self._history.records(begin, with_arrays=with_arrays):
            if progress is not None:
                progress(record.number)
            yield event_of(record, self._history)

    def events_with_registered(
        self, begin: int, *, progress: Callable[[int], None] | None = None
    ) -> Iterator[tuple[Event, frozenset[str]]]:
        """Yield the events from a record on, each with the workers registered before.

        Args:
          begin: number of the first record.
          progress: called with the number of each record.

        Raises:
          DurabilityError: see `events`.
        """
        registered = frozenset[str]()
        for event in self.events(progress=progress):
            if (snapshot := self._snapshots.get(event.number)) is not None:
                # Sessions may have ended without records: the center has a new id.
                registered = _with_changes(frozenset(), snapshot.about["ledger"])
            if event.number >= begin:
                yield event, registered
            registered = _with_changes(registered, event.ledger)

    def check(self, progress: Callable[[int], None] | None = None) -> Checked:
        """Check the chain, the hashes of the contributions, and the snapshots.

        Args:
          progress: called with the number of each record.

        Raises:
          DurabilityError: the tape is cut, or a record or a snapshot is not what was
            written.
        """
        kept = hashes = records = 0
        digests, saved = dict[int, str](), dict[int, str]()
        for event in self._events(self.begin, progress):
            records += 1
            kept += sum(message.is_kept for message in event.messages)
            hashes += sum(not message.is_kept for message in event.messages)
            digests[event.number + 1] = event.digest
            saved.update(event.snapshots)
        for number in self._snapshots:
            snapshot = self._history.snapshot(number)
            for what, found, recorded in (
                ("follows record", snapshot.parent, digests.get(number)),
                ("has the digest of snapshot", snapshot.digest, saved.get(number)),
            ):
                if recorded is not None and found.hex() != recorded:
                    raise errors.DurabilityError(
                        f"{self._history.snapshot_file(number)} is not the snapshot "
                        f"of this tape: it {what} {found.hex()}, and the chain has "
                        f"{recorded}"
                    )
        return Checked(records, kept, hashes, len(self._snapshots))

    def replay(
        self,
        rule: Rule,
        version: int | None = None,
        seconds: float | None = None,
        *,
        whole: bool = False,
        params: PyTree = None,
        progress: Callable[[int], None] | None = None,
    ) -> CenterState:
        """Return the center at a recorded version, bit for bit.

        The center is computed from the nearest snapshot before the version, and
        compared with the version's own snapshot, if there is one.

        Args:
          rule: the center's rule.
          version: the version; None for the newest one.
          seconds: seconds since the center began, instead of a version: the newest
            version at that time.
          whole: compute the center from the first snapshot, and compare it with all
            snapshots on the way.
          params: parameters with the containers to use, if the center has others than
            dicts, lists and tuples.
          progress: called with the number of each record.

        Raises:
          InvalidArgumentError: the tape does not have the version.
          RuleMismatchError: the center has another rule.
          DurabilityError: the tape is damaged, it has no contributions from which the
            version could be computed, or a snapshot is another center than the one
            computed here.
        """
        found = self.find(version, seconds)
        begin = self.snapshots[0].number if whole else self._before(found.version)
        run = self.run(rule, begin, params, progress, end=found.end)
        ((_, store),) = deque(run, maxlen=1)
        return store.save()

    def find(
        self,
        version: int | None = None,
        seconds: float | None = None,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> Found:
        """Return a recorded version, by its number or time.

        Args:
          version: the version; None for the newest one.
          seconds: seconds since the center began, instead of a version: the newest
            version at that time.
          progress: called with the number of each record.

        Raises:
          InvalidArgumentError: the tape does not have the version.
        """
        if version is not None and seconds is not None:
            raise errors.InvalidArgumentError(
                f"give a version or seconds, not both, got {version} and {seconds}"
            )
        first = self._snapshots[self.snapshots[0].number]
        begin, oldest = first.number, first.about["version"]
        time = first.about["time"] if begin else 0.0
        if seconds is not None and not seconds >= time:
            raise errors.InvalidArgumentError(
                f"seconds must be at least {time}, where the versions of {self.path} "
                f"begin, got {seconds}"
            )
        found = Found(begin, oldest, time, first.parent, begin)
        for event in self.events(begin, progress=progress):
            is_later = version is not None and event.version > version >= oldest
            if is_later or (seconds is not None and event.time > seconds):
                break
            end = event.number + 1
            if event.version > found.version:
                digest = bytes.fromhex(event.digest)
                found = Found(end, event.version, event.time, digest, end)
            found = found._replace(end=end)
        if version not in (None, found.version):
            raise errors.InvalidArgumentError(
                f"version must be in [{oldest}, {found.version}], the versions that "
                f"{self.path} can have, got {version}"
            )
        return found

    def start_of(self, version: int | None) -> int:
        """Return the number of the snapshot of a version; None for the first one.

        Raises:
          InvalidArgumentError: there is no snapshot of the version.
        """
        numbers = {each.version: each.number for each in reversed(self.snapshots)}
        if version is None:
            return self.snapshots[0].number
        if version not in numbers:
            raise errors.InvalidArgumentError(
                f"the first version must be one that has a snapshot in {self.path}, "
                f"{', '.join(map(str, sorted(numbers)))}, got {version}"
            )
        return numbers[version]

    def start_hash(self, number: int) -> str | None:
        """Return a hash of the arrays in a snapshot; None if there is no such snapshot.

        Args:
          number: number of the snapshot.
        """
        snapshot = self._snapshots.get(number)
        if snapshot is None:
            return None
        return "".join(each.digest.hex() for each in snapshot.contents if each)

    def ledgers(self, number: int) -> list[dict[str, Any]]:
        """Return the states of a ledger to restore, as of a number of records.

        Args:
          number: the number of records.
        """
        before = max(each for each in self._snapshots if each <= number)
        states = [self._snapshots[before].about["ledger"]]
        for event in self.events(before):
            if event.number >= number:
                break
            states.append(event.ledger)
        return states

    def _before(self, version: int) -> int:
        """Return the number of the snapshot from which a version is computed.

        A version with a snapshot is computed from the one before, if possible.
        """
        nearest = self._nearest(version)
        for each in reversed(self.snapshots):
            if each.version < version:
                ends = [segment.number for segment in self.segments[1:]] + [math.inf]
                is_kept = all(
                    segment.is_kept
                    for segment, end in zip(self.segments, ends, strict=True)
                    if segment.number < nearest and end > each.number
                )
                return each.number if is_kept else nearest
        return nearest

    def _nearest(self, version: int) -> int:
        """Return the number of the snapshot from which a version is computed.

        Raises:
          InvalidArgumentError: there is none.
        """
        numbers = [each.number for each in self.snapshots if each.version <= version]
        if not numbers:
            raise errors.InvalidArgumentError(
                f"version must be at least {self.snapshots[0].version}, where the "
                f"snapshots of {self.path} begin, got {version}"
            )
        return numbers[-1]

    def run(
        self,
        rule: Rule,
        begin: int | None = None,
        params: PyTree = None,
        progress: Callable[[int], None] | None = None,
        *,
        end: int | None = None,
    ) -> Iterator[tuple[Event | None, Store]]:
        """Yield the store of a snapshot, and again after each later event.

        Nothing waits for the device.

        Args:
          rule: the center's rule.
          begin: number of the snapshot; None for the first one.
          params: see `replay`.
          progress: see `replay`.
          end: number of records at which to end; None for all.

        Raises:
          DurabilityError, RuleMismatchError: see `replay`.
        """
        where = f"the tape {self.path}"
        begin = self.snapshots[0].number if begin is None else begin
        snapshot = self._history.snapshot(begin)
        store = Store.restore(rule, state_in(snapshot, rule, params, None, where))
        yield None, store
        if end is not None and end <= begin:
            return
        for event in self._events(begin, progress):
            if not all(message.is_kept for message in event.applied):
                raise errors.DurabilityError(
                    f"{self.path}: the contributions of record {event.number} were "
                    f"dropped, so version {event.version} and later ones cannot be "
                    "computed up to the next snapshot; there are snapshots of versions "
                    f"{', '.join(str(each.version) for each in self.snapshots)}"
                )
            event.apply(store)
            if event.number + 1 in self._snapshots:
                self._compare(event.number + 1, store)
            yield event, store
            if event.number + 1 == end:
                return

    def _compare(self, number: int, store: Store) -> None:
        """Compare a computed center with a snapshot.

        Raises:
          DurabilityError: they differ, by more than rounding if another stack of
            software and hardware wrote the snapshot.
        """
        snapshot, found = self._history.snapshot(number), store.save()
        center_state = trees.without_keys(found.center_state)
        leaves = jax.tree.leaves((found.params, center_state))
        apart = max(map(_apart, snapshot.arrays, map(np.asarray, leaves)), default=0.0)
        if not apart:
            return
        written = snapshot.about["stack"]
        words = (
            f"the center computed here and {self._history.snapshot_file(number)} "
            f"(version {found.version}) differ, relatively by {apart:.1e}"
        )
        if written == stack() or not apart <= _ROUNDING:
            raise errors.DurabilityError(
                f"{words}: the tape is damaged, or the rule is another one"
            )
        _log.warning(
            "%s: it was written on %s, and this is %s", words, written, stack()
        )


def _with_changes(registered: frozenset[str], ledger: dict[str, Any]) -> frozenset[str]:
    """Return the registered workers after a change of some members of a ledger."""
    members = ledger["members"]
    ended = {name for name, member in members.items() if member["has_ended"]}
    if ended.isdisjoint(registered) and members.keys() - ended <= registered:
        return registered
    return (registered | members.keys()) - ended


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference, relative to the largest element."""
    if a.tobytes() == b.tobytes():
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    largest = float(np.abs(a).max(initial=0)) or 1.0
    apart = float(np.abs(a - b).max(initial=0)) / largest
    return apart or np.finfo(np.float64).tiny  # such as 0.0 and -0.0


def read(path: str | os.PathLike[str]) -> Tape:
    """Return the tape in a directory, without locking or changing it.

    Args:
      path: directory of a center with a `Journal`.

    Raises:
      DurabilityError: the directory has no tape, or another release wrote it.

    Example:
      >>> import tempfile, jax.numpy as jnp, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     journal = agn_optax.center.Journal(folder, keep="contributions")
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=journal)
      ...     for i in range(3):
      ...         sent = agn_optax.center.Submission(1, jnp.ones(2), anchor_version=i)
      ...         _ = center.join(f"worker-{i}").exchange(sent)
      ...     center.close()
      ...     tape = agn_optax.tape.read(folder)
      ...     print(tape.replay(rule, version=2).params)
      [-1. -1.]
    """
    return Tape(path)
