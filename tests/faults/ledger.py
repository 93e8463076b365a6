"""Checks of what must hold in every run, whatever fails."""

import dataclasses
import functools
import itertools

import numpy as np

from agn_optax import errors
from agn_optax.center.durability._directory import Files

_RATE = 0.25  # moving rate of easgd


class BrokenError(Exception):
    """A check has failed; the message says which."""


def check(holds, text, *about):
    """Raise if a check fails."""
    if not holds:
        raise BrokenError(text % about)


@dataclasses.dataclass
class Message:
    """A message of a worker, and what became of it."""

    number: int  # 1, 2, 3, ... in a scenario: an element of its contribution
    worker: str
    session_id: str
    sequence: int
    samples: range
    steps: int
    contribution: np.ndarray | None = None
    is_sent: bool = False
    outcome: str = ""  # as its worker was told


class Ledger:
    """A record of all messages and versions, with which a center is compared.

    Attributes:
      versions: parameters of all versions so far, by number.
      applied: messages that made each version, from version 1 on.
      size: number of parameters.

    Args:
      scenario: the scenario.
      on_version: called right after versions at which an observer looks.
    """

    size = 4

    def __init__(self, scenario, on_version):
        self._on_version = on_version
        self.versions = [np.zeros(self.size, np.float32)]
        self.applied = []
        self.messages = {}  # by session id and sequence
        self.numbers = {}  # messages by number
        self._scenario = scenario
        self._rule = scenario.rule.name
        self._center_id = ""
        self._is_known = False  # whether a worker knows the center id
        self._known = 0  # newest version that somebody knows
        self._ranks = {}  # of sessions at the center: a newer one has a higher rank
        self._newest = {}  # rank of the newest session, by worker
        self._settled = {}  # rank of the newest session with an answer, by worker
        self._begun = set()  # sessions whose workers know that they have joined
        self._core = None
        self._count = itertools.count(1)
        self._current = {}  # session of each worker, in this process of the center
        self._replaced = set()  # sessions that others have replaced in this process

    # The workers.

    def new_session(self, worker):
        """Return the id of another session of a worker."""
        return f"session-{next(self._count):04} of {worker}"

    def message_of(self, life, sequence, first, steps):
        """Return a message, which a resumed worker has sent before."""
        key, samples = (life.session_id, sequence), range(first, life.worker.samples)
        if key in self.messages:
            check(
                self.messages[key].samples == samples or life.worker.has_twins,
                "%s has used number %d before",
                life.worker.name,
                sequence,
            )
        else:
            number = len(self.messages) + 1
            check(
                len(samples) == steps or life.worker.has_twins,
                "%s counts %d local steps of %d",
                life.worker.name,
                steps,
                len(samples),
            )
            about = (number, life.worker.name, *key, samples, steps)
            self.messages[key] = self.numbers[number] = Message(*about)
        return self.messages[key]

    def contribution(self, message, x):
        """Make the contribution of a message; its last element tells which it is."""
        made = np.array(x, np.float32)
        made[-1] = message.number
        if message.number in self._scenario.poisoned:
            made[0] = np.nan
        message.contribution = made
        return made

    def joined(self, life, center_id):
        """Record that a worker knows the center id, and that its session has begun."""
        check(center_id == self._center_id, "a worker joined another center")
        self._is_known = True
        self._begun.add(life.session_id)

    def pulled(self, life, version, params):
        """Record that a worker or an observer has a version."""
        self._check_version(life, version, params)

    def answered(self, life, message, answer):
        """Check the answer to a message, of which its worker will not be told twice."""
        number = message.number
        if answer.rejected:
            outcome = "rejected"
        else:
            outcome = "applied" if answer.applied else "dropped"
        at = self._version_of(number)
        check(
            message.outcome in ("", outcome),
            "message %d was %s, and then %s",
            number,
            message.outcome,
            outcome,
        )
        message.outcome = outcome
        mode = self._scenario.mode
        may_drop = getattr(mode, "versions", None) is not None
        may_drop = may_drop or getattr(mode, "late", None) == "drop"
        check(outcome != "dropped" or may_drop, "message %d was dropped", number)
        is_poisoned = number in self._scenario.poisoned
        check(outcome != "rejected" or is_poisoned, "message %d was rejected", number)
        if outcome == "applied":
            check(at is not None, "message %d was answered, but not applied", number)
            first = at if self._rule != "easgd" else at - 1
            check(
                answer.version >= first,
                "message %d made version %d, but version %d was the answer",
                number,
                at,
                answer.version,
            )
        else:
            check(at is None, "message %d was applied: the answer lies", number)
        self._check_version(life, answer.version, answer.params)
        worker, rank = message.worker, self._ranks[message.session_id]
        self._settled[worker] = max(rank, self._settled.get(worker, 0))

    def never_applied(self, message):
        """Record an error that says that the message has no effect."""
        message.outcome = "failed"
        is_applied = self._version_of(message.number) is not None
        check(not is_applied, "message %d was applied: the error lies", message.number)

    def cannot_resume(self, life, error):
        """Check that a session that cannot be resumed was replaced by another one."""
        newest = self._newest.get(life.name, 0)
        is_lost = (
            life.session_id in self._begun and newest <= self._ranks[life.session_id]
        )
        check(not is_lost, "session %s is lost: %s", life.session_id, error)

    def adopted(self, message, answer, x, *, in_flight):
        """Return a worker's parameters after an answer."""
        center = answer.params
        if self._rule != "easgd" or answer.rejected or in_flight:
            return center
        after = x + np.float32(_RATE) * (center - x)
        at = self._version_of(message.number)
        if answer.applied and answer.version == at - 1:  # not a repeated answer
            moved = self.versions[at] - self.versions[at - 1]
            lost = message.contribution - (
                message.contribution
                + np.float32(_RATE) * (center - message.contribution)
            )
            check(
                _close(moved, lost),
                "message %d is not conserved: %s and %s",
                message.number,
                moved,
                lost,
            )
        return after

    def _check_version(self, life, version, params):
        check(version >= life.seen, "version %d follows %d", version, life.seen)
        check(version < len(self.versions), "there is no version %d", version)
        check(
            np.array_equal(self.versions[version], params),
            "version %d has other parameters",
            version,
        )
        life.seen = version
        self._known = max(self._known, version)

    def _version_of(self, number):
        for version, numbers in enumerate(self.applied, 1):
            if number in numbers:
                return version
        return None

    # The center.

    def start(self, core):
        """Check a center that has started, and watch it."""
        store, version = core.store, core.store.current.number
        check(
            core.center_id == self._center_id or not self._is_known,
            "the center has another id, and no worker was told",
        )
        check(
            version >= self._known,
            "version %d was lost: the center has %d",
            self._known,
            version,
        )
        check(version < len(self.versions), "there was no version %d", version)
        check(
            np.array_equal(self.versions[version], _params(store)),
            "version %d was restored with other parameters: %s and %s",
            version,
            _params(store),
            self.versions[version],
        )
        check(core.ledger.version == version, "ledger and store differ")
        self._current, self._replaced = {}, set()
        self._center_id = core.center_id
        del self.versions[version + 1 :], self.applied[version:]
        self._core, apply = core, store.apply
        store.apply = lambda submissions, *args: self._apply(apply, submissions, *args)
        join, ledger = core.ledger.join, core.ledger
        ledger.join = functools.partial(self._join, join)

    def _join(self, join, worker, session_id, now, *, resume, **kwargs):
        connection = join(worker, session_id, now, resume=resume, **kwargs)
        rank = self._ranks.get(session_id, 0)
        is_replaced = rank < self._settled.get(worker, 0)
        check(
            not (resume and (is_replaced or session_id in self._replaced)),
            "%s has two lives: %s was replaced, and has resumed",
            worker,
            session_id,
        )
        if rank < self._newest.get(worker, 0) or connection == 1:
            self._ranks[session_id] = self._newest[worker] = next(self._count)
            self._replaced.add(self._current.get(worker))
            self._replaced.discard(session_id)
            self._current[worker] = session_id
        return connection

    def _apply(self, apply, submissions, *args):
        store, before = self._core.store, self._core.store.current.number
        apply(submissions, *args)
        number = store.current.number
        check(number == len(self.versions), "version %d was skipped", number)
        contributions = [
            np.asarray(store.unplace(each.contribution)) for each in submissions
        ]
        numbers = [round(float(each[-1])) for each in contributions]
        for each, contribution in zip(numbers, contributions, strict=True):
            message = self.numbers.get(each)
            check(message is not None, "no worker has made message %d", each)
            check(message.is_sent, "message %d was not sent", each)
            check(
                self._version_of(each) is None,
                "message %d of %s was applied twice",
                each,
                message.worker,
            )
            check(
                message.outcome == "",
                "message %d was %s, and is applied",
                each,
                message.outcome,
            )
            check(
                self._ranks[message.session_id] >= self._settled.get(message.worker, 0),
                "%s has two lives: message %d is of an earlier one",
                message.worker,
                each,
            )
            check(
                np.array_equal(message.contribution, contribution),
                "message %d has changed on its way",
                each,
            )
        check(len({*numbers}) == len(numbers), "a round has a message twice")
        missed = [before - each.anchor_version for each in submissions]
        after = self._expected(contributions, missed)
        params = _params(store)
        check(
            _close(params, after),
            "version %d is %s instead of %s",
            number,
            params,
            after,
        )
        self.versions.append(params)
        self.applied.append(numbers)
        if number in self._scenario.pulls:
            self._on_version()

    def _expected(self, contributions, missed):
        """Return the next version; messages have missed that many rounds."""
        before = self.versions[-1]
        if self._rule == "easgd":
            return before + _RATE * (contributions[0] - before)
        if getattr(self._scenario.mode, "late", None) == "weighted":
            pairs = zip(contributions, missed, strict=True)
            contributions = [each / (1 + rounds) for each, rounds in pairs]
        total = sum(contributions)
        return before - (total / len(contributions) if self._is_mean else total)

    @property
    def _is_mean(self):
        return self._rule == "average"

    # The end.

    def end(self, core, workers, folder):
        """Check what is left when all workers are done."""
        delivered = sum(core.ledger.totals[1:2])
        messages = [self.numbers[each] for numbers in self.applied for each in numbers]
        check(
            delivered == sum(each.steps for each in messages),
            "the totals have %d local steps of %d",
            delivered,
            sum(each.steps for each in messages),
        )
        for worker in workers:
            if worker.has_twins:
                continue
            samples = [
                sample
                for each in messages
                if each.worker == worker.name
                for sample in each.samples
            ]
            check(len(samples) == len({*samples}), "%s used samples twice", worker.name)
        if self._scenario.journal:
            self._check_tape(folder)

    def _check_tape(self, folder):
        files = Files(folder)
        parent, applied = None, []
        last, connections = 0.0, None  # unknown if a process began before
        for segment in files.segments():
            if segment.number and parent is None and self._scenario.keep:
                raise BrokenError("the beginning of the tape is missing")
            try:
                records = list(files.read_segment(segment))
            except errors.DurabilityError as error:
                raise BrokenError(f"the tape is damaged: {error}") from None
            for record in records:
                check(
                    parent is None or record.parent == parent,
                    "record %d breaks the chain",
                    record.number,
                )
                parent = record.digest
                check(record.about["time"] >= last, "time goes back on the tape")
                last = record.about["time"]
                members = record.about["ledger"]["members"]
                if "process" in record.about:
                    connections = {}
                for name in record.about["workers"] if connections is not None else ():
                    _check_joined(record, name, members, connections)
                made = [
                    (name, members[name]["session_id"], each["sequence"])
                    for each in record.about.get("messages", ())
                    for name in [each["worker"]]
                    if each["outcome"] == "applied"
                ]
                if made:
                    applied.append(made)
        expected = [
            [
                (each.worker, each.session_id, each.sequence)
                for each in map(self.numbers.get, numbers)
            ]
            for numbers in self.applied
        ]
        if not self._scenario.keep:  # a snapshot has replaced the beginning
            expected = expected[len(expected) - len(applied) :]
        check(applied == expected, "the tape has %s, not %s", applied, expected)


def _check_joined(record, worker, members, connections):
    """Check that the tape has all joins of a session before what became of it.

    Args:
      record: a record of the tape.
      worker: a worker of the record.
      members: the ledger's state of these workers.
      connections: session and connection of each worker in this process so far.
    """
    kind, session_id = record.about["kind"], members[worker]["session_id"]
    last, known = connections.get(worker, ("", 0))
    known = known if session_id == last else 0
    if kind == "join":
        connection = record.about["connection"]
        check(
            connection == known + 1,
            "record %d is connection %d of %s, after connection %d",
            record.number,
            connection,
            session_id,
            known,
        )
        connections[worker] = session_id, connection
    elif kind not in ("expired", "leave"):  # else it may not have returned since
        check(known, "record %d: %s has not joined on the tape", record.number, worker)


def _params(store):
    return np.array(store.unplace(store.current.params))


def _close(array, other):
    return np.abs(array - other).max() <= 1e-5 * (1 + np.abs(other).max())
