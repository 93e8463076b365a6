"""What an extra installs is there, or an error says how to get it."""

from __future__ import annotations

import importlib.util

from agn_optax import errors


def require(extra: str, *modules: str) -> None:
    """Before the first import of what an extra installs.

    Args:
      extra: of agn_optax, such as ``"service"``.
      modules: that it brings, as they are imported.

    Raises:
      MissingExtraError: one of them is not installed.
    """
    if missing := [name for name in modules if not _is_there(name)]:
        raise errors.MissingExtraError(
            f"{' and '.join(missing)} cannot be found: this needs the extra {extra!r}, "
            f"pip install 'agn_optax[{extra}]'",
            name=missing[0],
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor what it is in
        return False
