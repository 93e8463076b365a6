"""A process that is one worker, which trains until it is told to stop."""

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
import talking
from chaos import model
from chaos.tally import Tally

import agn_optax
from agn_optax import errors, service

PACE = 0.005  # seconds between two steps
INNER = optax.sgd(1.0)


class Training:
    """One life of a worker, on a thread of its own."""

    def __init__(self, told):
        self._told = told
        self._tally = Tally(pathlib.Path(told["tally"]), told["slots"])
        self._stopping, self._pausing = threading.Event(), threading.Event()
        self._joined = threading.Event()
        self._go = threading.Event()
        self._in_flight, self._fresh = [], []  # slots of steps that have not landed
        self._seen = None  # version
        self.failure = ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_until_joined(self, timeout):
        return self._joined.wait(timeout) and not self.failure

    def go(self):
        self._go.set()

    def rejoin(self):
        """Leaves, and comes back."""
        self._pausing.set()

    def stop(self):
        """The last steps are exchanged, and the worker leaves."""
        self._end = time.monotonic() + self._told["limit"]
        self._stopping.set()
        self._go.set()
        self._thread.join(self._told["limit"])
        if self._thread.is_alive():
            self.failure = f"{self._told['worker']} does not end: {where()}"
        return {"failure": self.failure}

    def _run(self):
        try:
            rule = model.rule(self._told["rule"], self._told["codec"])
            with self._connected(rule) as center:
                worker = agn_optax.Worker(
                    center,
                    INNER,
                    period=1,
                    name=self._told["worker"],
                    overlap=self._told["overlap"],
                    patience=self._told["patience"],
                )
                loop = self._start(worker)
                self._joined.set()
                self._go.wait()
                loop = self._train(worker, loop)
                np.save(self._told["end"], np.asarray(loop[0]["w"]))
                worker.leave()
        except Exception as error:
            self.failure = f"{self._told['worker']}: {error!r}"
            self._joined.set()  # it never will

    def _connected(self, rule):
        return self._insist(
            lambda: service.connect(
                self._told["address"],
                rule,
                timeout=self._told["timeout"],
                transports=self._told["transports"],
            )
        )

    def _insist(self, call, *expected):
        """As a program that is started again until it works."""
        end = time.monotonic() + self._told["limit"]
        while True:
            try:
                return call()
            except (errors.CenterUnreachableError, *expected):
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _start(self, worker):
        params = model.params(self._told["slots"])

        def start():
            try:
                return worker.start(params)
            except errors.NotInitializedError:
                with contextlib.suppress(errors.AlreadyInitializedError):
                    return worker.start(params, chief=True)
                # Another one is the chief, of the first shard so far perhaps.
                return worker.start(params, chief=False, timeout=self._told["limit"])

        # The center may not know yet that this worker's last life has ended.
        loop = self._insist(start, errors.NameTakenError)
        self._seen = worker.version
        self._in_flight, self._fresh = [], []
        return loop

    def _train(self, worker, loop):
        step = 0
        while True:
            try:
                if self._stopping.is_set() or self._pausing.is_set():
                    loop = self._exchange(worker, worker.flush, loop)
                    if self._stopping.is_set():
                        return loop
                    self._pausing.clear()
                    worker.leave()
                    loop = self._start(worker)
                slot = step % self._told["slots"]
                step += 1
                loop = _moved(worker.tx, *loop, self._told["row"], slot)
                self._tally.most[slot] += 1
                self._fresh.append(slot)
                loop = self._exchange(worker, worker.exchange, loop)
            except errors.WorkerStateError:  # the center is another one
                self._tally.add("lost")
                loop = self._start(worker)
            self._stopping.wait(PACE)

    def _exchange(self, worker, exchange, loop):
        while True:
            exchanges, dropped = worker.exchanges, worker.dropped
            try:
                return exchange(*loop)
            except errors.CenterUnreachableError:
                if self._stopping.is_set() and time.monotonic() > self._end:
                    raise
            finally:
                self._account(worker, exchanges, worker.dropped - dropped)

    def _account(self, worker, exchanges, dropped):
        """Which steps are in the center for sure."""
        for _ in range(worker.exchanges - exchanges):
            landed, self._in_flight = self._in_flight or self._fresh, []
            if landed is self._fresh:
                self._fresh = []
            if not dropped:  # else the center goes on without them
                np.add.at(self._tally.least, landed, 1)
            self._tally.add("landed")
        if worker._in_flight and not self._in_flight:
            self._in_flight, self._fresh = self._fresh, []
        if worker.exchanges > exchanges:
            seen, now = np.atleast_1d(self._seen), np.atleast_1d(worker.version)
            if np.any(now < seen):
                self._tally.add("backwards")
            self._seen = worker.version


def where():
    """What the threads are in that exchange, for whoever looks into it."""
    said = []
    for frame in sys._current_frames().values():
        places = [
            f"{pathlib.Path(each.filename).stem}:{each.lineno} {each.name}"
            for each in traceback.extract_stack(frame)
            if "agn_optax/" in each.filename or "worker_process" in each.filename
        ]
        if len(places) > 2:
            said.append(" > ".join(places[-8:]))
    return "; ".join(said)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _moved(tx, params, state, row, slot):
    zeros = jax.tree.map(jax.numpy.zeros_like, params)
    gradient = {**zeros, "w": zeros["w"].at[row, slot].set(1.0)}
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state


class Commands:
    """What the driver asks for."""

    def start(self, **told):
        model.step_clock(told["clock"])
        self._training = Training(told)

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
    talking.obey({name: getattr(me, name) for name in names})
