"""Warm processes for workers and centers, with faults that can be done to them."""

import contextlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from typing import NamedTuple

import numpy as np
from helpers import children

_HERE = pathlib.Path(__file__).parent
_PATIENCE = 240.0  # s, timeout, generous for a busy machine


class Resources(NamedTuple):
    """The resources that a process holds."""

    memory: int  # bytes
    threads: int
    files: int

    @classmethod
    def by(cls, pid):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        files = len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
        return cls(int(fields["VmRSS"].split()[0]) << 10, int(fields["Threads"]), files)

    def is_more_than(self, other):
        """Compare, with a margin for memory of allocators and for idle threads."""
        return (
            self.memory > other.memory + (24 << 20)
            or self.threads > other.threads + 4
            or self.files > other.files + 4
        )


class Clock:
    """The clock of a process, which can jump."""

    def __init__(self, path):
        self.path = path
        self._more = np.memmap(path, np.float64, "w+", shape=(1,))

    def jump(self, seconds):
        self._more[0] += seconds

    def mend(self):
        self._more[0] = 0.0


class Worker:
    """A process that can be several workers, one after the other."""

    def __init__(self, clock):
        self.clock = clock
        self.process = children.Process(_HERE / "worker_process.py", _PATIENCE)
        self.is_dead = False
        self.owes = 0  # answers still to be read

    @property
    def pid(self):
        return self.process._popen.pid

    def signal(self, number):
        if not self.is_dead:
            os.kill(self.pid, number)

    def kill(self):
        self.is_dead = True
        self.process.kill()


class Center:
    """A process that can become a center once."""

    def __init__(self, clock):
        self.clock = clock
        self._lines = []
        # With few arenas malloc keeps little unused memory, which would hide leaks.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MALLOC_ARENA_MAX": "2",
        }
        self._popen = subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-B", str(_HERE / "center_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    @property
    def pid(self):
        return self._popen.pid

    def serve(self, arguments):
        """Start serving; return the line with its addresses."""
        command = {"arguments": arguments, "clock": str(self.clock.path)}
        self._popen.stdin.write(json.dumps(command) + "\n")
        self._popen.stdin.flush()
        timer = threading.Timer(_PATIENCE, self._popen.kill)
        timer.start()
        line = self._popen.stdout.readline()
        timer.cancel()
        assert line, f"no center: {self.output()}"
        return json.loads(line)

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def fill_disk(self):
        """Make every write to a file fail from now on."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, 0))

    def wait(self, timeout):
        """Return its exit code; None if it still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout)
        return None

    def output(self):
        """Return its standard error so far; all of it, if it has ended."""
        if self._popen.poll() is not None:
            self._listening.join(_PATIENCE)
        return "".join(self._lines)

    def kill(self):
        """Kill the process by SIGKILL and wait for its end."""
        self._popen.kill()
        self._popen.wait()
        self._listening.join(_PATIENCE)
        for end in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            with contextlib.suppress(BrokenPipeError):
                end.close()

    def _listen(self):
        for line in self._popen.stderr:
            self._lines.append(line)


class ProcessPool(contextlib.AbstractContextManager):
    """A pool of processes that have started already.

    Args:
      workers, centers: number of processes kept ready.
    """

    def __init__(self, workers=4, centers=2):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="agn-optax-chaos-"))
        self._lock = threading.Lock()
        self._made = 0
        self._workers, self._centers = [], []
        for _ in range(workers):
            self._workers.append(self._worker())
        for _ in range(centers):
            self._centers.append(self._center())

    def worker(self):
        with self._lock:
            if not self._workers:
                self._workers.append(self._worker())
            return self._workers.pop(0)

    def center(self):
        with self._lock:
            self._centers.append(self._center())
            return self._centers.pop(0)

    def give_back(self, worker):
        """Return a worker's process to the pool."""
        worker.clock.mend()
        with self._lock:
            self._workers.append(worker)

    def __exit__(self, *exception):
        for worker in self._workers:
            worker.kill()
        for center in self._centers:
            center.kill()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def _path(self):
        self._made += 1
        return self._folder / f"clock-{self._made}"

    def _worker(self):
        return Worker(Clock(self._path()))

    def _center(self):
        return Center(Clock(self._path()))


CONTINUE, STOP, DRAIN, KILL = (
    signal.SIGCONT,
    signal.SIGSTOP,
    signal.SIGTERM,
    signal.SIGKILL,
)
