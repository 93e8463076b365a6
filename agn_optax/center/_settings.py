"""The settings of every center, for `LocalCenter` and for servers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from agn_optax import errors
from agn_optax._internal import Thresholds, check, combinations, notices
from agn_optax.center._ledger import Ledger
from agn_optax.center._limits import Limits
from agn_optax.center._modes import Asynchronous, Mode
from agn_optax.center.durability import Journal
from agn_optax.rules import Rule, check_outside, check_rule

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class CenterSettings:
    """The arguments of `LocalCenter`.

    Args:
      rule: a rule of `agn_optax.rules`; all workers use the same rule. A rule that
        combines messages by their mean, such as ``average`` and ``diloco``, needs
        ``mode=Synchronous()``: in the other modes n workers move the center n times as
        far, unless its optimizer has 1/n of the learning rate; a notice says so.
      params: the first parameters, which are copied; None if a chief will `initialize`
        them.
      mode: when messages are applied: `agn_optax.center.Asynchronous` (the default),
        `BoundedStaleness` or `Synchronous`; None for the default.
      barrier: number of workers that must have joined before any of them starts.
      durability: `agn_optax.center.Journal`, with a directory in which the center
        outlives its process. If the directory has a center, that center and its
        workers continue, and the values of ``params`` are not used. None keeps the
        center in memory.
      dtype: floating dtype of the center and its optimizer; None keeps that of the
        first parameters. With bfloat16 parameters, float32 makes the center a master
        copy.
      device: platform whose first device holds the center and runs its optimizer, such
        as ``"cpu"`` or ``"gpu"``. It may also be a `jax.Device`. None leaves the center
        where its first parameters are.
      limits: `agn_optax.center.Limits` on workers and their messages; None for
        ``Limits()``, which rejects messages that are not finite. To measure a message,
        the center waits for the device at every exchange. With
        ``Limits(messages=MessageLimits(nonfinite=False))`` it applies all messages, and
        waits for none.
      thresholds: `agn_optax.center.Thresholds` from which the log and the status say
        that training goes wrong; None for ``Thresholds()``.
    """

    rule: Rule
    params: PyTree = None
    _: dataclasses.KW_ONLY
    mode: Mode | None = Asynchronous()  # noqa: RUF009 it is immutable
    barrier: int = 0
    durability: Journal | None = None
    dtype: Any = None
    device: Any = None
    limits: Limits | None = None
    thresholds: Thresholds | None = None

    def __post_init__(self) -> None:
        check_rule(self.rule)
        check_outside(self.rule.center)
        if not isinstance(self.mode, Mode | None):
            raise errors.InvalidTypeError(
                "mode must be Asynchronous(), BoundedStaleness(...) or "
                f"Synchronous(...), got {self.mode!r}"
            )
        check.float_dtype(self.dtype, "dtype")
        self._check_limits()
        notices.check_thresholds(self.thresholds)
        check.whole_number(self.barrier, "barrier", least=0, optional=False)
        max_workers = (self.limits or Limits()).max_workers
        if max_workers is not None and self.barrier > max_workers:
            raise errors.InvalidArgumentError(
                f"barrier must be at most max_workers, {max_workers}, or no worker "
                f"ever starts; got {self.barrier}"
            )

    def _check_limits(self) -> None:
        # A subclass, `service.Limits`, has further limits, which would be ignored.
        if self.limits is not None and type(self.limits) is not Limits:
            raise errors.InvalidTypeError(
                "limits must be agn_optax.center.Limits(...), not those of a served "
                f"center, got {self.limits!r}"
            )

    def make_ledger(self) -> Ledger:
        """Return a ledger of no workers."""
        mode = self.mode or CenterSettings.mode
        assert mode is not None
        return Ledger(mode, limits=self.limits or Limits(), barrier=self.barrier)

    def find_device(self) -> Any:
        """Return the center's device; None if it depends on the parameters.

        Raises:
          InvalidArgumentError: this process has no such device.
        """
        if not isinstance(self.device, str):
            return self.device
        try:
            return jax.devices(self.device)[0]
        except RuntimeError as error:
            raise errors.InvalidArgumentError(
                "device must be a jax.Device or the name of a platform, got "
                f"{self.device!r} ({error})"
            ) from None


def check_combine(rule: Rule, mode: Mode) -> None:
    """Check that a center with this mode can combine messages as the rule does.

    Raises:
      InvalidArgumentError: the rule combines rounds, and the mode has none.
    """
    if not rule.is_summed and not mode.combines:
        combinations.reject(
            "a robust combine",
            "a center that is not synchronous",
            f"rule {rule.name!r} with {rule.combine}, mode={mode}",
        )
    if rule.weight is not None and not mode.combines:
        combinations.reject(
            "a rule with a weight",
            "a center that is not synchronous",
            f"rule {rule.name!r}, mode={mode}",
        )
