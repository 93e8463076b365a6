"""MuLoCo: are the messages of workers with Muon better than those with AdamW?

Thérien, Huang, Defazio, Rish and Belilovsky, *MuLoCo: Muon is a Practical Inner
Optimizer for DiLoCo*, 2025 (arXiv 2505.23725), find that DiLoCo loses quality as the
number of workers K grows, that the directions of pseudogradients are more correct with
Muon, and that less is lost with it.

Here 1 to 16 workers train the small language model of `language.py`, on the same
characters for all K: each step's batch is divided among them. A round has 30 local
steps.

- Directions: from a model that was trained without exchanges for 360 steps, K workers
  make a round with batches of 64 rows together. Their mean message is compared with the
  move that one worker makes with the whole batches, and each message with the mean. A
  journal keeps the messages, and the cosines are computed from this tape. The state of
  Adam or Muon begins anew. Independent messages of equal length would have the cosine
  1 / sqrt(K) with their mean.
- Loss: 20 rounds with 1 and with 16 workers, with batches of 16 rows together. The
  center's Nesterov momentum is that of the source's code: 0.6 for Muon, 0.8 for AdamW,
  both with the learning rate 0.7.

The source's models have 150 million to 15 billion parameters, and 2,200 runs tuned all
settings. Here a model has 65,536, and only the learning rates of the local steps were
tuned, by training without exchanges (`--tune 1`). Takes about five minutes on one
core.

    python examples/reproduce/muloco.py
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import language
import numpy as np
import optax
from report import Report, arguments, spread

from agn_optax import rules, simulate, tape
from agn_optax.center import Journal, Synchronous

PyTree = Any
PERIOD = 30
WORKERS: tuple[int, ...] = (2, 4, 8, 16)  # of the directions
ROWS, ROWS_OF_DIRECTIONS = 16, 64  # of all workers together, in a step
START = 12  # rounds without exchanges before the directions are compared
RATES = {"AdamW": 1e-2, "Muon": 2e-2}  # the best of 5e-3 to 4e-2, and of 1e-2 and 2e-2
MOMENTA = {"AdamW": 0.8, "Muon": 0.6}
# The source's losses with 150 M parameters: data parallel, and K = 1 and 16.
SOURCE = {"AdamW": (3.158, 3.142, 3.326), "Muon": (3.124, 3.120, 3.222)}
AVERAGE = rules.average()
RULES = {
    name: rules.diloco(optax.sgd(0.7, momentum, nesterov=True))
    for name, momentum in MOMENTA.items()
}


class Shares:
    """Batches that workers divide among them: ``data`` of `agn_optax.simulate.run`.

    Args:
      batches: the whole batches.
      workers: number of workers.
    """

    def __init__(self, batches: language.Batches, workers: int) -> None:
        self.batches, self.workers = batches, workers

    def __call__(self, worker: int, step: int) -> np.ndarray:
        """Return a worker's rows of a step's batch."""
        return self.batches(0, step)[worker :: self.workers]


@functools.cache
def shares(rows: int, workers: int) -> Shares:
    """Return the same object for the same numbers, so that programs are kept."""
    return Shares(language.Batches(rows), workers)


@functools.cache
def inner(name: str, rate: float, steps: int | None) -> optax.GradientTransformation:
    """Return the optimizer of local steps.

    Args:
      name: "AdamW" or "Muon".
      rate: its learning rate at first.
      steps: number of steps in which the rate falls to a tenth; None for a constant.
    """
    schedule = optax.cosine_decay_schedule(rate, steps, 0.1) if steps else rate
    if name == "AdamW":
        return optax.adamw(schedule, b2=0.99, weight_decay=0.0)
    return optax.contrib.muon(
        schedule,
        adam_b2=0.99,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=_matrices_of_layers,
    )


def _matrices_of_layers(params: PyTree) -> PyTree:
    """Return which matrices Muon moves: as in the source, not embedding and head."""
    muon = optax.contrib.MuonDimensionNumbers()
    return {
        name: jax.tree.map(lambda _: muon, part) if name.startswith("layer") else None
        for name, part in params.items()
    }


def trained(
    rule: rules.Rule,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    *,
    rows: int,
    workers: int,
    rounds: int,
    seed: int,
    journal: Journal | None = None,
) -> PyTree:
    """Return the center's parameters after a number of rounds."""
    data = shares(rows, workers)
    data.batches.seed = seed
    found = simulate.run(
        rule,
        optimizer,
        language.loss,
        data,
        params,
        cluster=simulate.Cluster(workers=workers, speed=simulate.Fixed(0.01)),
        mode=Synchronous(),
        period=PERIOD,
        exchanges=workers * rounds,
        durability=journal,
    )
    return found.params


