"""A process that runs one worker, which trains until a command stops it."""

import contextlib
import functools
import pathlib
import sys
import threading
import time
import traceback

import jax
import numpy as np
import optax
from chaos import model
from chaos.tally import Tally
from helpers import children

import agn_optax
from agn_optax import checkpoint, errors, service

PACE = 0.005  # seconds between two steps
INNER = optax.sgd(1.0)
BAD_EVERY = 17  # steps, where some are bad
RESIDUAL = 1e-3  # a smaller residual is rounding


class Training:
    """One session of a worker, in a separate thread."""

    def __init__(self, options):
        self._options = options
        self._tally = Tally(pathlib.Path(options["tally"]), options["slots"])
        self._stopping, self._pausing = threading.Event(), threading.Event()
        self._joined = threading.Event()
        self._go = threading.Event()
        self._in_flight, self._fresh = [], []  # slots of steps, not yet received
        # If true, steps are settled only when all of them are in the center, because an
        # answer does not show which steps it covers.
        self._settles = (
            options["burst"] > 1
            or options["delay"] is not None
            or bool(options["checkpoints"])
        )
        # The next step; in a dict, so that `Resumable` can restore it.
        first = 0 if options["checkpoints"] else self._tally["made"]
        self._at = {"step": np.array(first)}
        self._seen = None  # version
        self.failure = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_until_joined(self, timeout):
        return self._joined.wait(timeout) and not self.failure

    def go(self):
        self._go.set()

    def rejoin(self):
        """Leave, and join again."""
        self._pausing.set()

    def stop(self):
        """Exchange the last steps, and leave."""
        self._until = time.monotonic() + self._options["limit"]
        self._stopping.set()
        self._go.set()
        self._thread.join(self._options["limit"])
        if self._thread.is_alive():
            self.failure = f"{self._options['worker']} does not end: {where()}"
        return {"failure": self.failure}

    def _run(self):
        try:
            options = self._options
            rule = model.rule(options["rule"], options["codec"], options["weighs"])
            with self._connected(rule) as center:
                worker = agn_optax.Worker(
                    center,
                    INNER,
                    period=1 if self._fragments is None else model.PERIOD,
                    name=options["worker"],
                    overlap=options["overlap"],
                    patience=options["patience"],
                    fragments=self._fragments,
                )
                if options["checkpoints"]:
                    worker = checkpoint.Resumable(
                        worker, options["checkpoints"], at=self._at
                    )
                loop = self._start(worker)
                self._joined.set()
                self._go.wait()
                loop = self._train(worker, loop)
                np.save(options["end"], model.table(loop[0]))
                worker.leave()
        except Exception as error:
            self.failure = f"{self._options['worker']}: {error!r}"
            self._joined.set()  # to end the wait for it

    @property
    def _fragments(self):
        delay = self._options["delay"]
        return None if delay is None else model.fragments(delay)

    def _connected(self, rule):
        ca = self._options["ca"]
        return self._insist(
            lambda: service.connect(
                self._options["address"],
                rule,
                timeout=self._options["timeout"],
                transports=self._options["transports"],
                tls=None if ca is None else service.Tls(ca),
                token=self._options["token"],
                fragments=self._fragments,
            )
        )

    def _insist(self, call, *expected):
        """Repeat a call until it succeeds, as a restarted program would."""
        end = time.monotonic() + self._options["limit"]
        while True:
            try:
                return call()
            except (errors.CenterUnreachableError, *expected):
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _start(self, worker):
        params = model.params(self._options["slots"])

        def start():
            try:
                return worker.start(params)
            except errors.NotInitializedError:
                with contextlib.suppress(errors.AlreadyInitializedError):
                    return worker.start(params, chief=True)
                # Another worker is the chief, perhaps of the first shard only so far.
                return worker.start(params, chief=False, timeout=self._options["limit"])

        # The center may still count the worker's last session as connected.
        loop = self._insist(start, errors.NameTakenError)
        self._seen = worker.version
        self._in_flight, self._fresh = [], []
        if getattr(worker, "resumed", False):
            # The message of the checkpoint has been sent again, and acknowledged.
            self._tally.settle_first(int(self._at["step"]))
        return loop

    def _train(self, worker, loop):
        while True:
            try:
                if self._stopping.is_set() or self._pausing.is_set():
                    loop = self._settled(worker, loop)
                    if self._stopping.is_set():
                        return loop
                    self._pausing.clear()
                    worker.leave()
                    loop = self._start(worker)
                loop = self._step(worker, loop)
            except errors.WorkerStateError:  # a center with another id
                self._tally.add("lost")
                loop = self._start(worker)
            except errors.MessageRejectedError:  # too many in a row
                loop = self._start(worker)
            self._stopping.wait(PACE)

    def _step(self, worker, loop):
        """Make a local step, and its exchange if one is due."""
        step = int(self._at["step"])
        self._at["step"] = np.array(step + 1)
        slots = self._slots(worker, step)
        if self._options["rejects"] and step % BAD_EVERY == BAD_EVERY - 1:
            bad = model.BAD[step // BAD_EVERY % len(model.BAD)]
            loop = self._moved(worker, loop, slots, bad)
        else:
            self._tally.begin(step, slots)
            self._fresh += slots
            loop = self._moved(worker, loop, slots, 1.0)
        weight = self._options["row"] + 1 if self._options["weighs"] else None
        exchange = functools.partial(worker.exchange, weight=weight)
        return self._exchange(worker, exchange, loop)

    def _slots(self, worker, step):
        """Return the slots that a step moves: one in turn, or several, or none."""
        slots, burst = self._options["slots"], self._options["burst"]
        if self._options["delay"]:
            # Local changes to a fragment in flight are lost by design.
            halves = [[step % (slots // 2)], [slots // 2 + step % (slots - slots // 2)]]
            fragments = zip(worker._workers, halves, strict=True)
            free = [half for each, half in fragments if not each.machine.in_flight]
            return free[step % len(free)] if free else []
        return [(step + n) % slots for n in range(0 if step % burst else burst)]

    def _moved(self, worker, loop, slots, amount):
        moves = np.zeros(self._options["slots"], np.float32)
        moves[slots] = amount
        return _moved(worker.tx, *loop, self._options["row"], moves)

    def _settled(self, worker, loop):
        """Exchange until the center has all steps and residuals."""
        loop = self._exchange(worker, worker.flush, loop)
        while self._options["burst"] > 1 and _residual(loop[1]) > RESIDUAL:
            loop = self._moved(worker, loop, [], 0.0)
            loop = self._exchange(worker, worker.exchange, loop)
            loop = self._exchange(worker, worker.flush, loop)
            if self._stopping.is_set() and time.monotonic() > self._until:
                raise TimeoutError(f"a residual of {_residual(loop[1])} is left")
        if self._options["checkpoints"]:
            self._tally.settle_first(int(self._at["step"]))
        elif self._settles:
            self._tally.settle(self._fresh)
            self._fresh = []
        return loop

    def _exchange(self, worker, exchange, loop):
        while True:
            before = worker.exchanges, worker.dropped, worker.rejected
            try:
                return exchange(*loop)
            except errors.CenterUnreachableError:
                if self._stopping.is_set() and time.monotonic() > self._until:
                    raise
            finally:
                after = worker.exchanges, worker.dropped, worker.rejected
                self._account(worker, before[0], *np.subtract(after, before)[1:])

    def _account(self, worker, exchanges, dropped, rejected):
        """Record which steps are certainly in the center."""
        self._tally.add("rejected", rejected)
        # A sparse codec restores a dropped message to its residual, but not at shards.
        if rejected or (dropped and (len(self._options["address"]) > 1)):
            self._in_flight, self._fresh = [], []  # these steps may be lost
        if self._settles:
            self._tally.add("received", worker.exchanges - exchanges)
            self._see(worker, exchanges)
            return
        for _ in range(worker.exchanges - exchanges):
            received, self._in_flight = self._in_flight or self._fresh, []
            if received is self._fresh:
                self._fresh = []
            if not dropped:  # a dropped message is not in the center
                self._tally.settle(received)
            self._tally.add("received")
        if worker._workers[0].machine.in_flight and not self._in_flight:
            self._in_flight, self._fresh = self._fresh, []
        self._see(worker, exchanges)

    def _see(self, worker, exchanges):
        if worker.exchanges > exchanges:
            seen, now = np.atleast_1d(self._seen), np.atleast_1d(worker.version)
            if np.any(now < seen):
                self._tally.add("backwards")
            self._seen = worker.version


def where():
    """Return the stacks of threads in agn_optax, to debug a worker that hangs."""
    stacks = []
    for frame in sys._current_frames().values():
        places = [
            f"{pathlib.Path(each.filename).stem}:{each.lineno} {each.name}"
            for each in traceback.extract_stack(frame)
            if "agn_optax/" in each.filename or "worker_process" in each.filename
        ]
        if len(places) > 2:
            stacks.append(" > ".join(places[-8:]))
    return "; ".join(stacks)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _moved(tx, params, state, row, moves):
    gradient = jax.tree.map(jax.numpy.zeros_like, params)
    half = gradient["u"].shape[1]
    for name, part in (("u", moves[:half]), ("w", moves[half:])):
        gradient[name] = gradient[name].at[row].set(part)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


def _residual(state):
    """Return the sum of absolute residuals of error feedback."""
    states = getattr(state, "fragments", [state])
    residuals = [each.codec_state.residual for each in states]
    return sum(float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(residuals))


class Commands:
    """The commands that the driver sends."""

    def start(self, **options):
        model.step_clock(options["clock"])
        self._training = Training(options)

    def joined(self, timeout):
        return {"joined": self._training.wait_until_joined(timeout)}

    def go(self):
        self._training.go()

    def rejoin(self):
        self._training.rejoin()

    def where(self):
        return {"where": where()}

    def stop(self):
        return self._training.stop()


if __name__ == "__main__":
    me = Commands()
    names = ["start", "joined", "go", "rejoin", "where", "stop"]
    children.serve_commands({name: getattr(me, name) for name in names})
