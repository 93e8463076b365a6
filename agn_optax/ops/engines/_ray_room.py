"""The check whether a Ray cluster could ever hold a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def can_hold(
    nodes: Sequence[Mapping[str, float]],
    needs: Mapping[str, float],
    processes: int,
    strategy: str,
) -> bool:
    """Return whether idle nodes have room for the processes of a task.

    Args:
      nodes: resources of each node, by Ray's names.
      needs: resources that each process needs.
      processes: number of processes, which are placed together.
      strategy: their placement, a strategy of Ray's placement groups.
    """
    rooms = [_room(node, needs, processes) for node in nodes]
    if strategy == "STRICT_SPREAD":
        return sum(room > 0 for room in rooms) >= processes
    if strategy == "STRICT_PACK":
        return max(rooms, default=0) >= processes
    return sum(rooms) >= processes


def _room(node: Mapping[str, float], needs: Mapping[str, float], most: int) -> int:
    """Return how many processes a node holds; ``most`` if they need no resources."""
    # Ray counts in units of 1e-4, so that 0.3 is three times 0.1.
    times = (
        round(node.get(name, 0.0) * 1e4) // round(amount * 1e4)
        for name, amount in needs.items()
    )
    return min(times, default=most)
