"""Durable centers: restored without loss, or as of an earlier snapshot.

A killed process leaves its files unchanged, so a copy of them is what the next process
finds.
"""

import collections
import contextlib
import errno
import functools
import itertools
import os
import pathlib
import resource
import shutil
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared, tuning
from helpers.support import RULES, assert_identical, tree
from helpers.waiting import in_background, wait_until

import agn_optax
from agn_optax import errors, tape
from agn_optax._internal import trees
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    Limits,
    LocalCenter,
    Submission,
    Synchronous,
)
from agn_optax.center.durability import Keeper

DOWNPOUR = shared.downpour()
LIMIT = 60  # s, generous: no test should come near it
FIRST = "journal-000000000000"


def copied(directory, to):
    """Copy a directory at a time when its set of files does not change."""
    end = time.monotonic() + LIMIT
    while True:
        before = names(directory)
        with contextlib.suppress(
            shutil.Error, FileNotFoundError
        ):  # a file was just removed
            shutil.copytree(directory, to)
            is_settled = not any(name.endswith(".tmp") for name in before)
            if is_settled and names(directory) == names(to) == before:
                return to
        assert time.monotonic() < end, "its files change all the time"
        shutil.rmtree(to, ignore_errors=True)


@pytest.fixture
def killed(tmp_path):
    """Return a function that copies a directory, as a kill would leave it."""
    count = itertools.count()

    def copy(directory):
        return copied(directory, tmp_path / f"copy-{next(count)}")

    return copy


def files(directory):
    return {each.name: each.read_bytes() for each in pathlib.Path(directory).iterdir()}


def names(directory):
    """Return the names of the files; it works during writes."""
    return {each.name for each in pathlib.Path(directory).iterdir()}


def send(center, value=1.0, worker="w", anchor_version=0):
    message = jax.tree.map(lambda x: jnp.full_like(x, value), center.pull().params)
    return sessions.exchange(
        center, message, anchor_version=anchor_version, worker=worker
    )


def kept(durability, rule=DOWNPOUR, **settings):
    return LocalCenter(rule, durability=durability, **settings)


def found(durability):
    """Return the state that a new process would find."""
    center = kept(durability)
    saved = center.save()
    center.close()
    return saved


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in RULES), ("agn", "bfloat16")]
)
def test_replayed_center_is_equal_bit_for_bit(name, dtype, tmp_path, killed):
    rule = RULES[name]()
    center = LocalCenter(rule, tree(dtype), durability=Journal(tmp_path / "a"))
    for i in range(6):
        message = tree("bfloat16" if i == 3 else dtype, seed=i)
        sessions.exchange(
            center, message, anchor_version=max(0, i - 2), worker=f"w{i % 3}"
        )
    again = kept(Journal(killed(tmp_path / "a")), rule)
    assert again.center_id == center.center_id
    assert_identical(again.save(), center.save())
    assert again.core.ledger.state_to_save() == center.core.ledger.state_to_save()
    for each in (again, center):
        send(each, 0.3, "w1", 6)
    assert_identical(again.save(), center.save())
    again.close()
    center.close()


@pytest.mark.parametrize("late", ["next", "weighted"])
def test_rounds_are_replayed(late, tmp_path, killed):
    """Rounds have several messages and their weights."""
    mode = Synchronous(quorum=2, grace=0.0, late=late)
    settings = {"mode": mode, "rule": shared.average()}
    center = kept(Journal(tmp_path / "a"), **settings, params=jnp.ones(3))
    a, b, c = (center.core.join(worker) for worker in "abc")
    for sequence in (1, 2, 3):
        for i, session in enumerate((a, b, c)):
            session.submit(
                Submission(sequence, jnp.full(3, 0.3 * i + sequence), anchor_version=0)
            )
    assert a.answer(3, timeout=LIMIT) is not None
    b.leave()
    with center.core.reading(kept=True):
        again = kept(Journal(killed(tmp_path / "a")), **settings)
    assert_identical(again.save(), center.save())
    assert again.core.ledger.state_to_save() == center.core.ledger.state_to_save()
    assert set(again.core.members()[1]) == {"a", "c"}
    again.close()
    center.close()


