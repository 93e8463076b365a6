"""Workers of unequal speed, each with its own classes: which method trains best?

HeLoCo, momentum look-ahead, ordered momentum, delayed Nesterov, dynsgd, buffered and
rescaled messages, and rounds with a quorum, beside synchronous and asynchronous DiLoCo
and asynchronous SGD. Digits of 8 x 8 pixels are divided by class: worker k has the
classes that are k modulo K. K = 4 and 8 workers make local steps in 1 to 8 s, so the
classes of slow workers are seen least.

All methods train a network with one hidden layer of 32 units by SGD, with 10 local
steps of 16 images a round, on the virtual clock: 3,000 local steps in all (equal
samples), or the seconds that asynchronous workers need for these (equal time). The rate
of each center optimizer is the best of four, by the mean loss of two other seeds.
Losses are those of the point that the method evaluates, on 359 test images. A claim is
reproduced if it holds with each of five seeds, and in part if it holds for the median
with one K.

Sources: Abdullah Al Asif et al., *HeLoCo*, 2026, arXiv 2606.00271 (language models, a
language per worker); Thalaiyasingam Ajanthan et al., *Momentum Look-Ahead for
Asynchronous Distributed Low-Communication Training*, 2025; Chang-Wei Shi et al.,
*Ordered Momentum for Asynchronous SGD*, 2024, arXiv 2407.19234; Ammar Mahran et al.,
*Rescaled Asynchronous SGD*, 2026, arXiv 2605.13434. Their claims were read in the
abstracts. Not repeated are their models, data and rates, so differences may be larger
or smaller here. The whole takes 3 minutes of one core.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial
from report import Report, Verdict, arguments, spread

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import datasets

from agn_optax import delayed_nesterov, rules, scale_by_turnaround, simulate
from agn_optax.center import Asynchronous, CenterState, Mode, Synchronous
from agn_optax.rules import center_optimizers as outer

PyTree = Any
SOURCE = (
    "Al Asif et al., HeLoCo, 2026 (arXiv 2606.00271); Ajanthan et al., Momentum "
    "Look-Ahead, 2025; Shi et al., Ordered Momentum, 2024 (arXiv 2407.19234); "
    "Mahran et al., Rescaled Asynchronous SGD, 2026 (arXiv 2605.13434)"
)
PERIOD, BATCH, HIDDEN = 10, 16, 32
TUNING = (1000, 1001)  # seeds with which rates are chosen
INNER = optax.sgd(0.1)
DILOCO = rules.diloco()  # one object, so that methods share the workers' programs


@dataclasses.dataclass(frozen=True)
class Method:
    """A center optimizer of the number of workers and of a rate, and how it is used."""

    rates: Sequence[float]
    center: Callable[[int, float], optax.GradientTransformation]
    rule: rules.Rule = DILOCO
    mode: Callable[[int], Mode] = lambda workers: Asynchronous()
    looks_ahead: bool = False


def nesterov(rate: float) -> optax.GradientTransformation:
    """Return the center optimizer of DiLoCo."""
    return optax.sgd(rate, momentum=0.9, nesterov=True)


METHODS = {
    "synchronous DiLoCo": Method(
        (0.4, 0.8, 1.6, 3.2),
        lambda n, rate: nesterov(rate),
        mode=lambda n: Synchronous(),
    ),
    "quorum and grace": Method(
        (0.2, 0.4, 0.8, 1.6),
        lambda n, rate: nesterov(rate),
        mode=lambda n: Synchronous(quorum=n // 2, grace=10.0),
    ),
    "asynchronous SGD": Method(
        (0.8, 1.6, 3.2, 6.4), lambda n, rate: optax.sgd(rate / n)
    ),
    "asynchronous DiLoCo": Method(
        (0.1, 0.2, 0.4, 0.8), lambda n, rate: nesterov(rate / n)
    ),
    "delayed Nesterov": Method(
        (0.4, 0.8, 1.6, 3.2),
        lambda n, rate: delayed_nesterov(rate, 0.9, delay=n),
    ),
    "momentum look-ahead": Method(
        (0.1, 0.2, 0.4, 0.8),
        lambda n, rate: outer.momentum_lookahead(rate, 0.9),
        looks_ahead=True,
    ),
    "HeLoCo": Method(
        (0.2, 0.4, 0.8, 1.6),
        lambda n, rate: outer.heloco(rate, 0.9, messages=n),
        looks_ahead=True,
    ),
    "ordered momentum": Method(
        (0.4, 0.8, 1.6, 3.2),
        lambda n, rate: outer.ordered_momentum(rate, 0.9, messages=n),
    ),
    "buffered": Method(
        (0.2, 0.4, 0.8, 1.6),
        lambda n, rate: outer.buffered(nesterov(rate), n),
    ),
    "dynsgd": Method(
        (0.8, 1.6, 3.2, 6.4), lambda n, rate: optax.sgd(rate), rules.dynsgd()
    ),
    "rescaled": Method(
        (0.8, 1.6, 3.2, 6.4),
        lambda n, rate: optax.chain(scale_by_turnaround(n), optax.sgd(rate / n)),
    ),
}


class Problem:
    """The digits of some workers, and a network."""

    def __init__(self, workers: int) -> None:
        data = datasets.digits()
        train, test = data.train, data.test
        rows = [np.flatnonzero(train.labels % workers == k) for k in range(workers)]
        most = max(map(len, rows))
        self._arrays = (
            jnp.asarray(train.images.reshape(len(train.images), -1)),
            jnp.asarray(train.labels),
            jnp.asarray([np.resize(each, most) for each in rows]),
            jnp.asarray([len(each) for each in rows]),
        )
        pixels, self.workers = test.images.reshape(len(test.images), -1), workers
        slow = test.labels % workers == workers - 1
        self._tests = (pixels, test.labels), (pixels[slow], test.labels[slow])
        seconds = 8.0 ** (np.arange(workers) / (workers - 1))
        self.cluster = simulate.Cluster(
            workers=workers, speed=[simulate.LogNormal(s, 0.1) for s in seconds]
        )

    def data(self, seed: int) -> Partial:
        """Return the batches of a seed; all seeds share a program."""
        return Partial(batch, *self._arrays, jnp.int32(seed))

    def losses(self, params: PyTree) -> list[float]:
        """Return the losses on all test images, and on the slowest worker's classes."""
        return [float(evaluate(params, test)) for test in self._tests]


