"""Connections to several centers: the shards of one center, or a whole tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax.service import Observer

_MOST = 256  # centers, so that the walk through a tree ends


class Seen(NamedTuple):
    """The status of a center at one moment, or the error of asking for it.

    Attributes:
      address: the address that was asked.
      status: the center's status; None if it did not answer.
      error: why it did not answer; None if it did.
      depth: depth of the center in its tree; 0 for a root, or without a tree.
      under: address of the center's parent, and the center's name among the parent's
        workers; None for a root.
    """

    address: str
    status: dict[str, Any] | None
    error: errors.AgnOptaxError | None
    depth: int = 0
    under: tuple[str, str] | None = None

    @property
    def parents(self) -> list[str]:
        """The addresses of the center's parent: several if the parent is sharded."""
        parent = (self.status or {}).get("parent", "")
        return [address for address in parent.split(",") if ":" in address]

    @property
    def sites(self) -> dict[str, str]:
        """The names of workers that are centers themselves, by address."""
        workers = (self.status or {}).get("workers", ())
        return {w["serves_at"]: w["name"] for w in workers if w["serves_at"]}


class Centers(contextlib.AbstractContextManager["Centers"]):
    """Connections to centers, opened as centers are found. Also a context manager.

    Args:
      addresses: addresses of the known centers.
      connect: opens a connection to an address.
      tree: whether to look for parents and sites, too.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], Observer],
        *,
        tree: bool = False,
    ) -> None:
        self.addresses = list(addresses)
        self._connect = connect
        self._is_tree = tree
        # Opened here and not in `_one`: a bad option is an error of the command, and
        # is not reported as the error of a center.
        self._observers = {address: connect(address) for address in addresses}

    def __exit__(self, *exception: object) -> None:
        for observer in self._observers.values():
            observer.close()

    def look(self) -> list[Seen]:
        """Return the status of every center, each below its parent.

        Roots come in the order of the addresses. A tree has those centers whose address
        is given, or reported by a center that can be reached.
        """
        known = self._ask(self.addresses, 0)
        if not self._is_tree:
            return list(known.values())
        new = list(known)
        while new:
            near = [a for at in new for a in (*known[at].parents, *known[at].sites)]
            new = [address for address in dict.fromkeys(near) if address not in known]
            known |= self._ask(new, len(known))
        below = {site for seen in known.values() for site in seen.sites}
        roots = [
            seen.address
            for seen in known.values()
            if not (seen.parents if seen.status else seen.address in below)
        ]
        placed: dict[str, Seen] = {}
        for address in (*roots, *self.addresses):  # the latter may have no known parent
            _place(known[address], known, placed)
        return list(placed.values())

    def _ask(self, addresses: list[str], count: int) -> dict[str, Seen]:
        """Ask centers in parallel, unless ``count`` others have been asked already."""
        many = errors.CenterUnreachableError(f"there are more than {_MOST} centers")
        replies = {address: Seen(address, None, many) for address in addresses}
        asked = addresses[: max(0, _MOST - count)]
        with ThreadPoolExecutor(_MOST) as pool:
            return replies | dict(zip(asked, pool.map(self._one, asked), strict=True))

    def _one(self, address: str) -> Seen:
        try:
            if address not in self._observers:
                self._observers[address] = self._connect(address)
            return Seen(address, self._observers[address].status(), None)
        except errors.AgnOptaxError as error:
            return Seen(address, None, error)


def _place(seen: Seen, known: dict[str, Seen], placed: dict[str, Seen]) -> None:
    """Place a center and then its sites, each once even if it has several addresses."""
    center = (seen.status or {}).get("center") or seen.address
    if center in placed:
        return
    placed[center] = seen
    for site, name in seen.sites.items():
        under = seen.address, name
        _place(known[site]._replace(depth=seen.depth + 1, under=under), known, placed)
