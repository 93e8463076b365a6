"""What ``agn-optax launch`` tells the worker programs that it starts."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from agn_optax import errors, rules

RULE = "AGN_OPTAX_RULE"


class Environment(NamedTuple):
    """Who a launched program is.

    Attributes:
      address: of the center, for `connect` (``AGN_OPTAX_CENTER``).
      rank: 0, 1, ... (``AGN_OPTAX_RANK``); the chief may be rank 0.
      workers: how many there are (``AGN_OPTAX_WORKERS``).
      worker: this worker's name (``AGN_OPTAX_WORKER``).
      restarts: how often this worker failed and was started again
        (``AGN_OPTAX_RESTARTS``, 0 if there is none).
    """

    address: str
    rank: int
    workers: int
    worker: str
    restarts: int

    @property
    def rule(self) -> rules.Rule:
        """The rule of the center that `launch` has started (``AGN_OPTAX_RULE``).

        Raises:
          MissingArgumentError: it was told none, as with ``--center HOST:PORT``.
          InvalidArgumentError: the variable makes no sense.
        """
        text = os.environ.get(RULE)
        if text is None:
            raise errors.MissingArgumentError(
                f"{RULE} is not in the environment, where `agn-optax launch --rule "
                "...` has it for the center that it starts itself: make the rule here, "
                "as that of the center"
            )
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise errors.InvalidArgumentError(
                f"{RULE} must be an object of JSON, got {text!r}: {error}"
            ) from None
        if not isinstance(settings, dict):
            raise errors.InvalidArgumentError(
                f"{RULE} must be an object of JSON, got {text!r}"
            )
        return rules.named(settings)


def environment() -> Environment:
    """Who this program is, as ``agn-optax launch`` tells it by its environment.

    Returns:
      The center's address, this worker's rank and name, and how many workers there are.

    Raises:
      InvalidArgumentError: a variable is missing or makes no sense; names it.

    Example:
      >>> import os
      >>> from agn_optax import service
      >>> os.environ["AGN_OPTAX_CENTER"] = "127.0.0.1:5000"
      >>> os.environ["AGN_OPTAX_RANK"] = "1"
      >>> os.environ["AGN_OPTAX_WORKERS"] = "2"
      >>> os.environ["AGN_OPTAX_WORKER"] = "worker-1"
      >>> service.environment().worker
      'worker-1'
      >>> for name in ("CENTER", "RANK", "WORKERS", "WORKER"):
      ...     del os.environ[f"AGN_OPTAX_{name}"]
    """
    rank, workers = _number("AGN_OPTAX_RANK"), _number("AGN_OPTAX_WORKERS", least=1)
    if rank >= workers:
        raise errors.InvalidArgumentError(
            f"AGN_OPTAX_RANK must be below AGN_OPTAX_WORKERS ({workers}), got {rank}"
        )
    return Environment(
        _text("AGN_OPTAX_CENTER"),
        rank,
        workers,
        _text("AGN_OPTAX_WORKER"),
        _number("AGN_OPTAX_RESTARTS", default="0"),
    )


def _text(name: str, default: str = "") -> str:
    value = os.environ.get(name, default)
    if not value:
        raise errors.InvalidArgumentError(
            f"{name} is not in the environment: start this program with `agn-optax "
            "launch --workers N program.py`, which sets it, or set AGN_OPTAX_CENTER, "
            "AGN_OPTAX_WORKER, AGN_OPTAX_RANK and AGN_OPTAX_WORKERS yourself"
        )
    return value


def _number(name: str, *, default: str = "", least: int = 0) -> int:
    text = _text(name, default)
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise errors.InvalidArgumentError(
            f"{name} must be a whole number >= {least}, got {text!r}"
        )
    return int(text)
