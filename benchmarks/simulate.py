"""Simulated runs against real ones, and the speed of the simulator.

The real runs have a center and workers in processes of their own. A local step is a
computation and a pause up to the step's time. The simulator gets the recorded times of
the steps, as from a tape, and the bandwidth of the link. Two numbers are measured
before the run: the seconds of a call that exchanges, of one worker alone, and how many
exchanges a second the center makes for all workers together.

"exchanges a second" are the sum over the workers of one by the mean time of their
rounds. "staleness" is the mean of all messages, and "distance" half of the sum of the
differences between the two histograms of staleness, as fractions. "waiting" is the
fraction of the workers' time that is not in local steps. The error of waiting is in
percent of the whole time.

The slow links are paced by the kernel, for each worker's connection alone; their rate
is measured with one worker. The shared link is a proxy, which passes on the bytes in
the order of their arrival, and so one message after another, while the simulator's
transfers share it fairly.

The table "speed" has the events of a second on one core, as the simulator counts them
("events"), and as the times that it records ("recorded times").

The last table is of simulated training: a network of two layers, batches of 8 and
four local steps an exchange, with adam at the workers. Its memory is the process's
largest, so each row has a process of its own. Minutes and seconds of the processor are
those of all threads. Compilation is shown apart.

    python benchmarks/simulate.py
    python benchmarks/simulate.py --only unequal --window 60
    python benchmarks/simulate.py --only --sizes 100 10000
"""

import contextlib
import resource
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import centers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers.network import Network
from measuring import Benchmark, Process, Row

import agn_optax
from agn_optax import simulate
from agn_optax.center import Asynchronous, BoundedStaleness, Mode, Synchronous
from examples.pacing import pace

TIMES = ("began", "sent", "arrived", "settled", "received", "adopted")
PERIOD = 10
WARM_UP = 3  # rounds before all measurements
CALIBRATION = 4.0  # s, for each measurement before the window
MODES: dict[str, Any] = {
    "asynchronous": {},
    "overlap": {"overlap": True},
    "synchronous": {"mode": Synchronous()},
    "quorum": {"mode": "quorum"},
    "bounded": {"mode": BoundedStaleness(rounds=2)},
}
TRAININGS = ((100, 10_000), (1000, 100_000))  # workers and parameters


class Case(NamedTuple):
    """A run: seconds of each worker's steps, bytes, and bytes per second of links."""

    steps: Sequence[float]
    size: int = 40_000
    bandwidth: float | None = None  # of each worker's link
    shared: float | None = None  # of the center's link
    mode: Mode | None = None


CASES = {
    "equal": Case([0.030] * 4),
    "unequal": Case([0.021, 0.033, 0.047, 0.088]),
    "slow links": Case([0.021, 0.033, 0.047, 0.088], 2_000_000, 20e6),
    "shared link": Case([0.021, 0.033, 0.047, 0.088], 400_000, shared=4e6),
    "quorum": Case([0.021, 0.033, 0.047, 0.088], mode=Synchronous(3, grace=0.1)),
}


class Rounds(NamedTuple):
    """What a worker did: numbers of each round."""

    staleness: list[int]
    steps: list[float]  # seconds of local steps
    waited: list[float]  # seconds in the call that exchanged


class Calibration(NamedTuple):
    """What is measured before a run."""

    alone: float  # seconds of a call that exchanges, of one worker alone
    paced: float  # the same over a slow link
    together: float  # exchanges a second of all workers


_served: dict[str, Any] = {}  # in the process of the center


def serve(case: Case) -> str:
    """Serve a center, behind a proxy if its link is slow; return its address."""
    stack = _served["stack"] = contextlib.ExitStack()
    address = centers.serve(case.size, mode=case.mode)
    if case.shared is None:
        return address
    server = centers._servers[address]
    return stack.enter_context(Network(server, "socket", case.shared)).address


def close() -> None:
    """Close the proxy and the center."""
    _served.pop("stack").close()
    for address in [*centers._servers]:
        centers.stop(address)


_worker: dict[str, Any] = {}  # in the process of a worker


def join(address: str, name: str, size: int, step: float) -> None:
    """Make a worker, and its first rounds, which compile."""
    center = centers.connect(address, "socket")
    worker = agn_optax.Worker(center, optax.sgd(1e-6), period=PERIOD, name=name)
    ones = centers.tree(size, value=1.0)

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        updates, state = worker.tx.update(ones, state, params)
        return optax.apply_updates(params, updates), state

    _worker.update(center=center, worker=worker, update=update, step=step, ones=ones)
    _worker["loop"] = worker.start()
    rounds(WARM_UP, step)
    worker.leave()  # so that no other worker waits for it


def rounds(count: int | None, step: float, end: float = 0.0) -> Rounds:
    """Make a number of rounds, or those until a time."""
    worker, update, loop = (_worker[key] for key in ("worker", "update", "loop"))
    found = Rounds([], [], [])
    while count is None or len(found.steps) < count:
        begun = due = time.monotonic()
        for _ in range(PERIOD):
            loop = jax.block_until_ready(update(*loop))
            due += step
            time.sleep(max(0.0, due - time.monotonic()))
            sent = time.monotonic()
            loop = jax.block_until_ready(worker.exchange(*loop))
            if end and time.monotonic() >= end:
                _worker["loop"] = loop
                return found
        now = time.monotonic()
        found.steps.append(sent - begun)
        found.waited.append(now - sent)
        found.staleness.append(worker.staleness)
    _worker["loop"] = loop
    return found


