"""The center in this process: embedded default, and reference for every other."""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from agn_optax import errors
from agn_optax.center._protocol import Snapshot
from agn_optax.rules import Rule, _check, _exchange, _trees
from agn_optax.rules._rule import check_rule

PyTree = Any


class CenterState(NamedTuple):
    """All that a center is, as a pytree to save and to restore from."""

    params: PyTree  # the current version
    center_state: PyTree  # the center optimizer's
    version: Any  # int: exchanges applied


class LocalCenter:
    """The center variable of all workers in this process, which threads may share.

    Exchanges are atomic: message, staleness, center optimizer and new version happen
    under one lock. The lock is held while programs are handed to the device, never
    while they run. Versions are immutable, so a reader keeps what it has and delays
    nobody.

    Args:
      rule: a record of `agn_optax.rules`.
      params: the first parameters, copied; None leaves it to a chief to `initialize`
        them.
      dtype: floating dtype of the center and its optimizer; None keeps that of the
        parameters. float32 under workers with bfloat16 parameters is a master copy.

    Raises:
      InvalidTypeError: ``rule`` is not a rule.
      TreeMismatchError: ``params`` has leaves that are not real floating arrays.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> center = agn_optax.LocalCenter(rule, jnp.array([1.0, 2.0]))
      >>> worker = agn_optax.Worker(center, optax.sgd(0.5), period=2)
      >>> params, state = worker.start()
      >>> for _ in range(2):
      ...     updates, state = worker.tx.update(jnp.ones(2), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     params, state = worker.exchange(params, state)
      >>> print(center.pull().params, center.pull().version)
      [0. 1.] 1
    """

    def __init__(self, rule: Rule, params: PyTree = None, *, dtype: Any = None) -> None:
        check_rule(rule)
        self.rule = rule
        self._dtype = _check.float_dtype(dtype, "dtype")
        self._changed = threading.Condition()
        self._state: CenterState | None = None
        # Who initialized: "" is whoever made this center, None (after a restore) nobody
        # in this life.
        self._chief: str | None = None
        # The center optimizer's state has no readers, so it is updated in place.
        # Versions have.
        self._move = jax.jit(
            functools.partial(_exchange.move_center, rule),
            donate_argnames="center_state",
        )
        if params is not None:
            self.initialize(params, worker="")

    @classmethod
    def restore(cls, rule: Rule, saved: CenterState) -> LocalCenter:
        """A center that goes on where `save` was called.

        Args:
          rule: the rule of the saved center; its optimizer must have the same state.
          saved: what `save` returned, or its arrays read back from a checkpoint.

        Returns:
          A center at the saved version, which further exchanges take where the saved
          one would have gone, bit for bit.

        Raises:
          TreeMismatchError: the saved state is not one of this rule's center optimizer.
          InvalidArgumentError: the saved version is negative.

        Example:
          >>> import jax.numpy as jnp, agn_optax
          >>> center = agn_optax.LocalCenter(agn_optax.rules.diloco(), jnp.ones(2))
          >>> agn_optax.LocalCenter.restore(center.rule, center.save()).version
          0
        """
        center = cls(rule)
        _check.float_leaves(saved.params, "saved.params")
        params, center_state = _trees.copy((saved.params, saved.center_state))
        expected = jax.eval_shape(rule.center.init, params)
        _check.same_tree(
            center_state, expected, "saved.center_state", "the rule's center_state"
        )
        version = int(saved.version)
        if version < 0:
            raise errors.InvalidArgumentError(
                f"saved.version must not be negative, got {version}"
            )
        center._state = CenterState(params, center_state, version)
        return center

    def save(self) -> CenterState:
        """A copy of everything that the center is, consistent, for a checkpoint."""
        with self._changed:
            state = self._initialized()
            params, center_state = _trees.copy((state.params, state.center_state))
            return CenterState(params, center_state, state.version)

    @property
    def version(self) -> int:
        """Exchanges applied so far."""
        return self._initialized().version

    def initialize(self, params: PyTree, *, worker: str) -> Snapshot:
        """Gives the center its first parameters: see `Center.initialize`."""
        _check.float_leaves(params, "params")
        with self._changed:
            if self._state is not None and self._chief not in (None, worker):
                by = f"worker {self._chief!r}" if self._chief else "whoever made it"
                raise errors.AlreadyInitializedError(
                    f"worker {worker!r} wants to initialize a center that {by} has "
                    "initialized; start it with chief=False, and it adopts the center"
                )
            self._chief = worker
            if self._state is None:
                copy = _trees.copy(params, self._dtype)
                center_state = self.rule.center.init(_trees.copy(copy))
                self._state = CenterState(copy, center_state, 0)
                self._changed.notify_all()
            return self.pull()

    def wait(self, timeout: float | None = None) -> Snapshot:
        """The center as it is, once it is initialized: see `Center.wait`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state is not None, timeout):
                raise errors.NotInitializedError(
                    f"no chief has initialized this center within {timeout} s; start "
                    "one worker with start(params, chief=True)"
                )
            return self.pull()

    def pull(self) -> Snapshot:
        """The center as it is: ``.params`` and ``.version``, at any time."""
        state = self._initialized()
        return Snapshot(state.params, state.version)

    def exchange(
        self, contribution: PyTree, *, anchor_version: int, worker: str
    ) -> Snapshot:
        """Applies what a worker contributes: see `Center.exchange`."""
        del worker  # all are alike to this center
        with self._changed:
            before = self._initialized()
            _check.same_tree(contribution, before.params, "contribution", "center")
            _check.float_leaves(contribution, "contribution")
            is_int = isinstance(anchor_version, int | np.integer)
            if not is_int or not 0 <= anchor_version <= before.version:
                raise errors.InvalidArgumentError(
                    f"anchor_version must be in [0, {before.version}], the versions "
                    f"that this center has had, got {anchor_version!r}"
                )
            staleness = before.version - anchor_version
            params, center_state = self._move(
                contribution=_trees.place_like(contribution, before.params),
                center=before.params,
                center_state=before.center_state,
                staleness=np.int32(staleness),
            )
            self._state = after = CenterState(params, center_state, before.version + 1)
        adopted = before if self.rule.adopts == "before" else after
        return Snapshot(adopted.params, adopted.version, staleness)

    def _initialized(self) -> CenterState:
        state = self._state
        if state is None:
            raise errors.NotInitializedError(
                "this center has no parameters yet: give them to LocalCenter, or start "
                "one worker with start(params, chief=True)"
            )
        return state
