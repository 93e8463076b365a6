"""A process with several workers that train until a command: run by test_durability.py.

Each worker moves its own element of the center by one at every step.
"""

import threading

import numpy as np
import optax
from helpers import children

import agn_optax
from agn_optax import rules, service

RULE = rules.downpour()


class Commands:
    """The commands that the test sends."""

    def start(self, address, names, elements):
        self._stop = threading.Event()
        self._steps = dict.fromkeys(names, 0)
        self._failures = []
        self._threads = [
            threading.Thread(target=self._train, args=(address, name, element))
            for name, element in zip(names, elements, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self):
        """End all workers with a last exchange; return the steps that each made."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return {"steps": self._steps, "failures": self._failures}

    def _train(self, address, name, element):
        try:
            with service.connect(address, RULE, timeout=60) as center:
                worker = agn_optax.Worker(
                    center, optax.sgd(1.0), period=1, name=name, give_up=60
                )
                params, state = worker.start()
                gradient = np.zeros(params.shape, np.float32)
                gradient[element] = 1
                while not self._stop.is_set():
                    updates, state = worker.tx.update(gradient, state, params)
                    params = optax.apply_updates(params, updates)
                    self._steps[name] += 1
                    params, state = worker.exchange(params, state)
                worker.flush(params, state)
        except Exception as error:
            self._failures.append(f"{name}: {error!r}")


if __name__ == "__main__":
    me = Commands()
    children.serve_commands({"start": me.start, "stop": me.stop})
