"""Disks that lose what was not synced, and small ones, which only root can mount."""

import contextlib
import itertools
import os
import pathlib
import subprocess

import pytest

from helpers import tuning

SECTOR = 512  # bytes that a disk writes atomically


class Calls:
    """The calls of ``os`` that change files, each with the events that it causes.

    An event is a kind, a path and what belongs to the kind; `Disk.do` takes it.
    """

    def __init__(self):
        self.files = {}  # paths of open files, by descriptor

    def make(self, name, real, note, args, kwargs):
        """Make a call; ``note(result, *args)`` returns its events."""
        raise NotImplementedError

    def patch(self, patch):
        """Have ``os`` make these calls by `make`."""
        at = self.files.get
        for name, note in {
            "open": self._opened,
            "close": lambda _, file: self.files.pop(file, None) and [],
            "pwrite": lambda n, f, data, to: [("write", at(f), to, bytes(data[:n]))],
            "pwritev": lambda n, f, data, to: [
                ("write", at(f), to, b"".join(data)[:n])
            ],
            "posix_fallocate": lambda _, f, to, n: [("extend", at(f), to + n)],
            "ftruncate": lambda _, f, n: [("extend", at(f), n)],
            "truncate": lambda _, path, n: [("shrink", str(path), n)],
            "fsync": lambda _, f: [("sync", at(f))],
            "fdatasync": lambda _, f: [("sync", at(f))],
            "rename": lambda _, old, new: [("rename", str(old), str(new))],
            "unlink": lambda _, path: [("unlink", str(path))],
            "mkdir": lambda _, path, mode=0: [("make", str(path), True)],
        }.items():
            patch.setattr(os, name, self._made(name, getattr(os, name), note))
        tuning.set_journal_sync(patch, lambda file, sync: os.fdatasync(file))

    def _made(self, name, real, note):
        return lambda *args, **kwargs: self.make(name, real, note, args, kwargs)

    def _opened(self, file, path, flags, *mode):
        self.files[file] = str(path)
        made = [("make", str(path), False)] if flags & os.O_CREAT else []
        return made + ([("empty", str(path))] if flags & os.O_TRUNC else [])


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
            inside = [_parent(name) == path for name, _ in self._changes]
            self._kept.update(itertools.compress(self._changes, inside))
            outside = [not each for each in inside]
            self._changes = list(itertools.compress(self._changes, outside))
        elif kind == "sync":
            number = self._names[path]
            self._files[number] = self._contents(number, lambda: True)
            self._writes[number] = []
        elif kind in ("write", "extend", "shrink", "empty"):
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
            and self._are_there(_parent(path), names)
        }

    def _are_there(self, path, names):
        """Return whether a directory and those around it are on the disk."""
        while len(path) > len(self.root):
            if names.get(path) is None:
                return False
            path = _parent(path)
        return True

    def _contents(self, number, written):
        data = bytearray(self._files[number])
        for kind, *what in self._writes[number]:
            if kind == "empty" and written():
                data = bytearray()
            elif kind == "shrink" and written():
                del data[what[0] :]
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


def _parent(path):
    return path.rpartition(os.sep)[0]  # quicker than that of a `Path`


def put(files, root, copy):
    """Copy files from below ``root`` to below ``copy``."""
    for path, data in files.items():
        to = copy / pathlib.Path(path).relative_to(root)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(data)


@contextlib.contextmanager
def small_disks(folder):
    """Yield a function that mounts a file system in a folder, with options of tmpfs.

    Skips the test where nothing can be mounted.
    """
    mounted = []

    def mount(options):
        if os.getuid():
            pytest.skip("only root can mount a small disk")
        place = folder / f"disk-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 our own
            pytest.skip("nothing can be mounted here")
        mounted.append(place)
        return place

    try:
        yield mount
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", place], check=True)  # noqa: S603, S607 our own
