"""Pictures of numbers by version."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.tape import Measured

_SUFFIXES = (".png", ".svg", ".pdf")


def check(plot: pathlib.Path | None, needed: str = "", given: str | None = "") -> None:
    """Raise unless a picture can be drawn, if one is asked for.

    Args:
      plot: path of the picture; None for none.
      needed: the option that gives the numbers.
      given: its value; None if it was not given.

    Raises:
      InvalidArgumentError: the path has another suffix, or no numbers are drawn.
      MissingExtraError: matplotlib is not installed.
    """
    if plot is None:
        return
    if plot.suffix not in _SUFFIXES or not plot.parent.is_dir():
        raise errors.InvalidArgumentError(
            f"--plot must be a file that ends with {', '.join(_SUFFIXES)}, in a folder "
            f"that exists, got {plot}"
        )
    if given is None:
        raise errors.InvalidArgumentError(f"--plot needs {needed}")
    extras.require("plot", "matplotlib")


def draw(
    path: pathlib.Path,
    lines: Mapping[str, Sequence[Measured]],
    *,
    parted: float | None = None,
) -> None:
    """Draw numbers by the seconds since the center began.

    Args:
      path: path of the picture.
      lines: the numbers of each center, by its label.
      parted: time from which on only the schedule is real; None without one.

    Raises:
      DurabilityError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 an extra

    names = {n: None for rows in lines.values() for row in rows for n in row.numbers}
    figure = Figure(figsize=(6.4, 3.0 * max(1, len(names))), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(max(1, len(names)), squeeze=False)
    for axes, name in zip(grid[:, 0], names, strict=False):
        for label, rows in lines.items():
            found = [row for row in rows if name in row.numbers]
            x, y = [r.time for r in found], [r.numbers[name] for r in found]
            axes.plot(x, y, label=label or None, drawstyle="steps-post")
        if parted is not None:
            axes.axvline(parted, color="0.5", linestyle="--", label="workers part")
        if any(lines):
            axes.legend()
        axes.set(xlabel="seconds since the center began", ylabel=name)
    try:
        figure.savefig(path)
    except OSError as error:
        raise errors.DurabilityError(f"cannot write {path}: {error}") from error
