"""Changing numbers of workers in a run, and the effect on each rule.

Two workers train on digits with one center, then four, then two again. Each makes ten
local steps a round, and the workers exchange in turn (or in synchronous rounds). For
each rule, the program prints the center's error on held-out digits at the end of the
three phases.

    python examples/autoscaling.py
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import jax
import numpy as np
import optax
import two_hosts

import agn_optax
from agn_optax import center, rules

PyTree = Any
PERIOD = 10
INNER = optax.adam(1e-3)


def following(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Divide an optimizer's steps by the number of workers, through the staleness.

    Among n workers of the same speed, each message has a staleness of n - 1.
    """
    return optax.chain(optimizer, agn_optax.scale_by_staleness())


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule, and the mode of its center."""

    rule: Callable[[], rules.Rule]
    mode: center.Mode = dataclasses.field(default_factory=center.Asynchronous)


ROUNDS = center.Synchronous()
CASES = {
    "agn, adam(0.01)": Case(lambda: rules.agn(optax.adam(0.01))),
    "agn, adam(0.01) / (staleness + 1)": Case(
        lambda: rules.agn(following(optax.adam(0.01)))
    ),
    "agn_window": Case(rules.agn_window),
    "downpour": Case(rules.downpour),
    "dynsgd": Case(rules.dynsgd),
    "easgd, 0.9 / 2": Case(lambda: rules.easgd(0.9 / 2)),
    "easgd, 0.9 / 4": Case(lambda: rules.easgd(0.9 / 4)),
    "easgd, 0.9 / 2, in rounds": Case(lambda: rules.easgd(0.9 / 2), ROUNDS),
    "easgd, 0.9 / 4, in rounds": Case(lambda: rules.easgd(0.9 / 4), ROUNDS),
    "diloco": Case(rules.diloco),
    "diloco, in rounds": Case(rules.diloco, ROUNDS),
    "average, in rounds": Case(rules.average, ROUNDS),
}


class Trainer:
    """One worker, and the loop around it."""

    def __init__(
        self, shared: center.Center, name: str, data: Iterator[datasets.Split]
    ) -> None:
        self.worker = agn_optax.Worker(shared, INNER, period=PERIOD, name=name)
        self._local_step = local_step_of(self.worker.tx.update)
        self._data = data
        self._params, self._state = self.worker.start()

    def round(self) -> None:
        """Make the local steps of a round, and its exchange."""
        for _ in range(PERIOD):
            self._params, self._state = self._local_step(
                self._params, self._state, next(self._data)
            )
            self._params, self._state = self.worker.exchange(self._params, self._state)


@functools.cache
def local_step_of(update: Any) -> Any:
    """Return a compiled local step, the same one for all workers of a rule."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def local_step(params: PyTree, state: PyTree, batch: Any) -> Any:
        grads = jax.grad(two_hosts.loss_fn)(params, batch)
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return local_step


@jax.jit
def accuracy(params: PyTree, data: datasets.Split) -> jax.Array:
    """Return the fraction of images that are classified correctly."""
    return two_hosts.is_right(params, data).mean()


def errors_of(
    case: Case, data: datasets.Dataset, phases: list[int], rounds: int, seed: int
) -> list[float]:
    """Return the center's error on held-out digits, in %, at the end of each phase."""
    params = two_hosts.make_params(data.train.images[0].size, hidden=64)
    shared = agn_optax.LocalCenter(case.rule(), params, mode=case.mode)
    trainers: list[Trainer] = []
    errors = []
    with ThreadPoolExecutor(max(phases)) as threads:
        for workers in phases:
            while len(trainers) > workers:
                trainers.pop().worker.leave()
            while len(trainers) < workers:
                batches = two_hosts.batches(data.train, 32, 1000 * seed + len(trainers))
                trainers.append(Trainer(shared, f"worker-{len(trainers)}", batches))
            for _ in range(rounds):
                if case.mode.combines:  # rounds wait for all
                    list(threads.map(Trainer.round, trainers))
                else:
                    for trainer in trainers:
                        trainer.round()
            right = float(accuracy(shared.pull().params, data.test))
            errors.append(100.0 * (1.0 - right))
    for trainer in trainers:
        trainer.worker.leave()
    return errors


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--workers",
        default="2,4,2",
        help="number of workers in each phase (default 2,4,2)",
    )
    add("--rounds", type=int, default=15, help="rounds per phase (default 15)")
    add("--seeds", type=int, default=3, help="number of seeds (default 3)")
    add("--cases", default="", help="only the cases with this text in their names")
    args = parser.parse_args(arguments)
    args.workers = [int(each) for each in args.workers.split(",")]
    return args


def main(arguments: list[str] | None = None) -> int:
    """Print a table."""
    args = parse(arguments)
    data = datasets.digits()
    width = max(map(len, CASES))
    heads = "".join(f"{f'{n} workers':>22}" for n in args.workers)
    print(f"{'':{width}}{heads}")
    for name, case in CASES.items():
        if args.cases not in name:
            continue
        runs = [
            errors_of(case, data, args.workers, args.rounds, seed)
            for seed in range(args.seeds)
        ]
        cells = [
            f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"
            for each in np.array(runs).T.tolist()
        ]
        print(f"{name:{width}}{''.join(f'{c:>22}' for c in cells)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
