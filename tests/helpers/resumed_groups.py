"""Groups of processes that are a resumable worker, one group after the other."""

import pathlib

import jax
import numpy as np
import pytest

import agn_optax
from agn_optax import service
from agn_optax.center import ShardedCenter
from helpers import children, ports, resumed_pod

PROGRAM = pathlib.Path(resumed_pod.__file__)
LIMIT = 240  # s, generous for a busy machine


class Group:
    """The processes of a worker, each of which has one device.

    Args:
      stack: kills the processes at its end.
      count: number of processes.
      **how: further arguments of the command ``join``.
    """

    def __init__(self, stack, count, **how):
        started = children.processes(PROGRAM, count, timeout=LIMIT)
        self.processes = stack.enter_context(started)
        coordinator = ports.free_address()
        for index, process in enumerate(self.processes):
            process.send(
                do="join",
                coordinator=coordinator,
                process=index,
                processes=count,
                **how,
            )
        assert all(a == {"devices": count} for a in self.answers())

    def send(self, **command):
        for process in self.processes:
            process.send(**command)

    def answers(self):
        return [process.answer() for process in self.processes]

    def ask(self, **command):
        """Return the answer of the first process; those of the others must be equal."""
        self.send(**command)
        first, *others = self.answers()
        assert all(other == first for other in others)
        return first

    def kill(self):
        for process in self.processes:
            process.kill()

    def errors(self, **command):
        """Return the errors of all processes."""
        self.send(**command)
        found = []
        for process in self.processes:
            with pytest.raises(AssertionError) as caught:
                process.answer()
            found.append(str(caught.value))
        return found


def address_of(servers):
    return ",".join(server.address for server in servers)


def versions(servers):
    return [server.center.version for server in servers]


def undisturbed(rule, steps, shards=1, streaming=None):
    """Return the center after a run in this process."""
    rule_of_center = resumed_pod.RULES[rule]
    centers = [agn_optax.LocalCenter(rule_of_center) for _ in range(shards)]
    center = centers[0] if shards == 1 else ShardedCenter(centers)
    worker = resumed_pod.new_worker(center, streaming)
    params = jax.tree.map(jax.numpy.asarray, resumed_pod.initial_params())
    params, state = worker.start(params, chief=True)
    for number in range(steps):
        number = np.float32(number)
        params, state = resumed_pod.train_step(worker, rule, params, state, number)
        params, state = worker.exchange(params, state)
    worker.flush(params, state)
    return worker.center.pull()


def assert_equal_centers(servers, rule, expected, tolerance=0.0, streaming=None):
    """Check the center of some servers against the one of an undisturbed run."""
    fragments = resumed_pod.fragments_of(streaming)
    rule, like = resumed_pod.RULES[rule], expected.params
    with service.connect(
        address_of(servers), rule, like=like, fragments=fragments
    ) as center:
        found = center.pull()
    assert found.version == expected.version
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected.params):
        got = found.params[path[0].key]
        np.testing.assert_allclose(got, leaf, rtol=tolerance, atol=tolerance)