def batch(
    images: Any, labels: Any, rows: Any, counts: Any, seed: Any, worker: Any, step: Any
) -> tuple[Any, Any]:
    """Return images of the worker's own classes."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), worker), step)
    chosen = rows[worker][jax.random.randint(key, (BATCH,), 0, counts[worker])]
    return images[chosen], labels[chosen]


def loss(params: PyTree, batch: tuple[Any, Any]) -> jax.Array:
    """Return the mean cross-entropy."""
    images, labels = batch
    x = jax.nn.relu(images @ params["w"] + params["b"])
    logits = x @ params["v"] + params["c"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


evaluate = jax.jit(loss)


def first_params(seed: int) -> PyTree:
    """Draw first parameters."""
    rng = np.random.default_rng(seed)

    def normal(inputs: int, outputs: int) -> Any:
        w = rng.normal(size=(inputs, outputs)) * math.sqrt(2 / inputs)
        return jnp.asarray(w, jnp.float32)

    zeros = jnp.zeros
    return {"w": normal(64, HIDDEN), "b": zeros(HIDDEN)} | {
        "v": normal(HIDDEN, 10),
        "c": zeros(10),
    }


@dataclasses.dataclass(frozen=True)
class Budget:
    """The end of a run: local steps, or simulated seconds."""

    steps: int
    by_time: bool = False

    def end(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Return the arguments of `simulate.run`.

        The time is that in which asynchronous workers make the steps.
        """
        if not self.by_time:
            return {"steps": self.steps}
        planned = simulate.schedule(
            problem.cluster, period=PERIOD, steps=self.steps, seed=seed
        )
        return {"seconds": planned.duration}


