"""The limits of a center on its workers and their messages."""

from __future__ import annotations

import dataclasses

from agn_optax import errors
from agn_optax._internal import check
from agn_optax.center._message_limits import MessageLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a center on its workers and their messages.

    A served center has further limits: `agn_optax.service.Limits`.

    Args:
      max_workers: maximum number of registered workers. None for no limit.
      lease: seconds after which a worker that lost its connection is removed. Workers
        in the center's process have no connection, and are never removed.
      messages: message limits; messages that exceed one are rejected. None rejects
        messages that are not finite or far too large.

    Raises:
      InvalidTypeError: ``messages`` are not message limits.
      InvalidArgumentError: a value is out of range.

    Example:
      >>> import jax.numpy as jnp, agn_optax
      >>> limits = agn_optax.center.Limits(max_workers=1)
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.LocalCenter(rule, jnp.zeros(3), limits=limits)
      >>> session = center.join("worker-0")
      >>> try:
      ...     center.join("worker-1")
      ... except agn_optax.errors.CenterFullError as error:
      ...     print("full")
      full
    """

    max_workers: int | None = 64
    lease: float = 10.0
    messages: MessageLimits | None = None

    def __post_init__(self) -> None:
        check.whole_number(self.max_workers, "max_workers", least=1)
        check.seconds(self.lease, "lease")
        if not isinstance(self.messages, MessageLimits | None):
            raise errors.InvalidTypeError(
                f"messages must be MessageLimits(...), got {self.messages!r}"
            )
