"""Disks that are full, folders that go away, processes that are killed: for real.

Each ends in the center that was answered, or in an error that names what is wrong.
``AGN_OPTAX_KILLS=50`` kills so many processes in the middle of a compaction, twice.
"""

import collections
import contextlib
import itertools
import math
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import commands, sessions, shared, talking
from helpers.waiting import wait_until

from agn_optax import errors, service
from agn_optax.center import Journal, LocalCenter, Snapshots, backup
from agn_optax.center.durability import _found, _keeper, _writer

pytestmark = pytest.mark.slow

RULE = shared.downpour()
PROGRAM = pathlib.Path(__file__).with_name("kept_process.py")
KILLS = int(os.environ.get("AGN_OPTAX_KILLS", "2"))
ANSWERED = struct.Struct("<q32s")  # as kept_process.py writes them
LIMIT = 60  # seconds that nothing here takes
COPIES = 4 * KILLS
NOBODY = 65534


def send(center):
    message = jnp.ones_like(center.pull().params)
    return sessions.exchange(center, message, anchor_version=0, worker="w")


class Child:
    """A process that keeps a center in a directory, and exchanges all the time."""

    def __init__(self, process, directory, answered, kind="journal", **settings):
        answered.write_bytes(bytes(ANSWERED.size))
        self._answered, self._process = answered, process
        self.directory = directory
        where = {"directory": str(directory), "answered": str(answered)}
        self.ask("start", kind=kind, **where, **settings)
        self.goes_on()

    def ask(self, what, **settings):
        return self._process.ask(do=what, **settings)

    @property
    def answered(self):
        """Version and life."""
        version, life = ANSWERED.unpack(self._answered.read_bytes())
        return version, life.decode()

    def goes_on(self, by=5):
        """Until so many more exchanges have been answered."""
        before = self.answered[0]
        wait_until(lambda: self.answered[0] >= before + by)

    def kill(self):
        self._process.kill()


@pytest.fixture
def child(tmp_path):
    """Starts processes; each with a new directory, unless one is named."""
    count = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(directory=None, **settings):
            number = next(count)
            (process,) = stack.enter_context(talking.processes(PROGRAM, 1))
            directory = directory or tmp_path / f"kept-{number}"
            return Child(process, directory, tmp_path / f"told-{number}", **settings)

        yield start


@contextlib.contextmanager
def found(directory, kind=Journal):
    """The center that the next process finds: some beginning of what happened."""
    center = LocalCenter(RULE, durability=kind(directory))
    try:
        np.testing.assert_array_equal(center.pull().params, -center.version)
        yield center
    finally:
        center.close()


@pytest.mark.timeout(60 + 60 * KILLS)
@pytest.mark.parametrize("interval", [None, 30.0])
def test_killed_in_the_middle_of_a_compaction(interval, child):
    """Which goes on all the time. With an interval, too, a kill loses nothing."""
    dice, seen = np.random.default_rng(0), collections.Counter()
    for _ in range(KILLS):
        one = child(elements=20_000, size=1, interval=interval)
        with pytest.raises(errors.DurabilityError, match="another process keeps"):
            LocalCenter(RULE, durability=Journal(one.directory))
        one.goes_on(dice.integers(1, 20))
        time.sleep(dice.random() * 0.02)
        one.kill()
        version, life = one.answered
        kinds = [each.name.partition("-")[0] for each in one.directory.iterdir()]
        seen["unfinished"] += any(one.directory.glob("*.tmp"))
        seen["two of a kind"] += len(set(kinds)) < len(kinds)
        with found(one.directory) as center:
            assert (center.life, center.version - version in (0, 1)) == (life, True)
    assert seen.total() or KILLS < 20, "none was in the middle of one"
    print(seen)  # noqa: T201


@pytest.mark.timeout(60 + 60 * KILLS)
def test_copies_and_backups_at_random_moments(child, tmp_path):
    """A copy may be of files that do not go together, and then says so."""
    dice, seen = np.random.default_rng(0), collections.Counter()
    one = child(elements=2000, size=100_000)
    for number in range(COPIES):
        time.sleep(dice.random() * 0.01)
        version, life = one.answered
        copy, backed = tmp_path / f"copy-{number}", tmp_path / f"backup-{number}"
        try:
            shutil.copytree(one.directory, copy)
        except (shutil.Error, FileNotFoundError):
            seen["something had gone"] += 1
        else:
            try:
                with found(copy) as center:
                    assert center.life != life or center.version >= version
                    seen["same life" if center.life == life else "another"] += 1
            except errors.DurabilityError as error:
                seen["refused" if str(copy) in str(error) else "not by name"] += 1
        now = backup(one.directory, backed)
        assert now >= version
        with found(backed) as center:
            assert center.version == now
            assert center.life != life
        for each in (copy, backed):
            shutil.rmtree(each, ignore_errors=True)
    assert seen["same life"]
    assert not seen["not by name"]
    print(seen)  # noqa: T201


