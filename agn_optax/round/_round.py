"""The round: the only module that defines local steps and exchanges.

    every local step                                                    local_step
        x <- x + inner(penalty(g)),   r <- record(r, g)
    at an exchange
        k  = contribution(r, x, a, steps)          at the worker        contribute
        s  = encode(k)                             at the worker        contribute
        m  = message(decode(s), c)                 at the center        message_of
        c' = c + center_optimizer(m)               at the center        move_center
        p' = p + decode(encode(c' - p))            at the center        publish
        c  = round(c or c'), or p or p'            at the center        answer_of
        x  = adopt(x, c)                           at the worker        adopt
        r  = an empty record,   a = c              at the worker        begin_round

x are the parameters, g the gradients, r the record, a the anchor, c the center and p
the broadcast parameters. `exchange` makes all steps of an exchange. Code that holds the
center in an optimizer state calls `exchange`, or its two halves with local steps
between them: `depart`, which makes the message, and `land`, which moves the center. A
worker and a center outside the program call the single functions, with or without a
network between them. No other code knows the order of the steps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round._placement import WHOLE, Layout, held
from agn_optax.rules import Rule, discounted, told

PyTree = Any


class LocalState(NamedTuple):
    """State of a worker's local phase."""

    local_steps: jax.Array  # int32 scalar: local steps since the last exchange
    inner_state: PyTree  # state of the inner optimizer
    record: PyTree  # state of the rule's record; EmptyState for rules that keep none
    anchor: PyTree  # the center as last adopted; None if another copy can be used
    codec_state: PyTree  # state of the rule's codec; EmptyState for stateless codecs


class Departed(NamedTuple):
    """A message in flight, which moves the center some local steps later."""

    in_flight: jax.Array  # bool scalar: whether a message is in flight
    steps: jax.Array  # int32 scalar: local steps of which the message was made
    weight: jax.Array  # float scalar: mean weight of the workers' rounds
    message: PyTree  # combined message of all workers; like the center
    adopted: PyTree  # the parameters adopted at departure; None unless eager


class ExchangeState(NamedTuple):
    """State of a worker that holds the center: the local phase, and the center."""

    local: LocalState
    center: PyTree  # like the parameters, in the center's dtype
    center_state: PyTree  # state of the center optimizer
    exchanges: jax.Array  # int32 scalar: exchanges made or begun so far
    public: Public | None = None  # broadcast parameters; None if workers adopt `center`
    departed: Departed | None = None  # message in flight; None without a delay


class Public(NamedTuple):
    """Broadcast parameters: the center as workers adopt it with a downlink codec."""

    params: PyTree  # like the center
    codec_state: PyTree  # state of the downlink codec


def with_inner(state: ExchangeState, inner_state: PyTree) -> ExchangeState:
    """Replace the inner optimizer's state, which an exchange does not carry."""
    return state._replace(local=state.local._replace(inner_state=inner_state))


def init_local(
    rule: Rule,
    inner: optax.GradientTransformationExtraArgs,
    params: PyTree,
    anchor: PyTree,
    layout: Layout = WHOLE,
) -> LocalState:
    """Return the state of the local phase before its first step.

    ``anchor`` is not copied.
    """
    if rule.penalty is not None and jax.tree.leaves(rule.penalty.init(params)):
        raise errors.InvalidArgumentError(
            f"penalty of rule {rule.name!r} must be stateless, its init returns arrays"
        )
    return LocalState(
        local_steps=jnp.zeros((), jnp.int32),
        # A copy, because some optimizers keep the parameters passed to their init.
        inner_state=inner.init(trees.copy(params)),
        record=rule.record.init(layout.part(params)),
        anchor=anchor,
        codec_state=rule.codec.init(layout.part(params)),
    )


def local_step(
    rule: Rule,
    inner: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: LocalState,
    params: PyTree,
    center: PyTree,
    extra_args: dict[str, Any],
    layout: Layout = WHOLE,
) -> tuple[PyTree, LocalState]:
    """Make one local step: return updates for ``params``, and the new state.

    ``center`` is the anchor if the state keeps none.
    """
    grads, state = record(rule, grads, state, params, center, layout)
    updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
    updates = optax.tree.cast_like(updates, params)
    return updates, state._replace(inner_state=inner_state)


