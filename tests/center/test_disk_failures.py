"""Real failures: full disks, deleted directories and killed processes.

Each leads to the center that was confirmed, or to an error that names the problem.
``AGN_OPTAX_KILLS=50`` kills so many processes during compactions, for each of two
settings.
"""

import collections
import contextlib
import itertools
import os
import pathlib
import shutil
import struct
import tempfile
import time

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import children, sessions, shared
from helpers.disks import small_disks
from helpers.waiting import wait_until

from agn_optax import errors
from agn_optax.center import Journal, LocalCenter

pytestmark = pytest.mark.slow

RULE = shared.downpour()
PROGRAM = pathlib.Path(__file__).with_name("durable_center_process.py")
KILLS = int(os.environ.get("AGN_OPTAX_KILLS", "2"))
ANSWERED = struct.Struct("<q32s")  # the format of durable_center_process.py
LIMIT = 60  # s, generous: no test should come near it
COPIES = 4 * KILLS
NOBODY = 65534


def send(center):
    message = jnp.ones_like(center.pull().params)
    return sessions.exchange(center, message, anchor_version=0, worker="w")


class CenterProcess:
    """A process that keeps a center in a directory and exchanges continuously."""

    def __init__(self, process, directory, answered, **settings):
        answered.write_bytes(bytes(ANSWERED.size))
        self._answered, self._process = answered, process
        self.directory = directory
        where = {"directory": str(directory), "answered": str(answered)}
        self.ask("start", **where, **settings)
        self.goes_on()

    def ask(self, what, **settings):
        return self._process.ask(do=what, **settings)

    @property
    def answered(self):
        """The last confirmed version and the id of the center."""
        version, center_id = ANSWERED.unpack(self._answered.read_bytes())
        return version, center_id.decode()

    def goes_on(self, by=5):
        """Wait until this many more exchanges were confirmed."""
        before = self.answered[0]
        wait_until(lambda: self.answered[0] >= before + by)

    def kill(self):
        self._process.kill()


@pytest.fixture
def child(tmp_path):
    """Return a function that starts a process, with a new directory by default."""
    count = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(directory=None, **settings):
            number = next(count)
            (process,) = stack.enter_context(children.processes(PROGRAM, 1))
            directory = directory or tmp_path / f"kept-{number}"
            return CenterProcess(
                process, directory, tmp_path / f"answered-{number}", **settings
            )

        yield start


@contextlib.contextmanager
def found(directory):
    """Yield the center found by the next process; it must be an earlier state."""
    center = LocalCenter(RULE, durability=Journal(directory))
    try:
        np.testing.assert_array_equal(center.pull().params, -center.version)
        yield center
    finally:
        center.close()


@pytest.mark.timeout(60 + 60 * KILLS)
def test_center_killed_during_compaction_keeps_confirmed_exchanges(child):
    """Compaction runs all the time. A kill loses nothing."""
    dice, seen = np.random.default_rng(0), collections.Counter()
    for _ in range(KILLS):
        one = child(elements=20_000, size=1)
        with pytest.raises(errors.DurabilityError, match="another process keeps"):
            LocalCenter(RULE, durability=Journal(one.directory))
        one.goes_on(dice.integers(1, 20))
        time.sleep(dice.random() * 0.02)
        one.kill()
        version, center_id = one.answered
        kinds = [each.name.partition("-")[0] for each in one.directory.iterdir()]
        seen["unfinished"] += any(one.directory.glob("*.tmp"))
        seen["two of a kind"] += len(set(kinds)) < len(kinds)
        with found(one.directory) as center:
            assert (center.center_id, center.version - version in (0, 1)) == (
                center_id,
                True,
            )
    assert seen.total() or KILLS < 20, "none was in the middle of one"
    print(seen)  # noqa: T201


