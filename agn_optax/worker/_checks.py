"""The checks of a worker: local steps, the link to the center, and the residual.

`agn_optax._internal.notices` has their table. Numbers on the device are read once they
are computed, so that no check makes an exchange wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import jax

from agn_optax._internal import Notices, Thresholds
from agn_optax.center import Transfer
from agn_optax.rules import Rule
from agn_optax.worker._programs import Looked

# Seconds beyond what the link should take: less is noise of a busy machine, and more is
# said after a single exchange.
_LEAST_LOSS, _GREAT_LOSS = 0.1, 10.0
_LEAST_SECONDS = 1e-4  # of an exchange, as far as rates can be measured
_IN_A_ROW = 5  # slow exchanges that are needed for a notice otherwise
_GROWS_FOR = 9  # times, between ten exchanges


class Checks:
    """What goes wrong in the exchanges of one fragment.

    Args:
      worker: name of the worker.
      rule: the rule.
      thresholds: the thresholds; None for the default ones.

    Attributes:
      notices: what goes wrong now.
    """

    def __init__(self, worker: str, rule: Rule, thresholds: Thresholds | None) -> None:
        self.notices = Notices(thresholds)
        self._worker = worker
        self._needs_steps = not rule.needs_params
        # Numbers about a message, and the local steps that `exchange` has counted for
        # it; kept until the device has computed them.
        self._pending: tuple[Looked, int] | None = None
        self._empty = 0  # messages without local steps, in a row
        self._residual, self._growing = 0.0, 0  # last norm, and exchanges of growth
        self._rates: dict[str, float] = {}  # the best ones, bytes per second by address
        # By address: how much slower than expected the last exchanges were.
        self._delays: dict[str, deque[float]] = {}
        self._detours: dict[str, int] = {}  # exchanges by another link, in a row

    def begin_session(self) -> None:
        """Forget an earlier session, but not how fast its links were."""
        self._pending, self._empty, self._growing = None, 0, 0
        self.notices.forget(self._worker)

    def add(self, looked: Looked, counted: int) -> None:
        """Add a message; if an earlier one is not computed yet, that one is checked."""
        if self._pending is None:
            self._pending = looked, counted

    def after_exchange(self, transfers: Sequence[Transfer]) -> None:
        """Measure all that is known after an exchange, and log new notices."""
        self._check_links(transfers)
        if self._pending is None or not all(
            leaf.is_ready() for leaf in jax.tree.leaves(self._pending[0])
        ):
            return
        (looked, counted), self._pending = self._pending, None
        self._check_steps(int(looked.local_steps), counted)
        if looked.residual_norms is not None:
            self._check_residual(*map(float, jax.device_get(looked.residual_norms)))

    def _check_steps(self, steps: int, counted: int) -> None:
        """Compare the steps in the record with the calls of `exchange`.

        Steps of another optimizer than ``tx`` are not in the record, so nothing of them
        is sent. Loss scaling may skip some or all steps of a round, so fewer steps than
        counted are not an error.
        """
        self._empty = 0 if steps else self._empty + 1
        empty = self._empty if self._needs_steps else None
        self._measure("unrecorded_steps", empty, counted=counted)
        value: float | None
        if steps > counted:
            value, length = math.inf, "longer"
        else:
            value, length = counted / steps if steps else None, "shorter"
        self._measure(
            "miscounted_steps", value, steps=steps, counted=counted, length=length
        )

    def _check_residual(self, residual: float, contribution: float) -> None:
        self._growing = self._growing + 1 if residual > self._residual else 0
        self._residual = residual
        grows = self._growing >= _GROWS_FOR
        value = residual / contribution if contribution else math.inf
        self._measure("residual", value if grows else None, norm=residual)

    def _check_links(self, transfers: Sequence[Transfer]) -> None:
        self._check_way(transfers)
        slowest = max(map(self._delay_of, transfers), default=None)
        if slowest is None:
            return
        delay, link, seconds = slowest
        self._measure("slow_exchange", delay, link=link, seconds=seconds)

    def _delay_of(self, transfer: Transfer) -> tuple[float, str, float]:
        """Return how many times slower than expected an exchange was.

        Unless much time was lost, only several slow exchanges in a row count, because
        an exchange can be slow once on any machine.

        Returns:
          The factor, and the link and its seconds for the notice.
        """
        address, seconds = transfer.address, max(transfer.seconds, _LEAST_SECONDS)
        rate = transfer.nbytes / seconds
        expected, source = transfer.expected.rate, "as given"
        if expected is None:
            expected, source = self._rates.get(address, rate), "its best so far"
        self._rates[address] = max(rate, self._rates.get(address, rate))
        usual = transfer.nbytes / expected
        loss = seconds - usual
        last = self._delays.setdefault(address, deque(maxlen=_IN_A_ROW))
        factor = seconds / usual if loss > _LEAST_LOSS else 0.0
        last.extend([factor] * (_IN_A_ROW if loss > _GREAT_LOSS else 1))
        link = (
            f"{_way(transfer)} at {_shown(rate)}, and {_shown(expected)} was expected "
            f"({source})"
        )
        return min(last) if len(last) == _IN_A_ROW else 0.0, link, seconds

    def _check_way(self, transfers: Sequence[Transfer]) -> None:
        """Compare transports and interfaces with those that were expected."""
        found = 0, "", ""
        for transfer in transfers:
            wanted = _other_way(transfer)
            before = self._detours.get(transfer.address, 0)
            times = self._detours[transfer.address] = before + 1 if wanted else 0
            found = max(found, (times, _way(transfer), wanted))
        times, link, wanted = found
        self._measure("other_link", times, link=link, expected=wanted)

    def _measure(self, name: str, value: float | None, **values: object) -> None:
        self.notices.measure(name, value, self._worker, **values)


def _other_way(transfer: Transfer) -> str:
    """Return in which other way a transfer was expected; "" if it was in this one."""
    expected = transfer.expected
    if expected.transport not in (None, transfer.transport):
        why = f" ({transfer.detour})" if transfer.detour else ""
        return f"transport {expected.transport!r}{why}"
    # Without a network, messages do not leave this machine.
    if transfer.interface and expected.interface not in (None, transfer.interface):
        return f"interface {expected.interface!r}"
    if transfer.detour and expected.transport is None:
        return f"a direct connection ({transfer.detour})"
    return ""


def _way(transfer: Transfer) -> str:
    over = {None: "", "": " without a network"}.get(
        transfer.interface, f" over interface {transfer.interface!r}"
    )
    return f"with {transfer.address} by {transfer.transport!r}{over}"


def _shown(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"
