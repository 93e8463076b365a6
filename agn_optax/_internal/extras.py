"""Checks that modules, such as those of an extra, are installed."""

from __future__ import annotations

import importlib.util

from agn_optax import errors


def require(extra: str, *modules: str) -> None:
    """Raise unless the modules of an extra can be imported.

    Call it before the first import of one of these modules.

    Args:
      extra: the name of an extra of agn_optax, such as ``"service"``.
      modules: import names of modules that the extra installs.

    Raises:
      MissingExtraError: a module is not installed; the error has the pip command.
    """
    if missing := [name for name in modules if not is_installed(name)]:
        raise errors.MissingExtraError(
            f"{' and '.join(missing)} cannot be found: this needs the extra {extra!r}, "
            f"pip install 'agn_optax[{extra}]'",
            name=missing[0],
        )


def is_installed(name: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
