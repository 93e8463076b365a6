"""What a worker compiles: its local phase, and the halves of its exchanges.

    start       adopt a first center
    contribute  make what is sent
    adopt       take the answer, where the worker has waited for it
    give_in     take it in place of everything, where the message was refused

and where local steps go on meanwhile

    depart      make what is sent, and begin the next round
    stay        begin the next round; what is sent was made before
    land        take the answer with the progress made since
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax import round as rounds
from agn_optax._internal import check, trees
from agn_optax.round import LocalState
from agn_optax.rules import Rule

PyTree = Any


class Left(NamedTuple):
    """What tells the parameters as they were when a message left."""

    params: PyTree  # a copy; None where the contribution tells them, or nobody asks
    steps: jax.Array  # int32: local steps that it was made of


class Landing(NamedTuple):
    """How an answer is adopted that came while local steps went on."""

    delay: int = 0  # so many of them after the message left; 0 as soon as it is there
    mixing: float = 0.0  # how much stays of the parameters that it is adopted by

    def keeps_progress(self, rule: Rule) -> bool:
        """Whether the local steps made meanwhile are kept, and not mixed."""
        # Where worker and center move by one force, both do by that of the departure.
        return not self.delay or rule.adopts == "before"


AT_ONCE = Landing()


class InnerState(NamedTuple):
    """Of the inner optimizer, and of what is done to gradients before it."""

    gradients: PyTree
    inner: PyTree


@functools.lru_cache(maxsize=32)
def programs(
    rule: Rule,
    inner: optax.GradientTransformation,
    gradients: optax.GradientTransformation | None = None,
    landing: Landing = AT_ONCE,
) -> SimpleNamespace:
    """Those of all workers with one rule, one inner optimizer, and what is before it.

    Nothing compiles before it is called.

    Raises:
      InvalidTypeError: ``inner`` or ``gradients`` is not an optimizer.
    """
    inner = check.optimizer(inner, "inner")
    before = None if gradients is None else check.optimizer(gradients, "gradients")
    # Only a penalty reads the anchor at every step, and then it travels with the state.
    # For a contribution the worker holds on to the snapshot, which costs no copy.
    keep_anchor = rule.penalty is not None
    keeps_progress, mixing = landing.keeps_progress(rule), landing.mixing
    # Whether a contribution tells the parameters that it was made of.
    recovers = rounds.recovers(rule)
    # Whether a copy of them is kept instead, for who adds the progress since.
    keeps_left = keeps_progress and not recovers
    # Whether answers may be differences from what was adopted last.
    follows = rule.codec.answer_codec is not None

    def init(params: PyTree) -> LocalState:
        anchor = trees.copy(params) if keep_anchor else None
        state = rounds.init_local(rule, inner, params, anchor)
        check_local(state.inner_state)
        if before is not None:
            both = InnerState(before.init(trees.copy(params)), state.inner_state)
            state = state._replace(inner_state=both)
        return state

    def update(
        updates: PyTree, state: LocalState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LocalState]:
        rounds.check_step(updates, params, "worker.tx")
        first: PyTree = None
        if before is not None:
            first, own = state.inner_state
            updates, first = before.update(updates, first, params, **extra_args)
            state = state._replace(inner_state=own)
        updates, state = rounds.local_step(
            rule, inner, updates, state, params, None, extra_args
        )
        if before is not None:
            state = state._replace(inner_state=InnerState(first, state.inner_state))
        return updates, state

    def start(center: PyTree, like: PyTree) -> tuple[PyTree, LocalState]:
        params = jax.tree.map(
            lambda c, x: jnp.array(c, x.dtype, copy=True), center, like
        )
        anchor = trees.copy(center) if keep_anchor else None
        return params, init(params)._replace(anchor=anchor)

    def contribute(
        state: LocalState, params: PyTree, anchor: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        # The steps are returned because the state is donated when an answer is adopted.
        contribution, codec_state = rounds.contribute(rule, state, params, anchor)
        return contribution, codec_state, state.local_steps

    def adopt(
        params: PyTree, state: LocalState, center: PyTree
    ) -> tuple[PyTree, LocalState]:
        params = rounds.adopt(rule, params, center, mixing)
        return params, rounds.begin_round(rule, state, params, center)

    def give_in(
        params: PyTree,
        state: LocalState,
        contribution: PyTree,
        center: PyTree,
        *,
        becomes: Literal["owed", "forgotten", "lost"],
    ) -> tuple[PyTree, LocalState]:
        params = rounds.overwrite(params, center)  # also where rules adopt a part of it
        state = rounds.begin_round(rule, state, params, center)
        fresh = init(params)
        # What is not finite any more would spoil the next round too.
        codec_state = sound(state.codec_state, fresh.codec_state)
        if rule.codec.returned is not None and becomes == "owed":
            codec_state = rule.codec.returned(contribution, codec_state)
        elif becomes == "forgotten":
            # What is not finite has left nothing behind.
            message = rule.codec.decode(contribution, center)
            is_finite = _all([jnp.isfinite(x).all() for x in jax.tree.leaves(message)])
            codec_state = jax.lax.cond(
                is_finite, lambda: fresh.codec_state, lambda: codec_state
            )
        inner_state = sound(state.inner_state, fresh.inner_state)
        return params, state._replace(inner_state=inner_state, codec_state=codec_state)

    def take_back(state: LocalState, contribution: PyTree) -> LocalState:
        assert rule.codec.returned is not None
        owed = rule.codec.returned(contribution, state.codec_state)
        return state._replace(codec_state=owed)

    # What local steps may not touch while it is on its way lies in buffers of its own,
    # which the next departure writes over: fresh ones would take longer.
    def depart(
        spare: tuple[PyTree, PyTree], params: PyTree, state: LocalState, anchor: PyTree
    ) -> tuple[PyTree, Left, LocalState]:
        contribution, codec_state = rounds.contribute(rule, state, params, anchor)
        kept = params if keeps_left else None
        contribution, kept = rounds.overwrite(spare, (contribution, kept))
        left = Left(kept, state.local_steps)
        state = rounds.empty_record(rule, state, params, params)
        return contribution, left, state._replace(codec_state=codec_state)

    def stay(params: PyTree, state: LocalState) -> tuple[Left, LocalState]:
        # Of parameters that go on, the program returns a copy, as of all its inputs.
        left = Left(params if keeps_left else None, state.local_steps)
        return left, rounds.empty_record(rule, state, params, params)

    def land(
        params: PyTree,
        state: LocalState,
        contribution: PyTree,
        left: Left,
        anchor: PyTree,
        center: PyTree,
    ) -> tuple[PyTree, LocalState]:
        sent = left.params
        if recovers and keeps_progress:
            sent = rounds.recover(rule, contribution, params, state, anchor, left.steps)
        if keeps_progress:
            params = rounds.adopt_late(rule, params, sent, center, mixing)
        else:
            params = rounds.adopt(rule, params, center, mixing)
        return params, rounds.move_anchor(state, center)

    return SimpleNamespace(
        tx=optax.GradientTransformationExtraArgs(init, update),
        keeps_left=keeps_left,
        follows=follows,
        # Whether contributions or answers read the anchor, and the state has none.
        holds_anchor=follows or (rule.needs_anchor and not keep_anchor),
        start=jax.jit(start),
        contribute=jax.jit(contribute),
        codec_error=jax.jit(functools.partial(rounds.codec_error, rule)),
        distance=jax.jit(rounds.distance),
        adopt=jax.jit(adopt, donate_argnums=(0, 1)),
        give_in=jax.jit(give_in, donate_argnums=(0, 1), static_argnames="becomes"),
        # What a message had that the center has dropped; None where it is lost.
        take_back=jax.jit(take_back, donate_argnums=0) if rule.codec.returned else None,
        depart=jax.jit(depart, donate_argnums=(0, 2)),
        stay=jax.jit(stay, donate_argnums=1),
        land=jax.jit(land, donate_argnums=(0, 1)),
    )


def check_local(inner_state: PyTree) -> None:
    """An inner optimizer, of which this is the state, makes local steps alone.

    Raises:
      InvalidArgumentError: it does not.
    """
    if trees.nodes(inner_state, rounds.ExchangeState):
        raise errors.InvalidArgumentError(
            "inner must be an optimizer that makes local steps alone, got one that "
            "exchanges with a center of its own: give the optimizer inside it, as "
            "in Worker(center, optax.adam(1e-3), period=10)"
        )


def sound(state: PyTree, fresh: PyTree) -> PyTree:
    """A state; the fresh one if more of it is not finite than of that."""
    fresh = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), fresh, state)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True)
    finite = [
        (jnp.isfinite(old) | ~jnp.isfinite(new)).all()
        for old, new in pairs
        if jnp.issubdtype(old.dtype, jnp.floating)
    ]
    return jax.lax.cond(_all(finite), lambda: state, lambda: fresh)


def _all(conditions: list[jax.Array]) -> jax.Array:
    return jnp.stack([*conditions, jnp.array(True)]).all()
