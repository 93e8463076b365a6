"""The local phase of a worker, for a model in one piece or in fragments.

The inner optimizer makes its steps on the whole model, while each fragment has its own
exchanges. Without fragments, the state of the worker is that of its only
`FragmentWorker`. With fragments, the state has an inner state for the whole model, and
for each fragment a state without inner state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import optax

from agn_optax._internal import check, combinations, trees
from agn_optax.round import Fragments, LocalState, parts, steps
from agn_optax.rules import Rule
from agn_optax.worker._fragment import (
    Loop,
    check_called_from_python,
    check_not_deleted,
    not_its_state,
)
from agn_optax.worker._programs import (
    StreamingState,
    local_phase,
    replace_if_not_finite,
)
from agn_optax.worker._shardings import shardings_of

PyTree = Any


class WholeModel:
    """The local phase of a model without fragments, whose optimizer is ``tx``."""

    def __init__(self, tx: optax.GradientTransformationExtraArgs) -> None:
        self.tx = tx

    def check(self, params: PyTree, state: Any = None) -> None:
        """Do nothing: the only `FragmentWorker` checks its parameters and state."""

    def split_params(self, params: PyTree) -> list[PyTree]:
        """Return the parameters of each fragment."""
        return [params]

    def split_state(self, state: Any) -> list[LocalState]:
        """Return the state of each fragment."""
        return [state]

    def join(self, loops: Sequence[Loop], state: Any) -> tuple[PyTree, Any]:
        """Return the parameters and the state of the whole model.

        Args:
          loops: parameters and state of each fragment.
          state: a state of the whole model, whose inner state is kept; None at a start.
        """
        del state
        return loops[0]

    def check_loop(self, params: PyTree, state: Any) -> None:
        """Do nothing: the only `FragmentWorker` checks them."""

    def take(self, params: PyTree, state: Any, fragment: int) -> Loop:
        """Return the parameters and the state of a fragment."""
        del fragment
        return params, state

    def put(
        self,
        params: PyTree,
        state: Any,
        fragment: int,
        loop: Loop,
        *,
        resets: bool = False,
    ) -> tuple[PyTree, Any]:
        """Return the whole model after a fragment has changed to ``loop``.

        Args:
          params: the parameters before, which may be donated.
          state: the state before.
          fragment: index of the fragment.
          loop: parameters and state of the fragment.
          resets: whether the fragment was reset to the center.
        """
        del params, state, fragment, resets
        return loop


class FragmentedModel:
    """The local phase of a model in fragments; the methods are those of `WholeModel`.

    Args:
      fragments: the fragments.
      programs: returns the programs of each fragment.
      rule: the rule.
      inner: the inner optimizer, for the whole tree.
      name: name of the worker, for errors.
    """

    def __init__(
        self,
        fragments: Fragments,
        programs: Callable[[], Sequence[SimpleNamespace]],
        rule: Rule,
        inner: optax.GradientTransformation,
        name: str = "",
    ) -> None:
        self._fragments, self._programs = fragments, programs
        self._name, self._rule = name, rule
        self._inner = check.optimizer(inner, "inner")
        self.tx = local_phase(self._init, self._step)
        self._take, self._put = _take, _put
        if fragments.seed is not None:  # otherwise parts have whole leaves, not copied
            self._take, self._put = _take_copied, _put_in_place
        self._init_inner = jax.jit(lambda params: self.tx.init(params).inner_state)
        self._repair_inner = jax.jit(
            lambda state, params: replace_if_not_finite(
                state, self._init_inner(params)
            ),
            donate_argnums=0,
        )

    def _init(self, params: PyTree) -> StreamingState:
        pairs = zip(self._programs(), self.split_params(params), strict=True)
        fragments = tuple(programs.tx.init(part) for programs, part in pairs)
        # A copy, because some optimizers keep the parameters passed to their init.
        return StreamingState(self._inner.init(trees.copy(params)), fragments)

    def _step(
        self, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, StreamingState]:
        updates, inner_state, fragments = steps.local_step_of_parts(
            self._rule,
            self._inner,
            self._fragments.divide(params),
            updates,
            state.inner_state,
            state.fragments,
            params,
            [None] * len(state.fragments),
            extra_args,
        )
        return updates, StreamingState(inner_state, tuple(fragments))

    def check(self, params: PyTree, state: Any = None) -> None:
        check.float_leaves(params, "params")
        seed, shardings = self._fragments.seed, shardings_of(params)
        if seed is not None and shardings is not None and shardings.spans_processes:
            combinations.reject(
                "fragments of random elements",
                "a worker of several processes",
                f"{self._fragments}",
            )
        expected = jax.eval_shape(self._init_inner, params)
        if state is not None:
            self.split_state(state)
            name = "saved.state.inner_state"
            check.same_tree(state.inner_state, expected, name, "this worker's")

    def split_params(self, params: PyTree) -> list[PyTree]:
        return self._fragments.divide(params).cut(params)

    def split_state(self, state: Any) -> list[LocalState]:
        if not isinstance(state, StreamingState):
            raise not_its_state(self._name, state)
        count, expected = len(state.fragments), len(self._fragments)
        if count != expected:
            advice = f". It has {count} fragments, and this worker {expected}"
            raise not_its_state(self._name, state, advice)
        check_called_from_python(self._name, state)
        return [*state.fragments]

    def join(self, loops: Sequence[Loop], state: Any) -> tuple[PyTree, Any]:
        params = parts.join([params for params, _ in loops])
        inner_state = self._init_inner(params) if state is None else state.inner_state
        return params, StreamingState(inner_state, tuple(state for _, state in loops))

    def check_loop(self, params: PyTree, state: Any) -> None:
        self.split_state(state)
        if self._fragments.seed is not None:  # a program takes the elements
            check_not_deleted(self._name, params, "params")

    def take(self, params: PyTree, state: Any, fragment: int) -> Loop:
        part = self._take(self._fragments, fragment, params)
        return part, state.fragments[fragment]

    def put(
        self,
        params: PyTree,
        state: Any,
        fragment: int,
        loop: Loop,
        *,
        resets: bool = False,
    ) -> tuple[PyTree, Any]:
        part, own = loop
        params = self._put(self._fragments, fragment, params, part)
        inner_state, states = state.inner_state, [*state.fragments]
        if resets:  # the inner state may have caused the rejection
            inner_state = self._repair_inner(inner_state, params)
        states[fragment] = own
        return params, StreamingState(inner_state, tuple(states))


def _take(fragments: Fragments, fragment: int, params: PyTree) -> PyTree:
    return fragments.divide(params).take(fragment, params)


def _put(fragments: Fragments, fragment: int, params: PyTree, part: PyTree) -> PyTree:
    return fragments.divide(params).put(fragment, params, part)


# Compiled once for all workers of a process.
_take_copied = jax.jit(_take, static_argnums=(0, 1))
_put_in_place = jax.jit(_put, static_argnums=(0, 1), donate_argnums=2)
