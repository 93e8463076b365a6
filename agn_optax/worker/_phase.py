"""The local phase of a worker, and how its tree and state are those of its parts.

The local phase is one for the whole model, and each part has its own exchanges. A model
in one part has the state of that part. A model in fragments has an inner state for the
whole, and a state without inner state for each fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, trees
from agn_optax.round import Fragments, LocalState, parts
from agn_optax.worker._part import Part, check_called_from_python
from agn_optax.worker._programs import (
    InnerState,
    StreamingState,
    check_local,
    sound,
)

PyTree = Any
Loop = tuple[PyTree, Any]  # parameters and state, of a part or of the whole


class Whole:
    """The local phase of a model in one part."""

    def __init__(self, part: Part) -> None:
        self.tx: optax.GradientTransformationExtraArgs = part.programs.tx

    def check(self, params: PyTree) -> None:
        """Check the parameters of a start: the part does it."""

    def check_restored(self, params: PyTree, state: Any) -> None:
        """Check a saved state: the part does it."""

    def cut(self, params: PyTree) -> list[PyTree]:
        """Return the parameters of each part."""
        return [params]

    def states(self, state: Any) -> list[LocalState]:
        """Return the state of each part."""
        return [state]

    def begun(self, loops: Sequence[Loop]) -> Loop:
        """Return the loop of a worker that starts, of those of its parts."""
        return loops[0]

    def restored(self, loops: Sequence[Loop], state: Any) -> Loop:
        """Return the loop of a worker that was saved with ``state``."""
        del state
        return loops[0]

    def joined(self, loops: Sequence[Loop], state: Any, *, resets: bool) -> Loop:
        """Return the loop after an act of a part.

        Args:
          loops: those of the parts.
          state: the whole state before the act.
          resets: whether the part was reset to the center.
        """
        del state, resets
        return loops[0]


class Divided:
    """The local phase of a model in fragments; the methods are those of `Whole`.

    Args:
      fragments: the fragments.
      each: their parts.
      inner: the inner optimizer, which sees the whole tree.
      gradients: the transformation before it, or None.
    """

    def __init__(
        self,
        fragments: Fragments,
        each: Sequence[Part],
        inner: optax.GradientTransformation,
        gradients: optax.GradientTransformation | None,
    ) -> None:
        self._fragments, self._parts, self._name = fragments, each, each[0].name
        self._rule = each[0].center.rule
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

    def _init_inner(self, params: PyTree) -> PyTree:
        # A copy, because some optimizers keep the parameters passed to their init.
        state = self._inner.init(trees.copy(params))
        check_local(state)
        if self._before is None:
            return state
        return InnerState(self._before.init(trees.copy(params)), state)

    def _init(self, params: PyTree) -> StreamingState:
        pairs = zip(self._parts, self.cut(params), strict=True)
        own = tuple(part.programs.tx.init(tree) for part, tree in pairs)
        return StreamingState(self._init_inner(params), own)

    def _update(
        self,
        updates: PyTree,
        state: StreamingState,
        params: PyTree = None,
        **extra_args: Any,
    ) -> tuple[PyTree, StreamingState]:
        rounds.check_step(updates, params, "worker.tx")
        inner_state, first = state.inner_state, None
        if self._before is not None:
            first, inner_state = inner_state
            updates, first = self._before.update(updates, first, params, **extra_args)
        updates, inner_state, own = rounds.local_step_of_fragments(
            self._fragments.divide(params),
            self._rule,
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

    def check(self, params: PyTree) -> None:
        check.float_leaves(params, "params")
        jax.eval_shape(self._init_inner, params)

    def check_restored(self, params: PyTree, state: Any) -> None:
        self.states(state)
        expected = jax.eval_shape(self._init_inner, params)
        what = "saved.state.inner_state"
        check.same_tree(state.inner_state, expected, what, "this worker's")

    def cut(self, params: PyTree) -> list[PyTree]:
        return self._fragments.divide(params).cut(params)

    def states(self, state: Any) -> list[LocalState]:
        if not isinstance(state, StreamingState):
            raise errors.TreeMismatchError(
                f"state is not of worker {self._name!r}, which wants what worker.start "
                f"and worker.tx.update return, got {check.show(state)}"
            )
        check_called_from_python(self._name, state)
        return [*state.fragments]

    def begun(self, loops: Sequence[Loop]) -> Loop:
        params, own = _united(loops)
        return params, StreamingState(self._begin_inner(params), own)

    def restored(self, loops: Sequence[Loop], state: Any) -> Loop:
        params, own = _united(loops)
        return params, StreamingState(state.inner_state, own)

    def joined(self, loops: Sequence[Loop], state: Any, *, resets: bool) -> Loop:
        (params, own), inner_state = _united(loops), state.inner_state
        if resets:  # the inner state may have caused the rejection
            inner_state = self._mend_inner(inner_state, params)
        return params, StreamingState(inner_state, own)


def _united(loops: Sequence[Loop]) -> tuple[PyTree, tuple[LocalState, ...]]:
    """Return the whole parameters, and the states of the parts."""
    return parts.join([params for params, _ in loops]), tuple(own for _, own in loops)
