"""Cost of an exchange by size and by number of leaves, and its fit by a line.

"ratio" is relative to the first model, and "µs a leaf" the time of each further leaf.
With several sizes, "of the line" is relative to a straight line through the
milliseconds (fitted to relative errors, so that small sizes count as much as large
ones).

    python benchmarks/size.py
    python benchmarks/size.py --sizes 4e7 --leaves 1 10 100 1000 10000
    python benchmarks/size.py --sizes 4e9 --leaves 4 --transport socket
"""

import functools
import itertools
import time
from collections.abc import Sequence

import centers
import numpy as np
from measuring import Benchmark, Form, Process, Row


class Size(Benchmark, quick="--sizes 1e3 1e4 1e5 --leaves 1 8"):
    """Cost against size and leaves.

    Args:
      sizes: bytes of the models.
      leaves: leaves of the models of each size.
      transport: "grpc", "socket" or "memory".
    """

    sizes: Sequence[float] = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
    leaves: Sequence[int] = (1,)
    transport: str = "memory"

    def run(self) -> None:
        """Measure all models in turns."""
        process = self.use(Process())
        models = list(itertools.product(self.sizes, self.leaves))
        forms, begun = [], []
        for size, leaves in models:
            start = time.perf_counter()
            address = process.call(centers.serve, size, leaves)
            # The first exchange of very many leaves compiles for longer than the
            # default timeout.
            how: Row = {"stack": self.stack, "timeout": 600.0}
            run = centers.worker(address, self.transport, size, leaves, **how)
            run()
            begun.append(time.perf_counter() - start)
            # One exchange of a small model would be mostly noise.
            some = functools.partial(centers.seconds_of_one, run, 0.02)
            forms.append(Form(f"{size:,.0f}, {leaves}", "", some))
        forms = [form._replace(peer=forms[0].name) for form in forms]
        rows = self.turns(forms).rows(forms)
        times = np.array([row["milliseconds"] for row in rows])
        line = np.array([(1.0, size) for size, _ in models])
        fit, *_ = np.linalg.lstsq(line / times[:, None], np.ones(len(rows)), rcond=None)
        for i, (size, leaves) in enumerate(models):
            more, added = times[i] - times[0], leaves - self.leaves[0]
            rows[i] |= {
                "bytes": size,
                "leaves": leaves,
                "GB/s": 2e-6 * size / times[i],
                "µs_a_leaf": 1e3 * more / added if added else None,
                "of_the_line": times[i] / (line[i] @ fit),
                "first_exchange_s": begun[i],
            }
        title = f"an exchange over {self.transport}; line: {fit[0]:.3g} ms and "
        self.add("size", f"{title}{1e6 * fit[1]:.3g} ns a byte", rows)


if __name__ == "__main__":
    Size.main()
