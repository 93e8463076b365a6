"""Runs a scenario: real processes and connections, and the faults they meet."""

import atexit
import contextlib
import dataclasses
import functools
import pathlib
import random
import secrets
import shutil
import tempfile
import time

import numpy as np
from chaos import invariants, model
from chaos.processes import CONTINUE, DRAIN, KILL, STOP
from chaos.scenario import TIMEOUT
from chaos.tally import Tally
from helpers import certificates, ports
from helpers.network import Proxy

from agn_optax import service

HOST = ports.HOST  # of all centers; each worker reaches them at another address
LIMIT = 40.0  # s, timeout of all waits that are not invariants
DRAINS = 40.0  # s, the grace of a command after SIGTERM, and some more
_LOOK = 0.02


@dataclasses.dataclass
class Outcome:
    """The outcome of a scenario."""

    scenario: object
    broken: list  # violations of invariants
    steps: int = 0
    exchanges: int = 0
    recovered: float = 0.0  # seconds until the last survivor exchanged again
    seconds: float = 0.0
    details: str = ""  # further text


def run(scenario, spares, kind=None):
    """Run a scenario, end all its processes, and return its outcome.

    Args:
      scenario: scenario to run.
      spares: pool of processes.
      kind: subclass of `Run` to use instead.
    """
    begin = time.monotonic()
    outcome = Outcome(scenario, [])
    with tempfile.TemporaryDirectory(prefix="agn-optax-chaos-") as folder:
        try:
            with (kind or Run)(scenario, spares, pathlib.Path(folder)) as running:
                try:
                    running.through(outcome)
                except Exception as error:
                    outcome.broken.append(f"{error!r}; {running.output()}")
        except Exception as error:
            outcome.broken.append(f"at the end: {error!r}")
    outcome.seconds = time.monotonic() - begin
    return outcome


class ServedCenter:
    """A center that can be restarted at the same address.

    Args:
      options: options of the command.
      spares: pool of processes.
    """

    def __init__(self, options, spares):
        self.ports = ports.in_a_row(2)
        self._options = [
            *options,
            f"--address={HOST}:{self.ports[0]}",
            f"--direct-address={HOST}:{self.ports[1]}",
        ]
        self._spares = spares
        self.process = None

    @property
    def address(self):
        return f"{HOST}:{self.ports[0]}"

    def start(self):
        self.process = self._spares.center()
        self.process.serve(self._options)

    def end(self, number, timeout=DRAINS):
        """Send a signal; return exit code, None if it had to be killed, and output."""
        self.process.signal(CONTINUE)
        self.process.signal(number)
        code, output = self.process.wait(timeout), self.process.output()
        self.process.kill()
        return code, output


