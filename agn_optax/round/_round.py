"""The round: the one place that knows the order of a rule's functions.

    every local step                                                    local_step
        x <- x + inner(penalty(g)),   r <- record(r, g)
    sending, at the worker
        k  = contribution(r, x, a, steps),   s = encode(k)              contribute
        r  = an empty record                                            empty_record
    receiving, at the center                                            receive
        m  = message(decode(s), c)                                      message_of
        m  = discount(m)                                                weigh
        c' = c + center_optimizer(m)                                    apply
    the answer, at the worker
        c  = round(c or c')                                             answer_of
        x  = adopt(x, c)                                                adopt
        a  = c                                                          move_anchor

With the center in the optimizer state, an exchange is a `_send` and a `_receive`.
`exchange` calls one after the other; `send` and `receive_late` call them with local
steps in between. A worker and a center in two programs use the same functions, with a
connection between them. The worker calls `contribute` and `adopt_and_begin`; or, with
local steps in between, `send_and_begin` and `adopt_after_steps`. The center calls
`receive` for one message; for a round it calls `add_message` for each, `combine_round`
unless the rule sums messages, and `receive_round`. No other module knows the order
(`rules` calls the functions of a rule only to compare rules).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import _parts
from agn_optax.round._parts import Parts
from agn_optax.round.placements import WHOLE, Layout
from agn_optax.rules import Rule, codecs, discounted, extra_arguments, robust

PyTree = Any

_MAX_SAMPLE = 4096  # elements of a leaf


class LocalState(NamedTuple):
    """State of a worker's local phase."""

    local_steps: jax.Array  # int32 scalar: local steps since the last exchange
    inner_state: PyTree  # state of the inner optimizer
    record: PyTree  # state of the rule's record; EmptyState for rules that keep none
    anchor: PyTree  # the center as last adopted; None if another copy can be used
    codec_state: PyTree  # state of the rule's codec; EmptyState for stateless codecs


class Sent(NamedTuple):
    """Data to recover the parameters as they were when a message was sent."""

    params: PyTree  # a copy; None if not needed or recovered from the contribution
    steps: jax.Array  # int32: local steps in the contribution


class InFlight(NamedTuple):
    """A message that was sent, and is received some local steps later."""

    is_sent: jax.Array  # bool scalar: whether a message is in flight
    steps: jax.Array  # int32 scalar: local steps of the message's round
    weight: jax.Array  # float scalar: the mean weight of the workers' rounds
    message: PyTree  # the combined message of all workers, like the center


class Decoded(NamedTuple):
    """A contribution that arrived in encoded pieces, decoded."""

    contribution: PyTree  # like the center


class ExchangeState(NamedTuple):
    """State of a worker that holds the center: the local phase, and the center."""

    local: LocalState
    center: PyTree  # like the parameters, in the center's dtype
    center_state: PyTree  # state of the center optimizer
    exchanges: jax.Array  # int32 scalar: exchanges made or begun so far
    in_flight: InFlight | None = None  # None unless messages have a delay


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
        record=rule.record.init(layout.cut_part(params)),
        anchor=anchor,
        codec_state=rule.codec.init(layout.cut_part(params)),
    )


def init_center_state(rule: Rule, center: PyTree) -> PyTree:
    """Return the center optimizer's first state, which may keep ``center``'s arrays."""
    return rule.center.init(center)


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
    grads, state = _record(rule, grads, state, params, center, layout)
    updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
    updates = optax.tree.cast_like(updates, params)
    return updates, state._replace(inner_state=inner_state)


def local_step_of_parts(
    rule: Rule,
    inner: optax.GradientTransformationExtraArgs,
    parts: Parts,
    grads: PyTree,
    inner_state: PyTree,
    states: Sequence[LocalState],
    params: PyTree,
    centers: Sequence[PyTree],
    extra_args: dict[str, Any],
    layout: Layout = WHOLE,
) -> tuple[PyTree, PyTree, list[LocalState]]:
    """Make one local step of a whole tree, whose parts have their own records.

    The inner optimizer sees the whole tree. ``states`` and ``centers`` are those of the
    parts; the other arguments are those of `local_step`.

    Returns:
      Updates, and the new states of the inner optimizer and of the parts.
    """
    cut = zip(parts.cut(grads), states, parts.cut(params), centers, strict=True)
    recorded = [_record(rule, *part, layout) for part in cut]
    if rule.penalty is not None:  # else they are unchanged
        grads = _parts.join([grads for grads, _ in recorded])
    updates, inner_state = inner.update(grads, inner_state, params, **extra_args)
    states = [state for _, state in recorded]
    return optax.tree.cast_like(updates, params), inner_state, states