class Run(NamedTuple):
    """The numbers of one run."""

    loss: float  # on the test images
    slow_loss: float  # on those of the slowest worker's classes
    seconds: float  # simulated


def train(
    problem: Problem, method: Method, rule: rules.Rule, seed: int, budget: Budget
) -> Run:
    """Train with one seed, and evaluate."""
    found = simulate.run(
        rule,
        INNER,
        loss,
        problem.data(seed),
        first_params(seed),
        cluster=problem.cluster,
        period=PERIOD,
        mode=method.mode(problem.workers),
        seed=seed,
        **budget.end(problem, seed),
    )
    params = found.params
    if method.looks_ahead:
        assert isinstance(found.center, CenterState)
        params = outer.evaluated(found.center.center_state, params)
    whole, slow = problem.losses(params)
    return Run(whole, slow, found.schedule.duration)


class Found(NamedTuple):
    """The runs of a method with its best rate, one for each seed."""

    rate: float
    runs: list[Run]

    @property
    def losses(self) -> list[float]:
        """The test losses."""
        return [run.loss for run in self.runs]


def best(problem: Problem, method: Method, seeds: int, budget: Budget) -> Found:
    """Return the runs with the rate that is best with other seeds."""

    def runs(rate: float, seeds: Iterable[int]) -> list[Run]:
        rule = dataclasses.replace(
            method.rule, center=method.center(problem.workers, rate)
        )
        return [train(problem, method, rule, seed, budget) for seed in seeds]

    def mean(rate: float) -> float:
        found = np.mean([run.loss for run in runs(rate, TUNING[:seeds])])
        return float(np.nan_to_num(found, nan=np.inf))

    rate = min(method.rates, key=mean)
    return Found(rate, runs(rate, range(seeds)))


def compare(
    problem: Problem, steps: int, seeds: int, report: Report
) -> dict[str, tuple[Found, Found]]:
    """Return the runs of each method at equal samples, and at equal time."""
    found = {}
    for name, method in METHODS.items():
        report.progress(f"{problem.workers} workers: {name}")
        at_samples = best(problem, method, seeds, Budget(steps))
        at_time = at_samples
        if method.mode(problem.workers).combines:
            at_time = best(problem, method, seeds, Budget(steps, by_time=True))
        found[name] = at_samples, at_time
    return found


