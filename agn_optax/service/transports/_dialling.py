"""Which transport a worker's exchanges take."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agn_optax import errors
from agn_optax.service import center_pb2 as pb
from agn_optax.service.transports import TRANSPORTS, Link, Target

_log = logging.getLogger("agn_optax")


def check(given: Any) -> tuple[str, ...]:
    """``given`` if they are names of transports, in any order; all for None.

    Raises:
      InvalidArgumentError: they are not.
    """
    known = tuple(transport.name for transport in TRANSPORTS)
    if given is None:
        return known
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise errors.InvalidTypeError(
            f"transports must be a list of names such as {list(known)}, got {given!r}"
        )
    given = tuple(given)
    if not given or not set(given) <= set(known) or len(set(given)) < len(given):
        raise errors.InvalidArgumentError(
            f"transports must be some of {', '.join(known)}, each once, got {given}"
        )
    return given


class Dialler:
    """Finds a way to a center: the first of some transports that works.

    What did not work while another transport did is not tried again in this life of
    the center.

    Args:
      names: of the transports, the preferred one first.
      target: the center, without an offer.
    """

    def __init__(self, names: Sequence[str], target: Target) -> None:
        known = {transport.name: transport for transport in TRANSPORTS}
        self._transports = [known[name] for name in names]
        self._target = target
        self._offers: dict[str, pb.Offer] = {}
        self._useless: set[str] = set()
        # By links, what did not work before them.
        self._failed: weakref.WeakKeyDictionary[Link, set[str]]
        self._failed = weakref.WeakKeyDictionary()

    def learn(self, offers: Iterable[pb.Offer]) -> None:
        """What the center says of its transports now."""
        new = {offer.transport: offer for offer in offers}
        if new != self._offers:  # it was started anew
            self._offers, self._useless = new, set()

    def dial(self, ask: Callable[[], None]) -> Link:
        """A link to the center.

        Args:
          ask: asks the center what it offers, and has it learnt.

        Raises:
          CenterUnreachableError: none of the transports works.
        """
        failed: dict[str, OSError] = {}
        has_asked = False
        left = [each for each in self._transports if each.name not in self._useless]
        while left:
            transport = left.pop(0)
            offer = self._offers.get(transport.name)
            try:
                link = transport.dial(self._target._replace(offer=offer))
            except OSError as error:
                failed[transport.name] = error
            else:
                if failed:
                    _log.info("%s: not by %s", self._target.address, failed)
                self._failed[link] = set(failed)
                return link
            if not has_asked:  # it may have been started anew, somewhere else
                has_asked, known = True, self._offers
                ask()
                if self._offers is not known:
                    failed, left = {}, list(self._transports)
        why = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise errors.CenterUnreachableError(
            f"no way to the center at {self._target.address}: "
            f"{why or 'none of the transports works there'}"
        )

    def works(self, link: Link) -> None:
        """A worker has joined over a link; what failed before is not tried again."""
        self._useless |= self._failed.pop(link, set())
