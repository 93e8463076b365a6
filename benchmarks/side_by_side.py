"""Measurement of several forms in turns, within one run.

On a shared machine only ratios of neighbors in time are meaningful.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track


@dataclasses.dataclass
class Form:
    """One way to do a task, which can be run repeatedly."""

    name: str
    peer: str  # the form whose time is 1
    # Returns the seconds if it measures the time itself.
    run: Callable[[], float | None]


def machine() -> dict[str, Any]:
    """Describe the machine of the measurements."""
    packages = ("jax", "optax", "grpcio", "agn_optax")
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def take_turns(
    forms: Sequence[Form],
    repeats: int,
    console: Console,
    order: np.random.Generator | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of every run of every form, after a warm-up run.

    With ``order``, each turn has a new random order, for forms that leave work behind
    that slows down the next one.
    """
    for form in forms:
        form.run()
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    for _ in track(range(repeats), "measuring", console=console, transient=True):
        turn = range(len(forms)) if order is None else order.permutation(len(forms))
        for form in (forms[i] for i in turn):
            start = time.perf_counter()
            own = form.run()
            whole = time.perf_counter() - start
            seconds[form.name].append(whole if own is None else own)
    return seconds


def compare(
    seconds: Mapping[str, Sequence[float]], name: str, peer: str
) -> dict[str, Any]:
    """Return a form's median seconds, and its time relative to its peer's."""
    ratios = np.array(seconds[name]) / np.array(seconds[peer])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "form": name,
        "peer": peer,
        "ratio": round(float(middle), 3),
        "quartiles": [round(float(low), 3), round(float(high), 3)],
        "seconds": float(np.median(seconds[name])),
    }


def measure(
    forms: Sequence[Form],
    repeats: int,
    console: Console,
    order: np.random.Generator | None = None,
) -> dict[str, dict[str, Any]]:
    """Return median seconds and relative time of every form."""
    seconds = take_turns(forms, repeats, console, order)
    return {form.name: compare(seconds, form.name, form.peer) for form in forms}


def fastest(seconds: Mapping[str, Sequence[float]], names: Iterable[str]) -> str:
    """Return the form with the smallest median among those named."""
    return min(names, key=lambda name: float(np.median(seconds[name])))


def speed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose ratio is of speeds instead of times: more is better."""
    low, high = row["quartiles"]
    turned = {
        "ratio": round(1 / row["ratio"], 3),
        "quartiles": [round(1 / high, 3), round(1 / low, 3)],
    }
    return {**row, **turned}
