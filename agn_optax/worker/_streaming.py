"""A worker that exchanges by fragments, with one shard of a center at a time.

A shard is a separate center with its own versions, journal and ledger. Therefore each
fragment has its own `Worker`, for the shard that keeps it. That class applies an
exchange once, retries, overlaps, saves and restores it. This module only adds what the
fragments share: the local phase, and the order of their turns.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, combinations, trees
from agn_optax.center import Center, ShardedCenter
from agn_optax.round import Fragments, LocalState, parts
from agn_optax.worker._programs import Adoption, InnerState, check_local, sound
from agn_optax.worker._worker import Act, Callback, Worker, WorkerState

PyTree = Any


class StreamingState(NamedTuple):
    """State of the local phase of a worker that exchanges by fragments."""

    inner_state: PyTree  # state of the inner optimizer, for the whole tree
    fragments: tuple[LocalState, ...]  # one for each fragment, without inner state


class StreamingWorkerState(NamedTuple):
    """Complete state of a worker with fragments, to save and to restore from."""

    inner_state: PyTree
    fragments: tuple[WorkerState, ...]  # each with its part of the parameters
    turn: Any = 0  # int: fragment that comes first if several are due


class StreamingWorker(Worker):
    """A `Worker` with ``fragments``: one inner worker for each fragment.

    Its methods are those of `Worker`, for the whole tree. `version` and `life` have one
    entry for each fragment, `exchanges` is the smallest count among the fragments, and
    attributes of the last message are those of the fragment that sent it. Callbacks are
    called for each fragment's exchanges, with its index as ``fragment``.

    A call of `exchange` waits for one fragment at most. If several are due at once, the
    others have their turns at the next calls, except that one may be sent while the
    answer of another one is adopted. `flush` sends all fragments before any answer is
    waited for, because in synchronous rounds another worker may wait for any of them.
    """

    def __init__(
        self,
        center: Center,
        inner: optax.GradientTransformation,
        *,
        period: Any,
        fragments: Fragments | None = None,
        gradients: optax.GradientTransformation | None = None,
        name: str | None = None,
        overlap: bool = False,
        patience: int | None = None,
        give_up: float = 600.0,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        such_as = "an agn_optax.Fragments, such as Fragments(2)"
        check.instance(fragments, Fragments, f"fragments must be {such_as}")
        assert fragments is not None
        such_as = "a center, such as agn_optax.service.connect(addresses, rule)"
        check.instance(center, Center, f"center must be {such_as}")
        if not isinstance(center, ShardedCenter):
            center = ShardedCenter([center])
        if len(center.centers) != len(fragments):
            raise errors.InvalidArgumentError(
                "a worker with fragments needs a center in as many shards, each of "
                f"which keeps one: got {len(fragments)} fragments, and shards: "
                f"{len(center.centers)}"
            )
        fragments.check(center.rule)
        if fragments.eager:
            combinations.refuse("eager updates", "a Worker", f"{fragments}")
        if fragments.delay and overlap:
            got = f"delay={fragments.delay}, overlap=True"
            combinations.refuse("fragments with a delay", "overlap=True", got)
        if isinstance(period, rounds.DynamicPeriod):
            combinations.refuse("dynamic_period", "fragments", f"period={period}")
        lengths = rounds.as_schedule(period)
        fragments.check_period(int(lengths(0)))
        self.fragments = fragments
        self.center = center.divided_by(fragments)
        self.name = name or f"worker-{uuid.uuid4().hex[:8]}"
        adoption = Adoption(fragments.delay, fragments.mixing)
        self._workers = [
            _FragmentWorker(
                shard,
                adoption,
                period=fragments.periods(p, lengths),
                name=self.name,
                overlap=overlap,
                patience=patience,
                give_up=give_up,
                callbacks=[_of_fragment(p, each) for each in callbacks],
            )
            for p, shard in enumerate(center.centers)
        ]
        self._inner = check.optimizer(inner, "inner")
        self._before = None
        if gradients is not None:
            self._before = check.optimizer(gradients, "gradients")
        self.tx = optax.GradientTransformationExtraArgs(self._init, self._update)
        self._begin_inner = jax.jit(self._init_inner)
        self._mend_inner = jax.jit(
            lambda state, params: sound(state, self._init_inner(params)),
            donate_argnums=0,
        )
        self._turn, self._kept, self.before_send = 0, None, None  # as in `Worker`
        self._sum_up(self._workers[0])

    def __repr__(self) -> str:
        """Return the worker's name and rule, and the fragments' progress."""
        return (
            f"Worker({self.name!r}, {self.center.rule.name}, "
            f"{[worker.exchanges for worker in self._workers]} exchanges of "
            f"{len(self._workers)} fragments, at {self.center!r})"
        )

    # The local phase: the inner optimizer sees the whole tree.

    def _init_inner(self, params: PyTree) -> PyTree:
        # A copy, because some optimizers keep the parameters passed to their init.
        state = self._inner.init(trees.copy(params))
        check_local(state)
        if self._before is None:
            return state
        return InnerState(self._before.init(trees.copy(params)), state)

    def _init(self, params: PyTree) -> StreamingState:
        assert self.fragments is not None
        cut = self.fragments.divide(params).cut(params)
        pairs = zip(self._workers, cut, strict=True)
        own = tuple(worker.tx.init(part) for worker, part in pairs)
        return StreamingState(self._init_inner(params), own)

    def _update(
        self,
        updates: PyTree,
        state: StreamingState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, StreamingState]:
        assert self.fragments is not None
        rounds.check_step(updates, params, "worker.tx")
        inner_state, first = state.inner_state, None
        if self._before is not None:
            first, inner_state = inner_state
            updates, first = self._before.update(updates, first, params, **extra_args)
        updates, inner_state, own = rounds.local_step_of_fragments(
            self.fragments.divide(params),
            self.center.rule,
            self._inner,
            updates,
            inner_state,
            state.fragments,
            params,
            [None] * len(state.fragments),
            extra_args,
        )
        if self._before is not None:
            inner_state = InnerState(first, inner_state)
        return updates, StreamingState(inner_state, tuple(own))

    # Start, leave, save and restore of all fragments together.

    def start(
        self,
        params: PyTree = None,
        *,
        chief: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[PyTree, Any]:
        """Adopt the center and begin the first rounds: see `Worker.start`."""
        if params is None and not chief:
            whole = self.center.pull() if chief is None else self.center.wait(timeout)
            params = whole.params
        if params is None:
            return self._workers[0].start(None, chief=True)  # raises the right error
        check.float_leaves(params, "params")
        jax.eval_shape(self._init_inner, params)  # raises before any fragment joins
        cut = self._cut(params)
        self.leave()
        own = self._all(
            lambda worker, part: worker.start(part, chief=chief, timeout=timeout), cut
        )
        self._turn = 0
        params = parts.join([part for part, _ in own])
        inner_state = self._begin_inner(params)
        self._sum_up(self._workers[0])
        return params, StreamingState(inner_state, tuple(local for _, local in own))

    def _cut(self, params: PyTree) -> list[PyTree]:
        assert self.fragments is not None
        return self.fragments.divide(params).cut(params)

    def _all(self, begin: Callable[..., Any], *each: Sequence[Any]) -> list[Any]:
        """Call ``begin(worker, ...)`` for every fragment; leave all if one raises."""
        try:
            return [begin(*of_one) for of_one in zip(self._workers, *each, strict=True)]
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Leave all shards: see `Worker.leave`."""
        self._kept = None
        for worker in self._workers:
            worker.leave()

    @property
    def exchanges(self) -> int:
        """The smallest number of exchanges among the fragments."""
        return min(worker.exchanges for worker in self._workers)

    @property
    def version(self) -> Any:
        """The versions of the shards as last adopted; None before the start."""
        versions = tuple(worker.version for worker in self._workers)
        return None if None in versions else versions

    @property
    def life(self) -> Any:
        """The sessions of all fragments, as `Worker.life`; None before the start."""
        lives = [worker.life for worker in self._workers]
        return None if None in lives else lives

    def report(self, **numbers: Any) -> None:
        """Report numbers of this worker for monitoring: see `Worker.report`."""
        for worker in self._workers:
            worker.report(**numbers)

    def save(self, params: PyTree, state: Any) -> Any:
        """Return the complete state of this worker: see `Worker.save`."""
        self._check_state(state)
        saved = tuple(
            worker.save(part, local)
            for worker, part, local in zip(
                self._workers, self._cut(params), state.fragments, strict=True
            )
        )
        return StreamingWorkerState(state.inner_state, saved, self._turn)

    def restore(self, saved: Any, *, life: Any = None) -> tuple[PyTree, Any]:
        """Continue from a saved state: see `Worker.restore`."""
        if len(saved.fragments) != len(self._workers):
            raise errors.WorkerStateError(
                f"saved is of a worker with {len(saved.fragments)} fragments, and "
                f"worker {self.name!r} has {len(self._workers)}"
            )
        whole = parts.join([each.params for each in saved.fragments])
        expected = jax.eval_shape(self._init_inner, whole)
        check.same_tree(
            saved.inner_state, expected, "saved.inner_state", "this worker's"
        )
        lives = [None] * len(self._workers) if life is None else life
        if len(lives) != len(self._workers):
            raise errors.WorkerStateError(
                f"life is of a worker with {len(lives)} fragments, and worker "
                f"{self.name!r} has {len(self._workers)}"
            )
        inner_state = trees.copy(saved.inner_state)
        own = self._all(
            lambda worker, each, life: worker.restore(each, life=life),
            saved.fragments,
            lives,
        )
        self._kept = None
        self._turn = int(saved.turn) % len(self._workers)
        self._sum_up(self._workers[0])
        params = parts.join([part for part, _ in own])
        return params, StreamingState(inner_state, tuple(local for _, local in own))

    # Exchanges.

    @property
    def _parts(self) -> Sequence[Worker]:
        return self._workers

    def _check_flush(self, steps: int | None, weight: float | None) -> float | None:
        """Check that ``steps`` and ``weight`` are None.

        The rounds of fragments began at different times.
        """
        if steps is not None or weight is not None:
            got = f"steps={steps!r}, weight={weight!r}"
            combinations.refuse("fragments", "steps or weight of a flush", got)
        return None

    def _check_called_from_python(self, tree: PyTree) -> None:
        if isinstance(tree, StreamingState):
            tree = tree.fragments[0]
        super()._check_called_from_python(tree)

    def _one(
        self, p: int, act: Act, params: PyTree, state: StreamingState
    ) -> tuple[PyTree, StreamingState]:
        """Run an act of one fragment's worker on the whole tree."""
        self._check_state(state)
        worker, cut, own = self._workers[p], self._cut(params), list(state.fragments)
        refused = worker.refused
        part, local = act(cut[p], own[p])
        if part is cut[p] and local is own[p]:
            return params, state
        cut[p], own[p] = part, local
        params, inner_state = parts.join(cut), state.inner_state
        if worker.refused > refused:  # the inner state may have caused the rejection
            inner_state = self._mend_inner(inner_state, params)
        self._sum_up(worker)
        return params, StreamingState(inner_state, tuple(own))

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, StreamingState):
            raise errors.TreeMismatchError(
                f"state is not of worker {self.name!r}, which wants what worker.start "
                f"and worker.tx.update return, got {check.show(state)}"
            )
        self._check_called_from_python(state)

    def _sum_up(self, last: Worker) -> None:
        workers = self._workers
        self.dropped = sum(worker.dropped for worker in workers)
        self.refused = sum(worker.refused for worker in workers)
        self.refusal = last.refusal
        self.staleness = last.staleness
        self.norm = last.norm
        self.pace = last.pace


class _FragmentWorker(Worker):
    """The worker of one fragment, without the inner optimizer of the whole tree."""

    def __init__(self, shard: Center, adoption: Adoption, **settings: Any) -> None:
        self._adoption = adoption
        super().__init__(shard, _ALONE, **settings)


_ALONE = optax.identity()


def _of_fragment(p: int, callback: Callback) -> Callback:
    if not callable(callback):
        return callback  # `Worker` raises the error

    def told(step: int, values: Mapping[str, float]) -> object:
        return callback(step, {**values, "fragment": float(p)})

    return told
