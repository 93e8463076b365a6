"""The worker's side of a center, embedded or remote: one class for both."""

from __future__ import annotations

import functools
import uuid
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax.center._protocol import Center, Snapshot
from agn_optax.rules import _check, _exchange, _period, _trees
from agn_optax.rules._exchange import LocalState

PyTree = Any


class WorkerState(NamedTuple):
    """All that a worker is, as a pytree to save and to restore from."""

    params: PyTree
    state: LocalState
    anchor: PyTree  # the center as last adopted; None where the rule does not read it
    anchor_version: Any  # int
    local_steps: Any  # int: since the last exchange
    exchanges: Any  # int


class Worker:
    """One participant: its local phase as an optax transformation, and its exchanges.

    The loop is yours, as with any optax optimizer; `exchange` is called after every
    local step and acts when the period is full. It counts on the host, so that no local
    step waits for the device.

    Args:
      center: where the center variable lives: a `LocalCenter`, or anything with its
        protocol.
      inner: the inner optimizer.
      period: local steps between exchanges, a positive int; or a function from the
        exchanges that this worker has made (int) to the length of the round that
        begins.
      name: the worker's name, unique among the workers of the center; None makes one
        up.

    Attributes:
      tx: the local phase, inner step and record: ``tx.update(grads, state, params)``.
        Pure; jit it.
      name: the worker's name.
      exchanges: exchanges made.
      staleness: of the last message sent; None before the first. Where the rule adopts
        the center before the message, the worker's own last one counts.

    Raises:
      InvalidArgumentError: ``period`` is not a positive whole number.
      InvalidTypeError: ``inner`` is not an optimizer, or ``center`` not a center.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> center = agn_optax.LocalCenter(agn_optax.rules.agn(optax.sgd(0.1)))
      >>> worker = agn_optax.Worker(center, optax.sgd(0.1), period=2, name="worker-0")
      >>> params, state = worker.start({"w": jnp.zeros(3)}, chief=True)
      >>> for _ in range(4):
      ...     updates, state = worker.tx.update({"w": jnp.ones(3)}, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     params, state = worker.exchange(params, state)
      >>> worker.exchanges, center.version
      (2, 2)
    """

    def __init__(
        self,
        center: Center,
        inner: optax.GradientTransformation,
        *,
        period: Any,
        name: str | None = None,
    ) -> None:
        if not isinstance(center, Center):
            raise errors.InvalidTypeError(
                "center must be a center, such as agn_optax.LocalCenter(rule, params), "
                f"got {_check.show(center)}"
            )
        if name is not None and (not isinstance(name, str) or not name):
            raise errors.InvalidTypeError(f"name must be a non-empty str, got {name!r}")
        inner = _check.optimizer(inner, "inner")
        rule = center.rule
        self.center = center
        self.name = name or f"worker-{uuid.uuid4().hex[:8]}"
        self.exchanges = 0
        self.staleness: int | None = None
        self._period = _period.as_schedule(period)
        self._anchor: Snapshot | None = None
        self._answer: Snapshot | None = None  # of an exchange not yet adopted
        self._like: tuple[PyTree, LocalState] | None = None  # shapes of the loop
        self._local_steps = 0
        self._round_length = 0

        # Only a penalty reads the anchor at every step, and then it travels with the
        # state. For a contribution the worker holds on to the snapshot, which costs no
        # copy.
        keep_anchor = rule.penalty is not None
        self._holds_anchor = rule.needs_anchor and not keep_anchor

        def init_fn(params: PyTree) -> LocalState:
            anchor = _trees.copy(params) if keep_anchor else None
            return _exchange.init_local(rule, inner, params, anchor)

        def update_fn(
            updates: PyTree, state: LocalState, params: PyTree = None, **extra_args: Any
        ) -> tuple[PyTree, LocalState]:
            _exchange.check_step(updates, params, f"worker {self.name!r}")
            return _exchange.local_step(
                rule, inner, updates, state, params, None, extra_args
            )

        def start_fn(center: PyTree, like: PyTree) -> tuple[PyTree, LocalState]:
            params = jax.tree.map(
                lambda c, x: jnp.array(c, x.dtype, copy=True), center, like
            )
            state = init_fn(params)
            anchor = _trees.copy(center) if keep_anchor else None
            return params, state._replace(anchor=anchor)

        def adopt_fn(
            params: PyTree, state: LocalState, center: PyTree
        ) -> tuple[PyTree, LocalState]:
            params = _exchange.adopt(rule, params, center)
            return params, _exchange.begin_round(rule, state, params, center)

        self.tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
        self._start = jax.jit(start_fn)
        self._contribute = jax.jit(functools.partial(_exchange.contribute, rule))
        self._adopt = jax.jit(adopt_fn, donate_argnums=(0, 1))

    def start(
        self,
        params: PyTree = None,
        *,
        chief: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[PyTree, LocalState]:
        """Adopts the center and begins the first round.

        Every worker may run the same line, ``worker.start(params, chief=rank == 0)``:
        the chief's parameters initialize the center, the others wait for it and adopt
        it.

        Args:
          params: this worker's own parameters. Only the chief's values count; the
            others' give the dtypes and devices in which they adopt the center. None
            takes those of the center.
          chief: True initializes the center with ``params``, unless this worker has
            done so in an earlier life; False waits until a chief has; None expects an
            initialized center.
          timeout: seconds that ``chief=False`` waits at most; None waits for good.

        Returns:
          Parameters and state of the local phase: fresh arrays, to be donated if you
          like.

        Raises:
          NotInitializedError: the center has no parameters (in time).
          AlreadyInitializedError: ``chief=True``, but another worker was the chief.
          MissingArgumentError: ``chief=True`` without ``params``.
          TreeMismatchError: ``params`` does not belong to this center.
        """
        length = self._length_of_round(self.exchanges)
        if chief and params is None:
            raise errors.MissingArgumentError(
                f"worker {self.name!r} starts as chief and so must give parameters: "
                "start(params, chief=True), got params=None"
            )
        if chief:
            _check.float_leaves(params, "params")
            jax.eval_shape(self._start, params, params)  # before others are let in
            snapshot = self.center.initialize(params, worker=self.name)
        elif chief is None:
            snapshot = self.center.pull()
        else:
            snapshot = self.center.wait(timeout)
        if params is None:
            params = snapshot.params
        _check.same_tree(params, snapshot.params, "params", "center")
        _check.float_leaves(params, "params")
        placed = _trees.place_like(snapshot.params, params)
        params, state = self._start(placed, params)
        self._begin(params, state, snapshot._replace(params=placed), length)
        return params, state

    def exchange(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """To be called after every local step: exchanges when the period is full.

        On the other steps it returns what it was given, at the cost of one comparison.
        An exchange donates ``params`` and ``state``: go on with what is returned. If it
        raises, nothing has changed, and the next call tries again.

        Args:
          params: the parameters after the local step.
          state: the state after the local step.

        Returns:
          Parameters and state with which to go on.

        Raises:
          WorkerStateError: the worker was not started, or parameters or state have been
            donated to something else.
          TreeMismatchError: parameters or state are not those of this worker.
        """
        self._require_start()
        self._local_steps += 1
        if self._local_steps < self._round_length:
            return params, state
        return self._exchange(params, state)

    def flush(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        """Exchanges now, however many local steps the round has had, unless none.

        For the last words of a worker that leaves or is preempted: the message takes
        the number of steps really made.

        Args, returns and raises as `exchange`.
        """
        self._require_start()
        return self._exchange(params, state) if self._local_steps else (params, state)

    def save(self, params: PyTree, state: LocalState) -> WorkerState:
        """Everything that this worker is, for a checkpoint.

        The arrays are those given, not copies: write them before you donate them.

        Args:
          params: the parameters as they are.
          state: the state as it is.

        Returns:
          A pytree; with the center's own ``save``, made while no worker exchanges,
          training goes on as if it had never stopped.

        Raises:
          WorkerStateError: the worker was not started.
        """
        anchor = self._require_start()
        return WorkerState(
            params,
            state,
            anchor.params,
            anchor.version,
            self._local_steps,
            self.exchanges,
        )

    def restore(self, saved: WorkerState) -> tuple[PyTree, LocalState]:
        """Goes on where `save` was called, instead of `start`.

        Args:
          saved: what `save` returned, or its arrays read back from a checkpoint;
            copied.

        Returns:
          Parameters and state with which to go on.

        Raises:
          TreeMismatchError: what was saved does not belong to this worker or center.
          WorkerStateError: the center is older than what was saved.
        """
        center = self.center.pull()
        _check.same_tree(saved.params, center.params, "saved.params", "center")
        expected = jax.eval_shape(self._start, center.params, saved.params)[1]
        _check.same_tree(saved.state, expected, "saved.state", "this worker's state")
        if self._holds_anchor:
            _check.same_tree(saved.anchor, center.params, "saved.anchor", "center")
        if int(saved.anchor_version) > center.version:
            raise errors.WorkerStateError(
                f"saved is of a worker that has seen version "
                f"{int(saved.anchor_version)} of the center, which is at "
                f"{center.version}: restore both from one checkpoint, or adopt this "
                "center with start()"
            )
        exchanges = int(saved.exchanges)
        length = self._length_of_round(exchanges)
        params, state, anchor = _trees.copy((saved.params, saved.state, saved.anchor))
        self.exchanges = exchanges
        anchor = Snapshot(anchor, int(saved.anchor_version))
        self._begin(params, state, anchor, length)
        self._local_steps = int(saved.local_steps)
        return params, state

    def _exchange(self, params: PyTree, state: LocalState) -> tuple[PyTree, LocalState]:
        anchor = self._require_start()
        self._check_loop(params, state)
        length = self._length_of_round(self.exchanges + 1)
        if self._answer is None:
            contribution = self._contribute(state, params, anchor.params)
            self._answer = self.center.exchange(
                contribution, anchor_version=anchor.version, worker=self.name
            )
        answer = self._answer
        answer = answer._replace(params=_trees.place_like(answer.params, params))
        params, state = self._adopt(params, state, answer.params)
        self.exchanges += 1
        self.staleness = answer.staleness
        self._begin_round(answer, length)
        return params, state

    def _begin(
        self, params: PyTree, state: LocalState, anchor: Snapshot, length: int
    ) -> None:
        self._like = jax.eval_shape(lambda loop: loop, (params, state))
        self._begin_round(anchor, length)

    def _begin_round(self, anchor: Snapshot, length: int) -> None:
        # Without a reader, the anchor's arrays are let go, so that old versions can be
        # freed.
        self._anchor = anchor if self._holds_anchor else anchor._replace(params=None)
        self._answer = None
        self._local_steps = 0
        self._round_length = length

    def _length_of_round(self, exchanges: int) -> int:
        length = _check.positive_int(self._period(exchanges), f"period({exchanges})")
        return int(length)

    def _check_loop(self, params: PyTree, state: LocalState) -> None:
        """Everything that can be wrong with the loop's arrays, before any is sent."""
        assert self._like is not None
        _check.params_given(params, f"worker {self.name!r}")
        _check.same_tree(params, self._like[0], "params", "this worker's parameters")
        _check.same_tree(state, self._like[1], "state", "this worker's state")
        _check.float_leaves(params, "params")
        for what, tree in (("params", params), ("state", state)):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                if isinstance(leaf, jax.Array) and leaf.is_deleted():
                    raise errors.WorkerStateError(
                        f"{what}{jax.tree_util.keystr(path)} has been donated or "
                        f"deleted; give worker {self.name!r} what its last local step "
                        "returned"
                    )

    def _require_start(self) -> Snapshot:
        if self._anchor is None:
            raise errors.WorkerStateError(
                f"worker {self.name!r} has not started: call start() before its first "
                "local step"
            )
        return self._anchor
