"""The checks of a worker: local steps, the link to the center, and the residual.

`agn_optax._internal.notices` has their table. Numbers on the device are read once they
are computed, so that no check makes an exchange wait.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from agn_optax._internal import Notices, Thresholds, trees
from agn_optax.center import Answer, Transfer
from agn_optax.rules import Rule
from agn_optax.worker._programs import MessageNumbers

_log = logging.getLogger("agn_optax")

# Seconds beyond those expected of the link: fewer are noise of a busy machine, and more
# than the second number count after a single exchange.
_MIN_EXCESS, _LARGE_EXCESS = 0.1, 10.0
_LEAST_SECONDS = 1e-4  # of an exchange, as far as rates can be measured
_IN_A_ROW = 5  # slow exchanges that are needed for a notice otherwise
_GROWS_FOR = 9  # times, between ten exchanges


class ExchangeChecks:
    """Compare the exchanges of one fragment with the thresholds of a worker.

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
        # Numbers about a message, the local steps that `exchange` has counted for it,
        # and how much its codec saves; kept until the device has computed them.
        self._pending: tuple[MessageNumbers, int, float] | None = None
        self._empty = 0  # messages without local steps, in a row
        self._residual, self._growing = 0.0, 0  # last norm, and exchanges of growth
        self._rates: dict[str, float] = {}  # the best ones, bytes per second by address
        # By address: how much slower than expected the last exchanges were.
        self._factors: dict[str, deque[float]] = {}
        self._routes: dict[str, str] = {}  # the last one, by address
        self._other_routes: dict[str, int] = {}  # exchanges by one, in a row

    def begin_session(self) -> None:
        """Forget an earlier session, but not how fast its links were."""
        self._pending, self._empty, self._growing = None, 0, 0
        self.notices.forget(self._worker)
        self.notices.adopt((), is_logged=True)

    def add(self, numbers: MessageNumbers, counted: int, compression: float) -> None:
        """Add a message; if an earlier one is not computed yet, that one is checked.

        Args:
          numbers: numbers about the message.
          counted: the local steps that `exchange` has counted for it.
          compression: bytes of the parameters divided by those of the message.
        """
        if self._pending is None:
            self._pending = numbers, counted, compression

    def adopt(self, answer: Answer) -> None:
        """Take over the notices of the center, which an answer has."""
        # A center in this process, from which no bytes come, has logged them.
        self.notices.adopt(answer.notices, is_logged=answer.received is None)

    def after_exchange(self, transfers: Sequence[Transfer]) -> None:
        """Measure all that is known after an exchange, and log new notices."""
        self._check_links(transfers)
        if self._pending is None or not all(
            leaf.is_ready() for leaf in jax.tree.leaves(self._pending[0])
        ):
            return
        (numbers, counted, compression), self._pending = self._pending, None
        self._check_steps(int(trees.on_host(numbers.local_steps)), counted)
        if numbers.residual_norms is not None:
            residual, contribution = _own_norms(numbers.residual_norms)
            self._check_residual(residual, contribution * max(compression, 1.0))

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

    def _check_residual(self, residual: float, usual: float) -> None:
        """Compare a residual with the norm that its codec usually keeps.

        A codec that sends one element of n sends each after n messages, about, so that
        its residual grows up to some n contributions, and then grows no more.
        """
        self._growing = self._growing + 1 if residual > self._residual else 0
        self._residual = residual
        value = residual / usual if usual else math.inf
        is_growing = self._growing >= _GROWS_FOR
        self._measure(
            "residual", value if is_growing else None, norm=residual, usual=usual
        )

    def _check_links(self, transfers: Sequence[Transfer]) -> None:
        # A process of several may have nothing in a shard of the center.
        transfers = [transfer for transfer in transfers if transfer.nbytes]
        for transfer in transfers:
            self._log_route(transfer)
        self._check_routes(transfers)
        slowest = max(map(self._factor_of, transfers), default=None)
        if slowest is None:
            return
        factor, link, seconds = slowest
        self._measure("slow_exchange", factor, link=link, seconds=seconds)

    def _log_route(self, transfer: Transfer) -> None:
        """Log how a worker exchanges, at first and when that changes."""
        route = _route(transfer)
        if self._routes.get(transfer.address) == route:
            return
        self._routes[transfer.address] = route
        _log.info(
            "worker %r exchanges %s: %.3g MB at %s, round trip %.2g ms",
            self._worker,
            route,
            transfer.nbytes / 1e6,
            _shown(_rate(transfer)),
            1e3 * transfer.round_trip,
        )

    def _factor_of(self, transfer: Transfer) -> tuple[float, str, float]:
        """Return how many times slower than expected an exchange was.

        A rate that was given is that of the link alone, without its round trip. Unless
        much time was lost, only several slow exchanges in a row count, because an
        exchange can be slow once on any machine.

        Returns:
          The factor, and the link and its seconds for the notice.
        """
        address, seconds = transfer.address, max(transfer.seconds, _LEAST_SECONDS)
        rate = _rate(transfer)
        best = self._rates.get(address, rate)
        self._rates[address] = max(rate, best)
        expected, source = transfer.expected.rate, "as given"
        if expected is None:
            expected, source = best, "its best so far"
            usual = transfer.nbytes / expected
        else:
            usual = transfer.nbytes / expected + transfer.round_trip
        excess_seconds = seconds - usual
        last = self._factors.setdefault(address, deque(maxlen=_IN_A_ROW))
        factor = seconds / usual if excess_seconds > _MIN_EXCESS else 0.0
        last.extend([factor] * (_IN_A_ROW if excess_seconds > _LARGE_EXCESS else 1))
        link = (
            f"{_route(transfer)} at {_shown(rate)}, and {_shown(expected)} was "
            f"expected ({source})"
        )
        return min(last) if len(last) == _IN_A_ROW else 0.0, link, seconds

    def _check_routes(self, transfers: Sequence[Transfer]) -> None:
        """Compare transports and interfaces with those that were expected."""
        found = 0, "", ""
        for transfer in transfers:
            wanted = _wanted_route(transfer)
            before = self._other_routes.get(transfer.address, 0)
            times = self._other_routes[transfer.address] = before + 1 if wanted else 0
            link = f"{_route(transfer)} at {_shown(_rate(transfer))}"
            found = max(found, (times, link, wanted))
        times, link, wanted = found
        self._measure("other_link", times, link=link, expected=wanted)

    def _measure(self, name: str, value: float | None, **values: object) -> None:
        self.notices.measure(name, value, self._worker, **values)