def test_repeated_message_after_restart_is_not_applied_again(tmp_path, killed):
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    session = center.core.join("w", "session")
    session.submit(Submission(1, jnp.ones(2), anchor_version=0))
    session.wait_until_kept(session.answer(1, timeout=LIMIT))
    again = kept(Journal(killed(tmp_path / "a")))
    session = again.core.join("w", "session", resume=True)
    session.submit(Submission(1, jnp.ones(2), anchor_version=0))
    kept_answer = session.answer(1, timeout=LIMIT)
    assert kept_answer.answer.applied
    np.testing.assert_array_equal(kept_answer.version.params, -1)
    assert again.version == 1
    again.close()
    center.close()


def test_dropped_message_stays_dropped_after_restart(tmp_path, killed):
    mode = BoundedStaleness(versions=0)
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2), mode=mode)
    sessions.join(center, "slow")
    send(center)
    assert not send(center, worker="slow").applied
    again = kept(Journal(killed(tmp_path / "a")), mode=mode)
    member = again.core.members()[1]["slow"]
    assert (member.sequence, member.dropped, member.applied) == (1, 1, False)
    again.close()
    center.close()


def test_replaced_and_departed_workers_are_restored(tmp_path, killed):
    center = kept(
        Journal(tmp_path / "a"),
        params=jnp.zeros(2),
        limits=Limits(lease=LIMIT),
        barrier=2,
    )
    center.core.join("w", "old")
    session = center.core.join("v", "session")
    assert center.core.wait_for_barrier(0.0)
    center.core.join("w", "new", replace=True)
    session.leave()
    with center.core.reading(kept=True):
        copy = killed(tmp_path / "a")
    center.close()
    for directory in (copy, tmp_path / "a"):
        again = kept(Journal(directory), limits=Limits(lease=LIMIT), barrier=2)
        assert set(again.core.members()[1]) == {"w"}
        assert not again.core.members()[1]["w"].connected
        with pytest.raises(errors.WorkerStateError, match="replaced"):
            again.core.join("w", "old", resume=True)
        assert again.core.wait_for_barrier(0.0)
        again.close()


def test_departed_worker_keeps_its_new_connection_after_restart(tmp_path):
    """Otherwise a worker that returns to a restored center would be disconnected."""
    cuts = []
    with contextlib.closing(kept(Journal(tmp_path), params=jnp.zeros(2))) as center:
        center.join("w").leave()
    with contextlib.closing(kept(Journal(tmp_path))) as center:
        center.core.join("w", close_connection=lambda: cuts.append("w"))
        center.core.members()
        assert not cuts
        center.core.join("w", replace=True)
        assert cuts == ["w"]


def test_truncated_write_is_ignored(tmp_path, killed, caplog):
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2000))
    send(center)
    before = center.save()
    size = end_of_records(center)
    copy = killed(tmp_path / "a")
    send(center)
    with (tmp_path / "a" / FIRST).open("rb") as whole:
        whole.seek(size)
        part = whole.read(5000)
    with (copy / FIRST).open("r+b") as file:
        file.seek(size)
        file.write(part)
    again = kept(Journal(copy))
    assert again.center_id == center.center_id
    assert_identical(again.save(), before)
    assert "bytes of an incomplete write" in caplog.text
    assert send(again, anchor_version=1).version == 2
    assert_identical(found(Journal(killed(copy))), center.save())
    again.close()
    center.close()


def test_damage_is_named_and_files_stay_unchanged(tmp_path, killed):
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    send(center)
    begin = end_of_records(center)
    for _ in range(2):
        send(center)
    copy = killed(tmp_path / "a")
    center.close()
    for name, position, message in (
        (FIRST, begin + 70, f"record 2 at byte {begin} is damaged"),
        ("snapshot-000000000000", 70, "snapshot-000000000000: record 0 is damaged"),
    ):
        broken = killed(copy)
        with (broken / name).open("r+b") as file:
            file.seek(position)
            file.write(b"\xff")
        before = files(broken)
        with pytest.raises(errors.DurabilityError, match=message):
            kept(Journal(broken))
        assert files(broken) == before
    (copy / "snapshot-000000000000").unlink()
    with pytest.raises(errors.DurabilityError, match="its snapshot is missing"):
        kept(Journal(copy))


def removed(path, rng):
    path.unlink()


def cut_off(path, rng):
    os.truncate(path, rng.integers(path.stat().st_size))


def written(data):
    """Return the length before reserved bytes; 1 for a journal that just began."""
    return max(len(data.rstrip(b"\0")), 1)


