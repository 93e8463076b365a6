"""The traces of an executed schedule."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.center import CenterState
from agn_optax.round import parts
from agn_optax.simulate._schedule import Schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Traces:
    """The numbers of a simulated run, with an entry for each settled message.

    Messages are in the order in which the center settled them.

    Attributes:
      schedule: the schedule.
      digest: 64-bit digest of the schedule and of all numbers, as 16 hexadecimal
        digits. The same arguments give the same digest in any process with the same
        versions of JAX and of the machine's code.
      center: the last state of the center, for `LocalCenter.restore` and for
        ``serve``; with fragments, a tuple with that of each fragment's center.
      rows: index of the message in the arrays of the schedule.
      seconds: simulated seconds until the center settled the message.
      steps: local steps in all messages so far. With n fragments, a local step is in a
        message of each, and counts as 1 / n, rounded down.
      samples: samples in these steps; a batch has as many as the first axis of its
        first array.
      bytes: bytes of all messages so far and of their answers.
      loss: mean loss of the message's local steps, each on its own batch.
      evaluations: values of ``evaluate``.
      evaluation_versions: the versions of the center that were evaluated.
      evaluation_seconds: simulated seconds until then.
    """

    schedule: Schedule
    digest: str
    center: CenterState | tuple[CenterState, ...]
    rows: np.ndarray
    seconds: np.ndarray
    steps: np.ndarray
    samples: np.ndarray
    bytes: np.ndarray
    loss: np.ndarray
    evaluations: np.ndarray
    evaluation_versions: np.ndarray
    evaluation_seconds: np.ndarray

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.rows)

    def __repr__(self) -> str:
        """Return a summary."""
        centers = self._centers
        version = (
            [c.version for c in centers] if len(centers) > 1 else centers[0].version
        )
        return (
            f"Traces({len(self)} messages, version {version}, "
            f"seed={self.schedule.seed}, digest={self.digest})"
        )

    @property
    def params(self) -> Any:
        """The last parameters of the center."""
        return parts.join([center.params for center in self._centers])

    @property
    def _centers(self) -> tuple[CenterState, ...]:
        center = self.center
        return (center,) if isinstance(center, CenterState) else center

    @property
    def staleness(self) -> np.ndarray:
        """The staleness of each message."""
        return self.schedule.staleness[self.rows]

    @property
    def waiting(self) -> np.ndarray:
        """The seconds that each worker of the schedule spends without local steps."""
        return self.schedule.waiting

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the loss, the staleness of messages and the waiting of workers.

        Args:
          path: the file, such as ``"run.png"``.

        Raises:
          MissingExtraError: matplotlib is not installed: ``agn_optax[plot]``.
          InvalidArgumentError: there is nothing to draw.
        """
        extras.require("plot", "matplotlib")
        from matplotlib.figure import Figure  # noqa: PLC0415 only with an extra

        if not len(self):
            raise errors.InvalidArgumentError(
                "these traces have no message that could be drawn"
            )
        figure = Figure(figsize=(12, 7), layout="constrained")
        axes = figure.subplots(2, 3)
        for axis, (label, x) in zip(axes.flat, self._axes().items(), strict=False):
            axis.plot(x, self.loss, ".", markersize=1, color="0.75")
            axis.plot(*_smooth(x, self.loss), label="mean loss of local steps")
            if len(self.evaluations):
                at = np.searchsorted(self.seconds, self.evaluation_seconds)
                axis.plot(x[at], self.evaluations, label="evaluated center")
            axis.set(xlabel=label, ylabel="loss")
            axis.locator_params(axis="x", nbins=5)
        axes[0, 0].legend()
        stale, waiting = axes[1, 0], axes[1, 1]
        stale.hist(self.staleness, bins=min(50, int(self.staleness.max()) + 1))
        stale.set(xlabel="staleness, versions", ylabel="messages")
        waiting.hist(100 * (1 - self.schedule.utilization), bins=50, range=(0, 100))
        waiting.set(xlabel="% of its time without local steps", ylabel="workers")
        axes[1, 2].set_axis_off()
        axes[1, 2].text(0, 0.5, self._text(), va="center", family="monospace")
        figure.savefig(path, dpi=120)

    def _axes(self) -> dict[str, np.ndarray]:
        return {
            "simulated seconds": self.seconds,
            "samples": self.samples,
            "bytes": self.bytes,
        }

    def _text(self) -> str:
        lines = {"digest": self.digest, **self.schedule.summary()}
        return "\n".join(
            f"{name:22} {value:.4g}"
            if isinstance(value, float)
            else f"{name:22} {value}"
            for name, value in lines.items()
        )


def _smooth(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return means of about a hundred neighbors in order."""
    parts = min(100, len(x))
    means = [
        [part.mean() for part in np.array_split(values, parts)] for values in (x, y)
    ]
    return np.array(means[0]), np.array(means[1])
