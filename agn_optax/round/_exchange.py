"""The round: THE place where local steps and exchanges are written.

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

`exchange` is these in a row. An optimizer state that holds its center calls `exchange`,
or its two halves with local steps between: `depart`, until the message is made, and
`land`, which moves the center. A worker and a center outside the program call the same
pieces, with a wire (or nothing) between them. No other code knows the order.
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
    """What a worker keeps of its own: the state of the local phase."""

    local_steps: jax.Array  # int32 scalar: local steps since the last exchange
    inner_state: PyTree  # the inner optimizer's
    record: PyTree  # state of the rule's record; EmptyState for rules that keep none
    anchor: PyTree  # the center as last adopted, where no other copy serves; else None
    codec_state: PyTree  # of the rule's codec; EmptyState for codecs that keep none


class Departed(NamedTuple):
    """A message that has left, and moves the center some local steps later."""

    in_flight: jax.Array  # bool scalar: whether there is one
    steps: jax.Array  # int32 scalar: local steps that it was made of
    weight: jax.Array  # float scalar: the mean weight of the workers' rounds
    message: PyTree  # of all workers together, as the center
    adopted: PyTree  # the parameters as they were then set; None if it is not eager


class ExchangeState(NamedTuple):
    """State of a worker with a center at hand: the local phase, and the center."""

    local: LocalState
    center: PyTree  # as the parameters, in the center's dtype
    center_state: PyTree  # the center optimizer's
    exchanges: jax.Array  # int32 scalar: exchanges made so far; those that have begun
    public: Public | None = None  # what workers adopt, where that is not the center
    departed: Departed | None = None  # where messages take their time


class Public(NamedTuple):
    """The center that workers adopt, where a codec tells them of it by differences."""

    params: PyTree  # as the center
    codec_state: PyTree  # of that codec


def with_inner(state: ExchangeState, inner_state: PyTree) -> ExchangeState:
    """The same with another state of the inner optimizer, which exchanges leave out."""
    return state._replace(local=state.local._replace(inner_state=inner_state))


def init_local(
    rule: Rule,
    inner: optax.GradientTransformationExtraArgs,
    params: PyTree,
    anchor: PyTree,
    layout: Layout = WHOLE,
) -> LocalState:
    """The local phase before its first step; ``anchor`` is kept as it is."""
    if rule.penalty is not None and jax.tree.leaves(rule.penalty.init(params)):
        raise errors.InvalidArgumentError(
            f"penalty of rule {rule.name!r} must be stateless, its init returns arrays"
        )
    return LocalState(
        local_steps=jnp.zeros((), jnp.int32),
        # Of a copy: some optimizers keep the parameters that they are shown.
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
    """One local step: updates for ``params``, and the state with the gradient recorded.

    ``center`` is the anchor where the state keeps none.
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
    """What a local step is but for its inner optimizer: the gradients for that."""
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
    """What this worker sends, encoded, and the codec's state once it is sent.

    ``center`` is the anchor where the state keeps none. To be called once for each
    exchange: whoever repeats one sends the same bits again.
    """
    contribution = rule.contribution(
        state.record,
        params if rule.needs_params else None,
        _anchor(state, center) if rule.needs_anchor else None,
        state.local_steps,
    )
    return rule.codec.encode(contribution, state.codec_state)


def contribution_like(rule: Rule, center: PyTree, params: PyTree = None) -> PyTree:
    """What workers send, abstract: for whoever must know it before one comes.

    Args:
      rule: whose workers they are.
      center: the center, or a tree with its shapes and dtypes.
      params: the same of a worker's parameters; None if they have the center's dtypes.
    """

    def send(center: PyTree, params: PyTree) -> PyTree:
        state = init_local(rule, optax.identity(), params, None)
        return contribute(rule, state, params, center)[0]

    return jax.eval_shape(send, center, center if params is None else params)