def zeroed(path, rng):
    data = bytearray(path.read_bytes())
    begin = rng.integers(written(data))
    end = begin + rng.integers(1, len(data) - begin + 1)
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def changed(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.integers(written(data))] ^= 1 << rng.integers(8)
    path.write_bytes(data)


def end_of_records(center):
    """Return the bytes of a center's journal that are records on disk."""
    return center.core.keeper._writer.end


def directory_of(center):
    """Return the directory that a center writes to."""
    return center.core.keeper._directory


def has_saved(center):
    return center.core.keeper._saved[0] > 0


@pytest.fixture(scope="module")
def worn(tmp_path_factory):
    """Return directories of centers after many exchanges, with their last states."""
    params, made = jnp.zeros(1000), []
    folder = tmp_path_factory.mktemp("worn")

    def add(durability, center):
        saved = int(center.save().version), center.center_id
        copy = folder / f"{len(made)}"
        made.append((copy, saved))
        copied(durability.directory, copy)

    with pytest.MonkeyPatch.context() as patch:
        tuning.set_least_reserved(patch, 1 << 14)
        for i, kind in enumerate(
            (
                Journal(folder / "a"),
                Journal(folder / "b", size=3 * params.nbytes),
            )
        ):
            center = kept(kind, params=params)
            for number in range(1, 8):
                send(center, worker=f"w{number % 3}")
                if i and number % 3 == 0:
                    wait_for(center, functools.partial(has_saved, center))
            lock, recorded = folder / "ab"[i] / "lock", center.core.keeper.recorded
            wait_for(center, lambda: int(lock.read_text().split()[1]) == recorded)  # noqa: B023
            add(kind, center)  # as if the process was killed
            center.close()
            add(kind, center)
    return made


def restored(durability):
    """Return the store of the center that is found, and its id."""
    keeper = Keeper(durability, DOWNPOUR, threading.Condition())
    try:
        ledger = LocalCenter(DOWNPOUR).core.ledger
        return keeper.restore(ledger, None, None, None, False), keeper.center_id
    finally:
        keeper.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("damage", [removed, cut_off, zeroed, changed])
def test_damaged_center_is_equal_or_rejected_or_gets_a_new_id(damage, worn, tmp_path):
    """Any damage gives the same state, an error, or a center with another id."""
    rng = np.random.default_rng(0)
    seen = collections.Counter()
    for directory, (version, center_id) in worn:
        for name in sorted(files(directory)):
            for _ in range(1 if damage is removed else 12):
                copy = tmp_path / "copy"
                shutil.copytree(directory, copy)
                damage(copy / name, rng)
                try:
                    store, now = restored(Journal(copy))
                except errors.DurabilityError as error:
                    seen["rejected" if str(copy) in str(error) else "not by name"] += 1
                else:
                    if now == center_id:
                        assert store.current.number == version, name
                        np.testing.assert_array_equal(store.current.params, -version)
                    seen["same" if now == center_id else "another"] += 1
                shutil.rmtree(copy)
    assert seen["rejected"]
    assert not seen["not by name"]
    # A new id is given if the length is unknown.
    assert seen["another"] or damage is not removed


@pytest.mark.parametrize("what", ["gone", "shorter"])
def test_missing_or_truncated_journal_is_rejected(what, tmp_path, killed, caplog):
    """It is also rejected if, after a power failure, the lock file lags behind."""
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    before = (tmp_path / "a" / "lock").read_bytes()
    send(center)
    end = end_of_records(center)
    send(center)
    copy = killed(tmp_path / "a")
    (copy / "lock").write_bytes(before)
    same = kept(Journal(killed(copy)))
    assert (same.version, same.center_id) == (2, center.center_id)
    same.close()
    if what == "gone":
        (copy / FIRST).unlink()
    else:
        os.truncate(copy / FIRST, end)
    error = f"{FIRST} {'is missing' if what == 'gone' else 'was truncated'}: it may"
    with pytest.raises(errors.DurabilityError, match=error):
        kept(Journal(copy))
    (copy / "lock").unlink()  # as that error advises
    again = kept(Journal(copy))
    assert again.version == (0 if what == "gone" else 1)
    assert again.center_id != center.center_id
    assert not again.core.members()[1]
    assert "continues with a new id, at version" in caplog.text
    center.close()
    again.close()