def data_parallel(name: str, rate: float, rounds: int, seed: int) -> float:
    """Train one worker on all rows without exchanges, and return the held-out loss."""
    params = trained(
        AVERAGE,
        inner(name, rate, rounds * PERIOD),
        language.init(seed),
        rows=ROWS,
        workers=1,
        rounds=rounds,
        seed=seed,
    )
    return float(language.held_out_loss(params))


def loss(name: str, workers: int, rounds: int, seed: int) -> float:
    """Train with a center, and return the held-out loss."""
    params = trained(
        RULES[name],
        inner(name, RATES[name], rounds * PERIOD),
        language.init(seed),
        rows=ROWS,
        workers=workers,
        rounds=rounds,
        seed=seed,
    )
    return float(language.held_out_loss(params))


def directions(
    name: str, workers: Sequence[int], *, rows: int, start: int, seed: int
) -> dict[int, tuple[float, float]]:
    """Compare the messages of a round, for numbers of workers.

    Returns:
      The cosine of the mean message with the move of one worker, and that of each
      message with the mean; both are means over the matrices of the layers.
    """
    optimizer = inner(name, RATES[name], None)
    params = trained(
        AVERAGE,
        optimizer,
        language.init(seed),
        rows=ROWS,
        workers=1,
        rounds=start,
        seed=seed,
    )
    found, alone = {}, [np.empty(0)]
    for k in (1, *workers):
        with tempfile.TemporaryDirectory() as folder:
            trained(
                AVERAGE,
                optimizer,
                params,
                rows=rows,
                workers=k,
                rounds=1,
                seed=1000 + seed,
                journal=Journal(folder, keep="contributions"),
            )
            messages = messages_of_round(tape.read(folder))
        if k == 1:
            alone = [each[0] for each in messages]
            continue
        right = [
            float(_cosine(each.mean(0), one))
            for each, one in zip(messages, alone, strict=True)
        ]
        alike = [float(_cosine(each, each.mean(0)).mean()) for each in messages]
        found[k] = float(np.mean(right)), float(np.mean(alike))
    return found


