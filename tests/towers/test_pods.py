"""Workers of two processes each, like slices of two hosts, around a center."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from helpers import pod_worker, ports
from helpers.waiting import wait_until

import agn_optax
from agn_optax import service

LIMIT = 300  # s, generous for a busy machine
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HEARTBEAT_TIMEOUT = 10  # s


class Process:
    """One process of a worker, with its output."""

    def __init__(self, *arguments, **variables):
        self.popen = subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-B", pod_worker.__file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
            text=True,
        )
        self.text = ""
        self._progress = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self.text += line
            if line.startswith("progress "):  # skips the output of gloo
                self._progress.put(tuple(map(int, line.split()[1:])))
        self._progress.put(None)

    def go(self, steps):
        self.popen.stdin.write(f"{steps}\n")
        self.popen.stdin.flush()

    def progress(self):
        """Return the numbers of steps and exchanges that the process has made."""
        progress = self._progress.get(timeout=LIMIT)
        assert progress is not None, self.text
        return progress

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        self.popen.kill()
        self.popen.wait(LIMIT)
        self._reader.join(LIMIT)
        self.popen.stdout.close()


class Worker:
    """All processes of a worker."""

    def __init__(self, stack, rule, address, rank, devices, *more, processes=2):
        coordinator = ports.free_address()
        self.processes = []
        for process in range(processes):
            made = Process(
                rule,
                devices,
                HEARTBEAT_TIMEOUT,
                *more,
                JAX_PLATFORMS="cpu",
                AGN_OPTAX_CENTER=address,
                AGN_OPTAX_RANK=str(rank),
                AGN_OPTAX_WORKERS="2",
                AGN_OPTAX_PROCESSES=str(processes),
                AGN_OPTAX_PROCESS=str(process),
                AGN_OPTAX_COORDINATOR=coordinator,
            )
            stack.callback(made.close)
            self.processes.append(made)

    def start(self):
        return self.go(None)

    def go(self, steps):
        """Make steps, and return the output of its processes, which must be equal."""
        if steps is not None:
            for process in self.processes:
                process.go(steps)
        (progress,) = {process.progress() for process in self.processes}
        return progress[:2]  # without the bits of the parameters


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def reference_center(rule, turns, towers):
    """Return the center that two workers make in this process with the same towers."""
    center = agn_optax.LocalCenter(pod_worker.RULES[rule])
    loops = [
        pod_worker.Loop(
            center, rank, devices=jax.devices()[:towers], name=f"worker-{rank}"
        )
        for rank in range(2)
    ]
    for rank, loop in enumerate(loops):
        loop.start(chief=rank == 0)
    for rank in turns:
        for _ in range(3):
            loops[rank].step()
    return center.pull()


# Sums of two gradients do not depend on the order; sums of four do.
@pytest.mark.parametrize(
    ("rule", "devices", "rtol"), [("agn", 2, 1e-5), ("downpour", 1, 0)]
)
def test_workers_of_two_processes_equal_workers_of_one_process(
    stack, rule, devices, rtol
):
    # The workers wait for each other at the barrier.
    server = stack.enter_context(service.serve(pod_worker.RULES[rule], barrier=2))
    arguments = (stack, rule, server.address)
    workers = [Worker(*arguments, rank, devices) for rank in range(2)]
    assert [worker.start() for worker in workers] == [(0, 0), (0, 0)]
    assert set(server.center.workers) == {"worker-0", "worker-1"}
    turns = [0, 1, 1, 0, 1, 0]
    for i, rank in enumerate(turns):
        made = turns[: i + 1].count(rank)
        assert workers[rank].go(3) == (3 * made, made)
    center, alone = server.center.pull(), reference_center(rule, turns, 2 * devices)
    assert center.version == alone.version == len(turns)
    for own, other in zip(
        jax.tree.leaves(center.params), jax.tree.leaves(alone.params), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=rtol)
    if rule == "downpour":
        return

    first, second = workers[1].processes
    second.popen.kill()
    assert workers[0].go(3) == (12, 4)  # worker 0 continues while worker 1 fails
    assert first.popen.wait(LIMIT) == -signal.SIGABRT
    assert "another task died" in first.text
    assert workers[0].go(3) == (15, 5)
    again = Worker(*arguments, 1, devices)
    assert again.start() == (0, 0)
    assert again.go(3) == (3, 1)
    assert workers[0].go(3) == (18, 6)
    assert server.center.pull().version == len(turns) + 4


def test_processes_of_a_worker_share_a_message_in_flight(stack, tmp_path):
    rule, kept = pod_worker.RULES["agn"], agn_optax.center.Journal(tmp_path)
    address = ports.free_address()
    with service.serve(rule, address=address, durability=kept):
        worker = Worker(stack, "agn", address, 0, 1, "overlap")
        worker.start()
        steps, exchanges = worker.go(30)
        assert steps == 30
        assert exchanges in (9, 10)  # the last exchange may be in flight
    assert worker.go(2)[0] == 32  # no process waits for a message yet
    with service.serve(rule, address=address, durability=kept) as server:
        steps, exchanges = worker.go(31)
        assert steps == 63
        assert exchanges >= 19  # all processes waited at the same step
        wait_until(lambda: server.center.pull().version - exchanges in (0, 1))
    for process in worker.processes:  # each process raises after the timeout
        process.go(100)
    for process in worker.processes:
        assert process.popen.wait(LIMIT) == 1
        process.close()
        assert "CenterUnreachableError" in process.text
