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
from agn_optax.worker._programs import StreamingState, local_phase, replace_if_not_finite

PyTree = Any
Loop = tuple[PyTree, Any]  # parameters and state, of a part or of the whole


class Whole:
    """The local phase of a model in one part."""

    def __init__(self, part: Part) -> None:
        self.tx: optax.GradientTransformationExtraArgs = part.programs.tx

    def check(self, params: PyTree, state: Any = None) -> None:
        """Check the parameters of a start, or a saved loop: the part does it."""

    def cut(self, params: PyTree) -> list[PyTree]:
        """Return the parameters of each part."""
        return [params]

    def states(self, state: Any) -> list[LocalState]:
        """Return the state of each part."""
        return [state]

    def joined(
        self, loops: Sequence[Loop], state: Any, *, resets: bool = False
    ) -> Loop:
        """Return the whole loop.

        Args:
          loops: those of the parts.
          state: the whole state before, whose inner state is kept; None at a start.
          resets: whether a part was reset to the center.
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
        self.tx = local_phase(self._init, self._step, gradients)
        self._begin_inner = jax.jit(self._init_inner)
        self._mend_inner = jax.jit(
            lambda state, params: replace_if_not_finite(state, self._init_inner(params)),
            donate_argnums=0,
        )

    def _init(self, params: PyTree) -> StreamingState:
        pairs = zip(self._parts, self.cut(params), strict=True)
        own = tuple(part.programs.tx.init(tree) for part, tree in pairs)
        # A copy, because some optimizers keep the parameters passed to their init.
        return StreamingState(self._inner.init(trees.copy(params)), own)

    def _init_inner(self, params: PyTree) -> PyTree:
        return self.tx.init(params).inner_state

    def _step(
        self, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, StreamingState]:
        updates, inner_state, own = rounds.local_step_of_fragments(
            self._fragments.divide(params),
            self._rule,
            self._inner,
            updates,
            state.inner_state,
            state.fragments,
            params,
            [None] * len(state.fragments),
            extra_args,
        )
        return updates, StreamingState(inner_state, tuple(own))

    def check(self, params: PyTree, state: Any = None) -> None:
        check.float_leaves(params, "params")
        expected = jax.eval_shape(self._init_inner, params)
        if state is not None:
            self.states(state)
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

    def joined(
        self, loops: Sequence[Loop], state: Any, *, resets: bool = False
    ) -> Loop:
        params = parts.join([own for own, _ in loops])
        if state is None:
            inner_state = self._begin_inner(params)
        elif resets:  # the inner state may have caused the rejection
            inner_state = self._mend_inner(state.inner_state, params)
        else:
            inner_state = state.inner_state
        return params, StreamingState(inner_state, tuple(own for _, own in loops))
