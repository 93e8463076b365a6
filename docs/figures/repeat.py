"""Draw the pictures of docs/repeat.md: two runs that part, and a what-if.

    PYTHONPATH=examples python docs/figures/repeat.py

Four workers, which are threads, train a small network on digits around a center that
keeps its tape. All that is drawn is read off the tapes afterwards.
"""

from __future__ import annotations

import pathlib
import tempfile
import threading
import time
from typing import Any

import choosing
import datasets
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from rich.progress import track

from agn_optax import LocalCenter, Worker, rules, tape
from agn_optax.center import BoundedStaleness, Journal

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = pathlib.Path(__file__).parent
WORKERS, PERIOD, EXCHANGES = 4, 5, 60
STALE = 5  # versions
# s, for the local steps between two exchanges of each worker: unequal machines
TIMES = (0.06, 0.083, 0.097, 0.13)
RULE = rules.agn(optax.adam(3e-3))


@jax.jit
def gradients(params: Any, images: jax.Array, labels: jax.Array) -> Any:
    """Return the gradients of a batch."""
    return jax.grad(choosing.loss)(params, images, labels)


def run(path: str, train: Any) -> tape.Tape:
    """Train, and return the tape; the seeds are always the same."""
    journal = Journal(path, keep="contributions")
    params = choosing.init(jax.random.key(0))
    with LocalCenter(RULE, params, durability=journal, barrier=WORKERS) as center:
        workers = [
            threading.Thread(target=work, args=(center, seed, train))
            for seed in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return tape.read(path)


def work(center: LocalCenter, seed: int, train: Any) -> None:
    """Train one worker."""
    images, labels = train
    random = np.random.default_rng(seed)
    worker = Worker(center, optax.adam(1e-3), period=PERIOD, name=f"worker-{seed}")
    params, state = worker.start()
    for _ in range(PERIOD * EXCHANGES):
        batch = random.integers(0, len(labels), choosing.BATCH)
        grads = gradients(params, images[batch], labels[batch])
        updates, state = worker.tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        time.sleep(TIMES[seed] / PERIOD)
        params, state = worker.exchange(params, state)
    worker.leave()


def versions(found: tape.Tape) -> list[Any]:
    """Return the parameters of all versions on a tape."""
    return [
        store.current_params()
        for event, store in found.run(RULE)
        if event is None or event.applied
    ]


def draw_runs(a: tape.Tape, b: tape.Tape, error: Any) -> None:
    """Draw two runs of the same seeds, and how far apart their centers are."""
    parted = tape.diff(a, b)
    assert parted is not None
    figure, axes = plt.subplots(1, 2, figsize=(8, 3))
    for label, each in (("first run", a), ("second run", b)):
        rows = tape.evaluate(each, RULE, error, every=4)
        x, y = [r.version for r in rows], [r.numbers["value"] for r in rows]
        axes[0].plot(x, y, label=label)
    distances = [
        float(optax.tree.norm(optax.tree.sub(one, other)))
        for one, other in zip(versions(a), versions(b), strict=True)
    ]
    axes[1].plot(distances, color="tab:red")
    titles = ("test error, %", "distance of the two centers")
    for axis, title in zip(axes, titles, strict=True):
        axis.axvline(parted.version, ls="--", color="gray", lw=1)
        axis.set(xlabel="version", title=title)
        axis.grid(alpha=0.25)
    axes[0].set_yscale("log")
    axes[0].annotate(
        f"the runs part\nafter version {parted.version}",
        (parted.version, 0.05),
        (8, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color="gray",
    )
    axes[0].legend(frameon=False)
    save(figure, "runs")


def draw_what_if(found: tape.Tape, error: Any) -> None:
    """Draw the recorded center, and others with the same contributions."""
    figure, axis = plt.subplots(figsize=(7.2, 3.4))
    others: dict[str, dict[str, Any]] = {
        f"what if messages staler than {STALE} are dropped": {
            "mode": BoundedStaleness(versions=STALE)
        },
        "what if its optimizer is adam(1e-3)": {"rule": rules.agn(optax.adam(1e-3))},
    }
    for i, (label, changed) in enumerate(others.items()):
        what_if = tape.what_if(found, RULE, **changed, function=error, every=4)
        lines = {"recorded: adam(3e-3)": what_if.recorded} if i == 0 else {}
        for name, rows in (lines | {label: what_if.measured}).items():
            x, y = [r.time for r in rows], [r.numbers["value"] for r in rows]
            (line,) = axis.plot(x, y, label=name, ls="--" if name == label else "-")
        if what_if.parted is not None:
            axis.axvline(what_if.parted.time, ls=":", lw=1, color=line.get_color())
    axis.set(xlabel="seconds since the center began", ylabel="test error, %")
    axis.set_yscale("log")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    save(figure, "what-if")


def save(figure: Any, name: str) -> None:
    """Write a picture."""
    figure.tight_layout()
    figure.savefig(HERE / f"repeat-{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Train twice, and draw."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "agn", "font.size": 9})
    data = datasets.digits()
    train, test = (
        (np.asarray(split.images.reshape(-1, 64)), np.asarray(split.labels))
        for split in (data.train, data.test)
    )

    @jax.jit
    def error(params: Any) -> jax.Array:
        wrong = choosing.logits(params, test[0]).argmax(-1) != test[1]
        return 100 * jnp.mean(wrong)

    with tempfile.TemporaryDirectory() as folder:
        names = track(("compiled", "a", "b"), "training")
        # The first run compiles, which makes the others' first exchanges comparable.
        _, *tapes = [run(f"{folder}/{name}", train) for name in names]
        draw_runs(*tapes, error)
        draw_what_if(tapes[0], error)


if __name__ == "__main__":
    main()
