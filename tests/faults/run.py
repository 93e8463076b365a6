"""One run of a scenario, and the search for a smaller one that fails as well."""

import collections
import gc
import logging
import os
import pathlib
import random
import shutil
import tempfile
import time
import traceback

import pytest
from faults import scenario as scenarios
from faults.center import Server
from faults.events import FaultyDisk, Loop
from faults.ledger import BrokenError, Ledger
from faults.worker import Observer, Worker
from helpers import tuning

_LIMIT = 300.0  # s of the virtual clock, in which all workers must be done
_CALM = 60.0  # s after which packets are no longer lost
_COLLECTS = 50  # runs between two collections: processes leave open files behind
_TRIES = 400  # runs at most to make a scenario smaller


class Run:
    """A scenario, while it runs.

    Args:
      scenario: the scenario.
      folder: a directory to make if there is a journal.
      patch: a monkeypatch for the disk.
    """

    def __init__(self, scenario, folder, patch):
        self.scenario = scenario
        self.loop = Loop()
        self.ledger = Ledger(scenario, lambda: Observer(self).pull())
        self.disk = FaultyDisk(folder, dict(scenario.disk), forgets=scenario.power)
        if scenario.journal:
            folder.mkdir()
            self.disk.patch(patch)
        patch.setattr(time, "time", lambda: 1e9 + self.loop.now)
        self._dice = {}
        self.server = Server(self, folder / "center")
        self.workers = [
            Worker(self, number, plan) for number, plan in enumerate(scenario.workers)
        ]
        self.left = {each.name for each in self.workers}  # workers that are not done

    def delays(self, name):
        """Return when copies of a packet arrive, s: none, one or two.

        Args:
          name: name of the worker or observer to whom the packet belongs.
        """
        scenario = self.scenario
        dice = self._dice.get(name)
        if dice is None:
            seed = f"{scenario.seed} packets of {name}"
            dice = self._dice[name] = random.Random(seed)  # noqa: S311
        what, short, long = dice.random(), dice.uniform(0.001, 0.01), dice.random()
        if self.loop.now > _CALM:
            return [short]
        if what < scenario.lost:
            return []
        if what > 1 - scenario.late:
            short += 5.0 * long
        if long < scenario.repeated:
            return [short, short + 3.0 * what]
        return [short]

    def __call__(self):
        """Run to the end, and check what is left."""
        scenario, server = self.scenario, self.server
        for at in scenario.kills:
            self.loop.at(at, self._kill_center)
        for at, seconds in scenario.pauses:
            self.loop.at(at, server.pause, seconds)
        server.start()
        if not self.loop.run(lambda: not self.left, _LIMIT):
            left = ", ".join(sorted(self.left))
            raise BrokenError(f"{left} did not get on in {_LIMIT} s")
        if not scenario.closes and server.core is not None:
            server.end(power=scenario.power)
        self.loop.run(lambda: server.core is not None, _LIMIT)
        core = server.core
        while not server.close():
            self.loop.run(lambda: server.core is not None, 2 * _LIMIT)
            core = server.core
        self.ledger.end(core, self.workers, server.folder)

    def _kill_center(self):
        if self.server.core is not None:
            self.server.end(power=self.scenario.power)


class Runner:
    """Runs scenarios, one after the other, in one directory.

    Python's garbage collector runs between them, and skips what is left of them, such
    as compiled programs. The log would have thousands of expected warnings.

    Attributes:
      scenarios, events, processes: numbers of scenarios, of their events, and of
        processes of centers.
      outcomes: number of messages with each outcome.
      trace: what happened in the last run, to compare it with another.
    """

    def __init__(self):
        self.scenarios = self.events = self.processes = 0
        self.outcomes = collections.Counter()
        self.trace = None
        gc.disable()
        logging.disable(logging.CRITICAL)
        memory = pathlib.Path("/dev/shm")  # noqa: S108 a file system without a disk
        parent = memory if os.access(memory, os.W_OK) else None
        self._folder = pathlib.Path(tempfile.mkdtemp(dir=parent))

    def close(self):
        """Remove the directory."""
        logging.disable(logging.NOTSET)
        gc.enable()
        gc.unfreeze()
        shutil.rmtree(self._folder)

    def run(self, scenario):
        """Run a scenario; return how it failed, or "" if all checks held."""
        if self.scenarios % _COLLECTS == 0:
            gc.collect()
            gc.freeze()
        folder = self._folder / "run"
        with pytest.MonkeyPatch.context() as patch:
            tuning.set_least_reserved(patch, 4096)
            run = Run(scenario, folder, patch)
            try:
                run()
            except BrokenError as error:
                return str(error)
            except Exception:
                return traceback.format_exc()
            finally:
                run.disk.end_process()
                self.scenarios += 1
                self.events += run.loop.events
                self.processes += run.server.process
                messages = run.ledger.messages
                self.outcomes.update(each.outcome for each in messages.values())
                self.trace = (run.loop.events, run.disk.calls, run.ledger.applied)
                if scenario.journal:
                    shutil.rmtree(folder)
        return ""

    def shrink(self, scenario):
        """Return a scenario that fails, too, and cannot be made smaller."""
        tries, is_smaller = 0, True
        while is_smaller and tries < _TRIES:
            is_smaller = False
            for each in scenarios.smaller(scenario):
                tries += 1
                if self.run(each):
                    scenario, is_smaller = each, True
                    break
        return scenario

    def report(self, scenario, failure):
        """Return a failure as text, with a small scenario that has one."""
        small = self.shrink(scenario)
        return (
            f"{describe(scenario, failure)}\n"
            f"  smaller: {scenarios.show(small)}\n"
            f"  there: {self.run(small)}"
        )


def describe(scenario, failure):
    """Return a failure as text, with the command that repeats it."""
    return (
        f"seed {scenario.seed}: {failure}\n"
        f"  repeat it: make faults ARGS='--seed {scenario.seed} --count 1'"
    )
