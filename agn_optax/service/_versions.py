"""What runs here beside agn_optax: two ends should have the same."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "grpcio")


@functools.cache
def installed() -> dict[str, str]:
    """Versions by name; those that are not installed as packages are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
