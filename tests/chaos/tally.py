"""A record of a worker's steps, in a file that outlives its process.

A local step moves one element of the center, its slot, by one. Before the step is sent
the file records that the center may have it, and after its answer that it must.
"""

import numpy as np

_NUMBERS = ["received", "lost", "backwards", "rejected", "made"]


class Tally:
    """The record of one worker, over all of its sessions.

    Args:
      path: path of the file.
      slots: number of elements that only this worker moves.

    Attributes:
      least, most: for each slot, the least and the greatest possible number of moves.
    """

    def __init__(self, path, slots):
        size = len(_NUMBERS) + 2 * slots
        mode = "r+" if path.exists() else "w+"
        self._all = np.memmap(path, np.int64, mode, shape=(size,))
        self.least, self.most = self._all[len(_NUMBERS) :].reshape(2, slots)

    def add(self, name, count=1):
        """Add to a counter: exchanges ``received`` or ``rejected``, ``lost`` centers,
        or versions that went ``backwards``."""
        self._all[_NUMBERS.index(name)] += count

    def begin(self, number, slots):
        """Record that step ``number`` moves these slots; a repetition counts once."""
        if number >= self["made"]:
            np.add.at(self.most, slots, 1)
            self._all[_NUMBERS.index("made")] = number + 1

    def settle(self, slots):
        """Record that the center has the steps that moved these slots."""
        np.add.at(self.least, slots, 1)

    def settle_first(self, count):
        """Record that the center has the first steps, one slot each in turn."""
        np.maximum(self.least, in_turn(count, len(self.least)), out=self.least)

    def __getitem__(self, name):
        return int(self._all[_NUMBERS.index(name)])

    def steps(self):
        return int(self.most.sum())


def in_turn(count, slots):
    """Return the moves of each slot after ``count`` steps that move one in turn."""
    return count // slots + (np.arange(slots) < count % slots)