@pytest.mark.parametrize("kind", ["journal", "snapshots"])
def test_a_backup_of_a_center_that_has_ended(kind, child, tmp_path):
    settings = {"seconds": None, "exchanges": 3} if kind == "snapshots" else {}
    one = child(kind=kind, **settings)
    version = one.ask("stop")["version"]
    assert backup(one.directory, tmp_path / "to") == version
    with found(tmp_path / "to") as center:
        assert center.version == version


def test_what_can_and_what_cannot_be_backed_up(tmp_path):
    with pytest.raises(errors.DurabilityError, match=r"cannot read .*gone"):
        backup(tmp_path / "gone", tmp_path / "to")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.DurabilityError, match=r"there is no center in .*empty"):
        backup(tmp_path / "empty", tmp_path / "to")
    assert not (tmp_path / "to").exists()
    center = LocalCenter(RULE, jnp.zeros(2), durability=Journal(tmp_path / "a"))
    send(center)
    with pytest.raises(errors.InvalidArgumentError, match="a is not empty"):
        backup(tmp_path / "a", tmp_path / "a")
    copy = shutil.copytree(tmp_path / "a", tmp_path / "copy")
    said = commands.succeeds("backup", tmp_path / "a", tmp_path / "by command")
    assert said == f"version 1 is in {tmp_path / 'by command'}\n"
    center.close()
    (journal,) = copy.glob("journal-*")
    with journal.open("r+b") as file:
        file.seek(70)
        file.write(b"\xff")
    # Records that were written together do not tell where the damage begins.
    damaged = r"record 0 (at byte 0 )?is damaged"
    with pytest.raises(errors.DurabilityError, match=damaged):
        backup(copy, tmp_path / "to")
    assert not any((tmp_path / "to").iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system with so few bytes or files; `fill` takes what is left."""
    mounted = []

    def mount(options):
        if os.getuid():
            pytest.skip("only root can mount a small disk")
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 our own
            pytest.skip("nothing can be mounted here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)  # noqa: S603, S607 our own


@contextlib.contextmanager
def full(disk, but=0, files=False):
    """Nothing can be written to a small disk, but so many bytes; or no more files."""
    state = os.statvfs(disk)
    taken = [
        disk / f"taken-{number}" for number in range(state.f_ffree if files else 1)
    ]
    for each in taken:
        each.touch()
    if not files:
        taken[0].write_bytes(bytes(state.f_bavail * state.f_frsize - but))
    try:
        yield
    finally:
        for each in taken:
            each.unlink()


def test_a_disk_with_no_room_to_begin(small_disk):
    disk = small_disk("size=64k")
    center = LocalCenter(RULE, durability=Journal(disk / "a"))
    with pytest.raises(errors.DurabilityError, match=r"cannot write .*No space left"):
        center.initialize(jnp.zeros(100_000), worker="w")
    assert not center.core.is_initialized
    center.initialize(jnp.zeros(100), worker="w")
    center.close()
    with found(disk / "a") as center:
        assert center.version == 0


def test_a_full_disk_stops_the_center(small_disk):
    disk = small_disk("size=1m")
    center = LocalCenter(RULE, jnp.zeros(10_000), durability=Journal(disk / "a"))
    answered = []
    with pytest.raises(errors.CenterClosedError, match="No space left on device"):
        answered.extend(iter(lambda: send(center).version, None))
    assert center.core.degraded == center.core.failure
    center.close()
    assert answered
    again = shutil.copytree(disk / "a", disk.parent / "copy")
    with pytest.raises(errors.DurabilityError, match="No space left on device"):
        LocalCenter(RULE, durability=Journal(disk / "a"))  # it is full still
    with found(again) as same:
        assert (same.version, same.life) == (answered[-1], center.life)


@pytest.mark.parametrize("files", [False, True])
def test_a_disk_that_is_full_for_a_while(files, small_disk, caplog, tmp_path):
    """No snapshot can be written, and no journal begun; the old one goes on."""
    disk = small_disk("size=2m,nr_inodes=30")
    kept = Journal(disk / "a", size=100_000)
    center = LocalCenter(RULE, jnp.zeros(10_000), durability=kept)  # in 40 kB
    send(center)
    with full(disk, but=100_000, files=files):
        send(center)
        send(center)
        wait_until(lambda: "no snapshot could be written" in caplog.text)
        assert "No space left on device" in center.core.degraded
        assert ("the journal goes on in its old file" in caplog.text) == files
        assert not center.core.failure
        copy = shutil.copytree(disk / "a", tmp_path / "copy")
    with found(copy) as again:
        assert (again.version, again.life) == (3, center.life)
    for _ in range(3):
        send(center)
    wait_until(lambda: not center.core.degraded)
    center.close()
    assert not list((disk / "a").glob("journal-*"))
    with found(disk / "a") as again:
        assert (again.version, again.life) == (6, center.life)


@pytest.mark.parametrize("ends", ["full", "free", "killed"])
def test_a_center_that_goes_on_without_its_disk(
    ends, small_disk, caplog, tmp_path, monkeypatch
):
    monkeypatch.setattr(_keeper, "_REMINDS", 0.05)
    disk = small_disk("size=2m")
    kept = Journal(disk / "a", on_failure="go on")
    with (
        service.serve(RULE, jnp.zeros(10_000), durability=kept) as server,
        service.Observer(server.address) as observer,
    ):
        center = server.center
        send(center)
        assert observer.status()["degraded"] == ""
        with full(disk, but=20_000):
            for _ in range(3):
                send(center)
            assert center.version == 4
            said = observer.status()["degraded"]
            assert "in memory only" in said
            assert "No space left on device" in said
            for command, code in (("status", 0), ("doctor", 1)):
                result = commands.command(command, server.address)
                assert said in " ".join(result.stdout.split()), command
                assert result.exit_code == code, result.output
            wait_until(lambda: caplog.text.count(said) >= 3)
            send(center)
            if ends == "full":
                copy = shutil.copytree(disk / "a", tmp_path / "copy")
                with found(
                    copy
                ) as again:  # where less is said to be kept than there is
                    assert again.version < center.version
                    assert again.life != center.life
                server.stop()
                assert "No space left on device" in center.core.failure
                return
        if ends == "killed":  # after a snapshot that has found room
            wait_until(
                lambda: (
                    backup(disk / "a", tmp_path / "to") == 5 or clear(tmp_path / "to")
                )
            )
            copy = shutil.copytree(disk / "a", tmp_path / "copy")
            with found(copy) as again:
                assert again.version == 5
                assert again.life != center.life
            return
    assert not center.core.failure
    with found(disk / "a") as again:  # all of it is in the last snapshot
        assert (again.version, again.life) == (5, center.life)


def clear(directory):
    shutil.rmtree(directory)


def moved(directory):
    return directory.rename(directory.with_name("moved"))


def removed(directory):
    shutil.rmtree(directory)


def replaced(directory):
    gone = directory.rename(directory.with_name("moved"))
    shutil.copytree(gone, directory)
    return gone


def without_its_lock(directory):
    (directory / "lock").unlink()


def without_its_journal(directory):
    (journal,) = directory.glob("journal-*")
    journal.unlink()


@pytest.mark.parametrize("on_failure", ["stop", "go on"])
@pytest.mark.parametrize(
    "goes", [moved, removed, replaced, without_its_lock, without_its_journal]
)
def test_a_directory_that_goes_away(goes, on_failure, tmp_path):
    kept = Journal(tmp_path / "a", on_failure=on_failure)
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)
    for _ in range(3):
        send(center)
    now = goes(tmp_path / "a")
    said = "was removed, moved or replaced while it was in use"
    if on_failure == "stop":
        with pytest.raises(errors.CenterClosedError, match=said):
            send(center)
    else:
        for _ in range(3):
            send(center)
        assert said in center.core.degraded
    center.close()
    assert said in center.core.failure or goes is without_its_journal
    if now is not None:  # what had been answered by then is in it
        with found(now) as again:
            assert again.version == 4
            assert (again.life == center.life) == (on_failure == "stop")


def test_snapshots_are_not_written_into_another_directory(tmp_path, caplog):
    kept = Snapshots(tmp_path / "a", seconds=None, exchanges=1)
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)
    moved(tmp_path / "a")
    (tmp_path / "a").mkdir()
    send(center)
    wait_until(lambda: "was removed, moved or replaced" in center.core.degraded)
    center.close()
    assert "was removed, moved or replaced" in center.core.failure
    assert not any((tmp_path / "a").iterdir())


def test_a_directory_that_becomes_read_only(child):
    """The journal that is open goes on, and nothing else."""
    root = os.getuid() == 0  # who may write to anything: then somebody else does
    with tempfile.TemporaryDirectory() as place:
        pathlib.Path(place).chmod(0o777)
        directory = pathlib.Path(place, "a")
        one = child(directory, size=1, uid=NOBODY if root else None)
        directory.chmod(0o555)
        try:
            wait_until(lambda: "Permission denied" in one.ask("said")["degraded"])
            one.goes_on(100)
            assert not one.ask("said")["failure"]
            one.kill()
            version, life = one.answered
        finally:
            directory.chmod(0o755)
        with found(directory) as center:
            assert (center.life, center.version - version in (0, 1)) == (life, True)


class Syncs:
    """Those of the journal, counted; they wait for ``ready``."""

    def __init__(self, monkeypatch):
        self.count, self.ready = 0, threading.Event()
        self.ready.set()
        self._sync = _writer._sync
        monkeypatch.setattr(_writer, "_sync", self)

    def __call__(self, file):
        self.count += 1
        assert self.ready.wait(LIMIT)
        self._sync(file)


@pytest.fixture
def syncs(monkeypatch):
    return Syncs(monkeypatch)


def test_with_an_interval_answers_do_not_wait_for_the_disk(syncs, tmp_path):
    kept = Journal(tmp_path / "a", interval=1000.0)
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)
    for _ in range(5):
        send(center)
    assert syncs.count == 0
    copy = shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with found(copy) as again:  # a kill loses nothing: the system has it all
        assert (again.version, again.life) == (5, center.life)
    center.close()
    assert syncs.count == 1
    with found(tmp_path / "a") as again:
        assert (again.version, again.life) == (5, center.life)


def test_with_an_interval_nothing_waits_longer_for_the_disk(
    syncs, tmp_path, monkeypatch
):
    clock = types.SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(_writer, "time", clock)
    kept = Journal(tmp_path / "a", interval=1000.0)
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)
    send(center)
    clock.monotonic = lambda: 999.0
    send(center)
    assert syncs.count == 0
    clock.monotonic = lambda: 1000.0
    syncs.ready.clear()
    late = threading.Thread(target=send, args=(center,))
    late.start()  # nobody is answered while others have waited for so long
    wait_until(lambda: syncs.count == 1)
    assert late.is_alive()
    syncs.ready.set()
    late.join(LIMIT)
    assert center.version == 3
    center.close()


def test_with_an_interval_what_came_last_is_synced_in_time(syncs, tmp_path):
    kept = Journal(tmp_path / "a", interval=0.05)
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)
    send(center)
    wait_until(lambda: syncs.count)  # and nobody comes any more
    wait_until(lambda: center.core._keeper._writer._due == math.inf)
    center.close()


def test_with_an_interval_a_machine_that_stopped_is_another_life(tmp_path, monkeypatch):
    kept = Journal(tmp_path / "a", interval=1000.0)
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)
    for _ in range(3):
        send(center)
    copy = shutil.copytree(tmp_path / "a", tmp_path / "copy")
    center.close()
    with monkeypatch.context() as patch:
        patch.setattr(_found, "this_boot", lambda: "another")
        with found(tmp_path / "a") as again:  # which had been closed
            assert (again.version, again.life) == (3, center.life)
        (journal,) = copy.glob("journal-*")
        with journal.open("r+b") as file:
            file.truncate(1200)
        with found(copy) as again:
            assert again.version < 3
            assert again.life != center.life


def test_snapshots_stay_by_count_and_by_age(tmp_path):
    kept = Snapshots(
        tmp_path / "a", seconds=None, exchanges=1, keep=2, keep_seconds=3600.0
    )
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)

    def snapshots():
        return sorted((tmp_path / "a").glob("snapshot-*[0-9]"))

    for number in range(5):
        wait_until(lambda n=number: len(snapshots()) == n + 1)
        send(center)
    wait_until(lambda: len(snapshots()) == 6)
    for each in snapshots():
        os.utime(each, (0, 0))
    send(center)
    wait_until(lambda: len(snapshots()) == 2)
    center.close()
    assert len(snapshots()) == 2
    with found(tmp_path / "a", Snapshots) as again:
        assert again.version == 6
