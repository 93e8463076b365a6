"""Tapes are read, checked and replayed."""

import itertools
import pathlib
import runpy
import shutil
import struct
import threading

import jax
import numpy as np
import pytest
from helpers import shared, tapes
from helpers.support import RULES, assert_identical
from helpers.tapes import DOWNPOUR, Recording, record

from agn_optax import errors, tape
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    Limits,
    LocalCenter,
    MessageLimits,
    PackedCenter,
    Synchronous,
)
from agn_optax.service import serve

SIZE = 1000  # bytes of a journal, so that a snapshot follows every few exchanges


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_every_version_is_replayed_bit_for_bit(name, tmp_path):
    rule = RULES[name]()
    run = record(tmp_path, rule, exchanges=7)
    found = tape.read(tmp_path)
    for version, state in run.states.items():
        assert_identical(found.replay(rule, version), state)
    assert_identical(found.replay(rule), run.states[7])


@pytest.fixture(scope="module")
def segments(tmp_path_factory):
    """A tape of several segments, and its recording."""
    path = tmp_path_factory.mktemp("tape")
    return path, record(path, shared.agn(shared.adam(0.05)), exchanges=14, size=SIZE)


RULE = shared.agn(shared.adam(0.05))


def test_replay_begins_at_the_nearest_snapshot(segments):
    path, run = segments
    found = tape.read(path)
    assert len(found.snapshots) > 3
    for version in run.states:
        seen = []
        state = found.replay(RULE, version, progress=seen.append)
        assert_identical(state, run.states[version])
        before = [each for each in found.snapshots if each.version < version]
        if before:  # the records since the snapshot include joins
            assert seen[0] == before[-1].number
            assert len(seen) - (version - before[-1].version) in range(3)
        else:
            assert seen == [0]  # a join


def test_whole_replay_compares_all_snapshots_on_its_way(
    segments, tmp_path, monkeypatch
):
    path, run = segments
    copy = shutil.copytree(path, tmp_path / "copy")
    found = tape.read(copy)
    assert_identical(found.replay(RULE, whole=True), run.states[14])
    # A snapshot with another center, written as the center writes them.
    other = record(tmp_path / "other", RULE, exchanges=14, size=SIZE, seed=1)
    assert other.states.keys() == run.states.keys()
    middle = found.snapshots[2]
    shutil.copy(tmp_path / "other" / middle.path.name, middle.path)
    with pytest.raises(errors.DurabilityError, match=middle.path.name):
        tape.read(copy).replay(RULE, whole=True)
    with pytest.raises(
        errors.DurabilityError, match="is not the snapshot of this tape"
    ):
        tape.read(copy).check()


def test_snapshots_of_another_stack_may_differ_by_rounding(
    segments, monkeypatch, caplog
):
    found = tape.read(segments[0])
    apply = tape.Event.apply

    def apply_with_rounding(event, store):
        apply(event, store)
        store.current.params["w"] *= 1 + 1e-6

    monkeypatch.setattr(tape.Event, "apply", apply_with_rounding)
    with pytest.raises(errors.DurabilityError, match="differ, relatively by"):
        found.replay(RULE, whole=True)
    monkeypatch.setattr("agn_optax.tape._tape.stack", lambda: {"jax": "another"})
    found.replay(RULE, whole=True)
    assert "differ, relatively by" in caplog.text


