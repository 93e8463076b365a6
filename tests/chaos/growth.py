"""Thousands of exchanges over breaking connections: no process may leak resources."""

import dataclasses
import time

from chaos import runner
from chaos.processes import Resources
from chaos.scenario import PLAIN

_EVERY = 0.5  # seconds between two cuts
_FIRST = 5  # the first measurement comes after 1/5 of the exchanges
_SCENARIO = dataclasses.replace(PLAIN, size="medium", end="drain")


def run(count, spares):
    """Make ``count`` exchanges; return the outcome, with resources before and after."""

    class Growth(runner.Run):
        def faults(self, outcome):
            self._exchange(count // _FIRST)
            before = self._held()
            self._exchange(count)
            after = self._held()
            for name, had in before.items():
                outcome.details += f"{name}: {had}, then {after[name]}; "
                if after[name].is_more_than(had):
                    outcome.broken.append(f"{name} held {had}, and then {after[name]}")

        def _exchange(self, until):
            number, end = 0, time.monotonic() + max(runner.LIMIT, until / 10)
            while sum(tally["received"] for tally in self.tallies) < until:
                assert time.monotonic() < end, "exchanges do not go on"
                time.sleep(_EVERY)
                self.links[number % len(self.links)].cut_once()
                number += 1

        def _held(self):
            time.sleep(_EVERY)  # after the last cut
            own = {f"worker {n}": worker.pid for n, worker in self._own.items()}
            pids = {"center": self.centers[0].process.pid, **own}
            return {name: Resources.by(pid) for name, pid in pids.items()}

    return runner.run(_SCENARIO, spares, Growth)
