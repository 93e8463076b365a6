"""Versions of the dependencies that affect rounding, to compare both ends."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def installed() -> dict[str, str]:
    """Return versions by name."""
    return {name: metadata.version(name) for name in ("jax", "jaxlib", "optax")}
