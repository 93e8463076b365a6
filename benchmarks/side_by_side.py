"""Measuring forms of one thing in turns, within one process.

On a shared machine only ratios of neighbors in time mean anything.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import track


@dataclasses.dataclass
class Form:
    """One way to do it, ready to run again and again."""

    name: str
    peer: str  # the form whose time is 1
    run: Callable[[], None]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "optax": optax.__version__,
    }


def measure(
    forms: Sequence[Form],
    repeats: int,
    console: Console,
    order: np.random.Generator | None = None,
) -> dict[str, dict[str, Any]]:
    """Of every form: seconds (the median), and its time relative to its peer's.

    With ``order``, each turn has one of its own, for forms that leave work behind which
    the next one would pay for.
    """
    for form in forms:
        form.run()
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    for _ in track(range(repeats), "measuring", console=console, transient=True):
        turn = (
            forms
            if order is None
            else [forms[i] for i in order.permutation(len(forms))]
        )
        for form in turn:
            start = time.perf_counter()
            form.run()
            seconds[form.name].append(time.perf_counter() - start)
    rows = {}
    for form in forms:
        ratios = np.array(seconds[form.name]) / np.array(seconds[form.peer])
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        rows[form.name] = {
            "form": form.name,
            "peer": form.peer,
            "ratio": round(float(middle), 3),
            "quartiles": [round(float(low), 3), round(float(high), 3)],
            "seconds": float(np.median(seconds[form.name])),
        }
    return rows


def spread(row: dict[str, Any]) -> str:
    """The quartiles, for a table of rich."""
    low, high = row["quartiles"]
    return rf"\[{low:.2f}, {high:.2f}]"