def recovers(rule: Rule) -> bool:
    """Whether what a worker sends tells the parameters that it was made of.

    What a codec lost is still in the parameters, and in what the worker sends next.
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
    """The parameters that a contribution of so many steps was made of.

    ``params`` and ``state`` are those of now, with the anchor still that of then, which
    is ``center`` where the state keeps none.
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
    """The center and its optimizer's state after the exchange of one worker.

    Args:
      rule: whose center this is.
      contribution: of a worker, encoded.
      center: to be moved.
      center_state: the center optimizer's.
      extra_args: for the center optimizer: what there is to say of the contribution, or
        of the message of the round (see `Rule`), and more.
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
    """The center after one message; on a mesh, perhaps this tower's piece of both."""
    extra_args = told(extra_args)
    message = discounted(rule, optax.tree.cast_like(message, center), **extra_args)
    updates, center_state = rule.center.update(
        message, center_state, center, **extra_args
    )
    return optax.apply_updates(center, updates), center_state


def message_of(rule: Rule, contribution: PyTree, center: PyTree) -> PyTree:
    """The message that an encoded contribution is to ``center``, as it is now."""
    contribution = rule.codec.decode(contribution, center)
    return rule.message(contribution, center) if rule.message else contribution


def init_public(rule: Rule, center: PyTree) -> Public | None:
    """The first public center, which is exact; None where there is none."""
    codec = rule.codec.answer_codec
    return None if codec is None else Public(trees.copy(center), codec.init(center))


def publish(
    rule: Rule, center: PyTree, public: Public | None
) -> tuple[Public | None, PyTree]:
    """The next public center, and the encoded difference that makes it of the last.

    What a difference loses is in the next one, as each is taken from the exact center.
    What is not finite of it stays out, and the rest of its block goes on.
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
    """The public center after ``params``, by a difference: the same bits everywhere."""
    codec: Any = rule.codec.answer_codec
    decoded = codec.decode(encoded, params)

    def add(p: jax.Array, d: jax.Array) -> jax.Array:
        moved = p + d.astype(p.dtype)
        return jnp.where(jnp.isfinite(moved), moved, p)

    return jax.tree.map(add, params, decoded)


def difference_like(rule: Rule, center: PyTree) -> PyTree:
    """An encoded difference between public centers, abstract; None if none travel."""

    def encoded(center: PyTree) -> PyTree:
        return publish(rule, center, init_public(rule, center))[1]

    return jax.eval_shape(encoded, center)


def answer_of(rule: Rule, center: PyTree, public: Public | None = None) -> PyTree:
    """The center as a worker adopts it: as the rule's codec has it travel."""
    if public is not None:
        return public.params
    if rule.codec.answer_dtype is None:
        return center
    return jax.tree.map(lambda c: trees.rounded(c, rule.codec.answer_dtype), center)


def adopted_last(state: ExchangeState) -> PyTree:
    """The anchor of a worker that keeps none of its own."""
    return held(state.center) if state.public is None else state.public.params


def adopt(rule: Rule, params: PyTree, center: PyTree, mixing: float = 0.0) -> PyTree:
    """The parameters after taking back ``center``, the version that the rule adopts.

    With ``mixing``, that share of ``params`` stays; see `mixed`.
    """
    adopt_whole = overwrite if rule.adopt is None else rule.adopt
    return mixed(adopt_whole(params, center), params, mixing)


def adopt_late(
    rule: Rule, params: PyTree, sent: PyTree, center: PyTree, mixing: float = 0.0
) -> PyTree:
    """As `adopt`, for an answer that took its time.

    ``sent`` are the parameters as they were when the message left; the local progress
    made since then is kept, and goes into the next message.
    """
    return with_progress(adopt(rule, sent, center, mixing), params, sent)


