"""The driver of a run on Ray, which makes actors, shows their output and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agn_optax import errors
from agn_optax._signals import handled
from agn_optax.ops.engines._engine import Output
from agn_optax.ops.engines._local import CENTER, exit_code
from agn_optax.ops.engines._ray_actors import (
    ActorPlace,
    CenterActor,
    Claim,
    Said,
    WorkerActor,
    address_file,
    is_closed,
)
from agn_optax.ops.engines._run import Run
from agn_optax.ops.launch import Ended
from agn_optax.service import tokens

_LOOK = 5.0  # seconds that an actor waits for new output
_TICK = 0.2  # seconds, at most, until a signal is handled
_PAUSE = 1.0  # seconds before a retry
_SOON = 5.0  # seconds until waiting for an actor is reported
_SELDOM = 600.0  # seconds, at most, until the next report
_REMOVAL = 20.0  # seconds within which Ray removes the actors of a killed driver
_MARGIN = 10.0  # seconds, beside the grace, in which an actor ends its program
_THREADS = 8  # threads of an actor, one of which each waiting call takes
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Driver:
    """One launch of a run.

    Args:
      run: the run to carry out.
      output: as in `Engine.launch`.
      namespace: namespace of the actors.
      runtime_env: Ray's runtime environment of the actors.
      center: resources that the center's actor needs.
      worker: resources that each process of a worker needs.
      strategy: placement of a worker's processes.
      goes_on: whether the other workers go on when one has failed after its last
        restart.
    """

    def __init__(
        self,
        run: Run,
        output: Output,
        *,
        namespace: str,
        runtime_env: Mapping[str, Any],
        center: Mapping[str, float],
        worker: Mapping[str, float],
        strategy: str,
        goes_on: bool,
    ) -> None:
        self._run, self._output = run, output
        self._namespace = namespace
        self._own = {"namespace": namespace, "runtime_env": {**runtime_env}}
        self._center_needs, self._worker_needs = dict(center), dict(worker)
        self._strategy, self._goes_on = strategy, goes_on
        self._limit = run.stop_grace + _MARGIN  # seconds to end after being told to
        self._claim: Any = None
        self._center: Any = None
        self._center_node = ""
        self._center_seen = "", 0  # session id, and number of lines seen
        self._center_ended: Ended | None = None
        self._workers: list[_Worker] = []
        self._signals: list[int] = []
        self._is_broken = False  # failed, apart from the workers' and center's codes

    def run(self) -> dict[str, Any]:
        """Carry out the run, in any thread; signals are handled in the main thread.

        Returns:
          The summary of `Engine.launch`. A signal ends the run; the return code is then
          128 plus its number.

        Raises:
          InvalidArgumentError: another run has this name, or another driver runs it.
        """
        begin = time.monotonic()
        is_main = threading.current_thread() is threading.main_thread()
        main: asyncio.Task[Any] | None = None

        def hear(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signum)
            if main is not None:
                main.get_loop().call_soon_threadsafe(main.cancel)

        async def told() -> None:
            nonlocal main
            main = asyncio.current_task()
            if not self._signals:
                await self._all()

        with handled(_SIGNALS if is_main else (), hear):
            try:
                asyncio.run(told())
            except asyncio.CancelledError:  # by a signal
                pass
            except RayError as error:
                self._say("ray", str(error))
                self._is_broken = True
            finally:
                self._remove()
        seconds = time.monotonic() - begin
        ended = [
            each.ended or Ended(each.name, 0, each.lives, seconds, stopped=True)
            for each in self._workers
        ]
        ended += [] if self._center_ended is None else [self._center_ended]
        code = exit_code(ended, self._run) or int(self._is_broken)
        return {
            "returncode": 128 + self._signals[0] if self._signals else code,
            "seconds": seconds,
            "programs": [vars(each) for each in ended],
        }

    async def _all(self) -> None:
        tasks = [asyncio.create_task(_ticks())]
        try:
            await self._until_over(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()

    async def _until_over(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Wait until all workers have ended, or one of them or the center has failed.

        A failure of a worker counts after its last restart.
        """
        run = self._run
        await self._claim_name()
        center: asyncio.Task[Any] | None = None
        if run.has_center:
            await self._find_center()
            center = asyncio.create_task(self._watched_center())
            tasks.append(center)
            if not await self._serves(center):
                self._is_broken = True
                return
        for rank in range(run.workers):
            self._workers.append(await self._made_worker(rank))
        left = {asyncio.create_task(self._tend(each)) for each in self._workers}
        tasks += left
        while left:
            ends = left if center is None else left | {center}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            left -= done
            failed = [_is_at_fault(task.result()) for task in done]
            if center in done:
                self._is_broken = True
                return
            if any(failed) and not self._goes_on:
                return

    async def _claim_name(self) -> None:
        """Claim the name of the run, which only one driver may hold."""
        make = ray.remote(Claim).options(
            name=f"{self._run.name}-driver",
            max_restarts=-1,
            **_as_options({}),
            **self._own,
        )
        self._claim = await self._new(make)

    # The center.

    async def _find_center(self) -> None:
        """Find the actor of the run's center, or make it.

        An existing center is adopted, to be ended by this driver, only after its
        settings have been found to be the same.
        """
        run = self._run
        name, needs = f"{run.name}-{CENTER}", self._center_needs
        try:
            ray.get_actor(name, namespace=self._namespace)
            is_there = True
        except ValueError:
            is_there = False
        made = ray.remote(CenterActor).options(
            name=name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=_THREADS,
            **_as_options(needs),
            **self._own,
        )
        center: Any = made.remote(run)
        if not is_there:
            self._center = center
        place = await self._placed(CENTER, center, needs)
        command = run.serve_command(**run.durable())
        found = await self._insist(center.command.remote)
        if found != command:
            raise errors.InvalidArgumentError(
                f"a center of a run {run.name!r} exists with other settings, "
                f"{' '.join(found[3:])}; this run's are {' '.join(command[3:])}. "
                "Give this run another --name, or end the other one"
            )
        self._center, self._center_node = center, place.node
        if is_there:
            self._say(CENTER, "exists from an earlier launch, and goes on")
            self._center_seen = await self._insist(center.shown.remote)

    async def _serves(self, center: asyncio.Task[Ended]) -> bool:
        """Wait until the center serves; return False if it has ended."""
        while not await self._insist(self._center.serve.remote, _LOOK):
            if center.done():
                center.result()  # raises the task's error
                return False
        return True

    async def _watched_center(self) -> Ended:
        """Show the center's output until it ends, even if its actor or node is lost."""
        while True:
            try:
                said: Said = await self._center.look.remote(*self._center_seen, _LOOK)
            except ActorUnavailableError:
                self._say(CENTER, "its actor or node was lost; it comes back")
                needs = self._center_needs
                self._center_node = ""
                place = await self._placed(CENTER, self._center, needs)
                self._center_node = place.node
                continue
            self._center_seen = said.life, said.seen
            self._show(CENTER, said)
            if said.ended is not None:
                self._center_ended = said.ended
                return said.ended

    # Workers.

    async def _made_worker(self, rank: int) -> _Worker:
        """Make a worker's placement group, and in it an actor for each process."""
        run = self._run
        processes = run.worker_resources.processes
        bundles = [self._worker_needs.copy() for _ in range(processes)]
        group = placement_group(bundles, strategy=self._strategy)
        name = run.worker_name(rank)
        worker = _Worker(name, group)
        try:
            for index in range(processes):
                more = f"-{index}" if processes > 1 else ""
                make = ray.remote(WorkerActor).options(
                    name=f"{run.name}-{name}{more}",
                    max_restarts=-1,
                    max_concurrency=_THREADS,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=index
                    ),
                    **_as_options(self._worker_needs),
                    **self._own,
                )
                worker.actors.append(await self._new(make, run, rank))
        except BaseException:
            worker.remove()
            raise
        return worker

    async def _new(self, make: Any, *arguments: Any) -> Any:
        """Make an actor; wait while Ray removes that of a killed driver."""
        until = time.monotonic() + _REMOVAL
        has_said = False
        while True:
            try:
                return make.remote(*arguments)
            except ValueError as error:
                if time.monotonic() > until:
                    raise errors.InvalidArgumentError(
                        f"another driver runs {self._run.name!r}: {error}"
                    ) from None
                if not has_said:
                    self._say("ray", "another driver has this run; waits for its end")
                has_said = True
            await asyncio.sleep(_PAUSE)

    async def _tend(self, worker: _Worker) -> Ended:
        """Run a worker until it has ended with 0, or failed after its last restart."""
        begin, failures = time.monotonic(), 0
        token = ""
        if is_closed(self._run):
            token = await self._insist(self._center.token.remote, worker.name)
        while True:
            places = [
                await self._placed(
                    worker.name,
                    actor,
                    self._worker_needs,
                    processes=len(worker.actors),
                )
                for actor in worker.actors
            ]
            worker.is_placed = True
            hosts = ", ".join(place.host for place in places)
            self._say(worker.name, f"starts on {hosts}")
            code: int | None = None
            try:
                code = await self._life(worker, token)
            except _LostError:
                worker.is_placed = False
                self._say(worker.name, "its actor or node was lost; it starts again")
            if code is not None:
                failures += code != 0
                if not code or failures > self._run.restarts:
                    seconds = time.monotonic() - begin
                    worker.ended = Ended(
                        worker.name, code, worker.lives, seconds, stopped=False
                    )
                    # Its resources are for workers that wait for some.
                    await self._within(self._limit, self._ended(worker))
                    worker.remove()
                    return worker.ended
                number = f"{failures} of {self._run.restarts}"
                self._say(worker.name, f"starts again ({number})")
            worker.lives += 1
            await asyncio.sleep(_PAUSE)

    async def _life(self, worker: _Worker, token: str) -> int:
        """Run all processes of a worker once; return 0, or the code of a failed one.

        Raises:
          _LostError: a process was lost.
        """
        run = self._run
        told = {"AGN_OPTAX_RESTARTS": str(worker.lives)}
        if run.has_center:
            told["AGN_OPTAX_CENTER"] = f"file:{address_file(run)}"
        if token:
            told[tokens.TOKEN] = token
        first, *others = worker.actors
        with _lost():
            if others:
                told["AGN_OPTAX_COORDINATOR"] = await first.meeting.remote()
            lives = await asyncio.gather(
                *(
                    actor.start.remote(**told, AGN_OPTAX_PROCESS=str(index))
                    for index, actor in enumerate(worker.actors)
                )
            )
        watches = [
            asyncio.create_task(self._watched(worker, index, life))
            for index, life in enumerate(lives)
        ]
        try:
            for each in asyncio.as_completed(watches):
                if code := (await each).returncode:
                    return code  # the other processes end before the next start
            return 0
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watched(self, worker: _Worker, index: int, life: str) -> Ended:
        """Show the output of a process until it has ended."""
        actor, seen = worker.actors[index], 0
        while True:
            with _lost():
                said: Said = await actor.look.remote(life, seen, _LOOK)
            if said.life != life:
                raise _LostError
            worker.seen[index] = life, said.seen
            seen = said.seen
            self._show(worker.name, said)
            if said.ended is not None:
                return said.ended

    # The end.

    async def _end(self) -> None:
        """End the workers, then the center."""
        left = [each for each in self._workers if each.is_placed]
        await self._within(self._limit, *map(self._ended, left))
        if not self._center_node:
            return
        await self._within(self._limit, self._ended_center())

    async def _ended(self, worker: _Worker) -> None:
        """End a worker, and show its last output."""
        for index, actor in enumerate(worker.actors):
            with contextlib.suppress(RayError):
                await actor.stop.remote()
                life, seen = worker.seen.get(index, ("", 0))
                while life:
                    said: Said = await actor.look.remote(life, seen, _LOOK)
                    if said.life != life:
                        break
                    seen = said.seen
                    self._show(worker.name, said)
                    if said.ended is not None:
                        break

    async def _ended_center(self) -> None:
        await self._insist(self._center.stop.remote)
        await self._watched_center()

    async def _within(self, seconds: float, *calls: Awaitable[Any]) -> list[Any]:
        """Return the results of calls; nothing if one fails or they take too long."""
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), seconds)
        except (TimeoutError, RayError):
            return []

    def _remove(self) -> None:
        """Remove the run from the cluster; the files in its storage stay."""
        for worker in self._workers:
            worker.remove()
        for actor in (self._center, self._claim):
            if actor is not None:
                with contextlib.suppress(RayError):
                    ray.kill(actor)

    # Output, and calls of actors.

    async def _placed(
        self, name: str, actor: Any, needs: Mapping[str, float], *, processes: int = 1
    ) -> ActorPlace:
        """Return the node and process of an actor, once there is room for it.

        Args:
          name: name of the actor's task.
          actor: the actor to wait for.
          needs: resources that the actor needs.
          processes: number of processes of the task, which are placed together.
        """
        where = f"a node with {_said(needs)}"
        if processes > 1:
            where = f"{processes} places ({self._strategy}), each on {where}"
        call = asyncio.create_task(self._insist(actor.where.remote))
        pause = _SOON
        try:
            while not (await asyncio.wait([call], timeout=pause))[0]:
                self._say(name, f"waits for {where}")
                pause = min(2 * pause, _SELDOM)
            return call.result()
        finally:
            call.cancel()

    async def _insist(
        self, call: Callable[..., Awaitable[Any]], *arguments: Any
    ) -> Any:
        """Call an actor, again as long as it is unavailable, and return its answer."""
        while True:
            with contextlib.suppress(ActorUnavailableError):
                return await call(*arguments)
            await asyncio.sleep(_TICK)

    def _show(self, name: str, said: Said) -> None:
        if said.missed:
            self._say(name, f"{said.missed} lines came too fast to be shown")
        for line in said.lines:
            self._output(name, line)

    def _say(self, name: str, event: str) -> None:
        self._output(name, f"agn-optax: {event}")


