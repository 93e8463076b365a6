"""Processes that take commands: one JSON line each on stdin, and one back on stdout.

The order of events in several processes is then exact, and JAX starts only once in each
process.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback

import numpy as np


class Process:
    """The test's end of a started process; `ask` waits for it, with a timeout."""

    def __init__(self, program, timeout=120):
        self._timeout = timeout
        self._popen = subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-B", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, **command):
        """Send a command; `answer` waits for its result."""
        self._popen.stdin.write(json.dumps(command) + "\n")
        self._popen.stdin.flush()

    def answer(self):
        line = self._lines.get(timeout=self._timeout)
        assert line, "the process has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def ask(self, **command):
        self.send(**command)
        return self.answer()

    def answers_already(self):
        """Return whether an answer is available."""
        return not self._lines.empty()

    @property
    def is_running(self):
        """True until the process has ended."""
        return self._popen.poll() is None

    def kill(self):
        """Kill the process by SIGKILL and release its resources."""
        self._popen.kill()
        self._popen.wait(self._timeout)
        self._reader.join(self._timeout)
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.stdout.close()

    def _read(self):
        for line in self._popen.stdout:
            self._lines.put(line)
        self._lines.put("")


@contextlib.contextmanager
def processes(program, count, timeout=120):
    """Yield a list of ``count`` processes; all in the list are killed at the end."""
    made = []
    try:
        made.extend(Process(program, timeout) for _ in range(count))
        yield made
    finally:
        for process in made:
            process.kill()


def serve_commands(commands):
    """Serve in the process: call ``commands[do](**arguments)`` until stdin ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to stderr
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = commands[command.pop("do")](**command)
        except Exception:
            answer = {"error": traceback.format_exc()}
        output.write(json.dumps(answer or {}) + "\n")
        output.flush()


def as_hex(arrays):
    """Encode float32 arrays by name without loss."""
    return {
        name: [list(x.shape), np.asarray(x, np.float32).tobytes().hex()]
        for name, x in arrays.items()
    }


def from_hex(encoded):
    return {
        name: np.frombuffer(bytes.fromhex(text), np.float32).reshape(shape)
        for name, (shape, text) in encoded.items()
    }
