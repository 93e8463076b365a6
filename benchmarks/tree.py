"""A tree of centers, which are workers of other centers, beside its prediction.

Workers exchange 40 KB with pauses in place of local steps. "predicted" is what
`agn_optax.planning` predicts of the root from this machine's constants, which are
measured first, as if all had hosts of their own, and "ratio" is the measurement
relative to it, with quartiles.

    python benchmarks/tree.py --levels 3
"""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import centers
import numpy as np
from measuring import Benchmark, Process, Row, spread

from agn_optax import service
from agn_optax.ops.cli import _calibrate
from agn_optax.ops.planning import Tree

SIZE = 40e3  # bytes of the model
PROCESSES = 4  # of the workers, and of the centers below the root


class TreeOfCenters(Benchmark, quick="--levels 2 --step 0.05 --window 0.6"):
    """A tree of centers.

    Args:
      levels: levels of centers, each three times as many as those above.
      step: seconds of a local step.
      window: seconds in which exchanges are counted.
    """

    levels: int = 3
    step: float = 0.3
    window: float = 10.0

    def run(self) -> None:
        """Add the table."""
        shape, workers = Tree(levels=self.levels, period=1), 3**self.levels
        cluster: Row = {"step_time": self.step, "workers": workers, "tree": shape}
        cost = centers.plan(SIZE, _calibrate.calibrate(), **cluster)
        root, *sites = (self.use(Process()) for _ in range(1 + PROCESSES))
        levels = [[root.call(centers.serve, SIZE)]]
        for count, _ in reversed(shape.centers(workers)[:-1]):
            parents = itertools.islice(itertools.cycle(levels[-1]), count)
            each = zip(parents, itertools.cycle(sites), strict=False)
            levels.append([site.call(centers.serve, parent=at) for at, site in each])
        crew = [self.use(Process()) for _ in range(PROCESSES)]
        makers = centers.workers(levels[-1], "socket", SIZE, workers)
        centers.everywhere(crew, centers.hire, "", makers)
        observer = self.use(service.Observer(levels[0][0]))
        thread = self.use(ThreadPoolExecutor(1))
        whole = (self.repeats + 2) * self.window
        thread.submit(centers.work, crew, "", workers, whole, self.step)
        looks = []
        for _ in range(1 + self.repeats):  # all work at the first look
            time.sleep(self.window)
            below = observer.status()["workers"]
            done = sum(worker["exchanges"] for worker in below)
            looks.append((time.monotonic(), done))
        seconds, exchanges = np.diff(looks, axis=0).T
        predicted = cost.levels[-1].exchanges
        row = {
            "root": "exchanges a second",
            "predicted": predicted,
            "measured": float(np.median(exchanges / seconds)),
            **spread("ratio", exchanges / seconds / predicted),
        }
        title = f"{workers} workers below {self.levels} levels of centers, period 1"
        self.add("tree", title, [row])


if __name__ == "__main__":
    TreeOfCenters.main()