def test_missing_records_before_a_journal_are_named(tmp_path, killed):
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    send(center)
    copy = killed(tmp_path / "a")
    center.close()
    (copy / FIRST).rename(copy / "journal-000000000001")
    with pytest.raises(errors.DurabilityError, match="record 0 is missing before it"):
        kept(Journal(copy))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rule": shared.average()}, errors.RuleMismatchError, "its name is 'agn'"),
        (
            {"rule": shared.agn(shared.adam(0.2))},
            errors.RuleMismatchError,
            "its center optimizer turns",
        ),
        (
            {"params": {"w": jnp.ones(3)}},
            errors.TreeMismatchError,
            r"it has \['w'\] float32\[2\], where the parameters have .*float32\[3\]",
        ),
        (
            {"params": {"w": jnp.ones(2), "x": jnp.ones(2)}},
            errors.TreeMismatchError,
            r"the parameters have \['x'\] float32\[2\], which it has not",
        ),
        (
            {"params": {"w": jnp.ones(2, "bfloat16")}},
            errors.TreeMismatchError,
            r"it has \['w'\] float32\[2\], where .*bfloat16\[2\]",
        ),
        ({"dtype": "bfloat16"}, errors.TreeMismatchError, r"where .*bfloat16\[2\]"),
    ],
)
def test_directory_of_a_different_center_is_rejected(
    settings, error, message, tmp_path, killed
):
    rule = shared.agn(shared.adam(0.1))
    center = kept(Journal(tmp_path / "a"), rule, params={"w": jnp.zeros(2)})
    send(center)
    copy = killed(tmp_path / "a")
    before = files(copy)
    with pytest.raises(error, match=message):
        LocalCenter(**{"rule": rule, "durability": Journal(copy), **settings})
    assert files(copy) == before
    again = LocalCenter(rule, {"w": jnp.ones(2)}, durability=Journal(copy))
    assert_identical(again.save(), center.save())  # the stored parameters win
    again.close()
    center.close()


def test_directory_is_locked_by_one_center(tmp_path):
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    with pytest.raises(errors.DurabilityError, match="another process keeps its"):
        kept(Journal(tmp_path / "a"))
    center.close()
    center.close()
    with pytest.raises(errors.TreeMismatchError):
        kept(Journal(tmp_path / "a"), params=jnp.zeros(3))
    kept(Journal(tmp_path / "a")).close()  # the failed attempt did not keep the lock
    saved = center.save()
    with pytest.raises(errors.AlreadyInitializedError, match="there is a center in"):
        LocalCenter.restore(DOWNPOUR, saved, durability=Journal(tmp_path / "a"))
    restored = LocalCenter.restore(DOWNPOUR, saved, durability=Journal(tmp_path / "b"))
    send(restored)
    restored.close()
    assert found(Journal(tmp_path / "b")).version == 1


def test_path_that_is_not_a_directory_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.DurabilityError, match="cannot keep a center in"):
        kept(Journal(tmp_path / "file"))


def test_snapshots_are_written_after_an_exception_in_their_thread(
    tmp_path, monkeypatch, caplog
):
    is_due, calls = Keeper._is_due.fget, []

    def fails_once(keeper):
        calls.append(keeper)
        if len(calls) == 1:
            raise RuntimeError("on purpose")
        return is_due(keeper)

    monkeypatch.setattr(Keeper, "_is_due", property(fails_once))
    center = kept(Journal(tmp_path / "a", size=1), params=jnp.zeros(3))
    send(center)
    wait_until_saved(center)
    center.close()
    assert "thread 'agn-optax snapshots' failed, and goes on" in caplog.text


def wait_until_saved(center):
    """Wait until all records are in a snapshot."""
    keeper = center.core.keeper
    wait_for(center, lambda: keeper._saved[0] == keeper._number)


def wait_for(center, condition):
    """Wait for a condition that another thread of the center makes true."""

    def holds():
        with center.core.atomically():
            return condition()

    wait_until(holds)


def test_snapshot_replaces_the_journal(tmp_path, killed):
    params = jnp.zeros(1000)
    center = kept(Journal(tmp_path / "a", size=3 * params.nbytes), params=params)
    for number in range(1, 11):
        send(center)
        if number % 3 == 0:
            wait_until_saved(center)
    again = kept(Journal(killed(tmp_path / "a")))
    assert_identical(again.save(), center.save())
    last = {f"{kind}-{10:012}" for kind in ("snapshot", "journal")}
    wait_for(center, lambda: names(tmp_path / "a") == {"lock", *last})
    again.close()
    center.close()


