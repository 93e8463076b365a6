"""Measure which rule, period, center rate and codec suit a cluster, and draw the chart.

    PYTHONPATH=. python docs/figures/advice.py           # measure and draw
    PYTHONPATH=. python docs/figures/advice.py --draw    # draw again

Workers on a virtual clock (`agn_optax.simulate`) train a small network on noisy digits
in each setting of a grid: workers, seconds of an exchange, spread of speeds, failures.
All candidates of a setting train for the same virtual time and are compared by the loss
of the center on held-out digits. They are chosen step by step:

1. each rule and mode, with three periods and up to two center rates, one seed;
2. the best three of different rules or modes, with codecs and with overlap, one seed;
3. the best of each of these, and data parallel training, with three more seeds.

With failures, step 1 has only the better half of the candidates without failures, and
rounds with a quorum. With 32 workers it has instead the methods and periods that were
among the best three with fewer workers in the same setting, and step 2 only the best of
them. The table of step 3 belongs to the package, for `agn_optax.planning.advise`. A
full run takes 6 to 9 minutes of one core.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from matplotlib.figure import Figure

from agn_optax import errors, rules, simulate
from agn_optax.center import Asynchronous, Limits, Mode, Synchronous
from agn_optax.rules import codecs
from examples import datasets

HERE = pathlib.Path(__file__).parent
TABLE = HERE.parents[1] / "agn_optax" / "ops" / "planning" / "advice.json"
CHART = HERE / "choosing-advice.svg"

WORKERS = (2, 8, 32)
EXCHANGES = (0.1, 3.0, 100.0)  # local steps that an exchange takes without a codec
SPREADS = (1.0, 4.0)  # step time of the slowest worker by that of the fastest one
FAILURES = (0.0, 1 / 200)  # of a worker, for each local step
DOWN, LEASE = 20.0, 10.0  # local steps until a failed worker is back, is given up
PERIODS = {0.1: (1, 4, 16), 3.0: (4, 16, 64), 100.0: (16, 64, 256)}
TIME = {0.1: 100.0, 3.0: 200.0, 100.0: 960.0}  # local steps of the median worker
SIGMA = 0.1  # of the logarithm of a round's step time
HIDDEN, ROWS, STEPS, RATE = 32, 16, 1024, 1e-2
NOISE, POOL = 0.5, 10_000  # standard deviation in pixels; images of noise
MESSAGE = 4 * HIDDEN * (64 + 10)  # bytes, without a codec
REPEATS = 4  # of a held-out image, with other noise
_LINE = ("exchange", "spread", "failures")  # of the chart
FULL = 8  # workers up to which all candidates are tried
SEEDS = (1, 2, 3)  # of the last step
FINALISTS = 3
SHORTER = {
    "adam at the inner rate, which is data parallel training": "data parallel training",
    " times the inner rate": " x inner",
    "Nesterov momentum": "momentum",
}
COLORS = {
    "agn": "#e8a29b",
    "average": "#9ed7de",
    "diloco": "#c5b0d5",
    "dynsgd": "#dbdb8d",
    "easgd": "#a9c4e4",
}


class Setting(NamedTuple):
    """A cluster, with times in local steps of the median worker."""

    workers: int
    exchange: float
    spread: float = 1.0
    failures: float = 0.0


class Candidate(NamedTuple):
    """A way to train."""

    method: str  # a key of `METHODS`
    period: int
    codec: str = "none"
    overlap: bool = False


class Method(NamedTuple):
    """A rule with its mode; "n" in the text of the center rate is the workers."""

    rule: str
    mode: str
    center: str
    rate: float = 0.0


DATA_PARALLEL = "data parallel"


def _methods() -> dict[str, Method]:
    """Return the methods by name; rates of `agn` are multiples of the inner rate."""
    found = [Method("dynsgd", "asynchronous", "none")]
    found.append(Method("easgd", "asynchronous", "moving rate 0.9 / n", 0.9))
    found.append(Method("average", "synchronous", "none"))
    for rate in (2.0, 8.0):
        times = f"adam at {rate:g}"
        found += [
            Method("agn", "asynchronous", f"{times} / n times the inner rate", rate),
            Method("agn", "synchronous", f"{times} times the inner rate", rate),
        ]
    for rate in (0.4, 0.7):
        center = f"sgd at {rate:g}, Nesterov momentum 0.9"
        found += [
            Method("diloco", "asynchronous", f"delayed_nesterov at {rate:g}", rate),
            Method("diloco", "synchronous", center, rate),
            Method("diloco", "quorum", center, rate),
        ]
    found.append(Method("agn", "quorum", "adam at 8 times the inner rate", 8.0))
    named = {f"{each.rule}, {each.mode}, {each.rate:g}": each for each in found}
    data_parallel = "adam at the inner rate, which is data parallel training"
    return named | {DATA_PARALLEL: Method("agn", "synchronous", data_parallel, 1.0)}


METHODS = _methods()
CODECS: dict[str, codecs.Codec | None] = {
    "none": None,
    "bfloat16": codecs.cast("bfloat16"),
    "4 bits": codecs.two_way(codecs.error_feedback(codecs.quantize(4)), "bfloat16"),
}


@functools.cache  # the same objects share their programs
def rule_of(name: str, workers: int, codec: str) -> rules.Rule:
    """Return the rule of a method."""
    coded: Any = {"codec": CODECS[codec]}
    rule, mode, _, rate = METHODS[name]
    if mode == "quorum":  # the same object as without a quorum
        return rule_of(name.replace("quorum", "synchronous"), workers, codec)
    if rule == "dynsgd":
        return rules.dynsgd(**coded)
    if rule == "average":
        return rules.average(**coded)
    if rule == "easgd":
        return rules.easgd(rate / workers, **coded)
    if rule == "agn":
        parts = workers if mode == "asynchronous" else 1
        return rules.agn(optax.adam(RATE * rate / parts), **coded)
    if mode == "asynchronous":
        center = rules.delayed_nesterov(rate, 0.9, delay=workers)
        return rules.diloco(center, **coded)
    return rules.diloco(optax.sgd(rate, 0.9, nesterov=True), **coded)


def mode_of(name: str, workers: int) -> Mode:
    """Return the mode of a method; a quorum is three quarters of the workers."""
    mode = METHODS[name].mode
    if mode == "asynchronous":
        return Asynchronous()
    return Synchronous(-(-3 * workers // 4) if mode == "quorum" else None)


class Task:
    """A network with one hidden layer, and digits with noise.

    The parameters are one vector, and all batches are drawn before: programs are then
    compiled in two seconds.
    """

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        _, train, test = datasets.digits()
        images = jnp.asarray(train.images.reshape(-1, 64))
        labels = jnp.asarray(train.labels)
        noise = jnp.asarray(NOISE * random.normal(size=(POOL, 64)), jnp.float32)
        shape = (max(WORKERS), STEPS, ROWS)
        rows = jnp.asarray(random.integers(0, len(labels), shape), jnp.int32)
        noises = jnp.asarray(random.integers(0, POOL, shape), jnp.int32)
        clean = np.repeat(test.images.reshape(-1, 64), REPEATS, axis=0)
        noisy = clean + NOISE * random.normal(size=clean.shape)
        held_out = jnp.asarray(noisy, jnp.float32), np.repeat(test.labels, REPEATS)

        def data(worker: Any, step: Any) -> Any:
            which = worker % shape[0], step % STEPS
            drawn = rows[which]
            return images[drawn] + noise[noises[which]], labels[drawn]

        self.data, self.inner = data, optax.adam(RATE)
        self._held_out = jax.jit(lambda params: self.loss(params, held_out))

    @staticmethod
    def params(seed: int) -> jax.Array:
        """Return the first parameters, [64 * HIDDEN + HIDDEN * 10]."""
        random = np.random.default_rng(seed)
        first = random.normal(size=64 * HIDDEN) / 8
        last = random.normal(size=HIDDEN * 10) / HIDDEN**0.5
        return jnp.asarray(np.concatenate([first, last]), jnp.float32)

    @staticmethod
    def loss(params: jax.Array, batch: Any) -> jax.Array:
        """Return the mean cross-entropy of images [n, 64] and labels [n]."""
        images, labels = batch
        first, last = params[: 64 * HIDDEN], params[64 * HIDDEN :]
        hidden = jax.nn.relu(images @ first.reshape(64, HIDDEN))
        logits = hidden @ last.reshape(HIDDEN, 10)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def held_out(self, params: jax.Array) -> float:
        """Return the loss on held-out digits."""
        return float(self._held_out(params))


def steps_of(setting: Setting) -> list[float]:
    """Return the median seconds of each worker's local steps, about 1."""
    parts = np.linspace(-0.5, 0.5, setting.workers)
    return [setting.spread ** float(part) for part in parts]


