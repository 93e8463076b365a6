"""Several centers at a time: the shards of one, or all of a tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax.service import Observer

_MOST = 256  # centers, of a tree that has no end


class Seen(NamedTuple):
    """A center, as it was found at one moment.

    Attributes:
      address: by which it was asked.
      status: what it said; None if it did not.
      error: why it did not; None if it did.
      depth: of it in its tree; 0 for a root, or without a tree.
      under: address of its parent, and the name that it has among the workers there;
        None for a root.
    """

    address: str
    status: dict[str, Any] | None
    error: errors.AgnOptaxError | None
    depth: int = 0
    under: tuple[str, str] | None = None


class Centers(contextlib.AbstractContextManager["Centers"]):
    """Connections to centers, made as they are found. Also a context manager.

    Args:
      addresses: of those that are known.
      connect: makes a connection to one more.
      tree: whether parents and sites are looked for, too.
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
        # Before anything is asked: what is wrong with options is no fault of a center.
        self._observers = {address: connect(address) for address in addresses}

    def __exit__(self, *exception: object) -> None:
        for observer in self._observers.values():
            observer.close()

    def look(self) -> list[Seen]:
        """All of them, each below its parent; roots in the order of their addresses.

        Of a tree: those whose address somebody says who can be reached.
        """
        known: dict[str, Seen] = {}
        self._ask(self.addresses, known)
        if not self._is_tree:
            return [known[address] for address in self.addresses]
        placed = _Placed()
        for root in self._roots(known):
            self._place(known[root], known, placed)
        for address in self.addresses:  # those that no parent has named
            placed.add(known[address])
        return list(placed.in_order(None))

    def _roots(self, known: dict[str, Seen]) -> list[str]:
        """Of those that were given, and of all above them, who have no parent."""
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
        """A root, and all sites below it."""
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
        """All at once; adds what they said to what is known."""
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
    """Addresses of the parent, of which there are several where that is in shards."""
    said = (seen.status or {}).get("parent", "")
    return [each for each in said.split(",") if ":" in each]


class _Placed:
    """Centers that have their place in a tree, none of them twice."""

    def __init__(self) -> None:
        self._addresses: set[str] = set()
        self._lives: set[str] = set()
        self._below: dict[str | None, list[Seen]] = {}

    def add(self, seen: Seen) -> bool:
        """Whether it had none yet, by this address or another one."""
        life = (seen.status or {}).get("center", "")
        if seen.address in self._addresses or life in self._lives:
            return False
        self._addresses.add(seen.address)
        if life:  # those of earlier releases do not say which one it is
            self._lives.add(life)
        above = None if seen.under is None else seen.under[0]
        self._below.setdefault(above, []).append(seen)
        return True

    def in_order(self, above: str | None) -> Iterator[Seen]:
        """Each followed by all that is below it."""
        for seen in self._below.get(above, ()):
            yield seen
            yield from self.in_order(seen.address)