def record(
    rule: Rule,
    grads: PyTree,
    state: LocalState,
    params: PyTree,
    center: PyTree,
    layout: Layout = WHOLE,
) -> tuple[PyTree, LocalState]:
    """Record the gradients and apply the penalty: a local step before the inner one.

    Returns:
      The gradients for the inner optimizer, and the new state.
    """
    _, recorded = rule.record.update(
        layout.part(grads), state.record, layout.part(params)
    )
    if rule.penalty is not None:
        stateless = rule.penalty.init(params)
        anchor = _anchor(state, center)
        grads, _ = rule.penalty.update(grads, stateless, params, center=anchor)
    return grads, state._replace(
        local_steps=optax.safe_increment(state.local_steps), record=recorded
    )


def _anchor(state: LocalState, center: PyTree) -> PyTree:
    return center if state.anchor is None else state.anchor


def contribute(
    rule: Rule, state: LocalState, params: PyTree, center: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the encoded contribution of this worker, and the codec's next state.

    ``center`` is the anchor if the state keeps none. Call this once per exchange: a
    retry must send the same bits again.
    """
    contribution = rule.contribution(
        state.record,
        params if rule.needs_params else None,
        _anchor(state, center) if rule.needs_anchor else None,
        state.local_steps,
    )
    return rule.codec.encode(contribution, state.codec_state)


def contribution_like(rule: Rule, center: PyTree, params: PyTree = None) -> PyTree:
    """Return the shapes and dtypes of an encoded contribution, without computing one.

    Args:
      rule: the rule of worker and center.
      center: the center, or a tree with its shapes and dtypes.
      params: a worker's parameters, or a tree with their shapes and dtypes; None if
        they have the center's dtypes.
    """

    def send(center: PyTree, params: PyTree) -> PyTree:
        state = init_local(rule, optax.identity(), params, None)
        return contribute(rule, state, params, center)[0]

    return jax.eval_shape(send, center, center if params is None else params)


def recovers(rule: Rule) -> bool:
    """Return whether a contribution determines the parameters it was made of.

    Only the identity codec permits this, because another codec's error remains in the
    parameters and in the next contribution.
    """
    return rule.codec.is_identity and hasattr(rule.contribution, "recover")


def recover(
    rule: Rule,
    contribution: PyTree,
    params: PyTree,
    state: LocalState,
    center: PyTree,
    steps: jax.Array,
) -> PyTree:
    """Recover the parameters of which a contribution was made.

    Args:
      rule: the rule.
      contribution: the contribution, not encoded.
      params: the current parameters, for their dtypes.
      state: the current state, whose anchor is still that of the contribution.
      center: the anchor if the state keeps none.
      steps: local steps of which the contribution was made.
    """
    made: Any = rule.contribution
    return made.recover(
        contribution,
        params,
        _anchor(state, center) if rule.needs_anchor else None,
        steps,
    )


def move_center(
    rule: Rule,
    contribution: PyTree,
    center: PyTree,
    center_state: PyTree,
    *,
    extra_args: dict[str, Any] | None = None,
) -> tuple[PyTree, PyTree]:
    """Apply one worker's contribution: return the new center and optimizer state.

    Args:
      rule: the rule of the center.
      contribution: encoded contribution of a worker.
      center: the center.
      center_state: state of the center optimizer.
      extra_args: for the center optimizer: the metadata of the contribution, or of the
        combined message of the round (see `Rule`), and further arguments.
    """
    message = message_of(rule, contribution, center)
    return _descend(rule, message, center, center_state, extra_args or {})


def _descend(
    rule: Rule,
    message: PyTree,
    center: PyTree,
    center_state: PyTree,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Apply one message to the center, or to this tower's pieces of both."""
    extra_args = told(extra_args)
    message = discounted(rule, optax.tree.cast_like(message, center), **extra_args)
    updates, center_state = rule.center.update(
        message, center_state, center, **extra_args
    )
    return optax.apply_updates(center, updates), center_state


def message_of(rule: Rule, contribution: PyTree, center: PyTree) -> PyTree:
    """Decode a contribution, and make its message to the current ``center``."""
    contribution = rule.codec.decode(contribution, center)
    return rule.message(contribution, center) if rule.message else contribution


def init_public(rule: Rule, center: PyTree) -> Public | None:
    """Return the first broadcast parameters, which equal the center, or None.

    None if the rule has no downlink codec for differences.
    """
    codec = rule.codec.answer_codec
    return None if codec is None else Public(trees.copy(center), codec.init(center))


def publish(
    rule: Rule, center: PyTree, public: Public | None
) -> tuple[Public | None, PyTree]:
    """Move the broadcast parameters to the center, as far as the codec allows.

    The codec's error in one difference is part of the next difference, because each is
    taken from the exact center. Elements that are not finite are set to zero, so that
    they do not spoil the rest of their block.

    Returns:
      The next broadcast parameters, and the encoded difference that leads to them.
    """
    codec = rule.codec.answer_codec
    if codec is None or public is None:
        return None, None

    def differ(c: jax.Array, p: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(c - p), c - p, jnp.zeros_like(p))

    difference = jax.tree.map(differ, center, public.params)
    encoded, codec_state = codec.encode(difference, public.codec_state)
    return Public(follow(rule, public.params, encoded), codec_state), encoded


def follow(rule: Rule, params: PyTree, encoded: PyTree) -> PyTree:
    """Apply an encoded difference to broadcast parameters: the same bits everywhere."""
    codec: Any = rule.codec.answer_codec
    decoded = codec.decode(encoded, params)

    def add(p: jax.Array, d: jax.Array) -> jax.Array:
        moved = p + d.astype(p.dtype)
        return jnp.where(jnp.isfinite(moved), moved, p)

    return jax.tree.map(add, params, decoded)


def difference_like(rule: Rule, center: PyTree) -> PyTree:
    """Return the shapes and dtypes of an encoded difference, or None.

    None if the rule's answers are not differences.
    """

    def encoded(center: PyTree) -> PyTree:
        return publish(rule, center, init_public(rule, center))[1]

    return jax.eval_shape(encoded, center)


def answer_of(rule: Rule, center: PyTree, public: Public | None = None) -> PyTree:
    """Return the center as a worker adopts it, after the downlink codec."""
    if public is not None:
        return public.params
    if rule.codec.answer_dtype is None:
        return center
    return jax.tree.map(lambda c: trees.rounded(c, rule.codec.answer_dtype), center)


def adopted_last(state: ExchangeState) -> PyTree:
    """Return the anchor of a worker whose state keeps none."""
    return held(state.center) if state.public is None else state.public.params


def adopt(rule: Rule, params: PyTree, center: PyTree, mixing: float = 0.0) -> PyTree:
    """Return the parameters after the worker adopts ``center``.

    ``center`` is the version that the rule adopts. With ``mixing``, that share of
    ``params`` stays; see `mixed`.
    """
    adopt_whole = overwrite if rule.adopt is None else rule.adopt
    return mixed(adopt_whole(params, center), params, mixing)


def adopt_late(
    rule: Rule, params: PyTree, sent: PyTree, center: PyTree, mixing: float = 0.0
) -> PyTree:
    """Adopt an answer that arrived after further local steps.

    ``sent`` are the parameters when the message was sent. The local progress made since
    then is kept, and becomes part of the next message.
    """
    return with_progress(adopt(rule, sent, center, mixing), params, sent)


def with_progress(adopted: PyTree, now: PyTree, sent: PyTree) -> PyTree:
    """Add the progress from ``sent`` to ``now`` to ``adopted``.

    Progress that is not finite counts as zero, so that such parameters can recover.
    """

    def add(adopted: jax.Array, now: jax.Array, sent: jax.Array) -> jax.Array:
        since = now - sent
        since = jnp.where(jnp.isfinite(since), since, jnp.zeros_like(since))
        return (adopted + since).astype(now.dtype)

    return jax.tree.map(add, adopted, now, sent)


def begin_round(
    rule: Rule,
    state: LocalState,
    params: PyTree,
    adopted: PyTree,
    layout: Layout = WHOLE,
) -> LocalState:
    """Begin the next round: reset the step count and the record, set the anchor."""
    return move_anchor(empty_record(rule, state, params, adopted, layout), adopted)


def empty_record(
    rule: Rule, state: LocalState, params: PyTree, after: PyTree, layout: Layout = WHOLE
) -> LocalState:
    """Reset the step count and the record, once ``after`` has been computed."""
    # The empty record is written into the old one's buffer, after the center has read
    # the old one. Zeros that depend on nothing would be written first, which would need
    # a copy of the old record. These zeros formally depend on the center.
    never = state.local_steps < 0
    record = optax.tree.map_params(
        rule.record,
        lambda empty, c: jnp.where(never, c.astype(empty.dtype), empty),
        rule.record.init(layout.part(params)),
        layout.part(after),
    )
    return state._replace(local_steps=jnp.zeros((), jnp.int32), record=record)


def move_anchor(state: LocalState, adopted: PyTree) -> LocalState:
    """Set the anchor to the adopted center, if the state keeps an anchor."""
    if state.anchor is None:
        return state
    return state._replace(anchor=overwrite(state.anchor, adopted))


def exchange(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    extra_args: dict[str, Any],
    *,
    mixing: float = 0.0,
) -> tuple[PyTree, ExchangeState]:
    """Make an exchange with the center (or this tower's part of it) in ``state``.

    Args:
      rule: the rule.
      layout: layout of the center.
      params: the parameters after the last local step of a round.
      state: the state after that step.
      extra_args: for the center optimizer; ``weight`` is this worker's own.
      mixing: share of ``params`` that stays; see `mixed`.

    Returns:
      The adopted parameters, and the new state.
    """
    layout.check_met(rule.name)
    kept, center_state = layout.load(state.center, state.center_state)
    # The center before the exchange, gathered to match the parameters, for rules that
    # read it.
    live = None
    if rule.message is not None or rule.needs_anchor or rule.adopts == "before":
        live = layout.unite(kept, params)
    local = state.local
    anchor = None if local.anchor is None else layout.part(local.anchor)
    contribution, codec_state = contribute(
        rule,
        local._replace(anchor=anchor),
        layout.part(params),
        live if state.public is None else state.public.params,
    )
    share, said = _said(rule, layout, state, extra_args)
    message = _combined(
        rule, layout, params, contribution, kept, live, share, state.exchanges
    )
    moved, center_state = _descend(
        rule, message, kept, center_state, {**extra_args, **said}
    )
    public, _ = publish(rule, moved, state.public)
    if rule.adopts == "before":
        adopted, known = live, state.public
    else:
        adopted, known = layout.unite(moved, params), public
    adopted = answer_of(rule, layout.whole(adopted, params), known)
    adopting = adopt(rule, params, adopted, mixing)
    local = begin_round(rule, local, params, adopted, layout)
    center, center_state = layout.store(moved, center_state, state.center)
    return adopting, state._replace(
        local=local._replace(codec_state=codec_state),
        center=center,
        center_state=center_state,
        exchanges=optax.safe_increment(state.exchanges),
        public=public,
    )


def _said(
    rule: Rule, layout: Layout, state: ExchangeState, extra_args: dict[str, Any]
) -> tuple[jax.Array | None, dict[str, Any]]:
    """Return this worker's share of the mean, and the metadata of the message.

    The share is relative to the mean weight of the workers of a mesh, and None if all
    messages count alike. The metadata are extra arguments of the center optimizer.
    """
    said: dict[str, Any] = {
        "steps": state.local.local_steps,
        "since": state.exchanges,
        "workers": layout.count(state.exchanges),
    }
    weight = extra_args.get("weight")
    if weight is None:
        return None, said
    check.rate(weight, "weight", low=0.0, high=math.inf, low_open=True)
    own = jnp.asarray(weight, float)
    mean = layout.mean(own, state.exchanges)
    return own / mean if rule.combine == "mean" else None, {**said, "weight": mean}


def _combined(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    contribution: PyTree,
    kept: PyTree,
    live: PyTree,
    share: jax.Array | None,
    turn: jax.Array,
) -> PyTree:
    """Combine the contributions of all workers of a mesh to one message.

    The message is in the pieces of ``kept``.
    """

    def message(contribution: PyTree, center: PyTree) -> PyTree:
        return optax.tree.cast_like(message_of(rule, contribution, center), kept)

    if rule.codec.is_identity:  # an all-reduce may sum the messages
        own = message(contribution, kept if live is None else live)
        if share is not None:
            own = trees.scaled(own, share)
        return layout.combine(own, rule.combine, params, kept, turn)
    return layout.combine_encoded(
        contribution, lambda each: message(each, kept), rule.combine, params, share
    )


def nothing_departed(params: PyTree, center: PyTree, *, eager: bool) -> Departed:
    """Return an empty `Departed`, for a state whose exchanges have two halves."""
    return Departed(
        in_flight=jnp.zeros((), bool),
        steps=jnp.zeros((), jnp.int32),
        weight=jnp.ones((), float),
        message=optax.tree.zeros_like(center),
        adopted=optax.tree.zeros_like(params) if eager else None,
    )


def depart(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    extra_args: dict[str, Any],
) -> tuple[PyTree, ExchangeState]:
    """Make the first half of an exchange: make the message and begin the next round.

    No later step needs the message until `land`. A rule that adopts the center as it
    was before the message does so now. With eager updates (``state.departed.adopted``
    is not None) each worker now adopts the center moved by its own share of the
    message.

    Arguments and results are those of `exchange`; the center is whole.
    """
    layout.check_met(rule.name)
    local, center = state.local, state.center
    contribution, codec_state = contribute(rule, local, params, adopted_last(state))
    local = local._replace(codec_state=codec_state)
    share, said = _said(rule, layout, state, extra_args)
    message = _combined(
        rule, layout, params, contribution, center, center, share, state.exchanges
    )
    message = optax.tree.cast_like(message, center)
    assert state.departed is not None
    is_eager, adopted = state.departed.adopted is not None, None
    if is_eager:
        own = message_of(rule, contribution, center)
        if rule.combine == "mean":
            count = layout.count(state.exchanges)
            part = jnp.asarray(1.0 if share is None else share) / count
            own = trees.scaled(own, part)
        more = {**extra_args, **said}
        moved, _ = _descend(rule, own, center, state.center_state, more)
        params = adopted = overwrite(params, answer_of(rule, moved))
    elif rule.adopts == "before":
        before = answer_of(rule, center, state.public)
        params = adopt(rule, params, before)
        local = move_anchor(local, before)
    weight = jnp.asarray(said.get("weight", 1.0), float)
    departed = Departed(jnp.ones((), bool), local.local_steps, weight, message, adopted)
    return params, state._replace(
        local=empty_record(rule, local, params, message, layout),
        exchanges=optax.safe_increment(state.exchanges),
        departed=departed,
    )


def land(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    extra_args: dict[str, Any],
    *,
    mixing: float = 0.0,
) -> tuple[PyTree, ExchangeState]:
    """Make the second half of an exchange: apply the message and adopt the center.

    Arguments and results are those of `exchange`; ``state`` has a message in flight.
    """
    departed = state.departed
    assert departed is not None
    said = {
        "steps": departed.steps,
        "since": state.exchanges - 1,
        "workers": layout.count(state.exchanges - 1),
        "weight": departed.weight,
    }
    center, center_state = _descend(
        rule,
        departed.message,
        state.center,
        state.center_state,
        {**extra_args, **said},
    )
    public, _ = publish(rule, center, state.public)
    local = state.local
    if rule.adopts == "after":
        answer = answer_of(rule, center, public)
        adopted = adopt(rule, params, answer, mixing)
        if departed.adopted is not None:
            adopted = with_progress(adopted, params, departed.adopted)
        params = adopted
        local = move_anchor(local, answer)
    # Reset the message to zeros that formally depend on the center. If the loop left
    # the message unchanged, XLA would hoist what it can compute from the message out of
    # the loop, and compute it at every step.
    never = departed.steps < 0
    landed = jax.tree.map(lambda c: jnp.where(never, c, jnp.zeros_like(c)), center)
    return params, state._replace(
        local=local,
        center=center,
        center_state=center_state,
        public=public,
        departed=departed._replace(in_flight=jnp.zeros((), bool), message=landed),
    )


def mixed(adopted: PyTree, params: PyTree, mixing: float) -> PyTree:
    r"""Return :math:`\alpha x + (1 - \alpha) c`, where ``mixing`` is :math:`\alpha`."""
    if not mixing:
        return adopted

    def mix(adopted: jax.Array, own: jax.Array) -> jax.Array:
        wide = trees.wider(own.dtype, jnp.float32)
        mean = mixing * own.astype(wide) + (1.0 - mixing) * adopted.astype(wide)
        return mean.astype(own.dtype)

    return jax.tree.map(mix, adopted, params)


def overwrite(old: PyTree, new: PyTree) -> PyTree:
    """Return exactly ``new``, in the dtypes of ``old`` and in its donated buffers.

    The select reads ``old`` only formally. Without it jit would drop ``old`` as unused,
    its donated buffer would be lost, and each later output would take its neighbor's
    buffer, with a copy.
    """

    def over(o: Any, n: jax.Array) -> jax.Array:
        dtype = jnp.result_type(o)
        if n.dtype == dtype:
            return jnp.where(True, n, o)
        # Adopt a narrower center as it is stored: without an explicit rounding, XLA
        # could use the values from before its cast.
        wide = n.astype(trees.wider(n.dtype, dtype))
        return jnp.where(True, trees.rounded(wide, n.dtype).astype(dtype), o)

    return jax.tree.map(over, old, new)


def check_step(grads: PyTree, params: PyTree, who: str) -> None:
    """Check the gradients and parameters of a local step."""
    check.params_given(params, who)
    check.same_tree(grads, params, "grads", "params")
    check.float_leaves(grads, "grads")
    check.float_leaves(params, "params")