def cluster_of(setting: Setting) -> simulate.Cluster:
    """Return the cluster of a setting.

    A message and its answer, without a codec, take the seconds of an exchange.
    """
    every = 1 / setting.failures if setting.failures else None
    return simulate.Cluster(
        workers=setting.workers,
        speed=[simulate.LogNormal(each, SIGMA) for each in steps_of(setting)],
        link=simulate.Link(bandwidth=2 * MESSAGE / setting.exchange),
        failures=simulate.Failures(every=every, down=DOWN),
    )


def simulated(
    task: Task,
    cluster: simulate.Cluster,
    candidate: Candidate,
    seconds: float,
    seed: int,
) -> float:
    """Return the loss at the end of a run; infinite if all workers gave up."""
    workers = len(cluster.names)
    try:
        found = simulate.run(
            rule_of(candidate.method, workers, candidate.codec),
            task.inner,
            task.loss,
            task.data,
            task.params(seed),
            cluster=cluster,
            period=candidate.period,
            mode=mode_of(candidate.method, workers),
            limits=Limits(max_workers=None, lease=LEASE),
            overlap=candidate.overlap,
            seconds=seconds,
            seed=seed,
        )
    except errors.SimulationError:
        return float("inf")
    loss = task.held_out(found.params)
    return loss if np.isfinite(loss) else float("inf")


