"""Tapes: what a journal records, and what is kept after a snapshot has replaced it."""

import contextlib
import itertools
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import sessions, shared
from helpers.support import assert_identical
from helpers.waiting import wait_until

from agn_optax import errors
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    Limits,
    LocalCenter,
    MessageLimits,
    Submission,
    Synchronous,
)
from agn_optax.center.durability._directory import Files
from agn_optax.center.durability._files import Lock

DOWNPOUR = shared.downpour()
PARAMS = jnp.zeros(1000)


def make(directory, keep="contributions", *, rule=DOWNPOUR, params=PARAMS, **settings):
    """Return a center whose snapshots replace the journal after three messages."""
    durability = Journal(directory, size=3 * PARAMS.nbytes, keep=keep)
    return LocalCenter(rule, params, durability=durability, **settings)


def send(center, value=1.0, worker="w", **fields):
    message = jnp.full_like(PARAMS, value)
    version = center.version
    fields = {"anchor_version": version, **fields}
    return sessions.exchange(center, message, worker=worker, **fields)


def is_idle(center):
    """Return whether no snapshot is due or being written."""
    keeper = center.core.keeper
    with center.core.atomically():
        return not keeper._is_due and keeper._saved[0] == keeper._attempted


def run(center, exchanges, first=0):
    for number in range(first, first + exchanges):
        send(center, worker=f"w{number % 2}")
        wait_until(lambda: is_idle(center))


def names(directory, kind=""):
    return sorted(path.name for path in pathlib.Path(directory).glob(f"{kind}*-*"))


def records(directory):
    """Return all records of a tape; check its chain across segments."""
    files, found = Files(directory), []
    for segment in files.segments():
        assert segment.number == len(found)
        found += files.read_segment(segment)
    parents = [found[0].parent, *(record.digest for record in found)]
    for record, parent in zip(found, parents, strict=False):
        assert record.parent == parent
    for number in files.numbers("snapshot"):
        assert files.read_snapshot(number).parent == parents[number]
    return found


def events(directory):
    return [record.about for record in records(directory)]


def test_contributions_keeps_all_segments_and_snapshots(tmp_path):
    with make(tmp_path) as center:
        run(center, 10)
    with make(tmp_path, params=None) as center:
        run(center, 4, first=10)
        assert center.version == 14
    journals = [int(name.split("-")[1]) for name in names(tmp_path, "journal")]
    snapshots = [int(name.split("-")[1]) for name in names(tmp_path, "snapshot")]
    assert len(journals) > 3
    assert not names(tmp_path, "chain")
    assert set(journals) <= set(snapshots)
    found = records(tmp_path)
    sent = [each for each in found if each.about["kind"] == "exchange"]
    assert [each.about["version"] for each in sent] == [*range(1, 15)]
    assert all(each.arrays[0][0] == 1.0 for each in sent)
    for name in names(tmp_path, "journal"):  # none keeps reserved space
        data = (tmp_path / name).read_bytes()
        assert len(data) - len(data.rstrip(b"\0")) < 4096


def test_chain_says_which_snapshots_were_saved(tmp_path):
    with make(tmp_path) as center:
        run(center, 10)
    with make(tmp_path, params=None) as center:
        send(center)
    files = Files(tmp_path)
    said = [each for event in events(tmp_path) for each in event.get("snapshots", [])]
    saved = [
        [number, files.read_snapshot(number).digest.hex()]
        for number in files.numbers("snapshot")
    ]
    assert said == saved[:-1]  # no record follows the last one


def test_hashes_keeps_the_same_chain_without_contributions(tmp_path):
    with make(tmp_path / "a") as center:
        run(center, 10)
    whole = records(tmp_path / "a")
    # The same directory, continued with less to keep.
    with make(tmp_path / "a", "hashes", params=None) as center:
        assert center.version == 10
        wait_until(lambda: len(names(tmp_path / "a", "snapshot")) == 1)
        run(center, 4, first=10)
    assert len(names(tmp_path / "a", "snapshot")) == 1
    assert not names(tmp_path / "a", "journal")
    kept = records(tmp_path / "a")
    for before, after in zip(whole, kept, strict=False):
        assert (before.digest, before.about) == (after.digest, after.about)
        assert [c.digest for c in before.contents] == [c.digest for c in after.contents]
        assert not after.arrays
    assert len(kept) > len(whole)
    size = sum((tmp_path / "a" / n).stat().st_size for n in names(tmp_path / "a", "c"))
    assert size < 2 * PARAMS.nbytes * 5


def test_record_that_was_written_in_part_is_not_on_the_tape(tmp_path):
    """A power failure left its description whole, and not its contribution."""
    with make(tmp_path / "a", "hashes") as center:
        sessions.join(center, "w")
        send(center)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    journal = tmp_path / "b" / names(tmp_path / "b", "journal")[-1]
    raw = bytearray(journal.read_bytes())
    raw[len(raw.rstrip(b"\0")) - 1] ^= 1
    journal.write_bytes(raw)
    (tmp_path / "b/lock").write_bytes(Lock("journal", 1).to_bytes())
    with make(tmp_path / "b", "hashes") as center:
        assert center.version == 0
        run(center, 5)
    kinds = [each.kind for each in Files(tmp_path / "b").segments()]
    assert kinds[0] == "chain"
    assert sum(event["kind"] == "exchange" for event in events(tmp_path / "b")) == 5


