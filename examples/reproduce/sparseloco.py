"""SparseLoCo: 64 of 4,096 elements at 2 bits, with error feedback, beside float32.

Sarfi, Thérien, Lidin and Belilovsky, *Communication Efficient LLM Pre-training with
SparseLoCo*, 2025 (arXiv 2508.15706), send 1 to 3 % of the elements of a pseudogradient
in 2 bits each, keep the rest at the worker for later, and give up the center's
momentum. They find a lower loss than that of DiLoCo with float32 messages.

Here 4 workers train the small language model of `language.py` with AdamW and exchange
240 times, in rounds, after 15 local steps each. All methods begin with the same
parameters and see the same batches. Bits are those that the simulator counts for a
message.

The source's model has 512 million parameters. Here it has 65,536, and an element waits
64 rounds on average for its turn, so the number of rounds decides. Takes about five
minutes on one core.

    python examples/reproduce/sparseloco.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import language
import numpy as np
import optax
from report import Report, arguments, spread

from agn_optax import codecs, rules, simulate
from agn_optax.center import Synchronous

WORKERS, PERIOD, ROWS = 4, 15, 1
RATE = 1e-2


def sparse(k: int) -> codecs.Codec:
    """Return the codec of SparseLoCo, which sends k of 4,096 elements in 2 bits."""
    return codecs.chain_codecs(codecs.top_k(k), codecs.quantize(2, format="codebook"))


def method(codec: codecs.Codec | None = None, momentum: float = 0.0) -> rules.Rule:
    """Return DiLoCo with a codec, with Nesterov momentum or without."""
    if momentum:
        return rules.diloco(optax.sgd(0.7, momentum, nesterov=True), codec=codec)
    return rules.diloco(optax.sgd(0.8), codec=codec)


SPARSE, LOSSY = "SparseLoCo, 64", "64, no error feedback"
FLOAT32 = {
    "DiLoCo, momentum 0.9": method(momentum=0.9),
    "DiLoCo, momentum 0.5": method(momentum=0.5),
    "DiLoCo, no momentum": method(),
}
METHODS = FLOAT32 | {
    **{
        f"SparseLoCo, {k}": method(codecs.error_feedback(sparse(k), decay=0.95))
        for k in (256, 128, 64, 32)
    },
    LOSSY: method(sparse(64)),
}


def trained(
    rule: rules.Rule,
    inner: optax.GradientTransformation,
    data: language.Batches,
    rounds: int,
    seed: int,
) -> simulate.Traces:
    """Train with a center, and evaluate it twenty times."""
    data.seed = seed
    return simulate.run(
        rule,
        inner,
        language.loss,
        data,
        language.init(seed),
        cluster=simulate.Cluster(workers=WORKERS, speed=simulate.Fixed(0.01)),
        mode=Synchronous(),
        period=PERIOD,
        exchanges=WORKERS * rounds,
        evaluate=language.held_out_loss,
        every=max(1, rounds // 20),
    )


def bits(found: simulate.Traces) -> float:
    """Return the bits of a message for each parameter."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    return 8 * float(found.schedule.bytes_sent) / len(found) / parameters


def judge(
    report: Report, losses: dict[str, list[float]], sizes: dict[str, float]
) -> None:
    """Add the table and the claims."""
    dense = min(
        FLOAT32.keys() & losses.keys(), key=lambda name: np.median(losses[name])
    )
    above = {
        name: 100 * (np.divide(values, losses[dense]) - 1)
        for name, values in losses.items()
    }
    report.table(
        "Held-out loss at the end, nats per character",
        [
            "method",
            "bits per parameter",
            "times smaller",
            "loss",
            f"above {dense}, %",
        ],
        [
            [
                name,
                f"{sizes[name]:.3f}",
                f"{32 / sizes[name]:.0f}",
                spread(values),
                spread(above[name], 1),
            ]
            for name, values in losses.items()
        ],
    )
    smaller = 32 / sizes[SPARSE]
    report.claim(
        "A message with 64 of 4,096 elements at 2 bits is more than 97 times smaller "
        "than float32",
        "more than 97 times",
        f"{smaller:.0f} times: {sizes[SPARSE]:.3f} bits per parameter, positions and "
        "scales included",
        "reproduced" if smaller > 97 else "not reproduced",
        "" if smaller > 97 else "messages are larger",
    )
    for k in (128, 64):
        if (name := f"SparseLoCo, {k}") in losses:
            lower = above[name] < 0
            report.claim(
                f"With {100 * k / 4096:.1f} % of the elements the loss is lower than "
                "that of DiLoCo with float32",
                "lower, at all periods from 15 to 250",
                f"{spread(above[name], 1)} % above the best of three momenta of DiLoCo",
                "reproduced"
                if lower.all()
                else "in part"
                if lower.any()
                else "not reproduced",
                ""
                if lower.all()
                else "the model is small and the rounds are few: an element waits many "
                "rounds for its turn",
            )
    harm = np.subtract(losses[LOSSY], losses[SPARSE])
    report.claim(
        "Such sparsity needs error feedback",
        "error feedback stands in for the momentum",
        f"without it the loss is {spread(harm)} nats higher",
        "reproduced" if (harm > 0).all() else "not reproduced",
        "" if (harm > 0).all() else "not higher for all seeds",
    )


def draw(
    report: Report, curves: dict[str, tuple[Any, Any]], losses: Any, sizes: Any
) -> None:
    """Draw the loss against bits sent, and the last loss against bits of a message."""
    left, right = report.figure.subplots(1, 2, sharey=True)
    for name, (sent, loss) in curves.items():
        left.plot(sent, loss, label=name, lw=1)
    left.set(xscale="log", xlabel="bits sent by a worker, per parameter")
    left.set_ylabel("held-out loss, nats per character")
    for name, values in losses.items():
        middle = np.median(values)
        low, high = middle - min(values), max(values) - middle
        right.errorbar(sizes[name], middle, [[low], [high]], fmt="o", ms=3, label=name)
    right.set(xscale="log", xlabel="bits of a message, per parameter")
    right.legend(fontsize=6)


def main(given: Sequence[str] | None = None) -> int:
    """Train with all methods."""
    options = arguments(__doc__ or "", given, rounds=240)
    report = Report(
        "sparseloco",
        "Few elements, few bits: SparseLoCo",
        "Sarfi, Thérien, Lidin, Belilovsky, *Communication Efficient LLM Pre-training "
        "with SparseLoCo*, 2025 (arXiv 2508.15706), the abstract and the authors' "
        "summary",
        options,
    )
    rounds, methods = options.rounds, METHODS
    if options.quick:
        rounds = 8
        methods = {name: METHODS[name] for name in (*FLOAT32, SPARSE, LOSSY)[2:]}
    schedule = optax.cosine_decay_schedule(RATE, rounds * PERIOD, alpha=0.1)
    inner = optax.adamw(schedule, b2=0.99, weight_decay=0.0)
    data = language.Batches(ROWS)
    losses: dict[str, list[float]] = {}
    sizes, curves = {}, {}
    for name, rule in methods.items():
        for seed in range(options.seeds):
            found = trained(rule, inner, data, rounds, seed)
            losses.setdefault(name, []).append(float(found.evaluations[-1]))
            sizes[name] = bits(found)
            versions = np.asarray(found.evaluation_versions)
            curves[name] = (versions * sizes[name], found.evaluations)
            report.progress(f"{name}, seed {seed}: {losses[name][-1]:.4f}")
    judge(report, losses, sizes)
    draw(report, curves, losses, sizes)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
