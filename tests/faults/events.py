"""A virtual clock, conditions without threads, and a disk that fails on request."""

import contextlib
import fcntl
import heapq
import os
import shutil

from helpers.disks import Calls, Disk, put


class Loop:
    """Events in the order of their times, and of their creation at equal times."""

    def __init__(self):
        self.now = 0.0  # s
        self.events = 0  # number of events so far
        self._heap = []
        self._count = 0

    def at(self, delay, call, *args):
        """Call a function after a delay, in seconds."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call, args))

    def run(self, is_over, limit):
        """Let events happen until ``is_over()``; return whether it is in time."""
        while not is_over():
            if not self._heap or self._heap[0][0] > limit:
                return False
            self.now, _, call, args = heapq.heappop(self._heap)
            self.events += 1
            call(*args)
        return True


class Blocked(BaseException):
    """A call would have to wait: it is repeated when its condition is notified."""

    def __init__(self, condition, timeout):
        super().__init__()
        self.condition, self.timeout = condition, timeout


class Condition:
    """A condition of a process whose threads take turns; `Blocked` ends a turn.

    Args:
      let_others: runs another thread instead, if there is one that must not be
        repeated from its beginning; returns whether it did.
      wake: is given the calls that a notification wakes up.
    """

    def __init__(self, let_others, wake):
        self.waiting = {}  # calls that wait, in order
        self._let_others, self._wake = let_others, wake

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def wait(self, timeout=None):
        """Return whether the condition was notified; False once the time is over."""
        if timeout is not None and timeout <= 0:
            return False
        if self._let_others():
            return True
        raise Blocked(self, timeout)

    def wait_for(self, predicate, timeout=None):
        """Wait until a predicate holds; return its value."""
        while not (value := predicate()):
            if not self.wait(timeout):
                return predicate()
        return value

    def notify_all(self):
        """Wake up all calls that wait."""
        woken, self.waiting = self.waiting, {}
        self._wake(woken)

    notify = notify_all


class Deferred:
    """The future of a thread, which runs when its result is needed.

    Args:
      call: the function of the thread, called again if the disk fails.
    """

    def __init__(self, call, *_, **__):
        self._call = call

    def result(self):
        """Run the thread to its end."""
        while True:
            with contextlib.suppress(OSError):
                return self._call()


class KilledError(BaseException):
    """The process has been killed: nothing of it goes on."""


class FaultyDisk(Calls):
    """A disk whose process dies at chosen calls, and that forgets what is not synced.

    Args:
      root: directory of the files.
      faults: what happens at a call, by its number: "before" and "after" kill the
        process there, "torn" in the middle of a write, and "full" raises `OSError`.
      forgets: whether power may fail; otherwise files are kept as they are.

    Attributes:
      calls: number of calls so far that change something.
      running: whether a process of the simulation makes the calls, not the test itself.
      dead: whether that process has been killed.
    """

    def __init__(self, root, faults, *, forgets):
        super().__init__()
        self.root = root
        self.calls = 0
        self.running = self.dead = False
        self._faults = faults
        self._disk = Disk(root) if forgets else None
        self._journals = set()  # descriptors of journals that a process writes

    def make(self, name, real, note, args, kwargs):
        if not self.running:
            return real(*args, **kwargs)
        if name == "close":
            self.files.pop(args[0], None)
            self._journals.discard(args[0])
            return real(*args)
        if self.dead:
            raise KilledError
        if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
            result = real(*args, **kwargs)
            note(result, *args)
            return result
        self.calls += 1
        fault = self._faults.get(self.calls)
        if fault == "before":
            self.kill()
        if fault == "full" and name != "open":
            raise OSError(28, "No space left on device")
        if fault == "torn" and name == "pwritev":
            file, pieces, position = args
            data = b"".join(pieces)
            half = data[: len(data) // 2]
            self._note([("write", self.files[file], position, half)])
            os.pwrite(file, half, position)
            self.kill()
        # What is synced is in `_disk`: the disk of this machine need not be waited for.
        is_sync = name in ("fsync", "fdatasync")
        result = None if is_sync else real(*args, **kwargs)
        if self._disk is not None or name == "open":  # `note` records open files
            self._note(note(result, *args))
        if (
            name == "open"
            and args[1] & os.O_RDWR
            and args[1] & os.O_CREAT
            and "journal-" in str(args[0])
        ):
            self._journals.add(result)
        if fault == "after":
            self.kill()
        return result

    def _note(self, events):
        if self._disk is not None:
            for event in events:
                self._disk.do(*event)

    def kill(self):
        """Kill the process, which is running."""
        self.dead = True
        raise KilledError

    def end_process(self):
        """Close the files of a process that has ended."""
        self.running = False
        for file, path in self.files.items():
            if path.endswith("lock"):
                fcntl.flock(file, fcntl.LOCK_UN)
        # The contexts of the other files close them when Python frees the contexts.
        for file in self._journals & {*self.files}:
            os.close(file)
        self.files.clear()
        self._journals.clear()

    def cut_power(self, written):
        """Lose what was not synced, unless ``written()`` says that it was written."""
        left = self._disk.after_a_cut(written)
        for path in self.root.iterdir():
            shutil.rmtree(path)
        put(left, self.root, self.root)
        self._disk = Disk(self.root)