def test_events_say_what_happened(tmp_path):
    limits = Limits(messages=MessageLimits(norm=100.0))
    with Recording(tmp_path, mode=BoundedStaleness(versions=1), limits=limits) as run:
        run.send("a", steps=3, weight=2.0)
        run.send("b")
        assert run.send("a", scale=1e4).rejected
        run.send("a")
        run.send("a")
        assert not run.send("b").applied
        run.leave("b")
    events = list(tape.read(tmp_path).events())
    kinds = ["join", "exchange", "join", "exchange", "rejected"]
    assert [each.kind for each in events] == [
        *kinds,
        *("exchange", "exchange", "dropped", "leave"),
    ]
    assert [each.version for each in events] == [0, 1, 1, 2, 2, 3, 4, 4, 4]
    assert [each.number for each in events] == list(range(9))
    times = [each.time for each in events]
    assert times == sorted(times)
    first, rejected, dropped = (events[i].messages[0] for i in (1, 4, 7))
    assert (first.worker, first.sequence, first.steps, first.weight) == ("a", 1, 3, 2.0)
    assert (first.outcome, first.staleness, first.is_kept) == ("applied", 0, True)
    assert (rejected.outcome, dropped.outcome) == ("rejected", "dropped")
    assert "its norm is" in rejected.reason
    assert dropped.staleness == 2
    # Contributions that did not move the center are on the tape, too.
    for event in (events[1], events[4], events[7]):
        ((b, w),) = event.contributions()
        assert (b.shape, w.shape) == ((2,), (3, 2))
        norm = np.sqrt((b**2).sum() + (w**2).sum())
        assert norm == pytest.approx(event.messages[0].norm, rel=1e-5)


def test_rounds_are_replayed(tmp_path):
    rule, mode = shared.average(), Synchronous(late="weighted")
    with Recording(tmp_path, rule, mode=mode) as run:
        workers = ("a", "b", "c")
        for worker in workers:  # all are registered before the first round
            run.join(worker)
        for _ in range(3):
            for i, worker in enumerate(workers):
                run.submit(worker, weight=1.0 + i)
            for worker in workers:
                run.collect(worker)
    found = tape.read(tmp_path)
    for version, state in run.states.items():
        assert_identical(found.replay(rule, version), state)
    rounds = [each for each in found.events() if each.kind == "exchange"]
    assert [len(each.applied) for each in rounds] == [3, 3, 3]


def test_version_is_found_by_its_time(segments):
    path, _ = segments
    found = tape.read(path)
    events = [each for each in found.events() if each.applied]
    for before, after in itertools.pairwise(events):
        at = (before.time + after.time) / 2
        assert found.find(seconds=at).version == before.version
        assert found.find(seconds=after.time).version == after.version
    assert found.find(seconds=0.0).version == 0
    assert found.find(seconds=1e9).version == 14


def test_missing_version_is_an_error_with_the_versions(segments):
    path, _ = segments
    found = tape.read(path)
    for version in (-1, 15):
        with pytest.raises(errors.InvalidArgumentError, match=r"\[0, 14\]"):
            found.replay(RULE, version)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(errors.InvalidArgumentError, match=r"at least 0\.0,"):
            found.replay(RULE, seconds=seconds)
    with pytest.raises(errors.InvalidArgumentError, match="not both"):
        found.replay(RULE, 1, 2.0)


def test_another_rule_is_an_error(segments):
    path, _ = segments
    with pytest.raises(errors.RuleMismatchError, match="center optimizer"):
        tape.read(path).replay(shared.agn(shared.adam(0.1)))


@pytest.mark.slow
def test_tape_is_read_while_its_center_writes_it(tmp_path):
    """Whatever is read is a run of the center so far, and no error."""
    with Recording(tmp_path, size=SIZE) as run:
        stop = threading.Event()

        def exchange():
            while not stop.is_set():
                run.send()

        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            versions = []
            while len(versions) < 20 or versions[-1] < 100:
                found = tape.read(tmp_path)
                found.check()
                versions.append(found.replay(DOWNPOUR).version)
        finally:
            stop.set()
            thread.join()
        assert versions == sorted(versions)
        run.write()
        assert_identical(tape.read(tmp_path).replay(DOWNPOUR), run.center.save())