def _own_norms(norms: jax.Array) -> tuple[float, float]:
    """Return the two norms of `MessageNumbers`, over what this process has."""
    own = norms if norms.ndim == 1 else [s.data for s in norms.addressable_shards]
    rows = np.reshape(trees.on_host(own), (-1, 2))
    residual, contribution = np.linalg.norm(rows, axis=0)
    return float(residual), float(contribution)


def _wanted_route(transfer: Transfer) -> str:
    """Return the expected route of a transfer; "" if it took that one."""
    expected = transfer.expected
    if expected.transport not in (None, transfer.transport):
        why = f" ({transfer.detour})" if transfer.detour else ""
        return f"transport {expected.transport!r}{why}"
    if transfer.interface is None and expected.interface is not None:
        return f"interface {expected.interface!r} (this system does not tell its own)"
    # Without a network, messages do not leave this machine.
    if transfer.interface and expected.interface not in (None, transfer.interface):
        return f"interface {expected.interface!r}"
    if transfer.detour and expected.transport is None:
        return f"a direct connection ({transfer.detour})"
    return ""


def _route(transfer: Transfer) -> str:
    over = {None: "", "": " without a network"}.get(
        transfer.interface, f" over interface {transfer.interface!r}"
    )
    return f"with {transfer.address} by {transfer.transport!r}{over}"


def _rate(transfer: Transfer) -> float:
    """Return the rate of a transfer, in bytes per second."""
    return transfer.nbytes / max(transfer.seconds, _LEAST_SECONDS)


def _shown(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"
