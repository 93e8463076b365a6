"""After a power failure at any time, all confirmed exchanges are on disk.

The calls by which a center writes are recorded while it runs. Then, for a cut after
each of them, a directory is made with all data that must be on the disk (it was synced)
and a random part of the rest, and opened.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import sessions, shared, tuning

from agn_optax.center import Journal, LocalCenter
from agn_optax.center.durability import Keeper
from agn_optax.center.durability._directory import Files

pytestmark = pytest.mark.slow

RULE = shared.downpour()
SECTOR = 512  # bytes that a disk writes atomically


class Recording:
    """A recording of all changes to files and directories, in order."""

    def __init__(self):
        self.events = []
        self._lock = threading.RLock()
        self._files = {}  # paths of open files

    def recorded(self, name, note):
        """Wrap a function of ``os``; ``note`` returns the events of a call."""
        real = getattr(os, name)

        def call(*args, **kwargs):
            with self._lock:
                result = real(*args, **kwargs)
                self.events += note(result, *args)
            return result

        return call

    def patch(self, patch):
        at = self._files.get
        for name, note in {
            "open": self._opened,
            "close": lambda _, file: self._files.pop(file, None) and [],
            "pwrite": lambda n, f, data, to: [("write", at(f), to, bytes(data[:n]))],
            "pwritev": lambda n, f, data, to: [
                ("write", at(f), to, b"".join(data)[:n])
            ],
            "posix_fallocate": lambda _, f, to, n: [("extend", at(f), to + n)],
            "ftruncate": lambda _, f, n: [("extend", at(f), n)],
            "fsync": lambda _, f: [("sync", at(f))],
            "fdatasync": lambda _, f: [("sync", at(f))],
            "rename": lambda _, old, new: [("rename", str(old), str(new))],
            "unlink": lambda _, path: [("unlink", str(path))],
            "mkdir": lambda _, path, mode=0: [("make", str(path), True)],
        }.items():
            patch.setattr(os, name, self.recorded(name, note))
        tuning.set_journal_sync(patch, lambda file, sync: os.fdatasync(file))

    def _opened(self, file, path, flags, *mode):
        self._files[file] = str(path)
        made = [("make", str(path), False)] if flags & os.O_CREAT else []
        return made + ([("empty", str(path))] if flags & os.O_TRUNC else [])

    def client_knows(self, what):
        """Record that a client knows this from now on."""
        with self._lock:
            self.events.append(("known", what))


class Disk:
    """The state of a disk; ``root`` and its contents exist from the start."""

    def __init__(self, root):
        self.root = str(root)
        self._names = {}  # names as the system shows them: path to number
        self._kept = {}  # names on the disk
        self._changes = []  # changes of names that may be lost (None: removed)
        self._files = []  # by number: bytes on the disk, None for a directory
        self._writes = []  # by number: writes that may be lost
        for path in sorted(pathlib.Path(root).rglob("*")):
            self._kept[str(path)] = self._names[str(path)] = len(self._files)
            data = None if path.is_dir() else bytearray(path.read_bytes())
            self._files.append(data)
            self._writes.append([])

    def do(self, kind, path, *what):
        if path is None or not path.startswith(self.root):
            pass  # other files of this process
        elif kind == "make" and path not in self._names:
            self._name(path, len(self._files))
            self._files.append(None if what[0] else bytearray())
            self._writes.append([])
        elif kind == "rename":
            self._name(what[0], self._names[path])
            self._name(path, None)
        elif kind == "unlink":
            self._name(path, None)
        elif kind == "sync" and self._is_directory(path):
            inside = [
                str(pathlib.Path(name).parent) == path for name, _ in self._changes
            ]
            self._kept.update(itertools.compress(self._changes, inside))
            outside = [not each for each in inside]
            self._changes = list(itertools.compress(self._changes, outside))
        elif kind == "sync":
            number = self._names[path]
            self._files[number] = self._contents(number, lambda: True)
            self._writes[number] = []
        elif kind in ("write", "extend", "empty"):
            self._writes[self._names[path]].append((kind, *what))

    def _is_directory(self, path):
        return path == self.root or self._files[self._names[path]] is None

    def _name(self, path, number):
        self._changes.append((path, number))
        if number is None:
            self._names.pop(path, None)
        else:
            self._names[path] = number

    def after_a_cut(self, written):
        """Return paths and bytes of all files; ``written()`` decides on each change."""
        names = dict(self._kept)
        for path, number in self._changes:
            if written():
                names[path] = number
        return {
            path: self._contents(number, written)
            for path, number in names.items()
            if number is not None
            and self._files[number] is not None
            and all(
                names.get(str(each)) is not None
                for each in pathlib.Path(path).parents
                if str(each).startswith(self.root + os.sep)
            )
        }

    def _contents(self, number, written):
        data = bytearray(self._files[number])
        for kind, *what in self._writes[number]:
            if kind == "empty" and written():
                data = bytearray()
            elif kind == "extend" and written():
                data.extend(bytes(max(0, what[0] - len(data))))
            elif kind == "write":
                begin, new = what
                while new:
                    size = SECTOR - begin % SECTOR
                    part, new = new[:size], new[size:]
                    if written():
                        data.extend(bytes(max(0, begin + len(part) - len(data))))
                        data[begin : begin + len(part)] = part
                    begin += len(part)
        return data


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


def put(files, root, copy):
    """Copy files from below ``root`` to below ``copy``."""
    for path, data in files.items():
        to = copy / pathlib.Path(path).relative_to(root)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(data)


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