def test_counted_journal_size_is_the_size_on_disk(tmp_path):
    """Small exchanges and joins are tested, which have few or no arrays."""
    size = 10_000
    center = kept(Journal(tmp_path / "a", size=size), params=jnp.zeros(2))
    keeper = center.core.keeper

    def is_at_rest():
        """Return whether no thread of the keeper is about to write."""
        is_kept = keeper.is_kept(keeper.recorded)
        is_due = keeper._is_due
        return is_kept and not is_due and not keeper._writer.is_switching

    def join(i):
        center.core.join(f"w{i % 3}", f"session {i}", replace=True)

    for act in (lambda i: send(center), join):
        begun = set()
        for i in range(60):
            act(i)
            wait_for(center, is_at_rest)
            journal = max((tmp_path / "a").glob("journal-*"))
            written = len(journal.read_bytes().rstrip(b"\0"))
            assert written < size
            assert 0 <= keeper._writer.size - written < 64  # zeros up to a multiple
            begun.add(journal)
        assert len(begun) > 1
    center.close()


def test_journal_reserves_in_proportion_to_its_records(tmp_path):
    """A small journal is a small file, and a large journal grows rarely."""
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    journal = tmp_path / "a" / FIRST
    sizes = []
    for _ in range(400):
        send(center)
        reserved = journal.stat().st_size
        sizes += [reserved] if reserved not in sizes else []
        records = len(journal.read_bytes().rstrip(b"\0"))
        assert records <= reserved <= max(1 << 16, 2 * records + 1000)
    assert 1 < len(sizes) < 5
    center.close()


def test_snapshot_is_written_after_many_records(tmp_path, monkeypatch):
    tuning.set_most_records(monkeypatch, 5)
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    for _ in range(4):  # joining makes one more
        send(center)
    wait_until_saved(center)
    center.close()


