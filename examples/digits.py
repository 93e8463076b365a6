"""Train a small convolutional network with four asynchronous workers and one center.

Three rules (AGN, EASGD, DOWNPOUR) and one worker alone, all with the same number of
gradient evaluations. Every worker is a thread with its own part of the data; they share
nothing but an embedded center. Run it with ``make demo``, or on MNIST with
``python examples/digits.py --mnist FOLDER``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import datasets
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import agn_optax
from agn_optax import rules

mpl.use("Agg")
import matplotlib.pyplot as plt

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Method:
    """A rule and the optimizers that it works well with; no rule means one worker."""

    name: str
    inner: Callable[[], optax.GradientTransformation]
    rule: Callable[[], rules.Rule] | None
    color: str


METHODS = [
    Method(
        "AGN",
        inner=lambda: optax.adam(2e-3),
        rule=lambda: rules.agn(optax.adam(2e-3)),
        color="tab:red",
    ),
    Method(
        # With a Nesterov inner optimizer, as here, EASGD is EAMSGD.
        "EASGD",
        inner=lambda: optax.sgd(0.02, momentum=0.9, nesterov=True),
        rule=lambda: rules.easgd(moving_rate=0.2),
        color="tab:blue",
    ),
    Method(
        "DOWNPOUR",
        inner=lambda: optax.sgd(0.02),
        rule=rules.downpour,
        color="tab:green",
    ),
    Method("one worker", inner=lambda: optax.adam(2e-3), rule=None, color="tab:gray"),
]


class Network(nn.Module):
    """Two convolutions and two dense layers, for images of any size."""

    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [n, classes] of images [n, height, width, 1]."""
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=(2, 2))(x))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(self.classes)(x)


@dataclasses.dataclass
class Run:
    """What became of one method."""

    method: Method
    samples: list[int] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)
    exchanges: int = 0
    seconds: float = 0.0
    center: PyTree = None


def loss_fn(network: Network, params: PyTree, images: Any, labels: Any) -> jax.Array:
    """Mean cross-entropy of a batch."""
    logits = network.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_local_step(network: Network, tx: Any) -> Callable[..., Any]:
    """A compiled local step on the rows ``batch`` of a worker's images and labels."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def local_step(
        params: PyTree, state: PyTree, images: Any, labels: Any, batch: Any
    ) -> tuple[PyTree, PyTree]:
        grads = jax.grad(functools.partial(loss_fn, network))(
            params, images[batch], labels[batch]
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return local_step


def batches(size: int, batch_size: int, steps: int, seed: int) -> Any:
    """Rows of ``steps`` batches, epoch after epoch, each in an order of its own."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch_size:
            order.extend(rng.permutation(size))
        yield np.array(order[:batch_size])
        del order[:batch_size]


class Trainer:
    """Trains by any method on one dataset, and tests the center as it goes."""

    def __init__(self, data: datasets.Dataset, args: argparse.Namespace) -> None:
        self.data = data
        self.args = args
        self.network = Network(classes=int(data.train.labels.max()) + 1)
        self.first = self.network.init(jax.random.key(args.seed), data.train.images[:1])
        self.first = self.first["params"]
        self.parameter_bytes = sum(x.nbytes for x in jax.tree.leaves(self.first))
        test = jax.tree.map(jnp.asarray, data.test)

        def correct(params: PyTree) -> jax.Array:
            logits = jnp.asarray(self.network.apply({"params": params}, test.images))
            return jnp.mean(logits.argmax(-1) == test.labels)

        self.correct = jax.jit(correct)

    def train(self, method: Method, report: Callable[[Run, int], None]) -> Run:
        """One run of ``args.workers * args.steps`` gradient evaluations."""
        run = Run(method)
        start = time.perf_counter()
        if method.rule is None:
            run.center = self._train_alone(method, run, report)
        else:
            run.center = self._train_with_center(method, method.rule(), run, report)
        run.seconds = time.perf_counter() - start
        return run

    def _train_with_center(
        self,
        method: Method,
        rule: rules.Rule,
        run: Run,
        report: Callable[[Run, int], None],
    ) -> PyTree:
        center = agn_optax.LocalCenter(rule, self.first)
        failures: list[BaseException] = []
        threads = [
            threading.Thread(
                target=self._guarded(self._work, failures),
                args=(method, center, rank),
                name=f"worker-{rank}",
            )
            for rank in range(self.args.workers)
        ]
        for thread in threads:
            thread.start()
        # Meanwhile the center may be read at any time: each pull is one version, whole.
        last = -1
        while any(thread.is_alive() for thread in threads) and not failures:
            snapshot = center.pull()
            if snapshot.version >= last + self.args.workers:
                last = snapshot.version
                self._note(run, snapshot, report)
            else:
                time.sleep(0.005)
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self._note(run, center.pull(), report)
        return center.pull().params

    def _work(self, method: Method, center: agn_optax.Center, rank: int) -> None:
        """One worker: its share of the data, its own optimizer, and the center."""
        args = self.args
        worker = agn_optax.Worker(
            center, method.inner(), period=args.period, name=f"worker-{rank}"
        )
        local_step = make_local_step(self.network, worker.tx)
        images, labels = (jnp.asarray(x[rank :: args.workers]) for x in self.data.train)
        params, state = worker.start()
        for batch in batches(len(labels), args.batch, args.steps, args.seed + rank):
            params, state = local_step(params, state, images, labels, batch)
            params, state = worker.exchange(params, state)
        worker.flush(params, state)

    def _train_alone(
        self, method: Method, run: Run, report: Callable[[Run, int], None]
    ) -> PyTree:
        args = self.args
        tx = method.inner()
        local_step = make_local_step(self.network, tx)
        images, labels = (jnp.asarray(x) for x in self.data.train)
        params = jax.tree.map(jnp.copy, self.first)
        state = tx.init(params)
        steps = args.workers * args.steps
        for step, batch in enumerate(
            batches(len(labels), args.batch, steps, args.seed), start=1
        ):
            params, state = local_step(params, state, images, labels, batch)
            if step % (4 * args.period) == 0 or step == steps:
                self._append(run, step * args.batch, 0, params, report)
        return params

    def _note(
        self,
        run: Run,
        snapshot: agn_optax.Snapshot,
        report: Callable[[Run, int], None],
    ) -> None:
        """A point of the curves: every exchange stands for a period of one worker."""
        args = self.args
        run.exchanges = snapshot.version
        samples = snapshot.version * args.period * args.batch
        # A message and a center travel at each exchange.
        sent = 2 * snapshot.version * self.parameter_bytes
        samples = min(samples, args.workers * args.steps * args.batch)
        self._append(run, samples, sent, snapshot.params, report)

    def _append(
        self,
        run: Run,
        samples: int,
        sent: int,
        params: PyTree,
        report: Callable[[Run, int], None],
    ) -> None:
        run.samples.append(samples)
        run.megabytes.append(sent / 1e6)
        run.accuracy.append(float(self.correct(params)))
        report(run, samples)

    @staticmethod
    def _guarded(
        target: Callable[..., None], failures: list[BaseException]
    ) -> Callable[..., None]:
        """``target`` for a thread: what it raises is kept for the main one."""

        def guarded(*args: Any) -> None:
            try:
                target(*args)
            except BaseException as error:
                failures.append(error)

        return guarded


