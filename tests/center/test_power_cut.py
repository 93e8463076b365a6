"""After a power failure at any time, all confirmed exchanges are on disk.

The calls by which a center writes are recorded while it runs. Then, for a cut after
each of them, a directory is made with all data that must be on the disk (it was synced)
and a random part of the rest, and opened.
"""

import contextlib
import functools
import itertools
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import sessions, shared, tuning
from helpers.disks import Calls, Disk, put

from agn_optax.center import Journal, LocalCenter
from agn_optax.center.durability import Keeper
from agn_optax.center.durability._directory import Files

pytestmark = pytest.mark.slow

RULE = shared.downpour()


class Recording(Calls):
    """A recording of all changes to files and directories, in order."""

    def __init__(self):
        super().__init__()
        self.events = []
        self._lock = threading.RLock()

    def make(self, name, real, note, args, kwargs):
        with self._lock:
            result = real(*args, **kwargs)
            self.events += note(result, *args)
        return result

    def client_knows(self, what):
        """Record that a client knows this from now on."""
        with self._lock:
            self.events.append(("known", what))


def cuts(tape, disk, known=None):
    """Yield the last known value and the files after a cut at every event."""
    seen = set()
    for i, (kind, *what) in enumerate(tape.events):
        if kind == "known":
            (known,) = what
        else:
            disk.do(kind, *what)
        dice = np.random.default_rng(i)
        for share in (0.0, 0.1, 0.5, 0.9, 1.0):
            files = disk.after_a_cut(functools.partial(_is_written, dice, share))
            state = (known, *((k, bytes(v)) for k, v in sorted(files.items())))
            if state not in seen:
                seen.add(state)
                yield known, files


def _is_written(dice, share):
    return dice.random() < share


def run(durability, root, patch):
    """Run and close a center and record it; known values are center id and version."""
    tape, disk = Recording(), Disk(root)
    with patch.context() as patched:
        tape.patch(patched)
        center = LocalCenter(RULE, jnp.zeros(2), durability=durability)
        tape.client_knows((center.center_id, center.version))
        for version in range(center.version + 1, center.version + 8):
            worker = f"w{version % 3}"
            sessions.exchange(center, jnp.ones(2), anchor_version=0, worker=worker)
            tape.client_knows((center.center_id, version))
        tape.client_knows((center.center_id, center.version, "closing"))
        center.close()
        tape.client_knows((center.center_id, center.version, "closed"))
    return tape, disk


@pytest.fixture
def after_cuts(tmp_path, monkeypatch):
    """Yield cuts in a center's first run, and in the next after a close or a kill."""
    tuning.set_least_reserved(monkeypatch, 1 << 13)

    def after_cuts(make):
        count = itertools.count()

        def process(name, known=None, files=None):
            root = tmp_path / name
            root.mkdir()
            put(files or {}, tmp_path / "first", root)
            tape, disk = run(make(root / "deep" / "kept"), root, monkeypatch)
            for now, left in cuts(tape, disk, known):
                copy = tmp_path / f"{next(count)}"
                put(left, root, copy)
                yield now, left, make(copy / "deep" / "kept")

        ends = {}
        for known, files, durability in process("first"):
            yield known, durability
            if known is not None:
                # At the last cut everything is written.
                ends[known[2:]] = known[:2], files
        for name, end in (("after an end", ("closed",)), ("after a kill", ())):
            for known, _, durability in process(name, *ends[end]):
                yield known, durability

    return after_cuts


@contextlib.contextmanager
def found(durability):
    """Yield the store that the next process finds, and its keeper."""
    keeper = Keeper(durability, RULE, threading.Condition())
    try:
        ledger = LocalCenter(RULE).core.ledger
        yield keeper.restore(ledger, None, None, None, False), keeper
    finally:
        keeper.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 1500},
        {"size": 1 << 20},
        {"size": 1500, "keep": "contributions"},
        {"size": 1500, "keep": "hashes"},
    ],
)
def test_journal_has_all_confirmed_exchanges(after_cuts, settings):
    for known, durability in after_cuts(functools.partial(Journal, **settings)):
        with found(durability) as (store, keeper):
            if known is not None:
                center_id, version, *_ = known
                assert (keeper.center_id, store.current.number >= version) == (
                    center_id,
                    True,
                )
                number = store.current.number
                np.testing.assert_array_equal(store.current.params, -number)
                if durability.keep:
                    assert kept_versions(durability.directory) == [
                        *range(1, number + 1)
                    ]


def kept_versions(directory):
    """Return the versions of all exchanges on a tape, whose chain is checked."""
    files, found = Files(directory), []
    for segment in files.segments():
        for record in files.read_segment(segment):
            assert record.number == len(found)
            assert not found or record.parent == found[-1].digest
            found.append(record)
    events = [record.about for record in found]
    return [event["version"] for event in events if event["kind"] == "exchange"]