def _record(
    rule: Rule,
    grads: PyTree,
    state: LocalState,
    params: PyTree,
    center: PyTree,
    layout: Layout,
) -> tuple[PyTree, LocalState]:
    """Record the gradients and apply the penalty, before the inner optimizer's step.

    Returns:
      The gradients for the inner optimizer, and the new state.
    """
    _, recorded = rule.record.update(
        layout.cut_part(grads), state.record, layout.cut_part(params)
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
    contribution = _contribution(rule, state, params, center)
    return rule.codec.encode(contribution, state.codec_state)


def _contribution(
    rule: Rule, state: LocalState, params: PyTree, center: PyTree
) -> PyTree:
    return rule.contribution(
        state.record,
        params if rule.needs_params else None,
        _anchor(state, center) if rule.needs_anchor else None,
        state.local_steps,
    )


def residual_and_contribution(
    rule: Rule, state: LocalState, params: PyTree, center: PyTree
) -> tuple[PyTree, PyTree] | None:
    """Return the codec's residual, and the contribution before coding.

    None if `error_feedback` is not part of the codec. Arguments are those of
    `contribute`.
    """
    states = trees.nodes(state.codec_state, codecs.ErrorFeedbackState)
    if not states:
        return None
    residuals = [kept.residual for _, kept in states]
    return residuals, _contribution(rule, state, params, center)


def norms_of(compared: tuple[PyTree, ...]) -> jax.Array:
    """Return the norm of each tree over a sample of its elements, in float32.

    With whole norms, `contribute` takes 1.2 to 2 times as long on a CPU.
    """
    sampled = jax.tree.map(_sample, compared)
    return jnp.stack([optax.tree.norm(tree) for tree in sampled])


def _sample(leaf: jax.Array) -> jax.Array:
    """Return some elements of a leaf in float32, always the same ones."""
    # The leaf keeps its dimensions, because flattening would gather a sharded one.
    sizes, left = [], _MAX_SAMPLE
    for size in reversed(leaf.shape):
        sizes.append(min(size, left))
        left //= max(sizes[-1], 1)
    return leaf[tuple(map(slice, reversed(sizes)))].astype(jnp.float32)


def send_and_begin(
    rule: Rule, state: LocalState, params: PyTree, center: PyTree
) -> tuple[PyTree, LocalState]:
    """Make a contribution, and begin the next round before its answer arrives.

    Arguments are those of `contribute`. `adopt_after_steps` adopts the answer.

    Returns:
      The encoded contribution, and the state of the next round, with the old anchor.
    """
    contribution, codec_state = contribute(rule, state, params, center)
    state = empty_record(rule, state, params, params)
    return contribution, state._replace(codec_state=codec_state)


def contribution_like(rule: Rule, center: PyTree, params: PyTree = None) -> PyTree:
    """Return the shapes and dtypes of an encoded contribution, without computing one.

    Args:
      rule: the rule of worker and center.
      center: the center, or a tree with its shapes and dtypes.
      params: a worker's parameters, or a tree with their shapes and dtypes; None if
        they have the center's dtypes.
    """
    send, _ = _traced(rule)
    return jax.eval_shape(send, center, center if params is None else params)


@functools.lru_cache(maxsize=32)
def _traced(rule: Rule) -> tuple[Callable[..., PyTree], Callable[..., PyTree]]:
    """Return functions that JAX traces once for each kind of arguments.

    They make a first contribution, and the center optimizer's first state.
    """

    def send(center: PyTree, params: PyTree) -> PyTree:
        state = init_local(rule, optax.identity(), params, None)
        return contribute(rule, state, params, center)[0]

    return jax.jit(send), jax.jit(functools.partial(init_center_state, rule))


def exchange_bytes(
    rule: Rule, center: PyTree, params: PyTree = None
) -> tuple[int, int]:
    """Return the bytes of a message and of its answer, without computing any.

    Arguments are those of `contribution_like`.
    """
    message = trees.nbytes(contribution_like(rule, center, params))
    return message, trees.nbytes(center, rule.codec.answers)


def recovers(rule: Rule) -> bool:
    """Return whether a contribution determines the parameters it was made from.

    Only the identity codec permits this, because another codec's error remains in the
    parameters and in the next contribution.
    """
    return rule.codec.is_identity and hasattr(rule.contribution, "recover")


def receive(
    rule: Rule,
    contribution: PyTree,
    center: PyTree,
    center_state: PyTree,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Apply one worker's contribution to the center.

    Args:
      rule: the rule of the center.
      contribution: encoded contribution of a worker.
      center: the center.
      center_state: state of the center optimizer.
      extra_args: for the center optimizer: the metadata of the contribution (see
        `Rule`), and further arguments.

    Returns:
      The new center, and the new state of the center optimizer.
    """
    message = message_of(rule, contribution, center)
    message = weigh(rule, message, center, extra_args)
    return apply(rule, message, center, center_state, extra_args)


def decode(rule: Rule, contribution: PyTree, like: PyTree) -> PyTree:
    """Decode a contribution to a tree with the shapes of ``like``."""
    if isinstance(contribution, Decoded):
        return contribution.contribution
    return rule.codec.decode(contribution, like)


def message_of(rule: Rule, contribution: PyTree, center: PyTree) -> PyTree:
    """Decode a contribution, and return its message to the current ``center``."""
    contribution = decode(rule, contribution, center)
    return rule.message(contribution, center) if rule.message else contribution


def weigh(
    rule: Rule, message: PyTree, like: PyTree, extra_args: dict[str, Any]
) -> PyTree:
    """Cast a message to the dtypes of ``like``, and apply the rule's discount to it."""
    message = optax.tree.cast_like(message, like)
    return discounted(rule, message, **extra_arguments(extra_args))


def counted_weight(rule: Rule, weight: Any, steps: Any) -> Any:
    """Return the weight by which a message counts in its round; see `Rule.weight`.

    None if it counts as 1.
    """
    if rule.weight is None:
        return weight
    return rule.weight(steps if weight is None else weight, steps)


class Factors(NamedTuple):
    """The counts of a round's messages, for a center outside the program."""

    factors: list[float]  # of each message, before they are combined
    weights: list[float]  # of each message, for a weighted `Combine`
    divisor: float  # of the sum
    mean_weight: float  # of the weights that workers gave


def factors_of_round(
    rule: Rule,
    weights: Sequence[float | None],
    steps: Sequence[int],
    decays: Sequence[float],
) -> Factors:
    """Return how the messages of a round count.

    Args:
      rule: the rule of the center.
      weights: weight of each worker's round; None if it gave none.
      steps: local steps of each message, positive.
      decays: factor of each message for its staleness, ignored if the rule discounts
        messages itself.

    Raises:
      InvalidArgumentError: the rule makes a weight that is not positive and finite.
    """
    count = len(weights)
    factors = [1.0] * count if rule.discount else list(decays)
    given = [1.0 if weight is None else weight for weight in weights]
    mean = math.fsum(given) / count
    if not rule.is_weighted:
        return Factors(factors, [1.0] * count, 1.0, mean)
    counted = [
        1.0 if (weight := counted_weight(rule, *each)) is None else float(weight)
        for each in zip(weights, steps, strict=True)
    ]
    for weight in counted:
        what = f"the result of the weight of rule {rule.name!r}"
        check.rate(weight, what, low=0.0, high=math.inf, low_open=True)
    middle = math.fsum(counted) / count
    relative = [weight / middle for weight in counted]
    if not rule.is_summed:
        return Factors(factors, relative, 1.0, mean)
    factors = [f * w for f, w in zip(factors, relative, strict=True)]
    return Factors(factors, relative, float(count), mean)


def add_message(
    rule: Rule,
    total: PyTree,
    contribution: PyTree,
    center: PyTree,
    extra_args: dict[str, Any],
    factor: jax.Array,
) -> PyTree:
    """Add a message of a round, times its factor, to the sum of those before it.

    The sum, ``total``, is None before the first message, and in float32 or wider.
    """
    wide = jax.tree.map(trees.widened, center)
    message = message_of(rule, contribution, center)
    message = weigh(rule, message, wide, extra_args)
    message = jax.tree.map(lambda m: m * factor.astype(m.dtype), message)
    return message if total is None else jax.tree.map(jnp.add, total, message)


def combine_round(
    rule: Rule, messages: Sequence[PyTree], weights: Sequence[jax.Array]
) -> PyTree:
    """Combine the messages of a round, for rules that do not sum them.

    Each is a result of `add_message`, whose ``total`` was None. The weights are those
    of `Factors`.
    """
    together = jax.tree.map(lambda *m: jnp.stack(m), *messages)
    total = robust.total_of_leaves
    return combine_messages(rule, together, total, jnp.stack(weights))


def receive_round(
    rule: Rule,
    total: PyTree,
    divisor: jax.Array,
    center: PyTree,
    center_state: PyTree,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Apply the combined messages of a round to the center.

    Args:
      rule: the rule of the center.
      total: result of `add_message` or `combine_round`.
      divisor: divisor of ``total``; see `factors_of_round`.
      center: the center.
      center_state: state of the center optimizer.
      extra_args: extra arguments of the center optimizer.

    Returns:
      The new center, and the new state of the center optimizer.
    """
    mean = jax.tree.map(lambda t: t / divisor.astype(t.dtype), total)
    message = optax.tree.cast_like(mean, center)
    return apply(rule, message, center, center_state, extra_args)


def combine_messages(
    rule: Rule,
    messages: PyTree,
    total: Callable[[PyTree], jax.Array],
    weights: jax.Array | None = None,
) -> PyTree:
    """Combine all messages of a round as the rule's `Combine` describes them.

    The weights, [messages], are relative to their mean; None counts all alike.
    """
    assert isinstance(rule.combine, robust.Combine)
    weighted = (weights,) if rule.combine.weighted else ()
    return rule.combine.function(messages, total, *weighted)


def descend(
    rule: Rule,
    message: PyTree,
    center: PyTree,
    center_state: PyTree,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Return the center optimizer's updates for a message, and its new state."""
    return rule.center.update(
        message, center_state, center, **extra_arguments(extra_args)
    )


def apply(
    rule: Rule,
    message: PyTree,
    center: PyTree,
    center_state: PyTree,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Apply a message, which has been weighed.

    Args:
      rule: the rule of the center.
      message: one message, or the combined message of a round; on a mesh, perhaps this
        tower's piece of it.
      center: the center, in the same pieces.
      center_state: state of the center optimizer.
      extra_args: extra arguments of the center optimizer.

    Returns:
      The new center, and the new state of the center optimizer.
    """
    updates, center_state = descend(rule, message, center, center_state, extra_args)
    if rule.replaces:
        return overwrite(center, updates), center_state
    return optax.apply_updates(center, updates), center_state


def has_residual(rule: Rule) -> bool:
    """Return whether the codec can send later what a center has not applied."""
    return rule.codec.returned is not None


def restore_residual(rule: Rule, contribution: PyTree, codec_state: PyTree) -> PyTree:
    """Add a contribution that the center has not applied to the codec's residual."""
    assert rule.codec.returned is not None
    return rule.codec.returned(contribution, codec_state)


def center_state_like(rule: Rule, center: PyTree) -> PyTree:
    """Return the shapes and dtypes of a center optimizer's first state."""
    _, init = _traced(rule)
    return jax.eval_shape(init, center)


def map_center_state(
    rule: Rule, convert: Callable[[PyTree], PyTree], state: PyTree
) -> PyTree:
    """Convert every tree of parameters in a state of the center optimizer."""
    return optax.tree.map_params(rule.center, convert, state, is_leaf=lambda _: True)


def answer_of(rule: Rule, center: PyTree) -> PyTree:
    """Return the center as a worker adopts it, rounded if the codec says so."""
    if rule.codec.answers is None:
        return center
    return jax.tree.map(lambda c: trees.rounded(c, rule.codec.answers), center)


def adopt(rule: Rule, params: PyTree, center: PyTree, mixing: float = 0.0) -> PyTree:
    r"""Return the parameters after the worker adopts ``center``.

    ``center`` is the version that the rule adopts. With ``mixing``
    :math:`\alpha`, the result is :math:`\alpha x + (1 - \alpha) \text{adopt}(x, c)`.
    """
    adopted = (overwrite if rule.adopt is None else rule.adopt)(params, center)
    if not mixing:
        return adopted

    def mix(c: jax.Array, x: jax.Array) -> jax.Array:
        wide = trees.wider(x.dtype, jnp.float32)
        mean = mixing * x.astype(wide) + (1.0 - mixing) * c.astype(wide)
        return mean.astype(x.dtype)

    return jax.tree.map(mix, adopted, params)


def adopt_late(
    rule: Rule, params: PyTree, sent: PyTree, center: PyTree, mixing: float = 0.0
) -> PyTree:
    """Adopt an answer that arrived after further local steps.

    ``sent`` are the parameters when the message was sent. The local progress made since
    then is kept, and becomes part of the next message. Progress that is not finite
    counts as zero, so that such parameters can recover.
    """

    def add(adopted: jax.Array, now: jax.Array, sent: jax.Array) -> jax.Array:
        since = now - sent
        since = jnp.where(jnp.isfinite(since), since, jnp.zeros_like(since))
        return (adopted + since).astype(now.dtype)

    return jax.tree.map(add, adopt(rule, sent, center, mixing), params, sent)


def adopt_and_begin(
    rule: Rule, params: PyTree, state: LocalState, center: PyTree, mixing: float = 0.0
) -> tuple[PyTree, LocalState]:
    """Adopt the answer for which a worker has waited, and begin the next round."""
    adopted = adopt(rule, params, center, mixing)
    return adopted, begin_round(rule, state, adopted, center)


def adopt_after_steps(
    rule: Rule,
    params: PyTree,
    state: LocalState,
    contribution: PyTree,
    sent: Sent,
    anchor: PyTree,
    center: PyTree,
    *,
    keeps_progress: bool,
    mixing: float = 0.0,
) -> tuple[PyTree, LocalState]:
    """Adopt an answer after the local steps that followed `send_and_begin`.

    Args:
      rule: the rule.
      params: the current parameters.
      state: the current state.
      contribution: the contribution as sent.
      sent: the worker as it was then.
      anchor: the anchor of the contribution if the state keeps none.
      center: the answer.
      keeps_progress: whether the local steps since then are kept in full; see
        `adopt_late`.
      mixing: share of the parameters that stays; see `adopt`.
    """
    if keeps_progress:
        before = sent.params
        if recovers(rule):
            contribute: Any = rule.contribution
            old = _anchor(state, anchor) if rule.needs_anchor else None
            before = contribute.recover(contribution, params, old, sent.steps)
        adopted = adopt_late(rule, params, before, center, mixing)
    else:
        adopted = adopt(rule, params, center, mixing)
    return adopted, move_anchor(state, center)


def reset_to(
    rule: Rule, params: PyTree, state: LocalState, center: PyTree
) -> tuple[PyTree, LocalState]:
    """Take over the center in full, whatever the rule adopts; begin the next round."""
    params = overwrite(params, center)
    return params, begin_round(rule, state, params, center)


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
        rule.record.init(layout.cut_part(params)),
        layout.cut_part(after),
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
    """Send a message and receive its answer at once.

    The center (or this tower's piece of it) is in ``state``.

    Args:
      rule: the rule.
      layout: layout of the center.
      params: the parameters after the last local step of a round.
      state: the state after that step.
      extra_args: for the center optimizer; ``weight`` is this worker's own.
      mixing: share of ``params`` that stays; see `adopt`.

    Returns:
      The adopted parameters, and the new state.
    """
    stored = state.center
    center, center_state = layout.load(stored, state.center_state)
    state = state._replace(center=center, center_state=center_state)
    params, state, message, center_args = _send(rule, layout, params, state, extra_args)
    params, state = _receive(rule, layout, params, state, message, center_args, mixing)
    center, center_state = layout.store(state.center, state.center_state, stored)
    return params, state._replace(center=center, center_state=center_state)


def send(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    extra_args: dict[str, Any],
) -> tuple[PyTree, ExchangeState]:
    """Send a message, which `receive_late` receives, and begin the next round.

    No local step needs the message meanwhile. Arguments and results are those of
    `exchange`, for a whole center.
    """
    params, state, message, center_args = _send(rule, layout, params, state, extra_args)
    message = optax.tree.cast_like(message, state.center)
    mean_weight = center_args.get("weight")
    in_flight = InFlight(
        is_sent=jnp.ones((), bool),
        steps=state.local.local_steps,
        weight=jnp.asarray(1.0 if mean_weight is None else mean_weight, float),
        message=message,
    )
    local = empty_record(rule, state.local, params, message, layout)
    return params, state._replace(local=local, in_flight=in_flight)


def receive_late(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    extra_args: dict[str, Any],
    *,
    mixing: float = 0.0,
) -> tuple[PyTree, ExchangeState]:
    """Apply the message in flight, and adopt the center.

    Arguments and results are those of `exchange`.
    """
    in_flight = state.in_flight
    assert in_flight is not None
    center_args = {
        **extra_args,
        "steps": in_flight.steps,
        "since": state.exchanges - 1,
        "workers": layout.num_participants(state.exchanges - 1),
        "weight": in_flight.weight,
    }
    moved, state = _receive(
        rule, layout, params, state, in_flight.message, center_args, mixing
    )
    # Reset the message to zeros that formally depend on the center. If `when`, a loop
    # of zero or one iterations, left the message unchanged, XLA would compute what
    # depends on the message before the loop, at every local step.
    never = in_flight.steps < 0
    empty = jax.tree.map(lambda c: jnp.where(never, c, jnp.zeros_like(c)), state.center)
    in_flight = in_flight._replace(is_sent=jnp.zeros((), bool), message=empty)
    return moved, state._replace(in_flight=in_flight)


def _send(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    extra_args: dict[str, Any],
) -> tuple[PyTree, ExchangeState, PyTree, dict[str, Any]]:
    """Send a message: make it, and adopt the center if the rule does so before it.

    Arguments are those of `exchange`, but ``state`` has this tower's piece of the
    center on the device.

    Returns:
      Parameters and state, this tower's piece of the combined message of all workers,
      and its extra arguments of the center optimizer.
    """
    layout.check_all_workers_exchange(rule.name)
    # This tower's part of the center before the message, for rules that read it.
    part = None
    if rule.message is not None or rule.needs_anchor or rule.adopts == "before":
        part = layout.join_pieces(state.center, params)
    local = state.local
    anchor = None if local.anchor is None else layout.cut_part(local.anchor)
    contribution, codec_state = contribute(
        rule, local._replace(anchor=anchor), layout.cut_part(params), part
    )
    center_args = {
        **extra_args,
        "steps": local.local_steps,
        "since": state.exchanges,
        "workers": layout.num_participants(state.exchanges),
    }
    mean_weight = relative = None
    if (weight := extra_args.get("weight")) is not None:
        check.rate(weight, "weight", low=0.0, high=math.inf, low_open=True)
        weight = jnp.asarray(weight, float)
        mean_weight = layout.mean_over_participants(weight, state.exchanges)
        center_args["weight"] = mean_weight
    steps = jnp.maximum(local.local_steps, 1)  # no steps count as 1, as at a center
    counted = counted_weight(rule, weight, steps)
    if rule.is_weighted and counted is not None:
        if rule.weight is not None:
            counted = jnp.asarray(counted, float)
            mean_weight = layout.mean_over_participants(counted, state.exchanges)
        relative = counted / mean_weight
    message = _combined(rule, layout, params, state, contribution, part, relative)
    state = state._replace(
        local=local._replace(codec_state=codec_state),
        exchanges=optax.safe_increment(state.exchanges),
    )
    if rule.adopts == "before":
        params, state = _adopt_part(rule, layout, params, state, part)
    return params, state, message, center_args


def _combined(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    contribution: PyTree,
    part: PyTree,
    relative: jax.Array | None,
) -> PyTree:
    """Return this tower's piece of the combined message of all workers of a mesh.

    Args:
      rule: the rule.
      layout: layout of the center.
      params: the parameters, for their shapes.
      state: the state, with this tower's piece of the center.
      contribution: this worker's encoded contribution.
      part: this tower's part of the center; None if the rule does not read it.
      relative: weight of this worker relative to the mean; None to count all workers
        alike.
    """
    piece = state.center
    combine: Any = rule.combine
    if not rule.is_summed:
        weights = None if relative is None else layout.gather(relative)
        combine, relative = functools.partial(_combined_by, rule, weights), None

    def message_to(center: PyTree, contribution: PyTree) -> PyTree:
        return optax.tree.cast_like(message_of(rule, contribution, center), piece)

    if not rule.codec.is_identity:
        decode_piece = functools.partial(message_to, piece)
        return layout.combine_encoded(
            contribution, decode_piece, combine, params, relative
        )
    # All-reduce can sum these messages.
    message = message_to(piece if part is None else part, contribution)
    if relative is not None:
        message = trees.scaled(message, relative)
    return layout.combine(message, combine, params, piece, state.exchanges)


def _combined_by(
    rule: Rule,
    weights: jax.Array | None,
    messages: PyTree,
    total: Callable[[PyTree], jax.Array],
) -> PyTree:
    return combine_messages(rule, messages, total, weights)


def _receive(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    message: PyTree,
    center_args: dict[str, Any],
    mixing: float,
) -> tuple[PyTree, ExchangeState]:
    """Apply a message of `_send`; then adopt the center if the rule says so."""
    message = weigh(rule, message, state.center, center_args)
    center, center_state = apply(
        rule, message, state.center, state.center_state, center_args
    )
    state = state._replace(center=center, center_state=center_state)
    if rule.adopts == "after":
        part = layout.join_pieces(center, params)
        params, state = _adopt_part(rule, layout, params, state, part, mixing)
    return params, state


def _adopt_part(
    rule: Rule,
    layout: Layout,
    params: PyTree,
    state: ExchangeState,
    part: PyTree,
    mixing: float = 0.0,
) -> tuple[PyTree, ExchangeState]:
    """Adopt the center as parameters and anchor; ``part`` is this tower's part."""
    answer = answer_of(rule, layout.join_parts(part, params))
    adopted = adopt(rule, params, answer, mixing)
    if state.in_flight is None:
        local = begin_round(rule, state.local, params, answer, layout)
    else:  # the next round began at sending
        local = move_anchor(state.local, answer)
    return adopted, state._replace(local=local)


def nothing_in_flight(center: PyTree) -> InFlight:
    """Return an `InFlight` without a message, for states with a delay."""
    return InFlight(
        is_sent=jnp.zeros((), bool),
        steps=jnp.zeros((), jnp.int32),
        weight=jnp.ones((), float),
        message=optax.tree.zeros_like(center),
    )


def overwrite(old: PyTree, new: PyTree) -> PyTree:
    """Return exactly ``new``, in the dtypes of ``old`` and in its donated buffers.

    The select reads ``old`` only formally. Without it jit would drop ``old`` as unused,
    its donated buffer would be lost, and each later output would take its neighbor's
    buffer, with a copy.
    """

    def overwrite_leaf(old: Any, new: jax.Array) -> jax.Array:
        dtype = jnp.result_type(old)
        if new.dtype == dtype:
            return jnp.where(True, new, old)
        # Adopt a narrower center as it is stored: without an explicit rounding, XLA
        # could use the values from before its cast.
        wide = new.astype(trees.wider(new.dtype, dtype))
        return jnp.where(True, trees.rounded(wide, new.dtype).astype(dtype), old)

    return jax.tree.map(overwrite_leaf, old, new)


def check_step(grads: PyTree, params: PyTree, caller: str) -> None:
    """Check the gradients and parameters of a local step."""
    check.params_given(params, caller)
    check.same_tree(grads, params, "grads", "params")
    check.float_leaves(grads, "grads")
    check.float_leaves(params, "params")