def save_and_read_back(run: Run, folder: pathlib.Path) -> PyTree:
    """The center as an Orbax checkpoint, and what comes back from it."""
    folder = folder.resolve() / run.method.name.replace(" ", "-").lower()
    shutil.rmtree(folder, ignore_errors=True)
    ocp.save(folder, run.center)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        run.center,
    )
    return ocp.load(folder, abstract)


def table_of(runs: list[Run], trainer: Trainer, folder: pathlib.Path) -> Table:
    """The result of every run, its accuracy measured on the checkpoint read back."""
    table = Table(title=f"{trainer.data.name}: {trainer.args.workers} workers")
    table.add_column("method")
    for column in ("test accuracy", "exchanges", "MB exchanged", "seconds"):
        table.add_column(column, justify="right")
    for run in runs:
        accuracy = float(trainer.correct(save_and_read_back(run, folder)))
        table.add_row(
            run.method.name,
            f"{accuracy:.2%}",
            f"{run.exchanges}",
            f"{run.megabytes[-1]:.1f}",
            f"{run.seconds:.1f}",
        )
    return table


def plot(runs: list[Run], trainer: Trainer, path: pathlib.Path) -> None:
    """Accuracy of the center against samples seen and against bytes exchanged."""
    figure, (by_samples, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for run in runs:
        style = {"label": run.method.name, "color": run.method.color}
        by_samples.plot(run.samples, run.accuracy, **style)
        if run.exchanges:
            by_bytes.plot(run.megabytes, run.accuracy, **style)
        else:
            by_bytes.axhline(run.accuracy[-1], linestyle="--", **style)
    by_samples.set(xlabel="training samples, all workers", ylabel="test accuracy")
    by_bytes.set(xlabel="MB exchanged with the center")
    by_samples.set_ylim(max(0.0, min(run.accuracy[-1] for run in runs) - 0.35), 1.0)
    for axes in (by_samples, by_bytes):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.suptitle(
        f"{trainer.data.name}: the center of {trainer.args.workers} asynchronous "
        f"workers, period {trainer.args.period}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mnist", metavar="FOLDER", help="train on the idx files in FOLDER instead")
    add("--workers", type=int, default=4, help="asynchronous workers (default 4)")
    add("--period", type=int, default=10, help="local steps per exchange (default 10)")
    add("--steps", type=int, default=1000, help="local steps per worker (default 1000)")
    add("--batch", type=int, default=32, help="samples per gradient (default 32)")
    add("--seed", type=int, default=0)
    add("--output", type=pathlib.Path, default=pathlib.Path("demo-output"))
    args = parser.parse_args(arguments)
    for name in ("workers", "period", "steps", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(arguments: list[str] | None = None) -> list[Run]:
    """Trains by every method, prints the table and writes plot and checkpoints."""
    args = parse(arguments)
    data = datasets.mnist(args.mnist) if args.mnist else datasets.digits()
    trainer = Trainer(data, args)
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    total = args.workers * args.steps * args.batch
    progress = Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TextColumn("{task.completed:>7.0f}/{task.total:.0f} samples"),
        TextColumn("center {task.fields[accuracy]:>6}"),
        TimeElapsedColumn(),
        console=console,
    )
    runs = []
    with progress:
        for method in METHODS:
            bar = progress.add_task(method.name, total=total, accuracy="")

            def report(run: Run, samples: int, bar: Any = bar) -> None:
                accuracy = f"{run.accuracy[-1]:.1%}"
                progress.update(bar, completed=samples, accuracy=accuracy)

            runs.append(trainer.train(method, report))
    console.print(table_of(runs, trainer, args.output / "checkpoints"))
    plot(runs, trainer, args.output / "digits.png")
    console.print(f"plot: {args.output / 'digits.png'}")
    console.print(f"centers, as Orbax checkpoints: {args.output / 'checkpoints'}")
    return runs


if __name__ == "__main__":
    main()
