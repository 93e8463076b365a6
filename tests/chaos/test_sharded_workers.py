"""Two workers of four processes each, any of which is killed, and so is the center."""

import itertools
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from helpers import ports, sharded_life
from helpers.commands import ServerProcess

from agn_optax import service

LIMIT = 300  # s, generous for a busy machine
PROCESSES = 4
KILLS = 9  # each third one of the center, the others of a worker's process
MEGABYTES = int(os.environ.get("AGN_OPTAX_CHAOS_MB", "16"))  # of the model
# The most memory that a center may take: for programs and buffers, and for the center,
# and the messages, segments of shared memory and answers of two workers. Dozens of
# messages pass through each process of the center.
MEMORY = (512 + 14 * MEGABYTES) << 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Life:
    """The processes of one worker, from their start to their end.

    Attributes:
      made: the number of exchanges that it is known to have made.
      version: the version of the center that it is known to have.
      pace: seconds between the last two of these exchanges.
    """

    def __init__(self, name, address, end):
        coordinator, elements = ports.free_address(), MEGABYTES << 18
        self._progress = queue.Queue()  # numbers of exchanges; None at the end
        self.made, self.version, self.pace = 0, 0, 0.0
        self.processes = [
            subprocess.Popen(  # noqa: S603 our own program
                [
                    *(sys.executable, "-B", sharded_life.__file__, coordinator),
                    *(str(PROCESSES), str(process), name, address),
                    *(str(elements), end, str(LIMIT)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "JAX_PLATFORMS": "cpu",
                },
            )
            for process in range(PROCESSES)
        ]
        self.texts = [[] for _ in self.processes]
        self._readers = [
            threading.Thread(target=self._read, args=(process, text), daemon=True)
            for process, text in zip(self.processes, self.texts, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, process, text):
        last = time.monotonic()
        for line in process.stdout:
            text.append(line)
            if line.startswith("exchanged "):
                self.made, self.version = map(int, line.split()[1:])
                last, before = time.monotonic(), last
                self.pace = last - before
                self._progress.put(self.made)
        if process is self.processes[0]:
            self._progress.put(None)

    def wait_for_another(self):
        """Wait until it has made another exchange; raise if it has ended."""
        made = self.made
        while self.made == made:
            assert self._progress.get(timeout=LIMIT) is not None, self.output()

    def output(self):
        return "".join(itertools.chain(*self.texts))

    def end(self):
        """Return the exit codes of its processes, once all have ended."""
        codes = [process.wait(LIMIT) for process in self.processes]
        for reader in self._readers:
            reader.join(LIMIT)
        return codes

    def close(self):
        for process in self.processes:
            process.kill()
        self.end()
        for process in self.processes:
            process.stdout.close()


def test_no_kill_loses_doubles_or_tears_a_message(tmp_path, monkeypatch):
    # With few arenas malloc keeps little unused memory, which would hide leaks.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    rng, address = random.Random(31), ports.free_address()  # noqa: S311
    end = tmp_path / "end"
    server = ServerProcess(address, f"--journal={tmp_path / 'journal'}")
    peaks, idle = [], server.peak_memory()  # bytes; idle: before there is a model
    lives = {name: Life(name, address, end) for name in ("anna", "bert")}
    made, lost = 0, 0  # exchanges of ended lives; lives that were killed
    try:
        for kill in range(KILLS):
            name = rng.choice(["anna", "bert"])
            life = lives[name]
            life.wait_for_another()
            time.sleep(rng.uniform(0.0, life.pace))  # anywhere in the next exchange
            if kill % 3 == 2:
                known = max(each.version for each in lives.values())
                peaks.append(server.peak_memory())
                server.end(signal.SIGKILL)
                server.start()
                assert server.version >= known
                continue
            life.processes[rng.randrange(PROCESSES)].kill()
            assert 0 not in life.end()  # all of them end, and nobody else
            life.close()
            made, lost = made + life.made, lost + 1
            lives[name] = Life(name, address, end)
        for life in lives.values():
            life.wait_for_another()
        end.touch()
        for life in lives.values():
            assert life.end() == [0] * PROCESSES, life.output()
            made += life.made
        with service.connect(address, sharded_life.RULE, timeout=LIMIT) as center:
            last = center.pull()
        peaks.append(server.peak_memory())
    finally:
        for life in lives.values():
            life.close()
        server.end(signal.SIGKILL)
    assert max(peaks) <= idle + MEMORY, (peaks, idle)
    # Each killed life may have had one message applied whose answer it did not print.
    assert made <= last.version <= made + lost
    for leaf in jax.tree.leaves(last.params):
        np.testing.assert_array_equal(leaf, float(last.version))