def test_limit_drops_the_oldest_contributions_and_never_the_chain(tmp_path):
    limit = 12 * PARAMS.nbytes
    durability = Journal(
        tmp_path, size=3 * PARAMS.nbytes, keep="contributions", limit=limit
    )
    with LocalCenter(DOWNPOUR, PARAMS, durability=durability) as center:
        run(center, 20)
    kinds = [segment.kind for segment in Files(tmp_path).segments()]
    assert kinds == sorted(kinds)  # chains come before journals
    assert set(kinds) == {"chain", "journal"}
    left = [*names(tmp_path, "journal"), *names(tmp_path, "snapshot")]
    assert sum((tmp_path / name).stat().st_size for name in left) <= limit
    assert sum(event["kind"] == "exchange" for event in events(tmp_path)) == 20


def test_tape_is_not_dropped_by_forgotten_settings(tmp_path):
    make(tmp_path, "hashes").close()
    before = names(tmp_path)
    with pytest.raises(errors.DurabilityError, match="keeps a tape, with keep='ha"):
        make(tmp_path, None)
    assert names(tmp_path) == before
    make(tmp_path, "contributions").close()


def test_journal_that_was_not_kept_becomes_a_tape(tmp_path):
    with make(tmp_path, None) as center:
        run(center, 5)
    with make(tmp_path, "hashes") as center:
        run(center, 5)
    first = Files(tmp_path).segments()[0].number
    assert first > 0
    with pytest.raises(errors.DurabilityError, match="keeps a tape"):
        make(tmp_path, None)


def test_damaged_journal_keeps_its_contributions(tmp_path, caplog):
    with make(tmp_path) as center:
        run(center, 10)
    (journal, *_) = names(tmp_path, "journal")
    with (tmp_path / journal).open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    with make(tmp_path, "hashes", params=None) as center:
        wait_until(lambda: "contributions are still in" in caplog.text)
        send(center)
    assert journal in names(tmp_path)


def test_interrupted_drop_is_repeated(tmp_path):
    """A kill may leave a chain beside its journal, or snapshots of a chain."""
    with make(tmp_path) as center:
        run(center, 10)
    whole = [record.digest for record in records(tmp_path)]
    (journal, *_) = names(tmp_path, "journal")
    (tmp_path / journal.replace("journal", "chain")).write_bytes(b"half")
    assert [record.digest for record in records(tmp_path)] == whole
    make(tmp_path, "hashes").close()
    assert not names(tmp_path, "journal")
    assert [record.digest for record in records(tmp_path)] == whole


def test_segments_of_another_run_are_rejected(tmp_path):
    """Their records have the expected numbers, but do not name the ones before."""
    for folder, value in (("a", 1.0), ("b", 2.0)):
        center = make(tmp_path / folder, None)
        send(center, value)
        shutil.copytree(tmp_path / folder, tmp_path / f"{folder} killed")
        center.close()
    journal = "journal-000000000000"
    shutil.copy(tmp_path / "b killed" / journal, tmp_path / "a killed" / journal)
    with pytest.raises(errors.DurabilityError, match="record 0 does not continue"):
        make(tmp_path / "a killed", None)


def test_events_say_what_decided(tmp_path):
    mode = BoundedStaleness(versions=1)
    limits = Limits(messages=MessageLimits(norm=100.0, in_a_row=2), lease=0.0)
    center = make(tmp_path, mode=mode, limits=limits)
    slow = center.core.join("slow")
    for number in range(2):
        send(center, 1.0 + number, reported={"loss": 0.5, "step": np.int32(3)}, steps=4)
    slow.submit(Submission(1, jnp.full_like(PARAMS, 9.0), anchor_version=0))
    for _ in range(2):
        sent = Submission(1, jnp.full_like(PARAMS, 50.0), anchor_version=2)
        with contextlib.suppress(errors.MessageRejectedError):
            center.join("wild").exchange(sent)
        sent = sent._replace(sequence=2)
    gone = center.core.join("gone")
    gone.disconnect()
    center.core.members()
    slow.leave()
    center.close()
    found = records(tmp_path)
    kinds = [record.about["kind"] for record in found]
    assert kinds[:6] == ["join", "join", "exchange", "exchange", "dropped", "join"]
    assert "rejected" in kinds
    assert kinds[-4:] == ["join", "disconnect", "expired", "leave"]
    assert found[-3].about["workers"] == ["gone"]
    times = [record.about["time"] for record in found]
    assert times == sorted(times)
    assert times[0] >= 0
    first = found[0].about
    assert first["workers"] == ["slow"]
    assert first["session"] == slow.session_id
    assert first["process"]["center_id"] == center.center_id == found[0].parent.hex()
    exchange = found[2]
    (message,) = exchange.about["messages"]
    assert message["reported"] == {"loss": 0.5, "step": 3.0}
    assert (message["steps"], message["outcome"]) == (4, "applied")
    assert message["factor"] is None
    assert message["norm"] == pytest.approx(np.sqrt(1000.0))
    assert 0 <= message["arrived"] <= exchange.about["time"]
    dropped = found[4]
    (message,) = dropped.about["messages"]
    assert (message["outcome"], message["staleness"]) == ("dropped", 2)
    np.testing.assert_array_equal(dropped.arrays[0], 9.0)  # kept, too
    rejected = found[kinds.index("rejected")]
    (message,) = rejected.about["messages"]
    assert "its norm is" in message["reason"]
    np.testing.assert_array_equal(rejected.arrays[0], 50.0)