Job = tuple[Setting, Candidate, int]


class Sweep:
    """Runs of candidates in settings, and their losses.

    Args:
      scale: factor of the virtual time.
      seeds: seeds of the last step.
    """

    def __init__(self, scale: float, seeds: Sequence[int]) -> None:
        self.task, self.scale, self.seeds = Task(), scale, seeds
        self.losses: dict[Job, float] = {}
        self._began = time.monotonic()

    def run(self, jobs: Iterable[Job]) -> None:
        """Simulate runs, those that share programs one after another."""
        new = [job for job in dict.fromkeys(jobs) if job not in self.losses]
        new.sort(key=lambda job: (job[0].workers, *job[1], *job[0], job[2]))
        for i, job in enumerate(new):
            self.losses[job] = self._loss(*job)
            if i % 50 == 0 or i == len(new) - 1:
                self._say(
                    f"{i + 1} of {len(new)}, {job[0].workers} workers: {job[1].method}"
                )

    def _say(self, words: str) -> None:
        seconds = time.monotonic() - self._began
        sys.stderr.write(f"{seconds:6.0f} s  {words}\n")
        sys.stderr.flush()

    def _loss(self, setting: Setting, candidate: Candidate, seed: int) -> float:
        seconds = self.scale * TIME[setting.exchange]
        return simulated(self.task, cluster_of(setting), candidate, seconds, seed)

    def best(self, setting: Setting, seed: int = 0) -> list[Candidate]:
        """Return the candidates of a setting that have a loss, the best one first."""
        seen = {
            candidate: loss
            for (at, candidate, of), loss in self.losses.items()
            if at == setting and of == seed
        }
        return sorted(seen, key=lambda candidate: seen[candidate])

    def tried(self, setting: Setting) -> list[Candidate]:
        """Return the candidates that are tried with codecs and with overlap."""
        if setting.exchange < 1:
            return []
        return self.finalists(setting)[: 1 if setting.workers > FULL else FINALISTS]

    def finalists(self, setting: Setting) -> list[Candidate]:
        """Return the best candidates of different rules or modes."""
        kinds: dict[tuple[str, str], Candidate] = {}
        for candidate in self.best(setting):
            method = METHODS[candidate.method]
            kinds.setdefault((method.rule, method.mode), candidate)
        return [*kinds.values()][:FINALISTS]

    def measure(self, settings: Sequence[Setting], cells: Sequence[Any]) -> None:
        """Make all steps for the settings with one number of workers.

        Args:
          settings: the settings.
          cells: the table's entries of the settings with fewer workers.
        """

        def first(setting: Setting) -> list[Candidate]:
            """Return the candidates of the first step."""
            if setting.workers <= FULL:
                return candidates(setting)
            good = {
                candidate_of(**best)._replace(codec="none", overlap=False)
                for cell in cells
                if all(cell[name] == getattr(setting, name) for name in _LINE)
                for best in cell["best"]
            }
            return [one for one in candidates(setting) if one in good]

        calm = [each for each in settings if not each.failures]
        self.run((each, one, 0) for each in calm for one in first(each))
        failing = [each for each in settings if each.failures]
        jobs: list[Job] = []
        for setting in failing:
            chosen = first(setting)
            if setting.workers <= FULL and (
                known := self.best(setting._replace(failures=0.0))
            ):
                chosen = known[: len(known) // 2]
            quorums = [one for one in first(setting) if "quorum" in one.method]
            jobs += [(setting, one, 0) for one in (*chosen, *quorums)]
        self.run(jobs)
        self.run(
            (each, one._replace(codec=codec), 0)
            for each in settings
            for one in self.tried(each)
            for codec in CODECS
        )
        self.run(
            (each, one._replace(overlap=True), 0)
            for each in settings
            for one in self.tried(each)
        )
        self.run(
            (each, one, seed)
            for each in settings
            for one in (*self.finalists(each), Candidate(DATA_PARALLEL, 1))
            for seed in self.seeds
        )

    def row(self, setting: Setting) -> dict[str, Any]:
        """Return the table's entry of a setting."""

        def losses(candidate: Candidate) -> list[float]:
            seen = [self.losses[setting, candidate, seed] for seed in self.seeds]
            return [round(float(x), 3) for x in (np.mean(seen), min(seen), max(seen))]

        data_parallel = Candidate(DATA_PARALLEL, 1)
        compared = (*self.finalists(setting), data_parallel)
        measured = {one: losses(one) for one in compared}
        best = sorted(measured, key=lambda one: measured[one])
        return {
            **setting._asdict(),
            "data_parallel": measured[data_parallel],
            "best": [
                {
                    "rule": METHODS[one.method].rule,
                    "mode": METHODS[one.method].mode,
                    "period": one.period,
                    "center": METHODS[one.method].center,
                    "codec": one.codec,
                    "overlap": one.overlap,
                    "loss": measured[one],
                }
                for one in best[:FINALISTS]
            ],
        }


def candidates(setting: Setting) -> list[Candidate]:
    """Return all candidates without codecs and overlap."""
    varies = setting.spread > 1 or setting.failures
    return [
        Candidate(name, period)
        for name, method in METHODS.items()
        if name != DATA_PARALLEL and (varies or method.mode != "quorum")
        for period in PERIODS[setting.exchange]
    ]


def candidate_of(
    rule: str, mode: str, center: str, period: int, codec: str, overlap: bool, **_: Any
) -> Candidate:
    """Return the candidate of an entry of the table, or of a choice of an advice."""
    (method,) = (
        name for name, method in METHODS.items() if method[:3] == (rule, mode, center)
    )
    return Candidate(method, period, codec, overlap)


def draw(table: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draw the best candidate of each setting, colored by its rule."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agn"})
    figure = Figure(figsize=(8.6, 6.6), layout="constrained")
    axis = figure.subplots()
    rows = [*itertools.product(EXCHANGES, SPREADS, FAILURES)]
    cells = {tuple(cell[name] for name in Setting._fields): cell for cell in table}
    for (y, row), (x, workers) in itertools.product(
        enumerate(rows), enumerate(WORKERS)
    ):
        cell = cells.get((workers, *row))
        if cell is None:
            continue
        best = cell["best"][0]
        details = [best["center"], best["codec"], "overlap" * best["overlap"]]
        low, high = best["loss"][1:]
        lines = (
            f"{best['rule']}, {best['mode']}, period {best['period']}",
            ", ".join(each for each in details if each not in ("none", "")),
            f"loss {low:.2f} to {high:.2f}",
        )
        text = "\n".join(line for line in lines if line)
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        axis.barh(y, 0.97, 0.94, x - 0.485, color=COLORS[best["rule"]])
        axis.text(x, y, text, ha="center", va="center", fontsize=6.3)
    axis.set_xticks(range(len(WORKERS)), [f"{n} workers" for n in WORKERS])
    axis.set_yticks(range(len(rows)), [_title(*row) for row in rows], fontsize=7)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.set(xlim=(-0.5, len(WORKERS) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axis.spines[:].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _title(exchange: float, spread: float, failures: float) -> str:
    speeds = "equal speeds" if spread == 1 else f"speeds 1 to {spread:g}"
    often = "failures" if failures else "no failures"
    return f"exchange {exchange:g} steps\n{speeds}, {often}"


def write(path: pathlib.Path, minutes: float, cells: Sequence[Any]) -> None:
    """Write the table, with a line for each setting."""
    lines = ",\n".join(f"  {json.dumps(cell)}" for cell in cells)
    head = f'"cpu_minutes": {minutes}, "jax": "{jax.__version__}"'
    path.write_text(f'{{{head}, "cells": [\n{lines}\n]}}\n')


def main(given: Sequence[str] | None = None) -> int:
    """Measure, unless ``--draw`` is given, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="only draw: do not measure")
    parser.add_argument(
        "--quick", action="store_true", help="two workers, two settings"
    )
    parser.add_argument(
        "--go-on", action="store_true", help="keep the settings that the table has"
    )
    parser.add_argument("--table", type=pathlib.Path, default=TABLE)
    parser.add_argument("--chart", type=pathlib.Path, default=CHART)
    options = parser.parse_args(given)
    if not options.draw:
        grid = itertools.product(WORKERS, EXCHANGES, SPREADS, FAILURES)
        settings = [Setting(*each) for each in grid]
        if options.quick:
            settings = [Setting(2, 0.1), Setting(2, 3.0)]
        sweep = Sweep(0.5 if options.quick else 1.0, SEEDS)
        cells: list[dict[str, Any]] = []
        began, earlier = time.process_time(), 0.0
        if options.go_on:
            table = json.loads(options.table.read_text())
            cells, earlier = table["cells"], table["cpu_minutes"]
        done = {cell["workers"] for cell in cells}
        for workers in sorted({each.workers for each in settings} - done):
            some = [each for each in settings if each.workers == workers]
            sweep.measure(some, cells)
            cells += map(sweep.row, some)
            minutes = earlier + (time.process_time() - began) / 60
            write(options.table, round(minutes, 1), cells)
    draw(json.loads(options.table.read_text())["cells"], options.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