def work(seconds: float, start: float = 0.0) -> Rounds:
    """Make rounds in a session of a while, which begins at a time."""
    worker = _worker["worker"]
    _worker["loop"] = worker.start()
    time.sleep(max(0.0, start - time.monotonic()))
    found = rounds(None, _worker["step"], (start or time.monotonic()) + seconds)
    worker.leave()
    return found


def exchange_for(seconds: float) -> int:
    """Exchange without steps; return how often."""
    session = _worker["center"].join(f"{_worker['worker'].name}-bare")
    small = jax.tree.map(lambda x: 1e-5 * x, _worker["ones"])
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        done += 1
        message = agn_optax.center.Submission(done, small, anchor_version=0)
        jax.block_until_ready(session.exchange(message).params)
    session.leave()
    return done


def hang_up() -> None:
    """Close the connection."""
    _worker["center"].close()


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


class Simulate(
    Benchmark,
    quick="--window 1 --only unequal --sizes 10 --modes asynchronous --exchanges 100 0",
):
    """Simulations and real runs.

    Args:
      only: the real runs.
      window: seconds of a real run.
      sizes: numbers of workers whose simulation is timed.
      modes: the modes in which it is.
      exchanges: exchanges of the simulated trainings in `TRAININGS`; 0 for none.
    """

    only: Sequence[str] = tuple(CASES)
    window: float = 15.0
    sizes: Sequence[int] = (100, 10_000)
    modes: Sequence[str] = tuple(MODES)
    exchanges: Sequence[int] = (50_000, 5_000)
    repeats = 3

    def run(self) -> None:
        """Compare, then time the simulator."""
        rows: list[Row]
        for name in self.only:
            case = CASES[name]
            rows = []
            for _ in range(self.repeats):
                rows += [self.compare(case)]
            self.add(
                name, f"{name}: {self.window:g} s of {len(case.steps)} workers", rows
            )
        if self.sizes:
            self.add("speed", "the simulator", [*map(self.time, self.cases())])
        sizes = zip(TRAININGS, self.exchanges, strict=True)
        rows = []
        for size, count in sizes:
            if count:
                with Process() as own:
                    rows.append(own.call(train, *size, count))
        if rows:
            self.add("training", "simulated training", rows)

    def compare(self, case: Case) -> Row:
        """Return a table row of a real run and its simulation."""
        calibration, real = self.real(case)
        alone, extra = calibration.alone, calibration.paced - calibration.alone
        host = min(alone, 1 / calibration.together)
        rate = None if case.bandwidth is None else 2 * case.size / max(extra, 1e-3)
        cluster = simulate.Cluster(
            workers=len(case.steps),
            speed=[
                simulate.Recorded([s / PERIOD for s in each.steps]) for each in real
            ],
            link=simulate.Link(latency=alone - host, bandwidth=rate),
            center=simulate.CenterHost(seconds=host, bandwidth=case.shared),
        )
        found = simulate.schedule(
            cluster,
            period=PERIOD,
            mode=case.mode or Asynchronous(),
            rule=centers.rule(),
            params=centers.tree(case.size),
            seconds=20 * self.window,
        )
        stale = np.concatenate([np.array(each.staleness, int) for each in real])
        steps = [np.mean(each.steps) for each in real]
        waits = [np.mean(each.waited) for each in real]
        measured = sum(1 / (s + w) for s, w in zip(steps, waits, strict=True))
        waiting = np.mean([w / (s + w) for s, w in zip(steps, waits, strict=True)])
        rounds = [np.diff(found.began[found.worker == w]) for w in range(len(steps))]
        simulated = float(sum(1e9 / r.mean() for r in rounds))
        idle = float(np.mean(1 - found.utilization))
        ours = found.staleness[found.adopted >= 0]
        most = 1 + max(stale.max(), ours.max())
        histograms = [np.bincount(s, minlength=most) / len(s) for s in (stale, ours)]
        return {
            "exchanges a second": float(measured),
            "simulated": simulated,
            "error %": 100 * (simulated / float(measured) - 1),
            "staleness": float(stale.mean()),
            "simulated ": float(ours.mean()),
            "distance %": 50 * float(np.abs(histograms[0] - histograms[1]).sum()),
            "waiting %": 100 * float(waiting),
            "simulated  ": 100 * idle,
            "error": 100 * (idle - float(waiting)),
        }

    def real(self, case: Case) -> tuple[Calibration, list[Rounds]]:
        """Return what is measured before a run, and the run."""
        center = self.use(Process())
        crew = [self.use(Process()) for _ in case.steps]

        def all_of(function: Any, *arguments: Any) -> list[Any]:
            submitted = [each.submit(function, *arguments) for each in crew]
            return [answer.result() for answer in submitted]

        def start(address: str) -> None:
            joining = [
                each.submit(join, address, f"worker-{i}", case.size, step)
                for i, (each, step) in enumerate(zip(crew, case.steps, strict=True))
            ]
            for each in joining:
                each.result()

        start(center.call(serve, case._replace(mode=None, shared=None)))
        alone = float(np.median(crew[0].call(work, CALIBRATION).waited))
        together = sum(all_of(exchange_for, CALIBRATION)) / CALIBRATION
        paced = alone
        if case.bandwidth is not None:
            for process in (center, *crew):
                process.call(pace, case.bandwidth)
            paced = float(np.median(crew[0].call(work, CALIBRATION).waited))
            for process in (center, *crew):
                process.call(pace, centers.LOOPBACK)
        all_of(hang_up)
        center.call(close)
        start(center.call(serve, case))
        if case.bandwidth is not None:
            for process in (center, *crew):
                process.call(pace, case.bandwidth)
        found = all_of(work, self.window, time.monotonic() + 0.5)
        all_of(hang_up)
        center.call(close)
        self.stack.close()
        return Calibration(alone, paced, together), found

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
