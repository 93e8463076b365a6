"""The versions, processor and flags with which a center computes its numbers."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import platform

import jax
import numpy as np
import optax

from agn_optax._version import __version__


@functools.cache
def stack() -> dict[str, str]:
    """Return what decides the last bits of a center's numbers.

    Another center that applies the same messages on an equal stack computes the same
    bits.
    """
    return {
        "agn_optax": __version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "optax": optax.__version__,
        "numpy": np.__version__,
        "platform": jax.default_backend(),
        "processor": _processor(),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    """Return the name of the processor, or of its architecture if that is unknown."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()
