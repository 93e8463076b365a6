"""Notices of a center and its workers: training goes wrong, but does not stop.

`CHECKS` is the table: who looks, when a notice holds, its text, and what to do.
`Thresholds` has the number of each check that users may change. Every check compares
one value with its threshold, in `Notices.measure`, and nowhere else. Logs, the status
of a center, its page and docs/notices.md show the texts of the table.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from agn_optax._internal import check

_log = logging.getLogger("agn_optax")

REPEAT = 600.0  # s, minimum time between two lines in the log of the same notice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds of the checks for training that goes wrong; None or 0 turns one off.

    A center looks at the first ones, from ``lost_messages`` to ``not_on_disk``, and a
    worker at the others. A center shows what its workers found, whatever its own
    thresholds of their checks.

    Args:
      lost_messages: share of a worker's last ten messages that were rejected, dropped
        or late.
      missed_periods: time in which a worker made no exchange, as a multiple of the
        longest of its last intervals between two, and at least ten seconds.
      still_center: updates in a row that have not moved the center.
      other_norm: factor between the norms of a worker's messages and those of the
        others.
      apart: messages in a row that point away from those of the other workers.
      one_by_one: workers whose messages are applied one by one, by a rule for rounds.
      slow_link: factor by which a worker exchanges slower than the others.
      not_on_disk: snapshots in a row that could not be written to disk; if writing has
        ended, any threshold is reached.
      unrecorded_steps: exchanges in a row whose local steps did not reach the record.
      miscounted_steps: factor between the local steps in the record of a round and
        those that `exchange` counted.
      slow_exchange: time of an exchange, as a multiple of what its link should take.
      other_link: exchanges over another transport or network interface than expected.
      residual: norm of the residual of a codec, as a multiple of what the codec usually
        keeps: the contribution's norm times the codec's compression.

    Raises:
      InvalidArgumentError: a threshold is negative or not finite, or a share is
        greater than 1.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> from agn_optax.center import Thresholds
      >>> rule = agn_optax.rules.downpour()
      >>> thresholds = Thresholds(lost_messages=0.5, apart=None)
      >>> center = agn_optax.LocalCenter(rule, jnp.zeros(3), thresholds=thresholds)
      >>> center.notices
      []
    """

    lost_messages: float | None = 0.2
    missed_periods: float | None = 3.0
    still_center: int | None = 10
    other_norm: float | None = 100.0
    apart: int | None = 10
    one_by_one: int | None = 2
    slow_link: float | None = 10.0
    not_on_disk: int | None = 1
    unrecorded_steps: int | None = 2
    miscounted_steps: float | None = 2.0
    slow_exchange: float | None = 10.0
    other_link: int | None = 1
    residual: float | None = 2.5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, int):
                check.whole_number(value, field.name, least=0)
            elif value is not None:
                most = 1.0 if field.name == "lost_messages" else math.inf
                check.rate(value, field.name, low=0.0, high=most)


class Check(NamedTuple):
    """A row of the table."""

    observer: Literal["center", "worker"]
    condition: str  # when the notice holds, in words, with a {threshold}
    text: str  # of the notice, with the values that `Notices.measure` gets
    remedy: str  # what to do


