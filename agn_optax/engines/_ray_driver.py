"""The driver of a run on Ray: starts actors, shows what they say, and ends them."""

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

from agn_optax import errors, launch
from agn_optax.engines._engine import Output
from agn_optax.engines._local import CENTER, exit_code
from agn_optax.engines._ray_actors import (
    Center,
    Place,
    Process,
    Said,
    address_file,
    is_closed,
)
from agn_optax.engines._run import Run
from agn_optax.launch import Ended
from agn_optax.service import tokens

_LOOK = 5.0  # seconds that an actor waits for news
_TICK = 0.2  # seconds, at most, until a signal is heard
_PAUSE = 1.0  # seconds before what was lost or failed is tried again
_SOON = 5.0  # seconds after which it is said that something is waited for
_PROGRESS = 10.0  # seconds between two looks at the center
_MARGIN = 10.0  # seconds, beside the grace, that an actor has for its program's end
_THREADS = 8  # of an actor: those who look wait in one
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Driver:
    """One launch of a run.

    Args:
      run: what is run.
      output: as of `Engine.launch`.
      namespace: of the actors.
      runtime_env: of the actors, as Ray has it.
      center: what the center's actor needs of a node.
      worker: what each process of a worker needs of a node.
      strategy: how the processes of a worker are placed.
      goes_on: whether the others go on when a worker has failed for good.
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
        self._own = {"namespace": namespace, "runtime_env": {**runtime_env}}
        self._center_needs, self._worker_needs = dict(center), dict(worker)
        self._strategy, self._goes_on = strategy, goes_on
        self._center: Any = None
        self._center_ended: Ended | None = None
        self._workers: list[_Worker] = []
        self._version: int | None = None
        self._signals: list[int] = []

    def run(self) -> dict[str, Any]:
        """Does it all, from any thread; signals are heard in the main one.

        Raises:
          InvalidArgumentError: another run has this one's name, or a driver of it runs.
          KeyboardInterrupt, SystemExit: a signal came, and all has ended.
        """
        is_main = threading.current_thread() is threading.main_thread()
        main: asyncio.Task[Any] | None = None

        def hear(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signum)
            if main is not None:
                main.get_loop().call_soon_threadsafe(main.cancel)

        async def told() -> dict[str, Any]:
            nonlocal main
            main = asyncio.current_task()
            if self._signals:
                return {}
            return await self._all()

        with launch.handled(_SIGNALS if is_main else (), hear):
            try:
                summary = asyncio.run(told())
            except asyncio.CancelledError:
                summary = {}
            except RayError as error:
                self._say("ray", str(error))
                summary = {"returncode": 1}
            finally:
                self._remove()
        if self._signals:
            if self._signals[0] == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + self._signals[0])
        return summary

    async def _all(self) -> dict[str, Any]:
        begin = time.monotonic()
        tasks = [asyncio.create_task(_ticks())]
        try:
            ended = await self._until_over(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()
        ended += [] if self._center_ended is None else [self._center_ended]
        return {
            "returncode": exit_code(ended),
            "seconds": time.monotonic() - begin,
            "version": self._version,
            "programs": [vars(each) for each in ended],
        }

    async def _until_over(self, tasks: list[asyncio.Task[Any]]) -> list[Ended]:
        """Until all workers have ended, or one or the center has failed for good.

        Returns:
          What became of the workers.
        """
        run, ends = self._run, []
        if run.has_center:
            self._center = await self._found_center()
            center = asyncio.create_task(self._watched_center())
            tasks.append(center)
            if not await self._serves(center):
                return []
            tasks.append(asyncio.create_task(self._progress()))
            ends.append(center)
        self._workers = [await self._made_worker(rank) for rank in range(run.workers)]
        begin = time.monotonic()
        working = [asyncio.create_task(self._tend(each)) for each in self._workers]
        tasks += working
        ends += working
        while not all(task.done() for task in working):
            left = [task for task in ends if not task.done()]
            done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            failed = [task for task in done if _is_at_fault(task.result())]
            if any(task not in working or not self._goes_on for task in failed):
                break
        return [
            task.result()
            if task.done()
            else Ended(each.name, 0, each.lives, time.monotonic() - begin, stopped=True)
            for each, task in zip(self._workers, working, strict=True)
        ]

    # The center.

    async def _found_center(self) -> Any:
        """The actor of this run's center, which may be there."""
        run = self._run
        needs = dict(self._center_needs)
        made = ray.remote(Center).options(
            name=f"{run.name}-{CENTER}",
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=_THREADS,
            **_as_options(needs),
            **self._own,
        )
        center: Any = made.remote(run)
        await self._placed(CENTER, center, needs)
        command = run.serve_command(**run.durable())
        found = await self._insist(center.command.remote)
        if found != command:
            raise errors.InvalidArgumentError(
                f"a center of a run {run.name!r} is there with other settings, "
                f"{' '.join(found[3:])}; and this run's are {' '.join(command[3:])}. "
                "Give the run another --name, or end that one"
            )
        return center

    async def _serves(self, center: asyncio.Task[Ended]) -> bool:
        """Waits until the center serves; False if it has ended."""
        while not await self._insist(self._center.serve.remote, _LOOK):
            if center.done():
                return False
        return True

    async def _watched_center(self) -> Ended:
        """Shows what the center says until it has ended, whatever is lost."""
        life, seen = "", 0
        while True:
            try:
                said: Said = await self._center.look.remote(life, seen, _LOOK)
            except ActorUnavailableError:
                self._say(CENTER, "its actor or node was lost; it comes back")
                await self._insist(self._center.where.remote)
                continue
            life, seen = said.life, said.seen
            self._show(CENTER, said)
            if said.ended is not None:
                self._center_ended = said.ended
                return said.ended

    async def _progress(self) -> None:
        """Tells from time to time what the center has."""
        shown = None
        while True:
            status = await self._insist(self._center.status.remote)
            if status is not None:
                self._version = status["version"]
                there = sum(worker["connected"] for worker in status["workers"])
                line = (
                    f"version {self._version}, {there} of {self._run.workers} workers"
                )
                if line != shown:
                    self._say(CENTER, line)
                shown = line
            await asyncio.sleep(_PROGRESS)

    # Workers.

    async def _made_worker(self, rank: int) -> _Worker:
        """Its placement group, and in it an actor for each process."""
        run = self._run
        processes = run.worker_resources.processes
        bundles = [self._worker_needs.copy() for _ in range(processes)]
        group = placement_group(bundles, strategy=self._strategy)
        name = run.worker_name(rank)
        worker = _Worker(rank, name, group, [])
        try:
            for index in range(processes):
                more = f"-{index}" if processes > 1 else ""
                make = ray.remote(Process).options(
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
        """An actor; waits while that of a driver that was killed is being removed."""
        until = time.monotonic() + 4 * _SOON
        while True:
            try:
                return make.remote(*arguments)
            except ValueError as error:
                if time.monotonic() > until:
                    raise errors.InvalidArgumentError(
                        f"another driver runs {self._run.name!r}: {error}"
                    ) from None
            await asyncio.sleep(_PAUSE)

    async def _tend(self, worker: _Worker) -> Ended:
        """Keeps a worker running until it has ended for good."""
        begin, failures = time.monotonic(), 0
        token = ""
        if is_closed(self._run):
            token = await self._insist(self._center.token.remote, worker.name)
        while True:
            places = [
                await self._placed(worker.name, actor, self._worker_needs)
                for actor in worker.actors
            ]
            hosts = ", ".join(place.host for place in places)
            self._say(worker.name, f"starts on {hosts}")
            code: int | None = None
            try:
                code = await self._life(worker, token)
            except _LostError:
                self._say(worker.name, "its actor or node was lost; it starts again")
            if code is not None:
                failures += code != 0
                if not code or failures > self._run.restarts:
                    seconds = time.monotonic() - begin
                    return Ended(worker.name, code, worker.lives, seconds, False)
                number = f"{failures} of {self._run.restarts}"
                self._say(worker.name, f"starts again ({number})")
            worker.lives += 1
            await asyncio.sleep(_PAUSE)

    async def _life(self, worker: _Worker, token: str) -> int:
        """One start of all processes of a worker; 0, or the code of one that failed.

        Raises:
          _LostError: one was lost.
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
                    return code  # the others end before the next start
            return 0
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watched(self, worker: _Worker, index: int, life: str) -> Ended:
        """Shows what a process says until it has ended."""
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
        """Ends the workers, then the center."""
        limit = self._run.grace + _MARGIN
        await self._within(limit, *(self._ended(each) for each in self._workers))
        if self._center is None:
            return
        status = await self._within(_SOON, self._insist(self._center.status.remote))
        if status and status[0]:
            self._version = status[0]["version"]
        await self._within(limit, self._ended_center())

    async def _ended(self, worker: _Worker) -> None:
        """Ends a worker, and shows its last words."""
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
        """What they give; nothing if that takes too long."""
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), seconds)
        except (TimeoutError, RayError):
            return []

    def _remove(self) -> None:
        """Nothing of the run stays in the cluster; what is in its storage stays."""
        for worker in self._workers:
            worker.remove()
        if self._center is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._center)

    # What is said, and calls of actors.

    async def _placed(self, name: str, actor: Any, needs: Mapping[str, float]) -> Place:
        """Where an actor is, once there is room for it."""
        call = asyncio.create_task(self._insist(actor.where.remote))
        try:
            done, _ = await asyncio.wait([call], timeout=_SOON)
            if not done:
                self._say(name, f"waits for a node with {_said(needs)}")
            return await call
        finally:
            call.cancel()

    async def _insist(
        self, call: Callable[..., Awaitable[Any]], *arguments: Any
    ) -> Any:
        """What an actor answers, whether or not it is lost meanwhile."""
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
    """The driver's end of a worker.

    Attributes:
      rank, name: of it.
      actors: of its processes.
      lives: starts so far, but for the first.
      seen: of each process the life and the lines that were seen.
    """

    def __init__(
        self, rank: int, name: str, group: PlacementGroup, actors: list[Any]
    ) -> None:
        self.rank, self.name, self.actors = rank, name, actors
        self.lives = 0
        self.seen: dict[int, tuple[str, int]] = {}
        self._group = group

    def remove(self) -> None:
        """Its actors and its placement group."""
        with contextlib.suppress(RayError):
            for actor in self.actors:
                ray.kill(actor)
            remove_placement_group(self._group)


class _LostError(Exception):
    """A process of a worker was lost, and not by its own fault."""


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except ActorUnavailableError:
        raise _LostError from None


async def _ticks() -> None:
    """Has signals heard, which wake nobody."""
    while True:
        await asyncio.sleep(_TICK)


def _as_options(needs: Mapping[str, float]) -> dict[str, Any]:
    """Of an actor, what a bundle says by Ray's names."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    custom = {name: value for name, value in needs.items() if name not in own}
    given = {own[name]: value for name, value in needs.items() if name in own}
    return {"num_cpus": 0, **given, "resources": custom}


def _said(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in needs.items())


def _is_at_fault(ended: Ended) -> bool:
    return bool(ended.returncode) and not ended.stopped
