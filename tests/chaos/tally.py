"""What a worker has done, in a file that outlives its process.

A local step moves one element of the center, its slot, by one. Before the step is sent
the file says that it may be in the center, and after the answer that it must be.
"""

import numpy as np

_NUMBERS = ["landed", "lost", "backwards"]


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

    def add(self, name):
        """One more exchange that ``landed``, center that was ``lost``, or version that
        came ``backwards``."""
        self._all[_NUMBERS.index(name)] += 1

    def __getitem__(self, name):
        return int(self._all[_NUMBERS.index(name)])

    def steps(self):
        return int(self.most.sum())
