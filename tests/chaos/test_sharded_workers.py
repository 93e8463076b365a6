"""Two workers of four processes each, any of which is killed, and so is the center."""

import itertools
import os
import queue
import random
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from helpers import ports, sharded_life
from helpers.sharded_life import RULE

from agn_optax import service
from agn_optax.center import Journal

LIMIT = 300  # s, generous for a busy machine
PROCESSES = 4
EXCHANGES = 6  # of a worker that is not killed
MEGABYTES = int(os.environ.get("AGN_OPTAX_CHAOS_MB", "16"))  # of the model
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Life:
    """The processes of one worker, from their start to their end."""

    def __init__(self, name, address):
        coordinator, elements = ports.free_address(), MEGABYTES << 18
        self.progress = queue.Queue()  # numbers of exchanges; None at the end
        self.made = 0  # exchanges that it is known to have made
        self.processes = [
            subprocess.Popen(  # noqa: S603 our own program
                [
                    *(sys.executable, "-B", sharded_life.__file__, coordinator),
                    *(str(PROCESSES), str(process), name, address),
                    *(str(elements), str(EXCHANGES)),
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
        for line in process.stdout:
            text.append(line)
            if line.startswith("exchanged "):
                self.made = int(line.split()[1])
                self.progress.put(self.made)
        if process is self.processes[0]:
            self.progress.put(None)

    def wait_for(self, exchanges):
        """Wait until it has made some exchanges, or has ended."""
        while self.made < exchanges and self.progress.get(timeout=LIMIT) is not None:
            pass

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


def test_no_kill_loses_doubles_or_tears_a_message(tmp_path):
    rng, address = random.Random(31), ports.free_address()  # noqa: S311
    settings = {"address": address, "durability": Journal(tmp_path)}
    servers = [service.serve(RULE, **settings)]
    lives = {name: Life(name, address) for name in ("anna", "bert")}
    ended, lost = 0, 0  # exchanges of ended lives; lives that were killed
    try:
        for turn in range(6):
            name = rng.choice(["anna", "bert"])
            life = lives[name]
            life.wait_for(min(EXCHANGES - 1, life.made + 1))
            if turn % 3 == 2:  # the center is killed; a new one reads the journal
                servers[0].stop(grace=0.0)
                servers[0] = service.serve(RULE, **settings)
                continue
            life.processes[rng.randrange(PROCESSES)].kill()
            assert 0 not in life.end()  # all of them end, and nobody else
            life.close()
            ended, lost = ended + life.made, lost + 1
            lives[name] = Life(name, address)
        for life in lives.values():
            codes = life.end()
            assert codes == [0] * PROCESSES, "".join(itertools.chain(*life.texts))
            ended += EXCHANGES
        center = servers[0].center.pull()
    finally:
        for life in lives.values():
            life.close()
        servers[0].stop()
    # Each killed life may have had one message applied whose answer it did not print.
    assert ended <= center.version <= ended + lost
    for leaf in jax.tree.leaves(center.params):
        np.testing.assert_array_equal(leaf, float(center.version))