def test_failed_joins_are_recorded_with_their_reason(tmp_path):
    center = make(tmp_path, limits=Limits(max_workers=1))
    session = center.join("a")
    with pytest.raises(errors.CenterFullError) as full:
        center.join("b")
    with pytest.raises(errors.TreeMismatchError):
        center.join("a", params=jnp.zeros(3))
    with pytest.raises(errors.WorkerStateError):
        center.join("a", resume_token=["0" * 32, session.session_id])
    state = center.save()
    center.close()
    found = events(tmp_path)
    assert [event["kind"] for event in found] == ["join", *["failed_join"] * 3]
    assert [event["worker"] for event in found[1:]] == ["b", "a", "a"]
    assert found[1]["reason"] == str(full.value)
    assert all(not event["workers"] for event in found[1:])
    with make(tmp_path, params=None) as again:
        assert_identical(again.save(), state)
        assert again.workers == {"a"}


def test_failed_joins_without_end_are_counted(tmp_path):
    with make(tmp_path, limits=Limits(max_workers=1)) as center:
        center.join("w")
        for number in range(100):
            with pytest.raises(errors.CenterFullError):
                center.join(f"w{number}")
        send(center)
    kinds = [event["kind"] for event in events(tmp_path)]
    assert kinds == ["join", *["failed_join"] * 16, "join", "exchange"]
    (said,) = (x for event in events(tmp_path) if (x := event.get("more_failed_joins")))
    assert said == 100 - 16


def test_contributions_that_did_not_move_the_center_are_not_in_other_journals(tmp_path):
    center = make(tmp_path, None, mode=BoundedStaleness(versions=0))
    slow = center.core.join("slow")
    send(center)
    slow.submit(Submission(1, jnp.full_like(PARAMS, 9.0), anchor_version=0))
    slow.wait_until_kept(slow.answer(1))
    dropped = records(tmp_path)[-1]
    assert dropped.about["kind"] == "dropped"
    assert dropped.contents == [None]
    center.close()


def test_rounds_have_members_and_factors(tmp_path):
    mode = Synchronous(quorum=2, grace=0.0, late="weighted")
    center = make(tmp_path, rule=shared.average(), mode=mode)
    a, b, c = (center.core.join(worker) for worker in "abc")
    for sequence in (1, 2):
        for session in (a, b, c):
            session.submit(Submission(sequence, PARAMS + 1.0, anchor_version=0))
    assert a.answer(2, timeout=60) is not None
    with center.core.reading(kept=True):
        rounds = [event for event in events(tmp_path) if event["kind"] == "exchange"]
    assert rounds[0]["workers"] == ["a", "b"]
    assert rounds[0]["registered"] == 3
    assert "c" in rounds[1]["workers"]
    factors = {m["worker"]: m["factor"] for m in rounds[1]["messages"]}
    assert factors["c"] == 0.5
    center.close()


def test_time_continues_after_a_restart(tmp_path):
    with make(tmp_path) as center:
        send(center)
    for _ in range(2):
        with make(tmp_path, params=None) as center:
            send(center)
    times = [event["time"] for event in events(tmp_path)]
    assert times == sorted(times)
    processes = [event for event in events(tmp_path) if "process" in event]
    assert len(processes) == 3
    began = [event["process"]["began"] for event in processes]
    assert all(a < b for a, b in itertools.pairwise(began))


def test_restored_center_of_a_tape_is_equal(tmp_path):
    with make(tmp_path) as center:
        run(center, 7)
        saved = center.save()
    with make(tmp_path, params=None) as again:
        assert_identical(again.save(), saved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": "all"}, "keep must be 'contributions', 'hashes' or None, got 'all'"),
        ({"limit": 10}, "limit needs keep='contributions'"),
        ({"keep": "hashes", "limit": 10}, "limit needs keep='contributions'"),
        ({"keep": "contributions", "limit": 0}, "limit must be a whole number >= 1"),
    ],
)
def test_invalid_settings_of_a_tape_are_rejected(settings, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        Journal("d", **settings)
