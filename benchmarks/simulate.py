"""The speed of the simulator.

The table "speed" has the events of a second on one core, as the simulator counts them
("events"), and as the times that it records ("recorded times").

The other table is of simulated training: a network of two layers, batches of 8 and
four local steps an exchange, with adam at the workers. Its memory is the process's
largest, so each row has a process of its own. Minutes and seconds of the processor are
those of all threads. Compilation is shown apart.

`reality.py` compares simulated runs with real ones.

    python benchmarks/simulate.py
    python benchmarks/simulate.py --sizes 100 10000 --exchanges 0 0
"""

import resource
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import Benchmark, Process, Row

import agn_optax
from agn_optax import simulate
from agn_optax.center import BoundedStaleness, Synchronous

TIMES = ("began", "sent", "arrived", "settled", "received", "adopted")
MODES: dict[str, Any] = {
    "asynchronous": {},
    "overlap": {"overlap": True},
    "synchronous": {"mode": Synchronous()},
    "quorum": {"mode": "quorum"},
    "bounded": {"mode": BoundedStaleness(rounds=2)},
}
TRAININGS = ((100, 10_000), (1000, 100_000))  # workers and parameters


def train(workers: int, parameters: int, exchanges: int) -> Row:
    """Return the row of a simulated training."""
    hidden = parameters // 100 - 1
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w": 0.1 * jax.random.normal(keys[0], (100, hidden)),
        "v": 0.1 * jax.random.normal(keys[1], (100,)),
    }

    rule = agn_optax.rules.agn(optax.sgd(0.3 / workers))
    inner = optax.adam(1e-3)

    def loss(params: Any, batch: Any) -> Any:
        out = jnp.tanh(batch @ params["w"]).mean(axis=1) + batch @ params["v"]
        return jnp.mean((out - jnp.sin(batch[:, 0])) ** 2)

    def data(worker: Any, step: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(worker), step)
        return jax.random.normal(key, (8, 100))

    def execute(exchanges: int) -> tuple[float, float]:
        made = simulate.schedule(
            simulate.Cluster(workers=workers, speed=simulate.LogNormal(0.1, 0.2)),
            period=4,
            rule=rule,
            params=params,
            exchanges=exchanges,
        )
        begun = time.process_time(), time.perf_counter()
        simulate.execute(made, inner, loss, data, params)
        return time.process_time() - begun[0], time.perf_counter() - begun[1]

    first = max(64, exchanges // 10)
    compiled, _ = execute(first)  # later executions use its programs
    busy, passed = execute(exchanges)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "workers": workers,
        "parameters": parameters,
        "exchanges": exchanges,
        "a minute of the processor": 60 * exchanges / busy,
        "a minute": 60 * exchanges / passed,
        "compilation, s": compiled - first * busy / exchanges,
        "largest memory, GB": largest * 1024 / 1e9,
    }


class Simulate(Benchmark, quick="--sizes 10 --modes asynchronous --exchanges 100 0"):
    """Simulations.

    Args:
      sizes: numbers of workers whose simulation is timed.
      modes: the modes in which it is.
      exchanges: exchanges of the simulated trainings in `TRAININGS`; 0 for none.
    """

    sizes: Sequence[int] = (100, 10_000)
    modes: Sequence[str] = tuple(MODES)
    exchanges: Sequence[int] = (50_000, 5_000)
    repeats = 3

    def run(self) -> None:
        """Time the simulator."""
        if self.sizes:
            self.add("speed", "the simulator", [*map(self.time, self.cases())])
        sizes = zip(TRAININGS, self.exchanges, strict=True)
        rows: list[Row] = []
        for size, count in sizes:
            if count:
                with Process() as own:
                    rows.append(own.call(train, *size, count))
        if rows:
            self.add("training", "simulated training", rows)

    def cases(self) -> list[tuple[int, str]]:
        """Return the simulations to be timed."""
        return [(size, mode) for size in self.sizes for mode in self.modes]

    def time(self, case: tuple[int, str]) -> Row:
        """Return the row of a simulation."""
        workers, mode = case
        arguments = dict(MODES[mode])
        if arguments.get("mode") == "quorum":
            arguments["mode"] = Synchronous(max(1, workers * 3 // 4), grace=0.1)
        cluster = simulate.Cluster(
            workers=workers,
            speed=simulate.LogNormal(0.1, 0.2),
            link=simulate.Link(latency=0.02, bandwidth=1.25e9),
            center=simulate.CenterHost(seconds=1e-5),
        )
        exchanges = max(20_000, 10 * workers)
        rates = []
        for seed in range(self.repeats):
            begun = time.process_time()
            found = simulate.schedule(
                cluster, period=10, exchanges=exchanges, seed=seed, **arguments
            )
            seconds = time.process_time() - begun
            times = sum(int(np.sum(getattr(found, name) >= 0)) for name in TIMES)
            rates.append(
                (found.events / seconds, times / seconds, len(found) / seconds)
            )
        events, recorded, whole = np.max(rates, axis=0)
        return {
            "mode": mode,
            "workers": workers,
            "exchanges": exchanges,
            "exchanges a second": float(whole),
            "events": float(events),
            "recorded times": float(recorded),
        }


if __name__ == "__main__":
    Simulate.main()
