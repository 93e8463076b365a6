"""The driver of a run on Ray, which makes actors, shows their output and ends them.

Ray restarts a lost actor when there is room, and repeats the calls that it had not
answered (``max_restarts`` and ``max_task_retries``). The restarted actor of a worker
has no session, and so the driver starts the worker again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Awaitable
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from agn_optax import errors
from agn_optax._signals import handled
from agn_optax.ops.engines._engine import Output
from agn_optax.ops.engines._local import CENTER, exit_code
from agn_optax.ops.engines._ray_actors import CenterActor, Said, WorkerActor
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Ended

if TYPE_CHECKING:
    from agn_optax.ops.engines._ray import RaySettings

_LOOK = 5.0  # seconds that an actor waits for new output
_PAUSE = 1.0  # seconds before a retry
_SOON, _SELDOM = 10.0, 600.0  # seconds until a report of waiting: at first, at most
_REMOVAL = 30.0  # seconds within which Ray removes the actors of a killed driver
_MARGIN = 10.0  # seconds, beside the grace, in which an actor ends its program
_THREADS = 8  # threads of an actor, one of which each waiting call takes
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
        self._needs = {CENTER: center, "worker": worker}
        self._center: Any = None
        self._center_watch: asyncio.Task[Ended] | None = None
        self._workers: list[_Worker] = []
        self._signals: list[int] = []
        self._is_ending = False
        self._is_broken = False  # failed, apart from the workers' and center's codes

    def run(self) -> dict[str, Any]:
        """Carry out the run, in any thread; signals are handled in the main thread.

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
                await self._all()

        with handled(_SIGNALS if is_main else (), interrupt):
            try:
                asyncio.run(interruptible())
            except asyncio.CancelledError:  # by a signal
                pass
            except RayError as error:
                self._say("ray", str(error))
                self._is_broken = True
            finally:
                self._remove()
        seconds = time.monotonic() - begin
        ended = [
            worker.ended
            or Ended(worker.name, 0, worker.restarts, seconds, stopped=True)
            for worker in self._workers
        ]
        watch = self._center_watch
        if watch and watch.done() and not (watch.cancelled() or watch.exception()):
            ended.append(watch.result())
        code = exit_code(ended, self._run) or int(self._is_broken)
        return {
            "returncode": 128 + self._signals[0] if self._signals else code,
            "seconds": seconds,
            "programs": [vars(each) for each in ended],
        }

    async def _all(self) -> None:
        try:
            await self._until_over()
        finally:
            self._is_ending = True
            await self._end()

    async def _until_over(self) -> None:
        """Wait until all workers have ended, or one of them or the center has failed.

        A failure of a worker counts after its last restart.
        """
        run = self._run
        center: set[asyncio.Task[Any]] = set()
        if run.has_center:
            make = self._actor(CenterActor, f"{run.name}-{CENTER}", self._needs[CENTER])
            self._center = await self._new(make, run)
            watched = self._watched(CENTER, self._center)
            self._center_watch = asyncio.create_task(watched)
            center = {self._center_watch}
            while not await self._center.serves.remote(_LOOK):
                if self._center_watch.done():
                    self._is_broken = True
                    return
        for rank, name in enumerate(run.worker_names):
            make = self._actor(WorkerActor, f"{run.name}-{name}", self._needs["worker"])
            self._workers.append(_Worker(name, await self._new(make, run, rank)))
        for worker in self._workers:
            worker.task = asyncio.create_task(self._tend(worker))
        left: set[asyncio.Task[Any]] = {worker.task for worker in self._workers}
        while left:
            done, _ = await asyncio.wait(
                left | center, return_when=asyncio.FIRST_COMPLETED
            )
            left -= done
            codes = [task.result().returncode for task in done]
            if done & center:
                self._is_broken = True
                return
            if any(codes) and self._settings.on_failure == "stop":
                return

    # Actors.

    def _actor(self, kind: type, name: str, needs: dict[str, float]) -> Any:
        """Return what makes an actor that Ray restarts, with the resources it needs."""
        own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        given = {own[key]: value for key, value in needs.items() if key in own}
        return ray.remote(kind).options(
            name=name,
            namespace=self._settings.namespace,
            runtime_env=self._settings.runtime_env,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_THREADS,
            resources={key: value for key, value in needs.items() if key not in own},
            **{"num_cpus": 0, **given},
        )

    async def _new(self, make: Any, *arguments: Any) -> Any:
        """Make an actor; wait while Ray removes that of a killed driver."""
        until = time.monotonic() + _REMOVAL
        while True:
            try:
                return make.remote(*arguments)
            except ValueError as error:
                if time.monotonic() > until:
                    raise errors.InvalidArgumentError(
                        f"another driver runs {self._run.name!r}: {error}"
                    ) from None
            await asyncio.sleep(_PAUSE)

    async def _answered(self, task: str, call: Awaitable[Any]) -> Any:
        """Return the answer of an actor; report when it waits long for room."""
        answer = asyncio.ensure_future(call)
        needs = self._needs.get(task, self._needs["worker"])
        pause = _SOON
        while not (await asyncio.wait([answer], timeout=pause))[0]:
            self._say(task, f"waits for a node with {_described(needs)}")
            pause = min(2 * pause, _SELDOM)
        return answer.result()

    # Programs.

    async def _watched(self, task: str, actor: Any, session: str = "") -> Ended:
        """Show the output of a program until it has ended.

        Args:
          task: name of the program.
          actor: the actor that runs it.
          session: session id of the program; "" to go on with another session after
            the actor or its node was lost.

        Raises:
          _LostError: the session was lost.
        """
        last = session
        while True:
            said: Said = await self._answered(task, actor.look.remote(_LOOK))
            if last and said.session != last:
                if session:
                    raise _LostError
                self._say(task, "its actor or node was lost; it is back")
            last = said.session
            for line in said.lines:
                self._output(task, line)
            if said.ended is not None:
                return said.ended

    async def _tend(self, worker: _Worker) -> Ended:
        """Run a worker until it has ended with 0, or failed after its last restart."""
        begin, failures = time.monotonic(), 0
        while not self._is_ending:
            place = await self._answered(worker.name, worker.actor.where.remote())
            self._say(worker.name, f"starts on {place.host}")
            worker.is_running = True
            code = await self._session(worker)
            worker.is_running = False
            if self._is_ending:
                break
            failures += bool(code)
            if code == 0 or (code and failures > self._run.restarts):
                # Its resources are for workers that wait for some.
                ray.kill(worker.actor)
                seconds = time.monotonic() - begin
                worker.ended = Ended(
                    worker.name, code, worker.restarts, seconds, stopped=False
                )
                return worker.ended
            if code is None:
                self._say(worker.name, "its actor or node was lost; it starts again")
            else:
                number = f"{failures} of {self._run.restarts}"
                self._say(worker.name, f"starts again ({number})")
            worker.restarts += 1
            await asyncio.sleep(_PAUSE)
        seconds = time.monotonic() - begin
        return Ended(worker.name, 0, worker.restarts, seconds, stopped=True)

    async def _session(self, worker: _Worker) -> int | None:
        """Run a worker's program once; return its exit code, or None if it was lost."""
        session = await worker.actor.start.remote(worker.restarts)
        try:
            ended = await self._watched(worker.name, worker.actor, session)
        except _LostError:
            return None
        return ended.returncode

    # The end.

    async def _end(self) -> None:
        """End the workers, then the center."""
        limit = self._run.stop_grace + _MARGIN
        running = [worker for worker in self._workers if worker.is_running]
        for worker in running:
            worker.actor.stop.remote()
        if running:
            await asyncio.wait([worker.task for worker in running], timeout=limit)
        if self._center_watch is not None:
            self._center.stop.remote()
            await asyncio.wait([self._center_watch], timeout=limit)

    def _remove(self) -> None:
        """Remove the run from the cluster; the files in its storage stay."""
        left = [worker.actor for worker in self._workers if worker.ended is None]
        for actor in [*left, *([self._center] if self._center is not None else [])]:
            with contextlib.suppress(RayError):
                ray.kill(actor)

    def _say(self, name: str, event: str) -> None:
        self._output(name, f"agn-optax: {event}")


@dataclasses.dataclass
class _Worker:
    """The driver's record of a worker.

    Attributes:
      name: name of the worker.
      actor: the actor that runs its program.
      restarts: number of starts so far, without the first.
      is_running: whether its program runs.
      ended: final outcome of the worker; None before.
      task: the task that runs the worker.
    """

    name: str
    actor: Any
    restarts: int = 0
    is_running: bool = False
    ended: Ended | None = None
    task: asyncio.Task[Ended] = dataclasses.field(init=False)


class _LostError(Exception):
    """A program was lost with its actor or node."""


def _described(needs: dict[str, float]) -> str:
    described = (
        f"{value / 2**30:g} GiB" if name == "memory" else f"{value:g} {name}"
        for name, value in needs.items()
    )
    return ", ".join(described)