def test_packed_center_of_a_server_has_the_same_tape(tmp_path):
    """A served center keeps its parameters in two arrays; its tape is no other one."""
    rule = shared.diloco()
    journal = Journal(tmp_path, keep="contributions")
    with serve(rule, tapes.PARAMS, durability=journal) as server:
        assert isinstance(server.center, PackedCenter)
        run = Recording.__new__(Recording)
        run.center = server.center
        run._sessions, run._sent, run._anchors, run.states = {}, {}, {}, {}
        run._random = np.random.default_rng(0)
        for _ in range(4):
            run.send()
    found = tape.read(tmp_path)
    for version, state in run.states.items():
        assert_identical(found.replay(rule, version), state)


@pytest.fixture
def copy(segments, tmp_path):
    path, _ = segments
    return shutil.copytree(path, tmp_path / "copy")


def test_check_counts_what_it_has_read(copy):
    found = tape.read(copy)
    checked = found.check()
    assert checked == (16, 14, 0, len(found.snapshots))


def test_flipped_bit_of_a_contribution_is_found(copy):
    journal = sorted(copy.glob("journal-*"))[1]
    raw = bytearray(journal.read_bytes())
    # The last bytes that are not reserved space belong to a contribution.
    last = max(i for i, byte in enumerate(raw) if byte)
    raw[last] ^= 1
    journal.write_bytes(raw)
    with pytest.raises(errors.DurabilityError, match=r"journal-\d+"):
        tape.read(copy).check()


def test_cut_tape_is_an_error(copy):
    newest = sorted(copy.glob("journal-*"))
    cut = next(each for each in reversed(newest) if each.stat().st_size > 200)
    with cut.open("r+b") as file:
        file.truncate(64)
    for use in (tape.Tape.check, lambda found: found.replay(RULE, 14)):
        with pytest.raises(errors.DurabilityError, match="record"):
            use(tape.read(copy))


def test_newest_version_is_compared_with_its_snapshot_after_a_leave(tmp_path):
    with Recording(tmp_path) as run:
        run.send()
        run.leave("w0")
    snapshot = tape.read(tmp_path).snapshots[-1].path
    raw = bytearray(snapshot.read_bytes())
    raw[max(i for i, byte in enumerate(raw) if byte)] ^= 1
    snapshot.write_bytes(raw)
    with pytest.raises(errors.DurabilityError, match=snapshot.name):
        tape.read(tmp_path).replay(DOWNPOUR)


def test_records_without_a_snapshot_are_an_error(copy):
    for path in copy.glob("snapshot-*"):
        path.unlink()
    with pytest.raises(errors.DurabilityError, match="has records, but no snapshot"):
        tape.read(copy)


def test_missing_segment_is_an_error(copy):
    sorted(copy.glob("journal-*"))[1].unlink()
    with pytest.raises(errors.DurabilityError, match="missing"):
        tape.read(copy).check()


def test_missing_first_segment_is_an_error(copy):
    min(copy.glob("journal-*")).unlink()
    found = tape.read(copy)
    for use in (tape.Tape.check, lambda found: found.replay(RULE, whole=True)):
        with pytest.raises(errors.DurabilityError, match="record 0 is missing before"):
            use(found)


def test_segments_of_another_run_are_an_error(copy, tmp_path):
    record(tmp_path / "other", RULE, exchanges=14, size=SIZE, seed=1)
    name = sorted(copy.glob("journal-*"))[1].name
    shutil.copy(tmp_path / "other" / name, copy / name)
    with pytest.raises(errors.DurabilityError, match="chain"):
        tape.read(copy).check()


@pytest.mark.parametrize("make", ["missing", "empty", "file", "foreign"])
def test_directory_without_a_tape_is_an_error(make, tmp_path):
    path = tmp_path / "tape"
    if make == "file":
        path.write_text("no tape")
    elif make != "missing":
        path.mkdir()
    if make == "foreign":
        (path / "notes.txt").write_text("no tape")
    with pytest.raises(errors.DurabilityError, match="has no tape"):
        tape.read(path)


def test_newer_tape_is_an_error(copy):
    for path in copy.glob("snapshot-*"):
        raw = bytearray(path.read_bytes())
        raw[8:12] = struct.pack("<I", 99)
        path.write_bytes(raw)
    with pytest.raises(errors.DurabilityError, match="format 99"):
        tape.read(copy)


