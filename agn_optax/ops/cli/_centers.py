"""Connections to several centers: the shards of one center, or a whole tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
        known: dict[str, Seen] = {}
        self._ask(self.addresses, known)
        if not self._is_tree:
            return [known[address] for address in self.addresses]
        placed = _Placed()
        for root in self._roots(known):
            self._place(known[root], known, placed)
        for address in self.addresses:  # centers that no parent has reported
            placed.add(known[address])
        return list(placed.in_order(None))

    def _roots(self, known: dict[str, Seen]) -> list[str]:
        """Return the centers without a parent among the given ones and those above."""
        roots: dict[str, None] = {}
        climbed: set[str] = set()
        level = list(self.addresses)
        while level:
            climbed.update(level)
            above: dict[str, None] = {}
            for address in level:
                parents = _parents(known[address])
                (above if parents else roots).update(
                    dict.fromkeys(parents or [address])
                )
            level = [address for address in above if address not in climbed]
            self._ask([address for address in level if address not in known], known)
        return list(roots)

    def _place(self, root: Seen, known: dict[str, Seen], placed: _Placed) -> None:
        """Place a root and all sites below it."""
        level = [root] if placed.add(root) else []
        while level:
            named = {
                site: (parent, worker["name"])
                for parent in level
                for worker in (parent.status or {}).get("workers", ())
                if (site := worker["serves_at"])
            }
            self._ask([site for site in named if site not in known], known)
            level = []
            for site, (parent, name) in named.items():
                under = parent.address, name
                own = known[site]._replace(depth=parent.depth + 1, under=under)
                if placed.add(own):
                    level.append(own)

    def _ask(self, addresses: Sequence[str], known: dict[str, Seen]) -> None:
        """Ask centers in parallel, and add their replies to ``known``."""
        asked = list(addresses)[: max(0, _MOST - len(known))]
        for address in addresses[len(asked) :]:
            many = errors.CenterUnreachableError(f"there are more than {_MOST} centers")
            known[address] = Seen(address, None, many)
        if asked:
            with ThreadPoolExecutor(len(asked)) as pool:
                known.update(zip(asked, pool.map(self._one, asked), strict=True))

    def _one(self, address: str) -> Seen:
        try:
            if address not in self._observers:
                self._observers[address] = self._connect(address)
            return Seen(address, self._observers[address].status(), None)
        except errors.AgnOptaxError as error:
            return Seen(address, None, error)


def _parents(seen: Seen) -> list[str]:
    """Return the addresses of a center's parent: several if the parent is sharded."""
    said = (seen.status or {}).get("parent", "")
    return [each for each in said.split(",") if ":" in each]


class _Placed:
    """The centers that have been placed in a tree, each of them once."""

    def __init__(self) -> None:
        self._addresses: set[str] = set()
        self._lives: set[str] = set()
        self._below: dict[str | None, list[Seen]] = {}

    def add(self, seen: Seen) -> bool:
        """Place a center; return False if it is placed already, under any address."""
        life = (seen.status or {}).get("center", "")
        if seen.address in self._addresses or life in self._lives:
            return False
        self._addresses.add(seen.address)
        if life:  # empty if the center did not answer
            self._lives.add(life)
        above = None if seen.under is None else seen.under[0]
        self._below.setdefault(above, []).append(seen)
        return True

    def in_order(self, above: str | None) -> Iterator[Seen]:
        """Yield the centers below an address, each followed by those below it."""
        for seen in self._below.get(above, ()):
            yield seen
            yield from self.in_order(seen.address)
