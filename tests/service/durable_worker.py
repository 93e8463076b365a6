"""A process of several workers that train until told to end: run by test_durability.

Each has an element of the center for itself, and moves it by one a step.
"""

import threading

import numpy as np
import optax
from helpers import talking

import agn_optax
from agn_optax import rules, service

RULE = rules.downpour()


class Commands:
    """What the test asks for."""

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
        """Ends them all, each with a last exchange; says how many steps each made."""
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
    talking.obey({"start": me.start, "stop": me.stop})
