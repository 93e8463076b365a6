"""Objects of the user's modules, found by their names."""

from __future__ import annotations

import pathlib
import pkgutil
import sys
from typing import Any

from agn_optax import errors


def find_object(name: str, label: str) -> Any:
    """Return an object by its name, "module:object".

    Modules in the current directory are found.

    Args:
      name: the name.
      label: name of the setting that gives it, for the error.

    Raises:
      InvalidArgumentError: there is no such object.
    """
    folder = str(pathlib.Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.InvalidArgumentError(
            f'{label} must be "module:object", got {name!r}: {error} (looked for in '
            f"{folder} as well)"
        ) from error