Results = dict[int, dict[str, tuple[Found, Found]]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A claim that one method has a lower loss than another."""

    says: str
    expected: str
    better: str
    worse: str
    by_time: bool = False

    def check(self, results: Results, report: Report) -> None:
        """Claim what was seen with each number of workers."""
        shown, gains = [], []
        for workers, found in results.items():
            losses = [found[m][self.by_time].losses for m in (self.better, self.worse)]
            each = [100 * (1 - b / w) for b, w in zip(*losses, strict=True)]
            gains.append(each)
            shown.append(f"K = {workers}: {spread(each, 1)} %")
        lower = sum(gain > 0 for each in gains for gain in each)
        verdict: Verdict = "not reproduced"
        if lower == sum(map(len, gains)):
            verdict = "reproduced"
        elif any(np.median(each) > 0 for each in gains):
            verdict = "in part"
        report.claim(
            self.says,
            self.expected,
            "lower by " + ", ".join(shown),
            verdict,
            ""
            if verdict == "reproduced"
            else f"lower in {lower} of {sum(map(len, gains))} runs, with the best rate "
            "of each method, on a small network with few classes a worker",
        )


CLAIMS = [
    Comparison(
        "HeLoCo has a lower loss than asynchronous DiLoCo at equal tokens",
        "lower by up to 7.5 %",
        *("HeLoCo", "asynchronous DiLoCo"),
    ),
    Comparison(
        "HeLoCo has a lower loss than momentum look-ahead at equal time",
        "lower by up to 3.3 %",
        *("HeLoCo", "momentum look-ahead"),
        by_time=True,
    ),
    Comparison(
        "HeLoCo has a lower loss than synchronous DiLoCo if speeds differ much",
        "lower by up to 22.1 %",
        *("HeLoCo", "synchronous DiLoCo"),
        by_time=True,
    ),
    Comparison(
        "Momentum look-ahead has a lower loss than asynchronous DiLoCo",
        "lower in all its settings",
        *("momentum look-ahead", "asynchronous DiLoCo"),
    ),
    Comparison(
        "Ordered momentum converges better than asynchronous SGD",
        "better in all its settings",
        *("ordered momentum", "asynchronous SGD"),
    ),
    Comparison(
        "Ordered momentum converges better than plain momentum in asynchronous SGD",
        "better in all its settings",
        *("ordered momentum", "asynchronous DiLoCo"),
    ),
    Comparison(
        "Rescaled messages remove the bias towards the data of fast workers",
        "as fast as possible with unlike data, up to a constant",
        *("rescaled", "asynchronous SGD"),
        by_time=True,
    ),
]


def table(results: Results, report: Report) -> None:
    """Write all losses."""
    columns = "workers; method; rate; loss at equal samples; simulated s; "
    columns += "loss at equal time; on the slowest worker's classes"
    rows = []
    for workers, found in results.items():
        for name, (at_samples, at_time) in found.items():
            rates = dict.fromkeys((at_samples.rate, at_time.rate))
            rows.append(
                [
                    *(workers, name, ", ".join(f"{rate:g}" for rate in rates)),
                    spread(at_samples.losses),
                    f"{np.median([run.seconds for run in at_samples.runs]):.0f}",
                    spread(at_time.losses),
                    spread([run.slow_loss for run in at_time.runs]),
                ]
            )
    title = "Test losses; a second rate, and the last column, belong to equal time, "
    title += "simulated s to equal samples"
    report.table(title, columns.split("; "), rows)


def draw(results: Results, report: Report) -> None:
    """Draw the losses of each method at equal samples and at equal time."""
    many = report.figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axis, (workers, found) in zip(many, results.items(), strict=True):
        for by_time, (label, mark) in enumerate(
            [("equal samples", "o"), ("equal time", "d")]
        ):
            for i, each in enumerate(found.values()):
                losses = each[by_time].losses
                y, color = i + 0.3 * by_time, f"C{by_time}"
                axis.plot([min(losses), max(losses)], [y, y], color=color)
                name = label if i == 0 else None
                axis.plot(np.median(losses), y, mark, color=color, label=name)
        axis.set(title=f"{workers} workers", xlabel="test loss", xscale="log")
        axis.set_yticks(range(len(found)), found)
        axis.grid(axis="x", which="both", alpha=0.3)
    many[0].invert_yaxis()
    shown = many[0].get_legend_handles_labels()
    report.figure.legend(*shown, loc="outside lower center", ncols=2)


def main(given: Sequence[str] | None = None) -> int:
    """Compare the methods, and report."""
    options = arguments(__doc__ or "", given, steps=3000)
    counts = [4, 8]
    if not options.quick:
        options.seeds = max(options.seeds, 5)
    if options.quick:
        counts, options.steps = [4], min(options.steps, 400)
    report = Report(
        "non_iid", "Unequal workers with classes of their own", SOURCE, options
    )
    results = {
        workers: compare(Problem(workers), options.steps, options.seeds, report)
        for workers in counts
    }
    table(results, report)
    for claim in CLAIMS:
        claim.check(results, report)
    draw(results, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
