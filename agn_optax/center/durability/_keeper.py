"""The journal's settings, and the keeper that saves and restores a center.

A `Keeper` owns the directory. The core reports every change to it, one at a time, and
asks it whether the change is on disk.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center._ledger import Ledger
from agn_optax.center._runtime import Runtime
from agn_optax.center._store import CenterState, Store, log_version
from agn_optax.center.durability._chain import Digests, Witness, read_witness
from agn_optax.center.durability._directory import Directory
from agn_optax.center.durability._files import disk_errors
from agn_optax.center.durability._replay import (
    apply_record,
    is_fork,
    snapshot_of,
    state_in,
)
from agn_optax.center.durability._stack import stack
from agn_optax.center.durability._writer import Writer
from agn_optax.rules import Rule, difference

PyTree = Any
_log = logging.getLogger("agn_optax")
_JOURNAL_SIZE = 1 << 30  # bytes after which a snapshot replaces the journal
_MIN_SNAPSHOTS = 4  # minimum journal size, in snapshots, so that snapshots are few
_MAX_RECORDS = 100_000  # maximum records of a journal, so that a replay takes seconds
_MAX_FAILED_JOINS, _PERIOD = 16, 60.0  # records of failed joins in a period, s


@dataclasses.dataclass(frozen=True)
class Journal:
    """Every exchange is written to disk before it is answered.

    A center whose process was killed continues without loss: it has every answered
    exchange, and an exchange that is repeated is not applied again. Exchanges that
    arrive together are written together.

    Args:
      directory: directory of this center alone, to which every exchange is written
        before it is answered. It is created if necessary; a center that is found in it
        continues.
      size: bytes of the journal after which a snapshot replaces it. None for 1 GiB, or
        the size of four snapshots if that is larger. A snapshot is also written
        after 100,000 records of exchanges, joins and leaves, so that a start takes
        seconds.
      keep: records to keep after a snapshot has replaced them, as a tape of the run:
        "contributions" keeps all records and snapshots, and also records the
        contributions of dropped and rejected messages; "hashes" keeps the records
        without their contributions, and only the newest snapshot. None keeps nothing.
      limit: bytes of journals and snapshots beyond which "contributions" drops the
        contributions and the snapshots of the oldest journals. None for no limit.

    If the disk is full or fails, or if the directory is moved, the center closes and
    answers no further exchange.

    Raises:
      InvalidArgumentError: a value is out of range.

    Example:
      >>> import tempfile, jax.numpy as jnp, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     durability = agn_optax.center.Journal(folder)
      ...     center = agn_optax.LocalCenter(rule, jnp.ones(2), durability=durability)
      ...     sent = agn_optax.center.Submission(1, jnp.ones(2), anchor_version=0)
      ...     _ = center.join("worker-0").exchange(sent)
      ...     center.close()
      ...     center = agn_optax.LocalCenter(rule, durability=durability)
      ...     print(center.pull().params, center.version)
      ...     center.close()
      [0. 0.] 1
    """

    directory: str | os.PathLike[str]
    size: int | None = None
    keep: Literal["contributions", "hashes"] | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        path = self.directory
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise errors.InvalidTypeError(f"directory must be a path, got {path!r}")
        check.whole_number(self.size, "size", least=1)
        if self.keep not in (None, "contributions", "hashes"):
            raise errors.InvalidArgumentError(
                f"keep must be 'contributions', 'hashes' or None, got {self.keep!r}"
            )
        check.whole_number(self.limit, "limit", least=1)
        if self.limit is not None and self.keep != "contributions":
            raise errors.InvalidArgumentError(
                "limit needs keep='contributions': otherwise no contributions are kept "
                f"beyond a snapshot, got keep={self.keep!r}"
            )


# The complete state of a center: a function that returns the copied center state, the
# ledger's state, and the name of the chief.
Image = tuple[Callable[[], CenterState], dict[str, Any], str | None]


class Keeper:
    """Saves a center in a directory.

    Args:
      journal: the settings.
      rule: the rule of the center.
      changed: the condition around the center's lock. Callers of `begin` and `record`
        hold it, and notify it afterwards. The keeper notifies it of written records.
      runtime: the clock and the threads of the center.

    Attributes:
      center_id: the center id: that of the center on disk if no update is lost, or a
        new id.
      chief: name of the worker that initialized the center on disk.
      failure: error after which the center cannot be saved, and stops; "" without one.
      restore_message: how the center on disk continues; "" if there was none.
      saved_version: version of the newest snapshot written; None before the first.

    Raises:
      InvalidTypeError: ``journal`` has another type.
      DurabilityError: the directory cannot be used.
    """

    def __init__(
        self,
        journal: Journal,
        rule: Rule,
        changed: threading.Condition,
        runtime: Runtime = Runtime(),  # noqa: B008 it is immutable
    ) -> None:
        check.instance(journal, Journal, "durability must be Journal(...) or None")
        self.center_id = uuid.uuid4().hex
        self.chief: str | None = None
        self.failure = ""
        self.restore_message = ""
        self.saved_version: int | None = None
        self._journal = journal
        self._snapshot_error = ""  # why the last snapshot could not be written
        self._failed_snapshots = 0  # in a row
        self._directory = Directory(journal.directory)
        self._changed = changed
        self._runtime, self._clock = runtime, runtime.clock
        self._image: Callable[[], Image]
        self._rule = rule
        self._writer: Writer | None = None
        self._closed = False
        self._number = 0  # number of records so far
        # For a fork: the number of records that its parent has, too, and the digest of
        # the last one.
        self._parent: list[Any] | None = None
        # Of the last record before this process; a new center begins with its id.
        self._digest = bytes.fromhex(self.center_id)
        self._began = 0.0  # time at which the center began, s
        # What the next record says beside its event.
        self._noted: dict[str, Any] = {"snapshots": []}
        # End, s, of a period, and number of failed joins that it may still record.
        self._failed_joins_left = (-math.inf, 0)
        self._written = 0  # number of records that the journal has written
        self._digests = Digests(0)  # of written records
        self._saved: tuple[int, str] | None = None  # newest snapshot's number and id
        self._begun = 0  # number of the first record of this process
        self._attempted = 0  # number of records before the last attempt at a snapshot
        self._saved_size = 0
        self._saver: Future[None] | None = None  # set once there is a center

    def restore(
        self, ledger: Ledger, params: PyTree, dtype: Any, device: Any, flatten: bool
    ) -> Store | None:
        """Read the center in the directory, changing no file; None if there is none.

        Args:
          ledger: ledger whose workers are restored.
          params: parameters with the containers to use, and of the same model.
          dtype: expected dtype of the center; None accepts any.
          device: device of the center; None for the default device.
          flatten: whether the store may flatten the parameters.

        Raises:
          RuleMismatchError: the center on disk has another rule.
          TreeMismatchError: the center on disk has another model.
          DurabilityError: the center on disk cannot be read.
        """
        snapshot = self._directory.load()
        if snapshot is None:
            return None
        where = f"the center in {self._directory.path}"
        keeps = snapshot.about["keep"]
        if keeps and not self._journal.keep:
            raise errors.DurabilityError(
                f"{where} keeps a tape, with keep={keeps!r}; give Journal keep="
                "'contributions' or 'hashes' (--journal-keep), or its next snapshot "
                "would delete records of the tape"
            )
        saved = state_in(snapshot, self._rule, params, dtype, where)
        store = Store.restore(self._rule, saved, device, flatten=flatten)
        now = self._clock()
        states = [snapshot.about["ledger"]]
        self._number, self._digest = snapshot.number, snapshot.parent
        self._parent = snapshot.about.get("parent")
        if self._number:
            self._digests = Digests(self._number - 1)
            self._digests.add(self._digest)
        last, saved_as = snapshot, [snapshot.number, snapshot.digest.hex()]
        self._noted["snapshots"] = [saved_as]
        for record in self._directory.replay(snapshot):
            self._number, self._digest = record.number + 1, record.digest
            self._digests.add(record.digest)
            apply_record(record, store)
            states.append(record.about["ledger"])
            last = record
            if saved_as in record.about.get("snapshots", ()):
                self._noted["snapshots"] = []
        self._began = now - last.about["time"]
        version = ledger.version = store.current.number
        reason = self._directory.new_id_reason
        for state in states:
            # If updates are lost, workers may be ahead of the center: they restart.
            ledger.restore(state, now, is_new_id=bool(reason))
        if reason:
            self.restore_message = (
                f"{where} continues with a new id, at version {version}: {reason}"
            )
            _log.warning("%s", self.restore_message)
        else:
            self.restore_message = f"{where} continues at version {version}"
            self.center_id = snapshot.about["center_id"]
            self.chief = snapshot.about["chief"]
            if difference(snapshot.about["rule"], self._rule):
                self.restore_message += (
                    ", with another rule: the center optimizer begins with a new state"
                )
                _log.info("%s", self.restore_message)
            is_same = keeps == self._journal.keep and not is_fork(snapshot)
            if self._number == snapshot.number and is_same:
                self._saved = self._number, self.center_id
        self._saved_size = snapshot.size
        return store

    def begin(self, image: Callable[[], Image]) -> None:
        """Start to save the center, which now has parameters.

        Raises:
          DurabilityError: the center cannot be written.
        """
        self._image, number = image, self._number
        try:
            # The guarantee in the lock holds if the process is killed in between.
            with disk_errors(f"cannot write to {self._directory.path}"):
                if not self.restore_message:  # there was no center
                    self._began = self._clock()
                    self._directory.write_lock("new", number)
                if self._journal.keep:  # the tape goes on after its last records
                    self._directory.sync_newest()
                if self._saved != (number, self.center_id):
                    self._save(number, image(), self._digest)
                self._written = number
                self._writer = Writer(
                    self._directory,
                    number,
                    self._digest,
                    self._set_written,
                    self._fail,
                    self._runtime,
                )
                self._directory.write_lock("journal", number)
                if not self._journal.keep:  # else it may take long
                    self._directory.remove_old(number)
        except BaseException:
            if self._writer is not None:
                self._writer.close()
            self._writer = self._saved = None  # the next call may have other parameters
            self._noted["snapshots"] = []
            raise
        self._attempted = self._begun = number
        about = {"center_id": self.center_id, "stack": stack(), "began": time.time()}
        self._noted["process"] = about
        self._saver = self._runtime.keep_running(
            self._save_when_due, "agn-optax snapshots"
        )

    def record(
        self,
        kind: str,
        about: dict[str, Any],
        ledger: dict[str, Any],
        contents: Sequence[PyTree | None] = (),
    ) -> int:
        """Record an event of the center.

        Args:
          kind: kind of the event.
          about: its description, whose numbers may be arrays.
          ledger: the ledger's state of the workers that are concerned.
          contents: the contribution of each message; None for one that is not kept.

        Returns:
          The record number to wait for, see `is_kept`.
        """
        if self._writer is None or self._closed or self.failure:
            return self.recorded
        self._number += 1
        noted = {name: value for name, value in self._noted.items() if value}
        self._noted = {"snapshots": []}
        now = self.seconds(self._clock())
        head = {"kind": kind, "time": now}
        self._writer.append({**head, **about, **noted, "ledger": ledger}, contents)
        return self.recorded

    def may_record_failed_join(self) -> bool:
        """Return whether a join that failed gets a record, or is only counted.

        So that workers that try again and again do not fill the disk. The next record
        of any kind has the count.
        """
        now, (end, left) = self._clock(), self._failed_joins_left
        if now >= end:
            end, left = now + _PERIOD, _MAX_FAILED_JOINS
        self._failed_joins_left = end, max(0, left - 1)
        if not left:
            self._noted["more_failed_joins"] = 1 + self._noted.get(
                "more_failed_joins", 0
            )
        return left > 0

    @property
    def witness(self) -> str:
        """The newest record on disk, for workers; "" before the first record.

        Hold the lock to read it.
        """
        number = self._digests.end - 1
        digest = self._digests.find(number)
        if digest is None:
            return ""
        return str(Witness(self.center_id, number, digest))

    def check_witnesses(self, texts: Iterable[str], worker: str) -> None:
        """Check that this center has the records that a worker has seen; log an error.

        See `_check_witness`.
        """
        try:
            for text in texts:
                self._check_witness(text, worker)
        except errors.OtherHistoryError as error:
            _log.error("%s", error)
            raise

    def _check_witness(self, text: str, worker: str) -> None:
        """Check that this center has the record that a worker has seen.

        A record of another center says nothing about this one, which then has another
        center id. A record that was not kept is not compared. Call this without the
        lock: old records are searched on disk.

        Raises:
          InvalidArgumentError: the text is no witness.
          OtherHistoryError: the center has another record of this number, or none yet.
        """
        seen = read_witness(text)
        if seen.center_id != self.center_id:
            return
        with self._changed:
            end, digest = self._digests.end, self._digests.find(seen.number)
        if seen.number < end and digest is None and self._journal.keep:
            digest = self._directory.find_digest(seen.number)
        if seen.number >= end:
            found = f"this center has {end} records"
        elif digest not in (None, seen.digest):
            found = f"this center has another record {seen.number}"
        else:
            return
        raise errors.OtherHistoryError(
            "this center's history does not contain what worker "
            f"{worker!r} has seen: record {seen.number} with digest "
            f"{seen.digest.hex()}, but {found}. Its directory "
            f"{self._directory.path} may be an old copy, or another center has "
            "continued from a copy. Serve the newest directory; or remove its lock: "
            "then the center gets a new id, and its workers start again"
        )

    @property
    def keeps_all(self) -> bool:
        """True if contributions are kept that did not move the center, too."""
        return self._journal.keep == "contributions"

    def seconds(self, at: float) -> float:
        """Return the seconds from the center's beginning to a time of its clock."""
        return round(at - self._began, 6)

    @property
    def recorded(self) -> int:
        """Number of the newest record, to wait for; see `is_kept`."""
        return 0 if self._writer is None else self._number

    @property
    def degraded(self) -> str:
        """The reason why changes are missing on disk; "" if none are."""
        return self.failure or self._snapshot_error

    @property
    def failures(self) -> float:
        """Number of snapshots in a row that failed; infinite if writing has ended."""
        return math.inf if self.failure else self._failed_snapshots

    def is_kept(self, recorded: int) -> bool:
        """Return whether this many records are on disk; a `failure` ends writing."""
        return recorded <= self._written

    def close(self) -> None:
        """Write the remaining records and a last snapshot; release the directory."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            if self._saver is not None:
                self._saver.result()
                self._write_last()
        finally:
            self._directory.close()

    def _write_last(self) -> None:
        writer = self._writer
        assert writer is not None
        writer.close()
        try:
            with self._changed:
                number, image = self._number, self._image()
            if not self.failure:
                if self._saved != (number, self.center_id):
                    self._save(number, image, writer.digest)
                self._directory.write_lock("closed", number)
                self._remove_old(number + 1, (writer.begin, writer.end))
        except OSError as error:
            self._fail(error)

    def _set_written(self, number: int, digests: list[bytes]) -> None:
        with self._changed:
            for digest in digests:
                self._digests.add(digest)
            self._written = number
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = (
                f"this center can no longer be saved in {self._directory.path}: {error}"
            )
            _log.error("%s", self.failure)
            self._changed.notify_all()

    def _save_when_due(self) -> None:
        if self._journal.keep:  # else `begin` has done it
            self._remove_old(self._begun)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self.failure or self._is_due
                )
                if self._closed or self.failure:
                    return
            self._replace_journal()

    @property
    def _is_due(self) -> bool:
        """True if the journal is so long that a snapshot replaces it."""
        assert self._writer is not None
        default = max(_JOURNAL_SIZE, _MIN_SNAPSHOTS * self._saved_size)
        is_large = self._writer.size >= (self._journal.size or default)
        return is_large or self._number - self._attempted >= _MAX_RECORDS

    def _replace_journal(self) -> None:
        """Write a snapshot, which makes the records before it unnecessary."""
        writer = self._writer
        assert writer is not None
        try:
            with self._changed:
                self._attempted = number = self._number
                writer.begin_file()
                image = self._image()
                self._changed.wait_for(lambda: not writer.is_switching or self.failure)
                begin = writer.begin
                if self.failure:  # the digest before the snapshot is not known
                    return
            self._save(number, image, writer.before)
            self._remove_old(begin, writer.full)
        except Exception as error:
            self._snapshot_error = (
                f"no snapshot could be written to {self._directory.path}: {error}; the "
                "next attempt follows when the next snapshot is due"
            )
            self._failed_snapshots += 1
            _log.error("%s", self._snapshot_error)

    def _remove_old(self, begin: int, full: tuple[int, int] | None = None) -> None:
        """Remove what a snapshot has replaced, but for what is kept.

        Args:
          begin: number of the first record that may still be needed.
          full: the number of the first record, and the bytes, of the last journal that
            gets no more records; None if there is none.
        """
        keep = self._journal.keep
        if not keep:
            self._directory.remove_old(begin)
            return
        limit = 0 if keep == "hashes" else self._journal.limit
        try:
            if full is not None:
                self._directory.trim(*full)
            if limit is not None:
                self._directory.drop_contributions(begin, limit)
        except OSError as error:  # it is repeated after the next snapshot
            _log.error("contributions are still in %s: %s", self._directory.path, error)

    def _save(self, number: int, image: Image, parent: bytes) -> None:
        """Write a snapshot of a state, after the record with digest ``parent``."""
        copied, ledger, chief = image
        state = copied()
        about, arrays = snapshot_of(
            state,
            self._rule,
            center_id=self.center_id,
            time=self.seconds(self._clock()),
            keep=self._journal.keep,
            ledger=ledger,
            chief=chief,
            parent=self._parent,
        )
        written = self._directory.save(number, about, arrays, parent)
        with self._changed:
            others = [each for each in self._noted["snapshots"] if each[0] != number]
            self._noted["snapshots"] = [*others, [number, written.digest.hex()]]
        self._saved_size = written.size
        self._saved = number, self.center_id
        # Cleared before the new version can be seen.
        self._snapshot_error, self._failed_snapshots = "", 0
        self.saved_version = int(state.version)
        log_version(f"a snapshot is in {self._directory.path},", lambda: state)