@pytest.mark.parametrize(
    ("snapshot", "message"), [(1, 1 << 31), (1 << 31, 1 << 31), (1, 1)]
)
def test_journal_is_replaced_at_its_default_size(
    snapshot, message, tmp_path, monkeypatch
):
    """It has at most 1 GiB or four snapshots, and 100,000 records."""
    size = min(max(1 << 30, 4 * snapshot), 100_000 * message)
    keeper = Keeper(Journal(tmp_path), DOWNPOUR, threading.Condition())
    monkeypatch.setattr(keeper, "_saved_size", snapshot)
    for written, is_due in ((size - 1, False), (size, True)):
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "_writer", types.SimpleNamespace(size=written))
            patch.setattr(keeper, "_number", written // message)
            assert keeper._is_due == is_due
    keeper.close()


@contextlib.contextmanager
def no_more_files():
    """Make the system reject opening any more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_journal_continues_without_file_descriptors(tmp_path, killed, caplog):
    params = jnp.zeros(1000)
    center = kept(Journal(tmp_path / "a", size=2 * params.nbytes), params=params)
    send(center)
    send(center)  # now JAX has read all that it reads from files
    before = {"lock", *(f"{kind}-{3:012}" for kind in ("journal", "snapshot"))}
    wait_for(center, lambda: names(tmp_path / "a") == before)
    messages = "the journal continues in its old file", "no snapshot could be written"
    with no_more_files():
        for times in (1, 2):
            send(center)
            send(center)
            wait_for(
                center,
                lambda n=times: (
                    [caplog.text.count(each) for each in messages] == [n, n]
                ),
            )
    assert names(tmp_path / "a") == before
    copy = killed(tmp_path / "a")
    send(center)
    send(center)
    wait_until_saved(center)
    assert f"journal-{9:012}" in names(tmp_path / "a")
    assert not center.core.failure
    again = kept(Journal(copy))
    assert (again.version, again.center_id) == (6, center.center_id)
    again.close()
    center.close()


def test_snapshot_within_a_journal_is_restored(tmp_path, killed):
    """Its own journal could not be begun, so the older journal continues after it."""
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    send(center)
    keeper = center.core.keeper
    keeper._save(keeper._number, center.core._image(), keeper._writer.digest)
    for _ in range(2):
        send(center)
    again = kept(Journal(killed(tmp_path / "a")))
    assert_identical(again.save(), center.save())
    assert (again.center_id, again.core.members()[1]["w"].exchanges) == (
        center.center_id,
        3,
    )
    again.close()
    center.close()


@pytest.mark.parametrize("step", ["save", "begin_journal"])
def test_center_killed_while_it_begins_keeps_its_id_and_its_workers(
    step, tmp_path, monkeypatch
):
    center = kept(Journal(tmp_path / "a"))
    session = center.join("w")
    directory = directory_of(center)
    make = getattr(directory, step)

    def make_and_copy(*args):
        made = make(*args)
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        return made

    monkeypatch.setattr(directory, step, make_and_copy)
    center.initialize(jnp.zeros(2), worker="w")
    again = kept(Journal(tmp_path / "copy"))
    assert again.center_id == center.center_id
    resumed = again.join("w", resume_token=session.resume_token)
    assert resumed.exchange(Submission(1, jnp.ones(2), anchor_version=0)).applied
    again.close()
    center.close()


def test_initialization_is_undone_if_the_journal_cannot_be_begun(tmp_path, monkeypatch):
    center = kept(Journal(tmp_path / "a"))

    def full(*args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(directory_of(center), "begin_journal", full)
        with pytest.raises(errors.DurabilityError, match="Too many open files"):
            center.initialize(jnp.zeros(2), worker="chief")
    center.initialize(jnp.ones(2), worker="other")
    center.close()
    np.testing.assert_array_equal(found(Journal(tmp_path / "a")).params, 1)


def test_versions_and_staleness_may_exceed_int32(tmp_path, killed):
    rule, version = shared.dynsgd(), 2**31 + 5
    saved = LocalCenter(rule, jnp.zeros(2)).save()._replace(version=version)
    center = LocalCenter.restore(rule, saved, durability=Journal(tmp_path / "a"))
    for anchor in (version, 0):  # the second message is scaled to almost nothing
        answer = send(center, anchor_version=anchor)
        assert answer.staleness == answer.version - 1 - anchor
    np.testing.assert_allclose(center.pull().params, -1, rtol=1e-6)
    again = kept(Journal(killed(tmp_path / "a")), rule)
    assert again.version == version + 2
    assert_identical(again.save(), center.save())
    again.close()
    center.close()


def test_journal_continues_without_room_for_a_snapshot(
    tmp_path, killed, monkeypatch, caplog
):
    params = jnp.zeros(1000)
    center = kept(Journal(tmp_path / "a", size=2 * params.nbytes), params=params)
    tried = threading.Semaphore(0)

    def full(*args):
        tried.release()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory_of(center), "save", full)
    for number in range(1, 6):
        send(center)
        if number % 2 == 0:
            assert tried.acquire(timeout=LIMIT)
    copy = killed(tmp_path / "a")
    assert sum(name.startswith("journal") for name in names(copy)) == 3
    again = kept(Journal(copy))
    assert_identical(again.save(), center.save())
    assert "no snapshot could be written" in caplog.text
    damaged = killed(tmp_path / "a")
    os.truncate(damaged / f"journal-{3:012}", 5000)
    with pytest.raises(errors.DurabilityError, match="its end is damaged"):
        kept(Journal(damaged))
    again.close()
    center.close()
    assert (
        "No space left" in center.core.failure
    )  # everything but the last snapshot was written
    assert_identical(found(Journal(killed(tmp_path / "a"))), center.save())


class ControlledSyncs:
    """Syncs that wait, fail, and are counted."""

    def __init__(self, monkeypatch):
        self.syncs = 0
        self.ready = threading.Event()
        self.ready.set()
        self.error = None
        self.first_error = 1  # number of the first sync that fails
        tuning.set_journal_sync(monkeypatch, self)

    def __call__(self, file, sync):
        self.syncs += 1
        assert self.ready.wait(LIMIT)
        if self.error is not None and self.syncs >= self.first_error:
            raise OSError(self.error, os.strerror(self.error))
        sync(file)


@pytest.fixture
def disk(monkeypatch):
    return ControlledSyncs(monkeypatch)


def test_response_waits_until_the_message_is_synced(tmp_path, disk):
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2))
    for i in range(5):
        sessions.join(center, f"w{i}")
    disk.syncs = 0
    disk.ready.clear()
    workers = [
        threading.Thread(target=send, args=(center, 1.0, f"w{i}")) for i in range(5)
    ]
    workers[0].start()
    wait_for(center, lambda: disk.syncs == 1)
    for each in workers[1:]:
        each.start()
    wait_for(center, lambda: center.version == 5)
    assert all(each.is_alive() for each in workers)
    read = threading.Thread(target=lambda: center.core.reading(kept=True).__enter__())
    read.start()
    read.join(0.05)
    assert read.is_alive()
    disk.ready.set()
    for each in (*workers, read):
        each.join(LIMIT)
        assert not each.is_alive()
    assert disk.syncs == 2  # one for the first message, and one for all later ones
    center.close()


def test_worker_starts_when_its_join_is_synced(tmp_path, disk, killed):
    """A center killed right after a worker has started knows the worker."""
    center = kept(Journal(tmp_path / "a"), params=jnp.zeros(2), barrier=1)
    disk.ready.clear()
    joined = in_background(lambda: center.join("w"), "a test")
    wait_until(lambda: disk.syncs == 1)
    assert not joined.done()
    disk.ready.set()
    token = joined.result(LIMIT).resume_token
    again = kept(Journal(killed(tmp_path / "a")), barrier=1)
    resumed = again.join("w", resume_token=token, timeout=0.0)
    assert resumed.exchange(Submission(1, jnp.ones(2), anchor_version=0)).applied
    again.close()
    center.close()


def test_failing_disk_closes_the_center(tmp_path, killed, disk):
    center = kept(
        Journal(tmp_path / "a"), params=jnp.zeros(2), limits=Limits(lease=LIMIT)
    )
    send(center)
    disk.error = errno.ENOSPC
    message = jnp.ones(2)
    for _ in range(2):
        with pytest.raises(errors.CenterClosedError, match="No space left on device"):
            sessions.exchange(center, message, anchor_version=1, worker="w")
    assert center.version == 2  # in memory only; it was not confirmed
    with (
        pytest.raises(errors.CenterClosedError, match="No space left"),
        center.core.reading(kept=True),
    ):
        pytest.fail("it is not kept")
    with pytest.raises(errors.CenterClosedError):
        send(center, worker="other")
    center.core.wait_until_closed()
    center.close()
    disk.error = None
    # The write succeeded, so the data may have reached the disk; here it has not.
    copy = killed(tmp_path / "a")
    with (copy / FIRST).open("r+b") as file:
        file.seek(end_of_records(center))
        file.write(bytes(4096))
    again = kept(Journal(copy))
    assert (again.version, again.center_id) == (1, center.center_id)
    assert send(again, anchor_version=1).version == 2
    again.close()


def test_disk_failure_during_close_blocks_no_worker(tmp_path, disk):
    center = kept(Journal(tmp_path), params=jnp.zeros(2))
    for name in ("a", "b"):
        sessions.join(center, name)
    disk.syncs, disk.error, disk.first_error = 0, errno.ENOSPC, 2
    disk.ready.clear()

    def exchange(worker):
        with contextlib.suppress(errors.AgnOptaxError):
            send(center, worker=worker)

    workers = [threading.Thread(target=exchange, args=(name,)) for name in ("a", "b")]
    workers[0].start()
    wait_for(center, lambda: disk.syncs == 1)
    workers[1].start()
    wait_for(center, lambda: center.version == 2)
    closed = in_background(center.close, "a test")
    waiting = center.core.keeper._writer._queue
    wait_until(lambda: waiting.qsize() >= 2)  # the second message and the end marker
    disk.ready.set()
    closed.result(LIMIT)
    for each in workers:
        each.join(LIMIT)
        assert not each.is_alive()
    assert "No space left" in center.core.failure


def test_failed_snapshots_of_a_journal_are_not_retried_at_once(tmp_path, monkeypatch):
    tuning.set_most_records(monkeypatch, 5)
    tried = threading.Semaphore(0)

    def full(*args):
        tried.release()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        kept(Journal(tmp_path), params=jnp.zeros(2)) as center,
        monkeypatch.context() as context,
    ):
        context.setattr(directory_of(center), "save", full)
        for _ in range(6):
            send(center)
        assert tried.acquire(timeout=LIMIT)
        assert not tried.acquire(timeout=0.3)


def test_initialization_is_undone_if_it_cannot_be_written(tmp_path, monkeypatch):
    center = kept(Journal(tmp_path / "a"))

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(errors.DurabilityError, match="No space left on device"):
            center.initialize(jnp.zeros(2), worker="chief")
        assert not center.core.is_initialized
        assert names(tmp_path / "a") == {"lock"}
    center.initialize(jnp.zeros(2), worker="other")
    center.close()
    again = kept(Journal(tmp_path / "a"))
    again.initialize(jnp.ones(2), worker="other")
    np.testing.assert_array_equal(again.pull().params, 0)
    with pytest.raises(errors.AlreadyInitializedError, match="worker 'other' has"):
        again.initialize(jnp.ones(2), worker="chief")
    again.close()


def test_uninitialized_center_leaves_only_a_lock_file(tmp_path):
    kept(Journal(tmp_path / "a")).close()
    assert names(tmp_path / "a") == {"lock"}
    center = kept(Journal(tmp_path / "a"))
    assert not center.core.is_initialized
    center.close()


@pytest.mark.parametrize(
    "params",
    [
        {"a": [jnp.ones(2), (jnp.ones(3), None)], "b": {}},
        {0: jnp.ones(2), 1: {"x": jnp.ones(1)}},
        jnp.ones(2),
    ],
)
def test_plain_containers_are_restored(params, tmp_path):
    center = kept(Journal(tmp_path / "a"), params=params)
    center.close()
    again = kept(Journal(tmp_path / "a"))
    assert_identical(again.pull().params, params)
    again.close()


def test_random_keys_of_a_center_optimizer_are_restored(tmp_path):
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(3, impl="rbg"))
    rule = shared.diloco(optax.chain(noise, shared.sgd(0.1)))
    journal = Journal(tmp_path / "a", keep="contributions")
    center = kept(journal, rule, params=jnp.ones(3))
    send(center)
    again = LocalCenter.restore(rule, center.save())
    center.close()
    center = kept(journal, rule)
    for each in (again, center):
        send(each, worker="other")
    saved = center.save()
    center.close()
    replayed = tape.read(tmp_path / "a").replay(rule, whole=True)
    for found in (again.save(), replayed):
        assert trees.digest(found) == trees.digest(saved)


def test_custom_containers_must_be_passed_again(tmp_path):
    params = optax.TraceState({"w": jnp.ones(2)})  # a named tuple
    kept(Journal(tmp_path / "a"), params=params).close()
    with pytest.raises(errors.DurabilityError, match="containers other than dicts"):
        kept(Journal(tmp_path / "a"))
    again = kept(Journal(tmp_path / "a"), params=jax.tree.map(jnp.zeros_like, params))
    assert_identical(again.pull().params, params)
    again.close()


def test_worker_and_center_resume_together_bit_for_bit(tmp_path, killed):
    """Both resume as after a kill of their processes."""
    rule = shared.agn(shared.adam(0.1))

    def train(center, worker, loop, steps):
        for _ in range(steps):
            params, state = loop
            updates, state = worker.tx.update(params, state, params)
            loop = worker.exchange(optax.apply_updates(params, updates), state)
        return loop

    def new(center):
        return agn_optax.Worker(center, shared.adam(0.1), period=2, name="w")

    center = kept(Journal(tmp_path / "a"), rule, params=jnp.ones(3))
    worker = new(center)
    loop = train(center, worker, worker.start(), 5)
    saved = worker.save(*loop)
    again = kept(Journal(killed(tmp_path / "a")), rule)
    other = new(again)
    assert_identical(
        train(again, other, other.restore(saved), 5)[0],
        train(center, worker, loop, 5)[0],
    )
    assert_identical(again.save(), center.save())
    again.close()
    center.close()


def test_directory_of_an_earlier_release_is_rejected(tmp_path):
    kept(Journal(tmp_path / "a"), DOWNPOUR, params=jnp.ones(3)).close()
    (snapshot,) = (tmp_path / "a").glob("snapshot-*")
    with snapshot.open("r+b") as file:
        file.seek(8)
        file.write(b"\x01")
    before = files(tmp_path / "a")
    words = "has format 1, and this release reads 2; .* the release that wrote it"
    with pytest.raises(errors.DurabilityError, match=words):
        kept(Journal(tmp_path / "a"), DOWNPOUR)
    assert files(tmp_path / "a") == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Journal(""), "directory must be a path, got ''"),
        (lambda: Journal(None), "directory must be a path, got None"),
        (lambda: Journal("d", size=0), "size must be a whole number >= 1, got 0"),
        (lambda: kept("always"), r"must be Journal\(...\) or None, got 'alw"),
    ],
)
def test_invalid_durability_settings_are_rejected(make, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        make()
