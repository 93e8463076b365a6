"""Versions of Python and of the dependencies, which both ends should have in common."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "grpcio")


@functools.cache
def installed() -> dict[str, str]:
    """Return versions by name, without packages that are not installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