CHECKS = {
    "lost_messages": Check(
        "center",
        "{threshold:.0%} or more of a worker's last ten messages were rejected, "
        "dropped or late for their round",
        "{lost} of the last {count} messages of worker {worker!r} were rejected, "
        "dropped or late; the last one {reason}",
        "if messages are rejected, take a smaller learning rate, clip gradients or "
        "change the message limits. If they are late, take a shorter period for this "
        "worker, or a wider bound of the mode",
    ),
    "missed_periods": Check(
        "center",
        "a connected worker has made no exchange for {threshold:g} times the longest "
        "of its last intervals between two exchanges, nor for ten seconds, and does "
        "not wait for others. Before its first exchange, the longest interval of the "
        "other workers counts, and at least a minute",
        "worker {worker!r} has made no exchange for {seconds:.0f} s, {value:.1f} times "
        "the longest interval that was expected ({longest:.3g} s)",
        "look at the process and the log of this worker: it may hang in a collective, "
        "wait for data, or have lost its device",
    ),
    "still_center": Check(
        "center",
        "{threshold} updates in a row have not moved the center, or have moved less "
        "than one in ten of the elements that their messages reach",
        "the center has hardly moved in {value} updates: {reason}",
        "if messages are zero, make local steps with worker.tx and pass on its state. "
        "If updates are lost in rounding, give the center dtype='float32' (--dtype "
        "float32), or its optimizer a larger learning rate",
    ),
    "other_norm": Check(
        "center",
        "the norm of a worker's messages is {threshold:g} times that of the other "
        "workers, or 1/{threshold:g} of it, in their medians of five messages",
        "the messages of worker {worker!r} have a norm of {norm:.3g}, and those of the "
        "other workers {others:.3g}",
        "compare the learning rate, period, loss scale and data of this worker with "
        "those of the others",
    ),
    "apart": Check(
        "center",
        "for {threshold} messages in a row, the mean cosine of a worker's message with "
        "the last ones of the other workers was below zero; not for `easgd`, whose "
        "workers spread around the center",
        "the last {value} messages of worker {worker!r} point away from those of the "
        "other workers (mean cosine {cosine:.2g})",
        "check the data and labels of this worker, and that all train the same model. "
        "If their data differ much, take a shorter period. If the loss no longer "
        "falls, messages undo each other: take a smaller learning rate",
    ),
    "one_by_one": Check(
        "center",
        "{threshold} or more workers exchange with a center that applies messages one "
        "by one, and its rule is for rounds (`average`, `diloco`), with a center rate "
        "above 1 divided by the number of workers; said at the start, too",
        "{rule} is a rule for rounds, and in mode {mode} {workers} workers move the "
        "center {workers} times as far as in a round: {instead} would do",
        "take mode=Synchronous() (--mode synchronous); or plain SGD with a rate of 1 "
        "divided by the number of workers, without momentum (--rule diloco "
        "--center-optimizer sgd --learning-rate 0.5 for two workers); or a center "
        "optimizer of agn_optax.center_optimizers for messages that come one by one",
    ),
    "slow_link": Check(
        "center",
        "the best of a worker's last five exchanges moved bytes {threshold:g} times "
        "slower than the other workers do (the median of their best), and took 0.1 s "
        "longer than at their rate; not in shared memory",
        "worker {worker!r} exchanges {route} at {rate:.3g} MB/s, {value:.3g} times "
        "slower than the other workers ({others:.3g} MB/s)",
        "run agn-optax doctor from the worker's machine: its route may be a slower "
        "network. If its link is slow, take overlap=True, a longer period for this "
        "worker or a codec",
    ),
    "not_on_disk": Check(
        "center",
        "{threshold} or more snapshots of the center in a row could not be written to "
        "disk, or nothing can be written any more",
        "the center on disk lacks changes: {reason}",
        "make room on the disk, or repair it; look at the directory's owner and rights",
    ),
    "unrecorded_steps": Check(
        "worker",
        "{threshold} exchanges in a row had no local step in the record",
        "worker {worker!r} made no local step in {value} rounds in a row, but "
        "exchange() counted {counted} in the last one: its messages are empty, and the "
        "center does not move",
        "make local steps with worker.tx.update(grads, state, params), pass its state "
        "on, and give an optimizer of your own as Worker(center, inner, ...). If loss "
        "scaling skipped all of these steps, ignore this",
    ),
    "miscounted_steps": Check(
        "worker",
        "`exchange` counted {threshold:g} times the local steps of a round, or fewer "
        "than were made",
        "worker {worker!r} made {steps} local steps in a round, but exchange() counted "
        "{counted}: its rounds are {length} than its period",
        "call exchange once after every local step, or pass the number of steps: "
        "exchange(params, state, steps=...)",
    ),
    "slow_exchange": Check(
        "worker",
        "five exchanges in a row took {threshold:g} times as long as their link should "
        "take, and 0.1 s longer, or one took 10 s longer; without the time at the "
        "center. The link's rate is that of ExpectedLink(rate=...), or the worker's "
        "best rate so far",
        "an exchange of worker {worker!r} took {seconds:.3g} s, {value:.3g} times as "
        "long as expected: {link}",
        "look at what else uses the network, and run agn-optax doctor from this "
        "machine. Take a longer period, overlap=True or a codec if the link is slow",
    ),
    "other_link": Check(
        "worker",
        "{threshold} or more exchanges used another transport or network interface "
        "than expected",
        "worker {worker!r} exchanges {link}, and {expected} was expected",
        "run agn-optax doctor from this machine: a firewall may close the port of "
        "direct connections, or the center's name may belong to a slower network",
    ),
    "residual": Check(
        "worker",
        "the norm of a codec's residual is {threshold:g} times that of the "
        "contribution times the codec's compression (bytes of the parameters divided "
        "by those of the message), and has grown at ten exchanges in a row",
        "the residual of worker {worker!r} has a norm of {norm:.3g}, {value:.3g} times "
        "the {usual:.3g} that its codec usually keeps, and grows",
        "take a codec that sends more: more elements, more bits or smaller blocks. If "
        "the center drops or rejects the messages of this worker, see to that first",
    ),
}

_ORDER = {name: place for place, name in enumerate(CHECKS)}