def test_versions_without_contributions_are_an_error(tmp_path):
    """A limit has dropped contributions; later versions are computed as before."""
    rule = shared.diloco()
    run = record(tmp_path, rule, exchanges=14, size=SIZE, limit=3 * SIZE)
    found = tape.read(tmp_path)
    assert any(not each.is_kept for each in found.segments)
    checked = found.check()
    assert checked.records == 16
    assert checked.hashes
    assert checked.contributions + checked.hashes == 14
    oldest = found.snapshots[0].version
    assert oldest > 0
    for version in range(oldest, 15):
        assert_identical(found.replay(rule, version), run.states[version])
    with pytest.raises(errors.InvalidArgumentError, match=rf"\[{oldest}, 14\]"):
        found.replay(rule, 0)


def test_tape_of_hashes_has_all_events_and_the_newest_version(tmp_path):
    run = record(tmp_path, exchanges=6, size=SIZE, keep="hashes")
    found = tape.read(tmp_path)
    assert [each.number for each in found.events()] == list(range(8))
    hashes = [m.hash for each in found.events() for m in each.messages]
    assert len(set(hashes)) == 6
    assert_identical(found.replay(DOWNPOUR), run.states[6])
    assert found.check().hashes == 6


def test_center_without_a_tape_keeps_its_records_since_the_newest_snapshot(tmp_path):
    with Recording(tmp_path, keep=None) as run:
        for _ in range(3):
            run.send()
        run.write()
        found = tape.read(tmp_path)
        for version in range(4):
            assert_identical(found.replay(DOWNPOUR, version), run.states[version])
    assert tape.read(tmp_path).find().version == 3


def test_restart_continues_the_tape(tmp_path):
    first = record(tmp_path, exchanges=3)
    with Recording(tmp_path) as again:
        again.states |= first.states
        for _ in range(2):
            again.send("w5")
    found = tape.read(tmp_path)
    assert found.center_id == again.center.center_id == first.center.center_id
    for version, state in again.states.items():
        assert_identical(found.replay(DOWNPOUR, version), state)
    times = [each.time for each in found.events()]
    assert times == sorted(times)


GOLDEN = pathlib.Path(__file__).parents[1] / "tapes"


@pytest.mark.parametrize("path", [p.parent for p in sorted(GOLDEN.glob("*/lock"))])
def test_golden_tapes_are_audited(path):
    rule = runpy.run_path(str(GOLDEN / "make.py"))["RULES"][path.name]()
    found = tape.read(path)
    assert found.check().records == found.snapshots[-1].number
    kinds = tape.audit(found, rule).kinds
    assert kinds["exchange"] == found.snapshots[-1].version


def test_reading_changes_no_file(copy):
    before = {each.name: each.read_bytes() for each in copy.iterdir()}
    found = tape.read(copy)
    found.check()
    found.replay(RULE, 3)
    assert {each.name: each.read_bytes() for each in copy.iterdir()} == before


def test_containers_of_a_model_can_be_given(tmp_path):
    registered = jax.tree_util.register_dataclass(_Model, ["w"], [])
    params = registered(tapes.PARAMS["w"])
    run = record(tmp_path, exchanges=2, params=params)
    found = tape.read(tmp_path)
    with pytest.raises(errors.DurabilityError, match="containers"):
        found.replay(DOWNPOUR)
    state = found.replay(DOWNPOUR, params=params)
    assert isinstance(state.params, _Model)
    assert_identical(state, run.states[2])


class _Model:
    def __init__(self, w):
        self.w = w


def test_center_continues_beside_its_reader(tmp_path):
    record(tmp_path, exchanges=2)
    found = tape.read(tmp_path)
    with LocalCenter(
        DOWNPOUR, durability=Journal(tmp_path, keep="contributions")
    ) as center:
        assert center.version == found.find().version == 2