class _Worker:
    """The driver's record of a worker.

    Attributes:
      name: name of the worker.
      actors: actors of the worker's processes.
      lives: number of starts so far, without the first.
      seen: session id and number of lines seen, for each process.
      ended: final outcome of the worker; None before.
      is_placed: whether its actors have been placed, and were not lost since.
    """

    def __init__(self, name: str, group: PlacementGroup) -> None:
        self.name, self.actors = name, list[Any]()
        self.lives = 0
        self.seen: dict[int, tuple[str, int]] = {}
        self.ended: Ended | None = None
        self.is_placed, self._is_removed = False, False
        self._group = group

    def remove(self) -> None:
        """Remove the worker's actors and its placement group."""
        if self._is_removed:
            return
        self.is_placed, self._is_removed = False, True
        with contextlib.suppress(RayError):
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(self._group)


class _LostError(Exception):
    """A process of a worker was lost with its actor or node."""


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except ActorUnavailableError:
        raise _LostError from None


async def _ticks() -> None:
    """Wake the event loop regularly, because signals do not wake it."""
    while True:
        await asyncio.sleep(_TICK)


def _as_options(needs: Mapping[str, float]) -> dict[str, Any]:
    """Return a bundle of resources as options of an actor."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    custom = {name: value for name, value in needs.items() if name not in own}
    given = {own[name]: value for name, value in needs.items() if name in own}
    return {"num_cpus": 0, **given, "resources": custom}


def _said(needs: Mapping[str, float]) -> str:
    said = (
        f"{value / 2**30:g} GiB" if name == "memory" else f"{value:g} {name}"
        for name, value in needs.items()
    )
    return ", ".join(said)


def _is_at_fault(ended: Ended) -> bool:
    return bool(ended.returncode) and not ended.stopped