class Notice(NamedTuple):
    """Something that goes wrong now."""

    check: str  # a name of `CHECKS`
    worker: str  # the worker's name; "" if it is about the center
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text}. What to do: {self.remedy}"


class Notices:
    """The notices that hold now. They are logged when they start.

    A notice that still holds, or holds again, is logged once in `REPEAT` seconds.

    Args:
      thresholds: the thresholds; None for the default ones.
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or Thresholds()
        self._lock = threading.Lock()
        self._current: dict[tuple[str, str], Notice] = {}
        self._logged: dict[tuple[str, str], float] = {}  # time of the last line

    def threshold(self, name: str) -> Any:
        """Return the threshold of a check; None if it is switched off."""
        return getattr(self._thresholds, name) or None

    def is_on(self, name: str) -> bool:
        """Return whether a check has a threshold."""
        return self.threshold(name) is not None

    def measure(
        self, name: str, value: float | None, worker: str = "", **values: Any
    ) -> bool:
        """Compare a value with the threshold of a check; return whether it is reached.

        Args:
          name: a name of `CHECKS`.
          value: the value; None if nothing is wrong.
          worker: the worker's name; "" for the center.
          **values: the other values in the texts of the check.
        """
        threshold, key = self.threshold(name), (name, worker)
        if threshold is None or value is None or not value >= threshold:
            with self._lock:
                self._current.pop(key, None)
            return False
        described = CHECKS[name]
        values |= {"worker": worker, "value": value, "threshold": threshold}
        text = described.text.format(**values)
        notice = Notice(name, worker, text, described.remedy)
        self._start(notice)
        return True

    def take(self, worker: str, texts: Mapping[str, str]) -> None:
        """Replace the notices of a worker's own checks by those that it has sent.

        Args:
          worker: the worker's name.
          texts: what each check says, by its name; unknown names are ignored, which a
            newer worker may send.
        """
        if not (texts or self._current):  # as at almost every exchange
            return
        for name, row in CHECKS.items():
            if row.observer != "worker":
                continue
            if name in texts:
                self._start(Notice(name, worker, texts[name], row.remedy))
            else:
                with self._lock:
                    self._current.pop((name, worker), None)

    def adopt(self, notices: Iterable[Notice], *, is_logged: bool) -> None:
        """Replace the notices of a center's checks by those of its answer to a worker.

        Args:
          notices: the notices; those of unknown checks are ignored, which a newer
            center may send.
          is_logged: whether this process has logged them already.
        """
        notices = tuple(notices)
        if not (notices or self._current):  # as at almost every exchange
            return
        rows = CHECKS.items()
        known = {name for name, row in rows if row.observer == "center"}
        found = [notice for notice in notices if notice.check in known]
        kept = {(notice.check, notice.worker) for notice in found}
        with self._lock:
            for key in [k for k in self._current if k[0] in known and k not in kept]:
                del self._current[key]
        for notice in found:
            self._start(notice, is_logged=is_logged)

    def _start(self, notice: Notice, *, is_logged: bool = False) -> None:
        """Keep a notice, and log it unless it was logged a short time ago."""
        now, key = time.monotonic(), (notice.check, notice.worker)
        with self._lock:
            self._current[key] = notice
            is_due = now - self._logged.get(key, -math.inf) >= REPEAT
            is_due = is_due and not is_logged
            if is_due:
                self._logged = {
                    k: at for k, at in self._logged.items() if now - at < REPEAT
                }
                self._logged[key] = now
        if is_due:
            _log.warning("%s", notice)

    def forget(self, worker: str) -> None:
        """End all notices about a worker, such as one that has left."""
        with self._lock:
            for key in [key for key in self._current if key[1] == worker]:
                del self._current[key]

    def current(self, observer: str = "") -> list[Notice]:
        """Return the notices that hold now, in the order of the table and of names.

        Args:
          observer: "center" or "worker", for those of its checks; "" for all.
        """
        if not self._current:  # as at almost every exchange
            return []
        with self._lock:
            found = [
                notice
                for notice in self._current.values()
                if observer in ("", CHECKS[notice.check].observer)
            ]
        return sorted(found, key=lambda n: (_ORDER[n.check], n.worker))


def check_thresholds(thresholds: Any) -> None:
    """Raise `InvalidTypeError` unless this is None or `Thresholds`."""
    if thresholds is not None:
        expected = "thresholds must be agn_optax.center.Thresholds(...)"
        check.instance(thresholds, Thresholds, expected)


def condition(name: str) -> str:
    """Return when a notice holds, in words, with the default threshold."""
    threshold = getattr(Thresholds, name)
    return CHECKS[name].condition.format(threshold=threshold)
