"""One process of a resumable worker with sharded parameters, run by resumed_groups.

The gradient of a step depends on the parameters and the number of the step, which is
saved with the worker, so that all runs with the same number of steps have one result.
"""

import functools
import math
import os
import signal

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import agn_optax
from agn_optax import checkpoint, rules, service
from helpers import children, sessions, shared, waiting

PERIOD = 2
TIMEOUT = 60.0  # s, generous for a busy machine
RULES = {
    "downpour": shared.downpour(),
    "agn": rules.agn(shared.sgd(0.3)),
    # Its gradients do not depend on the parameters, nor on when an answer is adopted.
    "agn_fixed": rules.agn(shared.sgd(0.5)),
    # It has an anchor, and a residual.
    "diloco": rules.diloco(
        shared.sgd(0.5),
        codec=rules.codecs.error_feedback(rules.codecs.cast("bfloat16")),
    ),
}
SHAPE = (64, 24 << 10)  # of "w", whose pieces take several messages of gRPC
SPECS = {  # by layout: the axes of each parameter
    "rows": {"w": ("x", None), "b": (), "scale": ()},
    "columns": {"w": (None, "x"), "b": ("x",), "scale": ()},
}


def initial_params():
    return {
        "w": np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE) / 2**21,
        "b": np.zeros(4, np.float32),
        "scale": np.float32(0.5),
    }


def fragments_of(streaming):
    """Return the fragments of these arguments; None for no arguments."""
    return agn_optax.Fragments(**streaming) if streaming else None


def new_worker(center, streaming=None, **how):
    inner, fragments = shared.sgd(0.5), fragments_of(streaming)
    return agn_optax.Worker(
        center, inner, period=PERIOD, name="w", fragments=fragments, **how
    )


def train_step(worker, rule, params, state, number):
    def gradient(param):
        if rule == "agn":
            return param - jnp.sin(number + 1.0)
        # float32 can represent it and bfloat16 cannot, so results are exact. It does
        # not depend on parameters: with overlap these depend on the time of answers.
        return jnp.full_like(param, (1.0 + number / 256.0) / 8.0)

    grads = jax.tree.map(gradient, params)
    updates, state = worker.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


class Run:
    """A worker at its center; the methods are the commands."""

    worker = None

    def join(self, coordinator, process, processes, heartbeat_timeout=10):
        self.process = process
        if processes > 1:
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                heartbeat_timeout_seconds=heartbeat_timeout,
            )
        return {"devices": jax.device_count()}

    def connect(self, address, rule, layout, streaming=None, timeout=TIMEOUT, **how):
        """Make the worker, in place of an earlier one.

        Processes may have different addresses, in a list.
        """
        if isinstance(address, list):
            address = address[self.process]
        if self.worker is not None:
            self.worker.leave()
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        fragments = fragments_of(streaming)
        center = service.connect(
            address, RULES[rule], timeout=timeout, fragments=fragments
        )
        self.worker = self.loop = new_worker(center, streaming, **how)
        self.position = {"step": np.zeros((), np.int32)}
        self.params = {
            name: jax.device_put(
                value, NamedSharding(mesh, PartitionSpec(*SPECS[layout][name]))
            )
            for name, value in initial_params().items()
        }
        self.step = jax.jit(functools.partial(train_step, self.worker, rule))

    def start(self, folder, others=None):
        """Start, or continue from the last checkpoint."""
        if others == "data":
            given = {"data": iter(grain.MapDataset.range(9).to_iter_dataset())}
        elif others == "own":
            given = {"mean": {"m": jnp.zeros(2)}}
        else:
            given = {"position": self.position}
        self.loop = checkpoint.Resumable(
            self.worker, folder.format(process=self.process), **given
        )
        self.state = self.loop.start(self.params, chief=True, timeout=TIMEOUT)
        return self.report()

    def train(self, until):
        while (number := int(self.position["step"])) < until:
            self.state = self.step(*self.state, np.float32(number))
            self.position["step"] = np.asarray(number + 1, np.int32)
            self.state = self.loop.exchange(*self.state)
        return self.report()

    def flush(self):
        self.state = self.loop.flush(*self.state)
        return self.report()

    def receive(self):
        self.state = self.loop.receive(*self.state)
        return self.report()

    def die_when_sending(self):
        """Let the process be killed after a checkpoint, before it sends its pieces."""
        sessions.of_worker(self.worker).exchange = die

    def die_when_agreeing(self):
        """Let the process be killed once it has its answer."""
        sessions.of_worker(self.worker).processes.gather = die

    def die_between_shards(self):
        """Let the process be killed when only the first of two shards has a message."""
        first, _ = self.worker.center.centers
        version = first.describe().version

        def submit(submission):
            waiting.wait_until(lambda: first.describe().version > version)
            os.kill(os.getpid(), signal.SIGKILL)

        sessions.of_shards(self.worker)[-1].submit = submit

    def leave(self):
        self.worker.leave()

    def save(self, path):
        state = (self.worker, *self.state)
        checkpoint.save(path, worker=state, position=self.position)

    def load(self, path):
        loaded = checkpoint.load(
            path, like=self.params, worker=self.worker, position=self.position
        )
        self.state, self.position = loaded["worker"], loaded["position"]
        return self.report()

    def load_without_shardings(self, path):
        checkpoint.load(path, worker=self.worker)

    def report(self):
        like_w = [x for x in jax.tree.leaves(self.state) if x.shape == SHAPE]
        sharding = self.params["w"].sharding
        assert like_w
        assert all(x.sharding.is_equivalent_to(sharding, 2) for x in like_w)
        return {
            "step": int(self.position["step"]),
            "exchanges": self.worker.exchanges,
            # The ids of centers and sessions, for all shards or fragments; not the
            # witnesses, which have colons and change.
            "session": [
                part
                for part in jax.tree.leaves(self.worker.resume_token)
                if isinstance(part, str) and part and ":" not in part
            ],
        }


if __name__ == "__main__":
    run = Run()
    children.serve_commands(
        {name: getattr(run, name) for name in vars(Run) if name[0] != "_"}
    )
