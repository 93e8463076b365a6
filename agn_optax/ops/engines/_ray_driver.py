"""The driver of a run on Ray, which makes actors, shows their output and ends them.

Ray restarts a lost actor when there is room, and repeats the calls that it had not
answered (``max_restarts`` and ``max_task_retries``). A restarted actor has no session,
and so the driver starts its program again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from agn_optax import errors
from agn_optax._signals import handled
from agn_optax.ops.engines._engine import Output
from agn_optax.ops.engines._local import CENTER, exit_code, is_drained, serving_event
from agn_optax.ops.engines._ray_actors import CenterActor, NewOutput, WorkerActor
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Outcome

if TYPE_CHECKING:
    from agn_optax.ops.engines._ray import RaySettings

_POLL = 5.0  # seconds that an actor waits for new output
_PAUSE = 1.0  # seconds before a retry
# Seconds between reports that an actor waits for a node: at first, and at most.
_FIRST_REPORT, _MAX_REPORT_INTERVAL = 10.0, 600.0
_REMOVAL = 30.0  # seconds within which Ray removes the actors of a killed driver
_MARGIN = 10.0  # seconds after the grace in which an actor ends its program
# Seconds within which a center that was lost with its node releases the journal.
_HANDOVER = 120.0
_THREADS = 8  # threads of an actor; each waiting call takes one
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Driver:
    """One launch of a run.

    Args:
      run: the run to carry out.
      output: as in `Engine.launch`.
      settings: settings of the engine.
      center: resources that the center's actor needs, by Ray's names.
      worker: resources that a worker needs.
    """

    def __init__(
        self,
        run: Run,
        output: Output,
        settings: RaySettings,
        *,
        center: dict[str, float],
        worker: dict[str, float],
    ) -> None:
        self._run, self._output, self._settings = run, output, settings
        self._center_needs, self._worker_needs = center, worker
        self._center: list[_Task] = []  # one, if the run has a center of its own
        self._workers: list[_Task] = []
        self._serving = asyncio.Event()
        self._signals: list[int] = []
        self._is_ending = False
        self._has_failed = False  # beside failures that exit codes of programs show

    def run(self) -> dict[str, Any]:
        """Carry out the run, in any thread; only the main thread handles signals.

        Returns:
          The summary of `Engine.launch`. A signal ends the run; the return code is then
          128 plus its number.

        Raises:
          InvalidArgumentError: another driver runs a run of this name.
        """
        begin = time.monotonic()
        is_main = threading.current_thread() is threading.main_thread()
        main: asyncio.Task[Any] | None = None

        def interrupt(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signum)
            if main is not None:
                main.get_loop().call_soon_threadsafe(main.cancel)

        async def interruptible() -> None:
            nonlocal main
            main = asyncio.current_task()
            if not self._signals:
                await self._run_tasks()

        with handled(_SIGNALS if is_main else (), interrupt):
            try:
                asyncio.run(interruptible())
            except asyncio.CancelledError:  # by a signal
                pass
            except RayError as error:
                self._log("ray", str(error))
                self._has_failed = True
            finally:
                self._remove()
        seconds = time.monotonic() - begin
        outcomes = [
            task.outcome or Outcome(task.name, 0, task.restarts, seconds, stopped=True)
            for task in [*self._workers, *self._center]
        ]
        code = exit_code(outcomes, self._run) or int(self._has_failed)
        return {
            "returncode": 128 + self._signals[0] if self._signals else code,
            "seconds": seconds,
            "programs": [vars(outcome) for outcome in outcomes],
        }

    async def _run_tasks(self) -> None:
        try:
            await self._until_over()
        finally:
            self._is_ending = True
            await self._end(self._workers)
            await self._end(self._center)

    async def _until_over(self) -> None:
        """Wait until all workers have ended, or a failure ends the run.

        The run ends when the center has failed after its last restart or, with
        ``on_failure="stop"``, a worker has.
        """
        run = self._run
        if run.has_center:
            needs = self._center_needs
            center = await self._started(CENTER, CenterActor, needs, run)
            self._center = [center]
            served = asyncio.create_task(self._serving.wait())
            await _first_done({served, center.loop})
            if center.loop.done():
                center.loop.result()  # raises its error
                self._has_failed = True
                return
        for rank, name in enumerate(run.worker_names):
            needs = self._worker_needs
            worker = await self._started(name, WorkerActor, needs, run, rank)
            self._workers.append(worker)
        running = {worker.loop for worker in self._workers}
        centers = {center.loop for center in self._center}
        while running:
            done = await _first_done(running | centers)
            running -= done
            codes = [loop.result().returncode for loop in done]
            if done & centers:
                self._has_failed = True
                return
            if any(codes) and self._settings.on_failure == "stop":
                return

    # Tasks.

    async def _started(
        self, name: str, kind: type, needs: dict[str, float], *arguments: Any
    ) -> _Task:
        """Make an actor that Ray restarts, and run its program."""
        builtin = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        resources = {builtin[key]: v for key, v in needs.items() if key in builtin}
        actors: Any = ray.remote(kind).options(
            name=f"{self._run.name}-{name}",
            namespace=self._settings.namespace,
            runtime_env=self._settings.runtime_env,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_THREADS,
            resources={key: v for key, v in needs.items() if key not in builtin},
            **{"num_cpus": 0, **resources},
        )
        task = _Task(name, needs, lambda: actors.remote(*arguments))
        task.actor = await self._make_actor(task)
        task.loop = asyncio.create_task(self._keep_running(task))
        return task

    async def _make_actor(self, task: _Task) -> Any:
        """Make an actor of a task; wait while Ray removes a former one of its name."""
        until = time.monotonic() + _REMOVAL
        while True:
            try:
                return task.make()
            except ValueError as error:
                if time.monotonic() > until:
                    raise errors.InvalidArgumentError(
                        f"another driver runs {self._run.name!r}: {error}"
                    ) from None
            await asyncio.sleep(_PAUSE)

    async def _keep_running(self, task: _Task) -> Outcome:
        """Run a program until it has ended for good.

        A drained center starts again: the driver did not drain it, and the workers have
        no other center. After a loss, the previous center may still hold the journal on
        its node, so failures of the next one before it serves do not count.
        """
        run, is_center = self._run, task.name == CENTER
        max_failures = run.center_restarts if is_center else run.restarts
        begin, failures, lost_at = time.monotonic(), 0, -math.inf
        while not self._is_ending:
            location = await self._reply(task, task.actor.location.remote())
            self._log(task.name, f"starts on {location.host}")
            outcome = await self._run_program(task)
            has_served = self._serving.is_set()
            if is_center:
                self._serving.clear()
            if outcome is None:
                lost_at = time.monotonic()
                self._log(task.name, "its actor or node was lost; it starts again")
            elif self._is_ending or (not outcome.returncode and not is_center):
                return self._final(task, outcome, begin)
            elif is_center and is_drained(outcome, run):
                self._log(CENTER, "drained before the run's end; it serves again")
            elif (
                is_center and not has_served and time.monotonic() < lost_at + _HANDOVER
            ):
                self._log(CENTER, "starts again")
            else:
                failures += 1
                if failures > max_failures:
                    return self._final(task, outcome, begin)
                self._log(task.name, f"starts again ({failures} of {max_failures})")
            task.restarts += 1
            await asyncio.sleep(_PAUSE)
            if outcome is None and not is_center:
                await self._leave_room(task)
        seconds = time.monotonic() - begin
        return Outcome(task.name, 0, task.restarts, seconds, stopped=True)

    async def _leave_room(self, task: _Task) -> None:
        """End a worker's restarted actor while the center still waits for a node."""
        for center in self._center:
            is_back = asyncio.ensure_future(center.actor.location.remote())
            if not (await asyncio.wait([is_back], timeout=_FIRST_REPORT))[0]:
                ray.kill(task.actor)
                await is_back
                task.actor = await self._make_actor(task)

    async def _run_program(self, task: _Task) -> Outcome | None:
        """Run a program, show its output, return its outcome; None if it was lost."""
        session = await task.actor.start.remote(task.restarts)
        task.is_running = True
        try:
            while True:
                new: NewOutput = await self._reply(
                    task, task.actor.new_output.remote(_POLL)
                )
                if new.session != session:
                    return None
                for line in new.lines:
                    self._output(task.name, line)
                    if task.name == CENTER and serving_event(line):
                        self._serving.set()
                if new.outcome is not None:
                    return new.outcome
        finally:
            task.is_running = False

    def _final(self, task: _Task, outcome: Outcome, begin: float) -> Outcome:
        """Return a program's final outcome, and release its resources for others."""
        with contextlib.suppress(RayError):
            ray.kill(task.actor)
        seconds = time.monotonic() - begin
        task.outcome = dataclasses.replace(
            outcome, restarts=task.restarts, seconds=seconds
        )
        return task.outcome

    async def _reply(self, task: _Task, call: Awaitable[Any]) -> Any:
        """Return an actor's reply; report if the actor waits long for a node."""
        answer = asyncio.ensure_future(call)
        pause = _FIRST_REPORT
        while not (await asyncio.wait([answer], timeout=pause))[0]:
            self._log(task.name, f"waits for a node with {_described(task.needs)}")
            pause = min(2 * pause, _MAX_REPORT_INTERVAL)
        return answer.result()

    # The end.

    async def _end(self, tasks: list[_Task]) -> None:
        """End the programs of tasks that run, within the grace."""
        running = [task for task in tasks if task.is_running]
        for task in running:
            task.actor.stop.remote()
        if running:
            limit = self._run.stop_grace + _MARGIN
            await asyncio.wait([task.loop for task in running], timeout=limit)

    def _remove(self) -> None:
        """Remove the run from the cluster; the files in its storage stay."""
        for task in [*self._workers, *self._center]:
            if task.outcome is None:
                with contextlib.suppress(RayError):
                    ray.kill(task.actor)

    def _log(self, name: str, event: str) -> None:
        self._output(name, f"agn-optax: {event}")


@dataclasses.dataclass
class _Task:
    """The center or a worker, as the driver knows it.

    Attributes:
      name: name of the task.
      needs: resources of its actor, by Ray's names.
      make: makes an actor for the task.
      actor: the actor that runs its program.
      restarts: number of starts so far, without the first.
      is_running: whether its program runs.
      outcome: final outcome of the program; None before its end.
      loop: the loop that keeps the program running.
    """

    name: str
    needs: dict[str, float]
    make: Callable[[], Any]
    actor: Any = None
    restarts: int = 0
    is_running: bool = False
    outcome: Outcome | None = None
    loop: asyncio.Task[Outcome] = dataclasses.field(init=False)


async def _first_done(loops: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Wait until one of the tasks is done, and return those that are."""
    return (await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED))[0]


def _described(needs: dict[str, float]) -> str:
    described = (
        f"{value / 2**30:g} GiB" if name == "memory" else f"{value:g} {name}"
        for name, value in needs.items()
    )
    return ", ".join(described)