def with_progress(adopted: PyTree, now: PyTree, sent: PyTree) -> PyTree:
    """``adopted`` in place of ``sent``, and all that came since: up to ``now``.

    Progress that is not finite is none, or such parameters would stay what they are.
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
    """The local phase as the next round starts: an empty record, the new anchor."""
    return move_anchor(empty_record(rule, state, params, adopted, layout), adopted)


def empty_record(
    rule: Rule, state: LocalState, params: PyTree, after: PyTree, layout: Layout = WHOLE
) -> LocalState:
    """No local steps and an empty record, made when ``after`` is there."""
    # The empty record is written over the old one, after the center has read that.
    # Zeros that depend on nothing would be written first, and the old record copied out
    # of their way; these depend in name on the center.
    never = state.local_steps < 0
    record = optax.tree.map_params(
        rule.record,
        lambda empty, c: jnp.where(never, c.astype(empty.dtype), empty),
        rule.record.init(layout.part(params)),
        layout.part(after),
    )
    return state._replace(local_steps=jnp.zeros((), jnp.int32), record=record)


def move_anchor(state: LocalState, adopted: PyTree) -> LocalState:
    """The anchor, where the state keeps one, is what was adopted."""
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
    """An exchange with a center at hand, of which ``state`` holds what is kept here.

    Args:
      rule: says what is exchanged.
      layout: of the center.
      params: the parameters after the last local step of a round.
      state: the state then.
      extra_args: for the center optimizer; ``weight`` is this worker's own.
      mixing: how much of ``params`` stays; see `mixed`.
    """
    layout.check_met(rule.name)
    kept, center_state = layout.load(state.center, state.center_state)
    # Before anything moves, whoever looks at the center needs it cut as the parameters.
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
    """Of the workers of a mesh: how much this one counts, and what all say together.

    They count alike if none says how much it does.
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
    """One message, cut as ``kept``, of the contributions of all workers of a mesh."""

    def message(contribution: PyTree, center: PyTree) -> PyTree:
        return optax.tree.cast_like(message_of(rule, contribution, center), kept)

    if rule.codec.is_identity:  # messages may be summed on their way
        own = message(contribution, kept if live is None else live)
        if share is not None:
            own = trees.scaled(own, share)
        return layout.combine(own, rule.combine, params, kept, turn)
    return layout.combine_encoded(
        contribution, lambda each: message(each, kept), rule.combine, params, share
    )


def nothing_departed(params: PyTree, center: PyTree, *, eager: bool) -> Departed:
    """For an `ExchangeState` whose exchanges are made in two halves."""
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
    """The first half of an exchange: the message of all workers, and the next round.

    Nothing that follows needs the message until it lands. Who adopts the center as it
    was before the message does so now, and with eager updates (the state says so)
    everybody adopts the center as this worker's own share of the message will move it.

    Args and returns as `exchange`; the center is whole.
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
    """The second half of an exchange: the message moves the center, which is adopted.

    Args and returns as `exchange`, of a state with a message in flight.
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
    # Zeros, that depend in name on the center. Of a message that stays what it is, XLA
    # would compute all that it can before the loop that this is in, at every step.
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
    r""":math:`\alpha x + (1 - \alpha) c`, for ``mixing`` :math:`\alpha`."""
    if not mixing:
        return adopted

    def mix(adopted: jax.Array, own: jax.Array) -> jax.Array:
        wide = trees.wider(own.dtype, jnp.float32)
        mean = mixing * own.astype(wide) + (1.0 - mixing) * adopted.astype(wide)
        return mean.astype(own.dtype)

    return jax.tree.map(mix, adopted, params)


def overwrite(old: PyTree, new: PyTree) -> PyTree:
    """Exactly ``new``, in the dtypes of ``old`` and in its buffers, if it is donated.

    The select reads ``old`` in name only. Without it jit would drop ``old`` as unused,
    its donated buffer would be lost, and the outputs that follow would each take the
    buffer of their neighbor, with a copy.
    """

    def over(o: Any, n: jax.Array) -> jax.Array:
        dtype = jnp.result_type(o)
        if n.dtype == dtype:
            return jnp.where(True, n, o)
        # A narrow center is adopted as it is kept, not as it was before rounding.
        wide = n.astype(trees.wider(n.dtype, dtype))
        return jnp.where(True, trees.rounded(wide, n.dtype).astype(dtype), o)

    return jax.tree.map(over, old, new)


def check_step(grads: PyTree, params: PyTree, who: str) -> None:
    """What a local step is called with can be used at all."""
    check.params_given(params, who)
    check.same_tree(grads, params, "grads", "params")
    check.float_leaves(grads, "grads")
    check.float_leaves(params, "params")
