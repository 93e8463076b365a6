"""What a worker has done, in a file that outlives its process.

A local step moves one element of the center, its slot, by one. Before the step is sent
the file says that it may be in the center, and once that is certain that it must be.
"""

import numpy as np

_NUMBERS = ["landed", "lost", "backwards", "refused", "made"]


class Tally:
    """Of one worker, through all of its lives.

    Args:
      path: of the file.
      slots: elements that the worker has for itself.

    Attributes:
      least, most: by slot, how often it has been moved at least, and at most.
    """

    def __init__(self, path, slots):
        size = len(_NUMBERS) + 2 * slots
        mode = "r+" if path.exists() else "w+"
        self._all = np.memmap(path, np.int64, mode, shape=(size,))
        self.least, self.most = self._all[len(_NUMBERS) :].reshape(2, slots)

    def add(self, name, count=1):
        """So many more exchanges that ``landed`` or were ``refused``, centers that were
        ``lost``, or versions that came ``backwards``."""
        self._all[_NUMBERS.index(name)] += count

    def begin(self, number, slots):
        """Step ``number`` moves these slots; made again, it is the same step."""
        if number >= self["made"]:
            np.add.at(self.most, slots, 1)
            self._all[_NUMBERS.index("made")] = number + 1

    def settle(self, slots):
        """Steps that moved these are in the center for certain."""
        np.add.at(self.least, slots, 1)

    def settle_first(self, count):
        """The first steps, one slot each in turn, are in the center for certain."""
        np.maximum(self.least, in_turn(count, len(self.least)), out=self.least)

    def __getitem__(self, name):
        return int(self._all[_NUMBERS.index(name)])

    def steps(self):
        return int(self.most.sum())


def in_turn(count, slots):
    """How often each slot has been moved by so many steps, which move one in turn."""
    return count // slots + (np.arange(slots) < count % slots)
