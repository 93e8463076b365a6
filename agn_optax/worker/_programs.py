"""The compiled programs of a worker: for its local phase and for its exchanges.

    start       adopt the first center
    contribute  make the contribution of a message
    adopt       adopt the answer for which the worker has waited
    reset       reset the worker to the center, after its message was rejected
    restore_residual  add a dropped message to the residual of the codec

and if local steps go on while a message is in flight

    send        make the contribution, and begin the next round
    continue_without_answer  begin the next round while the message is retried
    receive     adopt the answer, and keep the local steps made since the message
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax._internal import check, combinations, trees
from agn_optax.round import LocalState
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule
from agn_optax.worker._shardings import ParamShardings

PyTree = Any
# The inner optimizer of a fragment; the real one is applied to the whole tree.
NO_INNER = optax.identity()


class StreamingState(NamedTuple):
    """State of the local phase of a worker that exchanges by fragments."""

    inner_state: PyTree  # state of the inner optimizer, for the whole tree
    fragments: tuple[LocalState, ...]  # one for each fragment, without inner state

    @property
    def local_steps(self) -> jax.Array:
        """The local steps of the first fragment's round."""
        return self.fragments[0].local_steps


class MessageNumbers(NamedTuple):
    """Numbers about a message, on the device, for the checks of a worker.

    They are results of the programs, because adopting an answer donates the state.
    """

    local_steps: jax.Array  # int32 scalar: steps in the record
    # float32[2], see `rounds.norms_of`; float32[devices, 2] for several processes, so
    # that none waits for another. None without a residual.
    residual_norms: jax.Array | None