@pytest.mark.timeout(60 + 60 * KILLS)
def test_copies_at_random_times_are_consistent_or_rejected(child, tmp_path):
    """Inconsistent copies are rejected by name."""
    dice, seen = np.random.default_rng(0), collections.Counter()
    one = child(elements=2000, size=100_000)
    for number in range(COPIES):
        time.sleep(dice.random() * 0.01)
        version, center_id = one.answered
        copy = tmp_path / f"copy-{number}"
        try:
            shutil.copytree(one.directory, copy)
        except (shutil.Error, FileNotFoundError):
            seen["something had gone"] += 1
        else:
            try:
                with found(copy) as center:
                    assert center.center_id != center_id or center.version >= version
                    seen["same id" if center.center_id == center_id else "another"] += 1
            except errors.DurabilityError as error:
                seen["rejected" if str(copy) in str(error) else "not by name"] += 1
        shutil.rmtree(copy, ignore_errors=True)
    assert seen["same id"]
    assert not seen["not by name"]
    print(seen)  # noqa: T201


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a file system with limited bytes or files."""
    with small_disks(tmp_path) as mount:
        yield mount


@contextlib.contextmanager
def full(disk, but=0, files=False):
    """Fill a small disk except for some bytes, or use up all of its files."""
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


def test_disk_without_room_for_the_first_snapshot_raises(small_disk):
    disk = small_disk("size=64k")
    center = LocalCenter(RULE, durability=Journal(disk / "a"))
    with pytest.raises(errors.DurabilityError, match=r"cannot write .*No space left"):
        center.initialize(jnp.zeros(100_000), worker="w")
    assert not center.core.is_initialized
    center.initialize(jnp.zeros(100), worker="w")
    center.close()
    with found(disk / "a") as center:
        assert center.version == 0


def test_full_disk_stops_the_center(small_disk):
    disk = small_disk("size=1m")
    center = LocalCenter(RULE, jnp.zeros(10_000), durability=Journal(disk / "a"))
    answered = []
    with pytest.raises(errors.CenterClosedError, match="No space left on device"):
        answered.extend(iter(lambda: send(center).version, None))
    assert center.core.keeper.degraded == center.core.failure
    center.close()
    assert answered
    again = shutil.copytree(disk / "a", disk.parent / "copy")
    with pytest.raises(errors.DurabilityError, match="No space left on device"):
        LocalCenter(RULE, durability=Journal(disk / "a"))  # the disk is still full
    with found(again) as same:
        assert (same.version, same.center_id) == (answered[-1], center.center_id)


@pytest.mark.parametrize("files", [False, True])
def test_journal_continues_while_the_disk_is_full(files, small_disk, caplog, tmp_path):
    """Neither a snapshot nor a new journal can be written; the old one continues."""
    disk = small_disk("size=2m,nr_inodes=30")
    kept = Journal(disk / "a", size=100_000)
    center = LocalCenter(RULE, jnp.zeros(10_000), durability=kept)  # 40 kB
    send(center)
    with full(disk, but=100_000, files=files):
        send(center)
        send(center)
        wait_until(lambda: "no snapshot could be written" in caplog.text)
        assert "No space left on device" in center.core.keeper.degraded
        assert ("the journal continues in its old file" in caplog.text) == files
        assert not center.core.failure
        copy = shutil.copytree(disk / "a", tmp_path / "copy")
    with found(copy) as again:
        assert (again.version, again.center_id) == (3, center.center_id)
    for _ in range(3):
        send(center)
    wait_until(lambda: not center.core.keeper.degraded)
    center.close()
    assert not list((disk / "a").glob("journal-*"))
    with found(disk / "a") as again:
        assert (again.version, again.center_id) == (6, center.center_id)


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


@pytest.mark.parametrize(
    "goes", [moved, removed, replaced, without_its_lock, without_its_journal]
)
def test_removed_or_replaced_directory_is_detected(goes, tmp_path):
    kept = Journal(tmp_path / "a")
    center = LocalCenter(RULE, jnp.zeros(100), durability=kept)
    for _ in range(3):
        send(center)
    now = goes(tmp_path / "a")
    error = "was removed, moved or replaced while it was in use"
    with pytest.raises(errors.CenterClosedError, match=error):
        send(center)
    center.close()
    assert error in center.core.failure
    if now is not None:  # it contains all exchanges confirmed before
        with found(now) as again:
            assert again.version == 4
            assert again.center_id == center.center_id


def test_journal_continues_in_a_read_only_directory(child):
    """The open journal continues; nothing else can be written."""
    root = os.getuid() == 0  # root can write anywhere, so another user is used
    with tempfile.TemporaryDirectory() as place:
        pathlib.Path(place).chmod(0o777)
        directory = pathlib.Path(place, "a")
        one = child(directory, size=1, uid=NOBODY if root else None)
        directory.chmod(0o555)
        try:
            wait_until(lambda: "Permission denied" in one.ask("status")["degraded"])
            one.goes_on(100)
            assert not one.ask("status")["failure"]
            one.kill()
            version, center_id = one.answered
        finally:
            directory.chmod(0o755)
        with found(directory) as center:
            assert (center.center_id, center.version - version in (0, 1)) == (
                center_id,
                True,
            )
