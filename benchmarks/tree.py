"""A tree of centers, which are workers of other centers, beside its prediction.

Workers exchange 40 KB with pauses in place of local steps. "predicted" is what
`agn_optax.planning` predicts of the root from this machine's constants, which are
measured first, as if all had hosts of their own, and "ratio" is the measurement
relative to it, with quartiles. At the end the root must have applied every message of
every worker once.

    python benchmarks/tree.py --levels 3
"""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import centers
import numpy as np
from measuring import Benchmark, Process, Row, spread

from agn_optax import service
from agn_optax.ops.cli import _calibrate
from agn_optax.ops.planning import Tree

SIZE = 40e3  # bytes of the model
PROCESSES = 4  # of the workers, and of the centers below the root


def exchanges_at(addresses: Sequence[str]) -> int:
    """Return how many exchanges centers have made with workers that are there."""
    found = 0
    for address in addresses:
        with service.Observer(address) as observer:
            workers = observer.status()["workers"]
            found += sum(worker["exchanges"] for worker in workers)
    return found


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
        machine = _calibrate.calibrate()
        cost = centers.plan(
            SIZE, machine, step_time=self.step, workers=workers, tree=shape
        )
        root, *sites = (self.use(Process()) for _ in range(1 + PROCESSES))
        levels = [[root.call(centers.serve, SIZE)]]
        made: list[tuple[Process, str]] = []
        for count, _ in reversed(shape.centers(workers)[:-1]):
            each = zip(itertools.cycle(sites), itertools.cycle(levels[-1]))
            for site, parent in itertools.islice(each, count):
                how: Row = {"parent": parent, "parent_period": 1}
                made.append((site, site.call(centers.serve, **how)))
            levels.append([address for _, address in made[-count:]])
        crew = [self.use(Process()) for _ in range(PROCESSES)]
        makers = centers.workers(levels[-1], "socket", SIZE, workers)
        centers.everywhere(crew, centers.hire, "", makers)
        thread = self.use(ThreadPoolExecutor(1))
        whole = (self.repeats + 2) * self.window
        work = thread.submit(centers.work, crew, "", workers, whole, self.step)
        looks = []
        for _ in range(1 + self.repeats):  # all work at the first look
            time.sleep(self.window)
            looks.append((time.monotonic(), exchanges_at(levels[0])))
        work.result()
        sent = exchanges_at(levels[-1])
        for site, address in reversed(made):  # from below, so that nothing is left
            site.call(centers.stop, address)
        with centers.connect(levels[0][0]) as connection:
            params = connection.pull().params
        arrived = {-float(value) for leaf in params for value in np.unique(leaf)}
        if arrived != {sent}:
            raise AssertionError(f"of {sent} messages the root has {arrived}")
        seconds, done = np.diff(looks, axis=0).T
        predicted = cost.levels[-1].exchanges
        row = {
            "root": "exchanges a second",
            "predicted": predicted,
            "measured": float(np.median(done / seconds)),
            **spread("ratio", done / seconds / predicted),
        }
        title = f"{workers} workers below {self.levels} levels of centers, period 1"
        self.add("tree", f"{title}; the root had all {sent} messages once", [row])


if __name__ == "__main__":
    TreeOfCenters.main()
