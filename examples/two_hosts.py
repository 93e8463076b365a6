"""Train one model on several hosts, each with all of its devices, through a center.

The first host serves the center and also trains; the others get its address:

    python examples/two_hosts.py --serve 0.0.0.0:50051 --insecure        # first host
    python examples/two_hosts.py --center FIRST-HOST:50051 --insecure    # second host

(Or both in two terminals of one machine: ``--serve``, ``--center 127.0.0.1:50051``.)
The devices of a host are one worker: they reduce their gradients at every step, and the
host exchanges with the center once a period. The hosts do not wait for a slow one. A
host that is ended with Ctrl-C or SIGTERM leaves the center, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import optax

import agn_optax
from agn_optax import center, errors, rules, service

PyTree = Any

# Rules, and inner optimizers that work well with them. All hosts need the same rule.
METHODS: dict[str, Callable[[], tuple[rules.Rule, optax.GradientTransformation]]] = {
    "agn": lambda: (rules.agn(optax.adam(2e-3)), optax.adam(2e-3)),
    "downpour": lambda: (rules.downpour(), optax.sgd(0.05)),
    "easgd": lambda: (rules.easgd(0.3), optax.sgd(0.05, 0.9, nesterov=True)),
}


def make_params(
    pixels: int, *, hidden: int = 128, classes: int = 10, seed: int = 0
) -> PyTree:
    """Return first parameters, the same on all hosts: a network with one hidden layer.

    Only those of the host that serves the center are used.
    """
    rng = np.random.default_rng(seed)

    def dense(inputs: int, outputs: int) -> PyTree:
        w = rng.normal(size=(inputs, outputs)) * (2 / inputs) ** 0.5
        return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(outputs)}

    return [dense(pixels, hidden), dense(hidden, classes)]


def apply(params: PyTree, images: Any) -> jax.Array:
    """Return the logits ``[n, classes]`` of images ``[n, height, width, 1]``."""
    hidden, out = params
    x = images.reshape(len(images), -1)
    return jax.nn.relu(x @ hidden["w"] + hidden["b"]) @ out["w"] + out["b"]


def loss_fn(params: PyTree, batch: datasets.Split) -> jax.Array:
    """Return the mean cross-entropy of a tower's rows."""
    logits = apply(params, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def is_right(params: PyTree, batch: datasets.Split) -> jax.Array:
    """Return 1.0 for every row that is classified correctly, else 0.0."""
    logits = apply(params, batch.images)
    return (logits.argmax(axis=-1) == batch.labels).astype(jnp.float32)


def batches(data: datasets.Split, rows: int, seed: int) -> Iterator[datasets.Split]:
    """Yield random batches of the whole data set; every host draws its own."""
    rng = np.random.default_rng(seed)
    while True:
        picked = rng.integers(0, len(data.labels), rows)
        yield datasets.Split(data.images[picked], data.labels[picked])


def say(text: str) -> None:
    """Print a line at once, also through a pipe."""
    print(text, flush=True)


def train(
    shared: center.Center,
    params: PyTree,
    inner: optax.GradientTransformation,
    towers: agn_optax.Towers,
    data: datasets.Dataset,
    args: argparse.Namespace,
) -> float:
    """Train on this host, and return the center's accuracy at the end."""
    worker = agn_optax.Worker(
        shared, inner, period=args.period, name=args.name, give_up=args.give_up
    )
    reduce = agn_optax.all_reduce("towers")

    def train_step(loop: PyTree, batch: datasets.Split) -> tuple[PyTree, jax.Array]:
        """Make a local step of a tower, with gradients reduced over all towers."""
        params, state = loop
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads, _ = reduce.update(grads, reduce.init(params), params)
        updates, state = worker.tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    step = towers.step(train_step)
    draws = batches(
        data.train, args.batch * towers.size, zlib.crc32(args.name.encode())
    )
    say(f"{args.name} joins the center and waits if hosts are missing")
    with worker:  # leaves the center at the end, also after an error
        loop = towers.replicate(worker.start(params))
        say(f"{args.name} trains on {towers}")
        for i in range(1, args.steps + 1):
            loop, loss = step(loop, towers.shard(next(draws)))
            due = worker.due  # if False, exchange only counts the step
            if due:
                loop = towers.unreplicate(loop)
            loop = worker.exchange(*loop)
            if due:
                loop = towers.replicate(loop)
            if i % args.report == 0:
                say(
                    f"{args.name}: step {i}/{args.steps}, loss "
                    f"{float(towers.mean(loss)):.3f}, {worker.exchanges} exchanges, "
                    f"staleness {worker.staleness} in the last one"
                )
        worker.flush(*towers.unreplicate(loop))  # the steps since the last exchange
        return towers.evaluate(is_right, shared.pull().params, data.test)


def run(args: argparse.Namespace) -> None:
    """Serve and train, or only train."""
    rule, inner = METHODS[args.rule]()
    towers = agn_optax.Towers(workers=1)
    data = datasets.digits()
    params = make_params(data.train.images[0].size)
    if args.center:
        shared = service.connect(
            args.center, rule, timeout=args.give_up, insecure=args.insecure
        )
        with contextlib.closing(shared):
            accuracy = train(shared, params, inner, towers, data, args)
        say(f"{args.name}: accuracy of the center when this host left: {accuracy:.1%}")
        return
    with service.serve(
        rule,
        params,
        address=args.serve,
        barrier=args.hosts,
        security=service.Security(insecure=args.insecure),
    ) as server:
        say(f"center at {server.address}")
        train(server.center, params, inner, towers, data, args)

        served: frozenset[str] = frozenset()
        while others := server.center.workers:
            if others != served:
                say(f"{args.name} has finished but still serves {', '.join(others)}")
            served = others
            time.sleep(0.2)
        end = server.center.pull()
    accuracy = towers.evaluate(is_right, end.params, data.test)
    say(f"accuracy of the center: {accuracy:.1%} after {end.version} exchanges")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--serve",
        metavar="ADDRESS",
        nargs="?",
        const="127.0.0.1:50051",
        help="serve the center here, and train (default address 127.0.0.1:50051)",
    )
    where.add_argument("--center", metavar="ADDRESS", help="train with this center")
    add = parser.add_argument
    add("--insecure", action="store_true", help="do not encrypt the connections")
    add(
        "--hosts",
        type=int,
        default=2,
        help="number of hosts that begin together, with --serve (default 2)",
    )
    add("--name", help="unique name of this host (default: hostname and process id)")
    add(
        "--towers",
        type=int,
        default=1,
        help="number of CPU devices, without accelerators (default 1)",
    )
    add(
        "--rule",
        choices=METHODS,
        default="agn",
        help="rule, the same on all hosts (default agn)",
    )
    add("--period", type=int, default=10, help="steps per exchange (default 10)")
    add("--steps", type=int, default=500, help="steps of this host (default 500)")
    add("--batch", type=int, default=32, help="rows per tower and step (default 32)")
    add("--report", type=int, default=100, help="steps per line printed (default 100)")
    add(
        "--give-up",
        type=float,
        default=30.0,
        help="seconds to keep trying an unreachable center (default 30)",
    )
    args = parser.parse_args(arguments)
    for name in ("hosts", "towers", "period", "steps", "batch", "report"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if not 0 < args.give_up < float("inf"):
        parser.error(f"--give-up must be positive, got {args.give_up}")
    args.name = args.name or f"{socket.gethostname()}-{os.getpid()}"
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run, and return the exit status: 0, 1 without a center, 130 if interrupted."""
    args = parse(arguments)
    jax.config.update("jax_num_cpu_devices", args.towers)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    try:
        run(args)
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            say(f"{args.name} was interrupted and has left the center")
        return 130
    except errors.AgnOptaxError as error:
        print(f"{args.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