def messages_of_round(recorded: tape.Tape) -> list[np.ndarray]:
    """Return the messages of the only round, ``[workers, elements]`` of each matrix.

    Embedding and head, the first two, are left out: both optimizers move them alike.
    """
    (event,) = (each for each in recorded.events() if each.kind == "exchange")
    sent = [each for each in event.contributions() if each is not None]
    matrices = list(zip(*sent, strict=True))[2:]
    return [np.stack(each).astype(float).reshape(len(each), -1) for each in matrices]


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of vectors in the last axis of ``a`` with ``b``."""
    return a @ b / np.linalg.norm(a, axis=-1) / np.linalg.norm(b)


def tune(rounds: int) -> None:
    """Print the loss of other learning rates, without exchanges."""
    for name in RATES:
        for rate in (5e-3, 1e-2, 2e-2, 4e-2):
            found = data_parallel(name, rate, rounds, seed=100)
            print(f"{name:6} {rate:g}: {found:.4f}", flush=True)


Numbers = dict[tuple[str, int], list[Any]]  # by optimizer and K; a value for each seed


def judge_directions(report: Report, found: Numbers, workers: Sequence[int]) -> None:
    """Add the table, the claims and the picture of the directions."""
    right = {key: [each[0] for each in values] for key, values in found.items()}
    alike = {key: [each[1] for each in values] for key, values in found.items()}
    report.table(
        "Cosine of the mean message with the move of data-parallel training, and of "
        "each message with the mean",
        [
            "K",
            *(f"data parallel, {name}" for name in RATES),
            *(f"mean, {name}" for name in RATES),
            "1 / sqrt(K)",
        ],
        [
            [
                k,
                *(spread(right[name, k]) for name in RATES),
                *(spread(alike[name, k]) for name in RATES),
                f"{k**-0.5:.3f}",
            ]
            for k in workers
        ],
    )
    most = workers[-1]
    for says, values in (
        ("With Muon the mean message has a more correct direction as K grows", right),
        ("With Muon the messages of a round agree more with their mean", alike),
    ):
        more = [
            (np.greater(values["Muon", k], values["AdamW", k])).all() for k in workers
        ]
        report.claim(
            says,
            "more correct pseudogradients",
            "cosine "
            + ", ".join(f"{spread(values[n, most])} {n}" for n in RATES)
            + f" at K = {most}",
            "reproduced" if all(more) else "in part" if any(more) else "not reproduced",
            ""
            if all(more)
            else f"for all seeds at {sum(more)} of {len(more)} numbers of workers; a "
            "worker has few rows, and its message much noise",
        )
    axis = report.figure.add_subplot(1, 2, 1)
    for color, name in enumerate(RATES):
        for values, style, words in (
            (right, "-", "with data parallel"),
            (alike, "--", "with the mean"),
        ):
            each = [values[name, k] for k in workers]
            axis.plot(
                workers,
                np.median(each, 1),
                f"C{color}{style}",
                label=f"{name}, {words}",
            )
            axis.fill_between(
                workers, np.min(each, 1), np.max(each, 1), color=f"C{color}", alpha=0.2
            )
    axis.plot(workers, np.power(workers, -0.5), "k:", label="1 / sqrt(K)")
    axis.set(xlabel="workers K", ylabel="cosine of messages", xscale="log")
    axis.set_xticks(workers, [str(k) for k in workers])
    axis.minorticks_off()
    axis.legend(fontsize=7)


def judge_losses(report: Report, parallel: Numbers, found: Numbers) -> None:
    """Add the table, the claim and the picture of the losses."""
    above = {
        (name, k): 100 * (np.divide(values, parallel[name, 1]) - 1)
        for (name, k), values in found.items()
    }
    report.table(
        "Held-out loss, nats per character, and how far it is above data parallel",
        ["optimizer", "data parallel", "K = 1", "K = 16", "K = 1, %", "K = 16, %"],
        [
            [
                name,
                spread(parallel[name, 1]),
                *(spread(found[name, k]) for k in (1, 16)),
                *(spread(above[name, k], 1) for k in (1, 16)),
            ]
            for name in RATES
        ],
    )
    less = np.less(above["Muon", 16], above["AdamW", 16])
    expected = ", ".join(
        f"{name} +{100 * (each[2] / each[0] - 1):.1f} %"
        for name, each in SOURCE.items()
    )
    report.claim(
        "With 16 workers MuLoCo loses less against data parallel than DiLoCo",
        f"{expected} (150 M parameters)",
        ", ".join(f"{name} {spread(above[name, 16], 1)} %" for name in RATES),
        "reproduced" if less.all() else "in part" if less.any() else "not reproduced",
        "" if less.all() else f"for {less.sum()} of {len(less)} seeds",
    )
    lower = np.less(found["Muon", 16], found["AdamW", 16])
    report.claim(
        "With 16 workers the loss of MuLoCo is lower than that of DiLoCo",
        f"{SOURCE['Muon'][2]} and {SOURCE['AdamW'][2]} (150 M parameters)",
        f"{spread(found['Muon', 16])} and {spread(found['AdamW', 16])}",
        "reproduced" if lower.all() else "in part" if lower.any() else "not reproduced",
        "" if lower.all() else f"for {lower.sum()} of {len(lower)} seeds",
    )
    axis = report.figure.add_subplot(1, 2, 2)
    for place, name in enumerate(RATES):
        for i, values in enumerate(
            (parallel[name, 1], found[name, 1], found[name, 16])
        ):
            label = name if not i else None
            x = np.full(len(values), i + 0.2 * place - 0.1)
            axis.plot(x, values, f"C{place}o", markersize=4, label=label)
    axis.set_xticks(range(3), ["data parallel", "K = 1", "K = 16"])
    axis.set(ylabel="held-out loss, nats per character", xlim=(-0.5, 2.5))
    axis.legend()


def main(given: Sequence[str] | None = None) -> int:
    """Compare directions, and then losses."""
    options = arguments(__doc__ or "", given, rounds=20, tune=0)
    rounds, workers, rows, start = options.rounds, WORKERS, ROWS_OF_DIRECTIONS, START
    if options.quick:
        rounds, workers, rows, start = 3, (4,), ROWS, 3
    if options.tune:
        tune(rounds)
        return 0
    report = Report(
        "muloco",
        "Muon at the workers: MuLoCo",
        "Thérien, Huang, Defazio, Rish, Belilovsky, *MuLoCo: Muon is a Practical Inner "
        "Optimizer for DiLoCo*, 2025 (arXiv 2505.23725), the abstract and the losses "
        "on its project page",
        options,
    )
    cosines: Numbers = {}
    parallel: Numbers = {}
    losses: Numbers = {}
    for name, rate in RATES.items():
        for seed in range(options.seeds):
            compared = directions(name, workers, rows=rows, start=start, seed=seed)
            for k, each in compared.items():
                cosines.setdefault((name, k), []).append(each)
            one = data_parallel(name, rate, rounds, seed)
            parallel.setdefault((name, 1), []).append(one)
            for k in (1, 16):
                losses.setdefault((name, k), []).append(loss(name, k, rounds, seed))
            report.progress(
                f"{name}, seed {seed}: {cosines[name, workers[-1]][-1]}, loss "
                f"{one:.4f}, {losses[name, 1][-1]:.4f}, {losses[name, 16][-1]:.4f}"
            )
    judge_directions(report, cosines, workers)
    judge_losses(report, parallel, losses)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