class Run(contextlib.ExitStack):
    """A running scenario. A fault of kind "x y" is begun by the method ``_x_y``."""

    def __init__(self, scenario, spares, folder):
        super().__init__()
        self._scenario, self._spares, self._folder = scenario, spares, folder
        self._tokens = {}  # by the worker's name; "*" for all other callers
        self._own = {}  # running processes of workers, by number
        self._over = []  # times and functions that end faults
        self.tallies = [
            Tally(folder / f"tally-{number}", scenario.slots)
            for number in range(scenario.workers)
        ]
        self._serve()
        for number in range(scenario.workers):
            self._start(number)
        self.callback(self._dismiss)

    # Centers, proxies and workers.

    def _serve(self):
        chosen = self._scenario
        count = {"one": 1, "shards": 2}[chosen.centers]
        own = [*chosen.options, *chosen.mode_options, *self._access()]
        self.centers = [
            self._begun([*own, *self._kept(number)]) for number in range(count)
        ]
        hosts = [f"127.0.1.{number + 1}" for number in range(chosen.workers)]
        self.links = [self._proxy(host) for host in hosts]

    def _access(self):
        """Return the options of a center for tokens and TLS."""
        if not self._scenario.secure:
            return ["--open"]  # workers would find no token: their addresses differ
        names = [f"w{number}" for number in range(self._scenario.workers)]
        self._tokens = {name: secrets.token_hex(16) for name in [*names, "*"]}
        lines = [f"chief {name} {self._tokens[name]}" for name in names]
        lines.append(f"chief,operator * {self._tokens['*']}")
        tokens = self._folder / "tokens"
        tokens.touch(mode=0o600)
        tokens.write_text("\n".join(lines))
        certificate, key = _certificate()
        return [
            f"--tokens={tokens}",
            f"--tls-certificate={certificate}",
            f"--tls-key={key}",
        ]

    def _connected(self, addresses):
        """Connect the driver to a center, or to all shards of one."""
        delay = self._scenario.delay
        in_parts = delay is not None and len(addresses) == len(model.OFFSETS)
        return service.connect(
            addresses,
            self._rule,
            tls=service.Tls(_certificate()[0]) if self._tokens else None,
            token=self._tokens.get("*"),
            fragments=model.fragments(delay) if in_parts else None,
        )

    def _begun(self, options):
        served = ServedCenter(options, self._spares)
        served.start()
        self.callback(lambda: served.process.kill())
        return served

    def _kept(self, number):
        where = self._folder / f"kept-{number}"
        return {
            "none": [],
            "journal": [f"--journal={where}"],
        }[self._scenario.durability]

    def _proxy(self, host):
        proxy = self.enter_context(Proxy(records=True))
        for center in self.centers:
            for port in center.ports:
                proxy.forward((HOST, port), at=(host, port))
        return proxy

    @property
    def _rule(self):
        chosen = self._scenario
        return model.rule(chosen.rule, chosen.codec, chosen.weighs)

    def _start(self, number):
        """Start a session of a worker."""
        chosen, worker = self._scenario, self._spares.worker()
        addresses = [
            f"127.0.1.{number + 1}:{center.ports[0]}" for center in self.centers
        ]
        worker.process.ask(
            do="start",
            address=addresses,
            worker=f"w{number}",
            row=number,
            slots=chosen.slots,
            rule=chosen.rule,
            codec=chosen.codec,
            overlap=chosen.overlap,
            patience=chosen.patience,
            timeout=TIMEOUT,
            transports=[chosen.transports[number]],
            ca=str(_certificate()[0]) if self._tokens else None,
            token=self._tokens.get(f"w{number}"),
            burst=chosen.burst,
            delay=chosen.delay,
            weighs=chosen.weighs,
            rejects=chosen.rejects,
            checkpoints=str(self._folder / f"kept-by-{number}") * chosen.resumes,
            tally=str(self._folder / f"tally-{number}"),
            end=str(self._folder / f"end-{number}.npy"),
            clock=str(worker.clock.path),
            limit=LIMIT,
        )
        self._own[number] = worker

    def _dismiss(self):
        """Kill workers that did not end, so that their processes are not reused."""
        for worker in self._own.values():
            worker.kill()

    def output(self):
        """Return the last output of the centers, for debugging."""
        ends = [center.process.output()[-300:] for center in self.centers]
        return "; ".join(filter(None, ends))

    # The course of the scenario.

    def through(self, outcome):
        chosen = self._scenario
        for worker in self._own.values():
            if not worker.process.ask(do="joined", timeout=LIMIT)["joined"]:
                raise AssertionError(worker.process.ask(do="stop")["failure"])
        for worker in self._own.values():
            worker.process.ask(do="go")
        self.faults(outcome)
        outcome.recovered = self._recovered(outcome)
        for worker in self._own.values():
            while worker.owes:
                worker.process.answer()
                worker.owes -= 1
            worker.process.send(do="stop")
        for number in list(self._own):
            worker = self._own[number]
            failure = worker.process.answer()["failure"]
            if failure:
                outcome.broken.append(failure)
            else:
                self._spares.give_back(self._own.pop(number))
        self._end(outcome)
        outcome.steps = sum(tally.steps() for tally in self.tallies)
        outcome.exchanges = sum(tally["received"] for tally in self.tallies)
        invariants.check_versions(self.tallies, chosen, outcome.broken)

    def faults(self, outcome):
        """Begin and end all faults in time; return when the last one is over."""
        begin = time.monotonic()
        due = [
            (fault.at, self._begin, (fault, outcome)) for fault in self._scenario.faults
        ]
        while due or self._over:
            now = time.monotonic() - begin
            ready = [each for each in due + self._over if each[0] <= now]
            for each in sorted(ready, key=lambda each: each[0]):
                (due if each in due else self._over).remove(each)
                _, act, arguments = each
                ends = act(*arguments)
                if isinstance(ends, tuple):
                    seconds, end = ends
                    later = time.monotonic() - begin + seconds
                    self._over.append((later, end, ()))
            time.sleep(_LOOK)

    def _begin(self, fault, outcome):
        """Begin a fault; return its duration in seconds and a function to end it."""
        act = getattr(self, "_" + fault.kind.replace(" ", "_"))
        return act(fault, outcome)

    def _recovered(self, outcome):
        """Return the seconds until all survivors have exchanged again."""
        before = {n: self.tallies[n]["received"] for n in self._own}
        begin = time.monotonic()
        while any(self.tallies[n]["received"] == had for n, had in before.items()):
            if time.monotonic() - begin > self._scenario.recovers:
                for number, had in before.items():
                    if self.tallies[number]["received"] == had:
                        outcome.broken.append(self._stuck(number))
                break
            time.sleep(_LOOK)
        return time.monotonic() - begin

    def _stuck(self, number):
        worker = self._own[number]
        while worker.owes:
            worker.process.answer()
            worker.owes -= 1
        where = worker.process.ask(do="where")["where"]
        waited = self._scenario.recovers
        return f"worker {number} does not go on after {waited} s: {where}"

    # Faults of the connection from a worker to its center.

    def _proxy_of(self, fault):
        return self.links[fault.target]

    def _directions_of(self, fault):
        proxy = self._proxy_of(fault)
        return [proxy.there] * fault.there + [proxy.back] * fault.back

    def _cut(self, fault, outcome):
        self._proxy_of(fault).cut_once()

    def _outage(self, fault, outcome):
        self._proxy_of(fault).cut()
        return fault.seconds, self._proxy_of(fault).mend

    def _cut_inside(self, fault, outcome):
        for direction in self._directions_of(fault):
            direction.left = int(fault.amount)

    def _delay(self, fault, outcome):
        return self._set(fault, "delay", 0.0)

    def _throttle(self, fault, outcome):
        return self._set(fault, "rate", None)

    def _set(self, fault, what, normal):
        directions = self._directions_of(fault)

        def end():
            for direction in directions:
                setattr(direction, what, normal)

        name = {"delay": fault.amount, "rate": fault.amount}[what]
        for direction in directions:
            setattr(direction, what, name)
        return fault.seconds, end

    def _hold(self, fault, outcome):
        directions = self._directions_of(fault)
        for direction in directions:
            direction.gate.clear()
        return fault.seconds, lambda: [direction.gate.set() for direction in directions]

    def _strand(self, fault, outcome):
        self._proxy_of(fault).strand(there=fault.there, back=fault.back)

    def _close_half(self, fault, outcome):
        self._proxy_of(fault).close_half(there=fault.there)

    def _replay(self, fault, outcome):
        self._proxy_of(fault).replay()

    # Faults of workers.

    def _kill(self, fault, outcome):
        worker = self._own.pop(fault.target, None)
        if worker is None:
            return
        worker.kill()
        self.links[fault.target].forget()  # a dead worker's bytes are not replayed
        if fault.amount:
            self._start(fault.target)
            self._own[fault.target].process.ask(do="go")

    def _stop(self, fault, outcome):
        worker = self._own.get(fault.target)
        if worker is None:
            return None
        worker.signal(STOP)
        return fault.seconds, lambda: worker.signal(CONTINUE)

    def _leave(self, fault, outcome):
        worker = self._own.get(fault.target)
        if worker is not None:
            self.links[fault.target].forget()
            worker.process.send(do="rejoin")  # a stopped worker answers later
            worker.owes += 1

    # Faults of centers.

    def _kill_center(self, fault, outcome):
        center = self.centers[fault.target]
        center.end(KILL)
        center.start()

    def _stop_center(self, fault, outcome):
        process = self.centers[fault.target].process
        process.signal(STOP)
        return fault.seconds, lambda: process.signal(CONTINUE)

    def _drain_center(self, fault, outcome):
        center = self.centers[fault.target]
        self._drain(center, outcome)
        center.start()

    def _disk(self, fault, outcome):
        """Fill the disk: the center ends by itself at its next exchange, if any."""
        center = self.centers[fault.target]
        center.process.signal(CONTINUE)
        center.process.fill_disk()
        code = center.process.wait(TIMEOUT)
        if code is not None and (
            code != 1 or "no longer be saved" not in center.process.output()
        ):
            outcome.broken.append(
                f"with a full disk: {code}, {center.process.output()}"
            )
        center.end(KILL)
        center.start()

    # Jumps of a clock, which must have no effect.

    def _clock(self, fault, outcome):
        clocks = [self.centers[0].process.clock]
        if fault.target in self._own:
            clocks.append(self._own[fault.target].clock)
        random.Random(fault.at).choice(clocks).jump(fault.amount)  # noqa: S311

    # The end.

    def _drain(self, center, outcome):
        code, output = center.end(DRAIN)
        if code != 0:
            outcome.broken.append(
                f"a center that was drained ended with {code}: {output}"
            )

    def _end(self, outcome):
        """Check the invariants of the centers, before and after their end."""
        chosen = self._scenario
        addresses = [center.address for center in self.centers]
        with self._connected(addresses) as center:
            params = center.pull().params
        seen = model.table(params)
        parts = [self._pulled(each) for each in self.centers]
        for each in self.centers:
            if chosen.end == "drain":
                self._drain(each, outcome)
            else:
                each.end(KILL)
        ends = {
            number: np.load(path)
            for number in range(chosen.workers)
            if (path := self._folder / f"end-{number}.npy").exists()
        }
        invariants.check_counts(seen, self.tallies, chosen, outcome.broken)
        invariants.check_turns(seen, self.tallies, chosen, outcome.broken)
        invariants.check_claims(params, self.tallies, chosen, outcome.broken)
        if chosen.conserves:
            invariants.check_conservation(seen, ends, self.tallies, outcome.broken)
        if chosen.durability == "journal":
            for number, part in enumerate(parts):
                folder = self._folder / f"kept-{number}"
                invariants.check_journal(part, folder, self._rule, outcome.broken)

    def _pulled(self, served):
        """Return the parameters of one center or shard."""
        with self._connected(served.address) as center:
            return center.pull().params


@functools.cache
def _certificate():
    """Return a certificate for all addresses of centers, and its key."""
    folder = tempfile.mkdtemp(prefix="agn-optax-chaos-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    hosts = [HOST]
    hosts += [f"127.0.1.{number + 1}" for number in range(model.WORKERS)]
    hosts += [f"127.0.2.{number + 1}" for number in range(2)]
    names = ",".join(f"IP:{host}" for host in hosts)
    return certificates.make(pathlib.Path(folder), names)