@functools.lru_cache(maxsize=32)
def programs(
    rule: Rule,
    inner: optax.GradientTransformation,
    delay: int = 0,
    mixing: float = 0.0,
    shardings: ParamShardings | None = None,
) -> SimpleNamespace:
    """Return the programs of all workers with these settings.

    A program is compiled at its first call.

    Args:
      rule: the rule.
      inner: the inner optimizer.
      delay: local steps before an answer is adopted; 0 adopts it when it arrives.
      mixing: share of the worker's own parameters that stays.
      shardings: shardings of sharded parameters; None if each is on one device.

    Raises:
      InvalidTypeError: ``inner`` is not an optimizer.
      InvalidArgumentError: the codec cannot be used with the shardings.
    """
    jit: Callable[..., Any] = jax.jit
    norms_of = rounds.norms_of
    if shardings is not None:
        jit, rule = shardings.jit, shardings.rule(rule)
        if shardings.spans_processes:
            norms_of = functools.partial(shardings.by_device, rounds.norms_of)
    inner = check.optimizer(inner, "inner")
    # Only a penalty reads the anchor at every step, so the state keeps a copy of it.
    # For contributions the worker keeps the last snapshot, which needs no copy.
    keep_anchor = rule.penalty is not None
    # True if local steps since the message are kept in full, not mixed. A rule that
    # adopts the center before the message (easgd) moves worker and center by the same
    # difference, computed from the parameters as sent: later steps must not change it.
    keeps_progress = not rule.replaces and (not delay or rule.adopts == "before")
    # True if a copy of the sent parameters is kept, to compute the progress since,
    # because the contribution does not determine them.
    keeps_sent = keeps_progress and not rounds.recovers(rule)

    def init(params: PyTree) -> LocalState:
        anchor = trees.copy(params) if keep_anchor else None
        return rounds.init_local(rule, inner, params, anchor)

    def update(
        updates: PyTree, state: LocalState, params: PyTree, extra_args: dict[str, Any]
    ) -> tuple[PyTree, LocalState]:
        return rounds.local_step(rule, inner, updates, state, params, None, extra_args)

    tx = local_phase(init, update)

    def start(center: PyTree, like: PyTree) -> tuple[PyTree, LocalState]:
        params = jax.tree.map(
            lambda c, x: jnp.array(c, x.dtype, copy=True), center, like
        )
        anchor = trees.copy(center) if keep_anchor else None
        return params, tx.init(params)._replace(anchor=anchor)

    def contribute(
        state: LocalState, params: PyTree, anchor: PyTree
    ) -> tuple[PyTree, PyTree, MessageNumbers]:
        contribution, codec_state = rounds.contribute(rule, state, params, anchor)
        return contribution, codec_state, numbers_of(state, params, anchor)

    def numbers_of(state: LocalState, params: PyTree, anchor: PyTree) -> MessageNumbers:
        pair = rounds.residual_and_contribution(rule, state, params, anchor)
        norms = None if pair is None else norms_of(pair)
        return MessageNumbers(state.local_steps, norms)

    def reset(
        params: PyTree,
        state: LocalState,
        contribution: PyTree,
        center: PyTree,
        *,
        residual: Literal["restored", "discarded", "kept"],
    ) -> tuple[PyTree, LocalState]:
        params, state = rounds.reset_to(rule, params, state, center)
        fresh = tx.init(params)
        # States that are not finite would spoil the next round too.
        codec_state = replace_if_not_finite(state.codec_state, fresh.codec_state)
        if rounds.has_residual(rule) and residual == "restored":
            codec_state = rounds.restore_residual(rule, contribution, codec_state)
        elif residual == "discarded":
            # A message that is not finite has left nothing in the codec's residual.
            message = rounds.decode(rule, contribution, center)
            is_finite = _all_true(
                [jnp.isfinite(x).all() for x in jax.tree.leaves(message)]
            )
            codec_state = jax.lax.cond(
                is_finite, lambda: fresh.codec_state, lambda: codec_state
            )
        inner_state = replace_if_not_finite(state.inner_state, fresh.inner_state)
        return params, state._replace(inner_state=inner_state, codec_state=codec_state)

    def restore_residual(state: LocalState, contribution: PyTree) -> LocalState:
        codec_state = rounds.restore_residual(rule, contribution, state.codec_state)
        return state._replace(codec_state=codec_state)

    # A message in flight is kept in separate buffers, which local steps cannot change.
    # The next message overwrites them, because allocating new ones would take longer.
    def send(
        spare: tuple[PyTree, PyTree], params: PyTree, state: LocalState, anchor: PyTree
    ) -> tuple[PyTree, rounds.Sent, LocalState, MessageNumbers]:
        contribution, begun = rounds.send_and_begin(rule, state, params, anchor)
        numbers = numbers_of(state, params, anchor)
        copied = params if keeps_sent else None
        contribution, copied = rounds.overwrite(spare, (contribution, copied))
        return contribution, rounds.Sent(copied, state.local_steps), begun, numbers

    def continue_without_answer(
        params: PyTree, state: LocalState
    ) -> tuple[rounds.Sent, LocalState]:
        # The parameters are not donated, so the program returns a copy of them.
        sent = rounds.Sent(params if keeps_sent else None, state.local_steps)
        return sent, rounds.empty_record(rule, state, params, params)

    adopt = functools.partial(rounds.adopt_and_begin, rule, mixing=mixing)
    receive = functools.partial(
        rounds.adopt_after_steps, rule, keeps_progress=keeps_progress, mixing=mixing
    )

    return SimpleNamespace(
        tx=tx,
        keeps_sent=keeps_sent,
        # True if contributions need an anchor that the state does not keep.
        holds_anchor=rule.needs_anchor and not keep_anchor,
        start=jit(start),
        contribute=jit(contribute),
        adopt=jit(adopt, donate_argnums=(0, 1)),
        reset=jit(reset, donate_argnums=(0, 1), static_argnames="residual"),
        # None if the codec keeps no residual.
        restore_residual=jit(restore_residual, donate_argnums=0)
        if rounds.has_residual(rule)
        else None,
        send=jit(send, donate_argnums=(0, 2)),
        continue_without_answer=jit(continue_without_answer, donate_argnums=1),
        receive=jit(receive, donate_argnums=(0, 1)),
    )


def local_phase(
    init: Callable[[PyTree], Any], step: Callable[..., tuple[PyTree, Any]]
) -> optax.GradientTransformationExtraArgs:
    """Return a local phase as an optax transformation that checks its arguments.

    Args:
      init: parameters -> state with an ``inner_state``.
      step: updates, state, parameters and extra arguments -> updates and state.
    """

    def init_fn(params: PyTree) -> Any:
        state = init(params)
        if trees.nodes(state.inner_state, rounds.ExchangeState):
            combinations.reject(
                "a Worker",
                "an inner optimizer that exchanges with a center of its own",
                "an inner state with an ExchangeState",
            )
        return state

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        rounds.check_step(updates, params, "worker.tx")
        return step(updates, state, params, extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def replace_if_not_finite(state: PyTree, fresh: PyTree) -> PyTree:
    """Return ``state``, or ``fresh`` if ``state`` has elements that are not finite.

    Elements that are not finite in ``fresh`` either are ignored.
    """
    fresh = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), fresh, state)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True)
    finite = [
        jnp.isfinite(old) | ~jnp.isfinite(new)
        for old, new in pairs
        if jnp.issubdtype(old.dtype, jnp.floating)
    ]
    return jax.lax.cond(_all_true(finite), lambda: state, lambda: fresh)


def _all_true(conditions: Iterable[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.array(True), *(c.all() for c in conditions)]).all()
