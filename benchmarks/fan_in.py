"""Total exchanges/s of many workers at one center, and the slowest worker's share.

Workers are threads of four client processes, each with its own connection, and exchange
for a while, as fast as they can or with pauses in place of local steps. The numbers of
workers take turns. "speed" is the total relative to that of the first number, "of peak"
relative to the best number of workers, and "slowest" the share of the slowest worker
relative to the mean. "raw TCP" has as many sockets that send, add and send back, each
with its own numbers. Where each worker has a process of its own, there are also bare
gRPC streams.

    python benchmarks/fan_in.py
    python benchmarks/fan_in.py --megabytes 0.04 --workers 1 4
    python benchmarks/fan_in.py --megabytes 0.04 --workers 200 --pause 0.5
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import centers
import numpy as np
import peers
from measuring import Benchmark, Form, Process, Run

PROCESSES = 4


class FanIn(Benchmark, quick="--megabytes 0.04 --workers 1 2 --window 0.1"):
    """Many workers at one center.

    Args:
      megabytes: size of the model.
      workers: numbers of workers.
      transports: transports of the exchanges.
      pause: seconds before each exchange.
      window: seconds in which exchanges are counted.
    """

    megabytes: float = 4.0
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    transports: Sequence[str] = centers.TRANSPORTS
    pause: float = 0.0
    window: float = 1.0

    def run(self) -> None:
        """Measure all transports and numbers of workers in turns."""
        size, most = round(1e6 * self.megabytes), max(self.workers)
        center, peer = self.use(Process()), self.use(Process())
        teams: dict[str, list[Callable[..., Run]]] = {}
        for transport in self.transports:
            address = center.call(centers.serve, size)
            teams[transport] = centers.workers([address], transport, size, most)
        teams["raw TCP"] = [peers.raw_socket(peer, size) for _ in range(most)]
        if most <= PROCESSES:
            stream = peer.call(peers.serve_grpc, size)
            for name, client in peers.CLIENTS.items():
                teams[name] = [functools.partial(client, stream, size)] * most
        crew = [self.use(Process()) for _ in range(PROCESSES)]
        done: dict[str, list[list[float]]] = defaultdict(list)  # [runs][workers]

        def count(name: str, team: str, workers: int) -> float:
            exchanges = centers.work(crew, team, workers, self.window, self.pause)
            done[name].append(exchanges)
            return self.window / sum(exchanges)

        forms: dict[str, list[Form]] = defaultdict(list)
        for team, makers in teams.items():
            centers.everywhere(crew, centers.hire, team, makers)
            for n in self.workers:
                run = functools.partial(count, f"{team}, {n}", team, n)
                first = f"{team}, {self.workers[0]}"
                forms[team].append(Form(f"{team}, {n}", first, run))
        times = self.turns(
            [form for team_forms in forms.values() for form in team_forms]
        )
        for team, team_forms in forms.items():
            rows = times.rows(team_forms, size)
            peak = max(row["a_second"] for row in rows)
            for row, n in zip(rows, self.workers, strict=True):
                shares = np.sum(done[row["form"]][1:], axis=0)  # without the warm-up
                row |= {"workers": n, "of_peak": round(row["a_second"] / peak, 3)}
                row["slowest"] = round(float(shares.min() / shares.mean()), 3)
            key = f"{self.megabytes:g} MB, {team}"
            self.add(key, f"{key}: exchanges of all workers", rows)


if __name__ == "__main__":
    FanIn.main()
