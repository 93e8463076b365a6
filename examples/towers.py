"""Train a character-level transformer on a mesh: data parallel, independent, islands.

The same train step and optimizer use the devices in three modes: as one worker that
reduces its gradients at every step; as independent workers that exchange once a period;
or as islands, which are data parallel inside and exchange once a period. All modes see
the same number of characters of Python's standard library.

    python examples/towers.py                  # every local accelerator, else four CPUs

On several hosts, launch the same script once on each, with --hosts (docs/towers.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from flax.training.train_state import TrainState
from matplotlib import ticker
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import agn_optax
from agn_optax import rules

mpl.use("Agg")
import matplotlib.pyplot as plt

PyTree = Any

# From Okabe and Ito's palette, which color-blind people can distinguish.
STYLES = (("#000000", "--"), ("#D55E00", "-"), ("#0072B2", "-."))
RULES: dict[str, Callable[[], rules.Rule]] = {
    "average": rules.average,
    "diloco": rules.diloco,
    "agn": lambda: rules.agn(optax.adam(1e-2)),
}


class Transformer(nn.Module):
    """A decoder that predicts the next character at every position."""

    layers: int
    width: int
    context: int

    @nn.compact
    def __call__(self, characters: jax.Array) -> jax.Array:
        """Return logits ``[rows, context, 128]`` of characters ``[rows, context]``."""
        x = nn.Embed(128, self.width)(characters)
        x = x + nn.Embed(self.context, self.width)(jnp.arange(self.context))
        mask = nn.make_causal_mask(characters)
        for _ in range(self.layers):
            attention = nn.SelfAttention(num_heads=self.width // 16)
            x = x + attention(nn.LayerNorm()(x), mask)
            hidden = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(hidden)
        return nn.Dense(128)(nn.LayerNorm()(x))


@dataclasses.dataclass
class Run:
    """Results of one mode: the test loss of its center during training."""

    mode: str
    towers: agn_optax.Towers
    characters: list[int] = dataclasses.field(default_factory=list)
    megabytes: list[float] = dataclasses.field(default_factory=list)  # sent per device
    loss: list[float] = dataclasses.field(default_factory=list)  # nats per character
    seconds: float = 0.0  # training time, without compilation


class Trainer:
    """Model, data and training loop, the same for all modes."""

    def __init__(self, text: datasets.Text, args: argparse.Namespace) -> None:
        self.text, self.args = text, args
        self.model = Transformer(args.layers, args.width, args.context)
        self.own_rows = args.batch * len(jax.local_devices())  # rows of this process
        # Each process draws its own rows, and is tested on its own part.
        self.seed = (args.seed, jax.process_index())
        windows = self._windows(text.test, np.random.default_rng(self.seed), 64)
        self.test = windows

    def optimizer(self) -> tuple[optax.GradientTransformation, agn_optax.Phases]:
        """Return an optimizer that reduces gradients and exchanges, and its phases."""
        warmup = max(1, self.args.rounds * self.args.period // 10)
        schedule = optax.linear_schedule(0.0, self.args.learning_rate, warmup)
        split = agn_optax.phases(
            optax.adamw(schedule), RULES[self.args.rule](), axis_name="workers"
        )
        return optax.chain(agn_optax.all_reduce("towers"), split), split

    def train(self, run: Run, report: Callable[[Run], None]) -> None:
        """Train in one mode; first parameters and data are the same in all modes."""
        args, towers = self.args, run.towers
        tx, split = self.optimizer()

        def make(key: jax.Array) -> TrainState:
            example = jnp.zeros((1, args.context), jnp.int32)
            params = self.model.init(key, example)["params"]
            return TrainState.create(apply_fn=self.model.apply, params=params, tx=tx)

        state = towers.create(make, jax.random.key(args.seed))

        def train_round(state: TrainState, rows: jax.Array) -> Any:
            steps = jnp.swapaxes(rows, 0, 1)
            state, losses = jax.lax.scan(self._step, state, steps)
            params, opt_state = split.exchange(state.params, state.opt_state)
            return state.replace(params=params, opt_state=opt_state), losses

        rounds = towers.step(train_round)
        data = self._rounds(towers)
        batches = next(data)
        program = rounds.lower(state, batches).compile()
        sent = sent_in_a_round(towers, state.params, args.period)
        self._measure(run, state, 0.0)
        report(run)
        for i in range(args.rounds):
            start = time.perf_counter()
            state, losses = program(state, batches)
            batches = next(data)  # while the devices compute
            jax.block_until_ready(losses)
            run.seconds += time.perf_counter() - start
            if (i + 1) % args.evaluate == 0 or i + 1 == args.rounds:
                self._measure(run, state, sent * (i + 1))
                report(run)

    def _step(self, state: TrainState, rows: jax.Array) -> tuple[TrainState, jax.Array]:
        """Make an ordinary train step, which does not depend on the towers."""

        def objective(params: PyTree) -> jax.Array:
            return self._losses(params, rows).mean()

        loss, grads = jax.value_and_grad(objective)(state.params)
        return state.apply_gradients(grads=grads), loss

    def _losses(self, params: PyTree, rows: jax.Array) -> jax.Array:
        """Return the loss of every row, in nats per character."""
        rows = rows.astype(jnp.int32)
        logits = self.model.apply({"params": params}, rows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
        return losses.mean(axis=1)

    def _measure(self, run: Run, state: TrainState, sent: float) -> None:
        center = run.towers.center_params(state)
        run.loss.append(run.towers.evaluate(self._losses, center, self.test))
        rows = self.own_rows * jax.process_count()
        step = int(run.towers.mean(state.step))
        run.characters.append(step * rows * self.args.context)
        run.megabytes.append(sent / 1e6)

    def _rounds(self, towers: agn_optax.Towers) -> Iterator[PyTree]:
        rng = np.random.default_rng(self.seed)
        while True:
            windows = [
                self._windows(self.text.train, rng, self.own_rows)
                for _ in range(self.args.period)
            ]
            yield towers.shard(np.stack(windows, axis=1))  # [rows, steps, characters]

    def _windows(self, text: Any, rng: np.random.Generator, rows: int) -> Any:
        """Return ``rows`` windows of text, one character longer than the context."""
        starts = rng.integers(0, len(text) - self.args.context - 1, size=rows)
        return np.stack([text[s : s + self.args.context + 1] for s in starts])


def sent_in_a_round(towers: agn_optax.Towers, params: PyTree, period: int) -> float:
    """Return the bytes that each device sends in a round: gradients and an exchange.

    Each is an all-reduce over n members, in which the best algorithms send
    2 (n - 1) / n of the parameters' size.
    """
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves(params))  # a row for each tower
    size = rows / towers.size

    def all_reduce(members: int) -> float:
        return 2 * (members - 1) / members * size

    gradients = all_reduce(towers.size // towers.workers)
    return period * gradients + all_reduce(towers.workers)


def table_of(runs: list[Run]) -> Table:
    """Make a table of the loss and the bytes sent of each mode."""
    table = Table(title="test loss of the center")
    table.add_column("mode")
    for column in ("workers", "nats per character", "MB sent per device", "seconds"):
        table.add_column(column, justify="right")
    for run in runs:
        each = run.towers.size // run.towers.workers
        table.add_row(
            run.mode,
            f"{run.towers.workers} x {each}",
            f"{run.loss[-1]:.3f}",
            f"{run.megabytes[-1]:.1f}",
            f"{run.seconds:.1f}",
        )
    return table


def conclusion(runs: list[Run]) -> str:
    """Compare the bytes and losses of the other modes with the first, in a line."""
    first, *others = runs
    if not others or not first.megabytes[-1]:
        return "Test loss against bytes"
    ratios = (
        f"{run.mode} {run.megabytes[-1] / first.megabytes[-1]:.0%} "
        f"(loss {run.loss[-1] - first.loss[-1]:+.2f})"
        for run in others
    )
    return f"Bytes compared with {first.mode}: {', '.join(ratios)}"


def plot(runs: list[Run], trainer: Trainer, path: pathlib.Path) -> None:
    """Plot the loss of the center against characters seen and against bytes sent."""
    figure, panels = plt.subplots(
        1, 2, figsize=(12, 4.8), sharey=True, layout="constrained"
    )
    by_characters, by_bytes = panels
    for run, (color, style) in zip(runs, STYLES, strict=False):
        look = {"color": color, "linestyle": style, "linewidth": 2}
        millions = np.array(run.characters) / 1e6
        by_characters.plot(millions, run.loss, label=run.mode, **look)
        sent = np.array(run.megabytes) > 0  # without the first point, at zero bytes
        by_bytes.plot(np.array(run.megabytes)[sent], np.array(run.loss)[sent], **look)
    by_characters.set(
        title="Test loss against characters",
        xlabel="millions of characters, all towers",
        ylabel="test loss of the center, nats per character",
    )
    by_bytes.set(xlabel="MB sent by each device (log scale)", xscale="log")
    by_bytes.set_title(conclusion(runs), fontsize=10)
    by_bytes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    by_bytes.xaxis.set_major_formatter("{x:g}")
    by_bytes.xaxis.set_minor_formatter(ticker.NullFormatter())
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False)
    figure.suptitle(
        f"{trainer.text.name}: {runs[0].towers.size} towers, rule {trainer.args.rule}, "
        f"period {trainer.args.period}"
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--towers",
        type=int,
        default=4,
        help="number of CPU devices, without accelerators (default 4)",
    )
    add("--rule", choices=RULES, default="average", help="rule (default average)")
    add("--period", type=int, default=10, help="local steps per round (default 10)")
    add("--rounds", type=int, default=80, help="rounds of training (default 80)")
    add("--evaluate", type=int, default=5, help="rounds between tests (default 5)")
    add("--batch", type=int, default=8, help="rows per tower and step (default 8)")
    add("--context", type=int, default=64, help="characters per row (default 64)")
    add(
        "--width",
        type=int,
        default=64,
        help="width of the model, a multiple of 16 (default 64)",
    )
    add("--layers", type=int, default=2, help="layers of the model (default 2)")
    add(
        "--learning-rate",
        type=float,
        default=3e-3,
        help="learning rate after warmup (default 3e-3)",
    )
    add("--megabytes", type=float, default=8.0, help="MB of text (default 8)")
    add("--seed", type=int, default=0, help="seed of parameters and data (default 0)")
    add("--hosts", type=int, default=1, help="number of hosts (default 1)")
    output = pathlib.Path("demo-output")
    add(
        "--output",
        type=pathlib.Path,
        default=output,
        help="folder for the plot (default demo-output)",
    )
    args = parser.parse_args(arguments)
    for name in (
        "towers",
        "hosts",
        "period",
        "rounds",
        "evaluate",
        "batch",
        "context",
        "layers",
    ):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.megabytes * 1e6 * 0.05 < 2 * args.context:
        parser.error(
            f"--megabytes {args.megabytes:g} is too small for --context {args.context}"
        )
    if args.width < 16 or args.width % 16:
        parser.error(f"--width must be a multiple of 16, got {args.width}")
    return args


def main(arguments: list[str] | None = None) -> list[Run]:
    """Train in every mode; process 0 prints the table and writes the plot."""
    args = parse(arguments)
    jax.config.update("jax_num_cpu_devices", args.towers)
    if args.hosts > 1:
        index = os.environ.get("JAX_PROCESS_ID")  # if the cluster does not know it
        jax.distributed.initialize(
            num_processes=args.hosts, process_id=None if index is None else int(index)
        )
    devices = jax.devices()
    modes = {"data parallel": 1}
    if len(devices) > 1:
        modes["independent"] = len(devices)
    if len(devices) % 2 == 0 and len(devices) > 2:
        # Islands of nearby devices: those of one host, if there are several hosts.
        hosts = jax.process_count()
        modes["islands"] = hosts if 1 < hosts < len(devices) else 2
    trainer = Trainer(datasets.python_source(args.megabytes), args)
    runs = [
        Run(mode, agn_optax.Towers(devices, workers=workers))
        for mode, workers in modes.items()
    ]
    first = jax.process_index() == 0
    console = Console(quiet=not first)
    progress = Progress(
        TextColumn("{task.description:>13}"),
        BarColumn(),
        TextColumn("{task.completed:>8.0f}/{task.total:.0f} characters"),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not first,
    )
    rows = trainer.own_rows * jax.process_count()
    total = args.rounds * args.period * rows * args.context
    with progress:
        for run in runs:
            bar = progress.add_task(run.mode, total=total, loss="")

            def report(run: Run, bar: Any = bar) -> None:
                loss = f"{run.loss[-1]:.3f}"
                progress.update(bar, completed=run.characters[-1], loss=loss)

            trainer.train(run, report)
    console.print(table_of(runs))
    if first:
        args.output.mkdir(parents=True, exist_ok=True)
        plot(runs, trainer, args.output / "towers.png")
        console.print(f"plot: {args.output / 'towers.png'}")
    return runs


if __name__ == "__main__":
    main()
