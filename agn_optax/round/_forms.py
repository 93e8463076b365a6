"""Three forms of a method that keeps its center in the optimizer state.

All have the same state and give the same results:

- *drop-in* (`exchange_every`): ``tx.update`` decides in the compiled program whether an
  exchange is due. It works wherever an optax optimizer does.
- *split* (`phases`): local phase and exchange are separate programs, for loops that
  count their steps. No branch is compiled, and adoption is exact.
- *round* (`scan_round`): one program scans the local steps of a period and then makes
  the exchange.

All three exchange the whole tree, or fragments of it in turn (`_fragments`).
`center_params` finds the center in the state, inside any wrappers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import (
    _collectives,
    _elementwise,
    _fragments,
    _leafwise,
    _moments,
    _parts,
    _period,
    _round,
)
from agn_optax.round._fragments import Fragments, FragmentsState
from agn_optax.round._round import ExchangeState, with_inner
from agn_optax.round.placements import (
    Layout,
    OnHost,
    Placement,
    as_stored,
    center_arrays,
    layout_of,
    to_host,
)
from agn_optax.rules import Rule, check_rule, counts_exchanges

PyTree = Any
State = ExchangeState | FragmentsState
_log = logging.getLogger("agn_optax")


class Phases(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """The split form, see `phases`: the local phase is an optax optimizer.

    Attributes:
      init: ``params -> state``.
      update: ``(grads, state, params, **extra) -> (updates, state)``: a local step.
      exchange: ``(params, state, **extra) -> (params, state)``: the end of a round.
        With fragments, it exchanges all of them, or one of them with ``fragment=p``. If
        messages have a delay, this call sends the message, and the call with
        ``receive=p`` applies it, or does nothing if no message is in flight. Both
        indices are static.
    """

    exchange: Callable[..., tuple[PyTree, PyTree]]

    def __new__(cls, init: Any, update: Any, exchange: Any) -> Phases:
        """Make a pair (init, update) with one more function as an attribute."""
        self = super().__new__(cls, init, update)
        self.exchange = exchange
        return self


def phases(
    inner: optax.GradientTransformation,
    rule: Rule,
    *,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    fragments: Fragments | None = None,
    moments: _moments.Periods | None = None,
) -> Phases:
    """Make a rule's split form: two programs, for loops that count their steps.

    ``update(grads, state, params, **extra)`` is the local phase: the inner step and the
    record, at every step. ``exchange(params, state, **extra)`` ends a round: the
    parameters become those that the rule adopts, bit for bit. Jit both, donate
    parameters and state, and call ``exchange`` after every period of updates.

    Args:
      inner: the inner optimizer.
      rule: a rule, such as one of `agn_optax.rules`.
      axis_name: name of the mesh axis whose members are the workers, bound by vmap,
        pmap or shard_map around ``exchange``; None for one worker.
      center_dtype: floating dtype of center and center optimizer; None keeps the
        parameters'. With bfloat16 parameters, a float32 center is a master copy.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`,
        which also tells when each is due; None exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too; see
        `exchange_every`.

    Returns:
      An optax optimizer for the local phase, which can be used like any other (in a
      chain, in a ``TrainState``). Its additional function ``exchange`` finds its own
      part in the state of the whole chain. The state is that of `exchange_every`, an
      `ExchangeState` or a `FragmentsState`, so the two forms can alternate.

    Raises:
      InvalidTypeError: ``inner`` is not an optimizer, or ``rule`` not a rule.
      MissingArgumentError: ``update`` was called without ``params``.
      TreeMismatchError: gradients, parameters and state do not match, or have leaves
        that are not real floating arrays.
      UnboundAxisError: ``axis_name`` is not bound around ``exchange``, or the axis of a
        sharded center is not bound around ``init``, ``update`` or ``exchange``.
      InvalidArgumentError: ``jax.vmap(tx.init)`` got workers that begin with different
        parameters; or the rule, its center optimizer, the placement, the fragments and
        the parameters cannot be used together.
      CenterNotFoundError, AmbiguousCenterError: ``exchange`` got a state without a
        center, or with several.

    Example:
      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> tx = agn_optax.phases(optax.sgd(0.1), agn_optax.rules.agn(optax.sgd(0.5)))
      >>> local = jax.jit(tx.update, donate_argnums=1)
      >>> exchange = jax.jit(tx.exchange, donate_argnums=(0, 1))
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> for step in range(1, 5):
      ...     updates, state = local(jnp.array([1.0, 1.0]), state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     if step % 4 == 0:
      ...         params, state = exchange(params, state)
      >>> print(params)
      [0.5 1.5]
    """
    inner = check.optimizer(inner, "inner")
    check_rule(rule)
    center_dtype = check.float_dtype(center_dtype, "center_dtype")
    layout = layout_of(axis_name, placement)
    _fragments.check_fragments(fragments)
    if fragments is not None:
        fragments.check(rule, layout)
    moments = _moments.checked_periods(moments)
    # The center in the state serves as the anchor, except in three cases: workers adopt
    # the center as it was before the exchange; they adopt a rounded center; or the
    # penalty reads the whole center at every step, and a step cannot read it in the
    # state.
    keep_anchor = rule.needs_anchor and (
        rule.adopts == "before"
        or rule.codec.answers is not None
        or (rule.penalty is not None and not layout.is_readable_in_step)
    )

    layout.check_rule(rule)

    def init_one(
        params: PyTree, inner: optax.GradientTransformationExtraArgs
    ) -> ExchangeState:
        """Return the first state of a whole tree, or of a fragment."""
        if pieces := layout.piece_shapes(params):
            _elementwise.check(rule, params, pieces)
        whole = layout.vary_over_workers(trees.copy(params, center_dtype))
        piece = layout.cut_piece(whole)
        center_state = layout.vary_over_workers(
            _round.init_center_state(rule, trees.copy(piece))
        )
        in_flight = None
        if fragments is not None and fragments.delay:
            in_flight = _round.nothing_in_flight(piece)
        center, center_state = layout.store(piece, center_state, params)
        anchor = trees.copy(whole) if keep_anchor else None
        return ExchangeState(
            local=_round.init_local(rule, inner, params, anchor, layout),
            center=center,
            center_state=center_state,
            exchanges=jnp.zeros((), jnp.int32),
            in_flight=in_flight,
        )

    def init_fn(params: PyTree) -> State:
        check.float_leaves(params, "params")
        if axis_name is not None:
            _collectives.check_same_params(params, axis_name)
        layout.check_memory()
        layout.check_bound_for_steps()
        state: State
        if fragments is None:
            first = state = init_one(params, inner)
        else:
            state = _fragments.init_fragments(fragments, rule, inner, params, init_one)
            first = state.fragments[0]
        _moments.check_fields(moments, _inner_state(state))
        if counts_exchanges(rule.center, center_arrays(first.center_state)):
            _log.warning(
                "the center optimizer of rule %r has a schedule, which counts "
                "exchanges: after N local steps with period P it is at N / P. "
                "agn_optax.by_local_steps(optimizer) makes it count local steps",
                rule.name,
            )
        return state

    def check_state(params: PyTree, state: State) -> None:
        """Check that parameters and state match."""
        if fragments is None and isinstance(state, ExchangeState):
            layout.check_center(params, state.center)
        elif fragments is None or isinstance(state, ExchangeState):
            raise errors.TreeMismatchError(
                f"the state is a {type(state).__name__}, but {rule.name} was made with "
                f"fragments={fragments}"
            )
        else:
            _fragments.check_state(fragments, state, params, layout)

    def update_fn(
        updates: PyTree, state: State, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, State]:
        _round.check_step(updates, params, rule.name)
        check_state(params, state)
        layout.check_bound_for_steps()
        if isinstance(state, FragmentsState):
            assert fragments is not None
            updates, inner_state, locals_ = _round.local_step_of_parts(
                rule,
                inner,
                fragments.divide(params),
                updates,
                state.inner_state,
                [fragment.local for fragment in state.fragments],
                params,
                [center_arrays(fragment.center) for fragment in state.fragments],
                extra_args,
                layout,
            )
            moved = tuple(
                fragment._replace(local=local)
                for fragment, local in zip(state.fragments, locals_, strict=True)
            )
            return updates, FragmentsState(inner_state, moved)
        center = center_arrays(state.center)
        updates, local = _round.local_step(
            rule, inner, updates, state.local, params, center, extra_args, layout
        )
        return updates, state._replace(local=local)

    def exchange_one(
        params: PyTree,
        state: ExchangeState,
        extra_args: dict[str, Any],
        *,
        only_receives: bool,
    ) -> tuple[PyTree, ExchangeState]:
        """Exchange a whole tree, or a fragment."""
        exchange, send, receive = _halves(rule, layout, extra_args, fragments)
        if state.in_flight is not None:
            params, state = _collectives.when(
                state.in_flight.is_sent, lambda carry: receive(*carry), (params, state)
            )
            return (params, state) if only_receives else send(params, state)
        if rule.adopts == "before":  # worker and center move from their old values
            return _leafwise.when(
                None,
                lambda carry, _: exchange(*carry),
                (params, state),
                params,
                state.exchanges,
                functools.partial(_elementwise.is_leafwise, rule),
            )
        return exchange(params, state)

    def exchange_fn(
        params: PyTree,
        state: PyTree,
        *,
        fragment: int | None = None,
        receive: int | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        check.params_given(params, rule.name)
        found = find_state(state)
        check_state(params, found)
        check.float_leaves(params, "params")
        layout.check_bound()
        indices = _fragments.fragments_to_exchange(fragments, fragment, receive)
        exchange = functools.partial(
            exchange_one, extra_args=extra_args, only_receives=receive is not None
        )
        moved: State
        average = functools.partial(_moments.average, moments, layout)
        if isinstance(found, FragmentsState):
            assert fragments is not None
            owners = _moments.owners(moments, fragments.divide(params), params)
            params, moved = _fragments.exchange_fragments(
                fragments, exchange, params, found, indices
            )
            inner_state = found.inner_state
            for f in indices if receive is None else ():
                exchanges = found.fragments[f].exchanges
                inner_state = average(inner_state, exchanges, owns=owners[f])
            moved = moved._replace(inner_state=inner_state)
        else:
            inner_state = average(found.local.inner_state, found.exchanges)
            params, exchanged = exchange(params, with_inner(found, None))
            moved = with_inner(exchanged, inner_state)
        return params, trees.map_nodes(lambda _: moved, state, State)

    return Phases(init_fn, update_fn, exchange_fn)


def exchange_every(
    inner: optax.GradientTransformation,
    rule: Rule,
    period: Any,
    *,
    axis_name: Any = None,
    center_dtype: Any = None,
    placement: Placement | None = None,
    fragments: Fragments | None = None,
    moments: _moments.Periods | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Make a rule's drop-in form: an optax optimizer that exchanges periodically.

    .. math::
        x \leftarrow x + \text{inner}(g); \quad
        \text{and at every } \lambda\text{-th step: }
        c' = c + \text{center}(m), \; x \leftarrow \text{adopt}(x)

    Its updates must be applied unchanged: put it last in a chain. The parameters adopt
    the center through ``params + updates``, so they equal the center up to rounding
    errors of their own magnitude, and parameters that are not finite do not recover.
    Reverse-mode differentiation through the optimizer is not supported, because it
    contains a loop. If one of these matters, use `phases` or `scan_round`. Read the
    center with `center_params`.

    Args:
      inner: the inner optimizer, which makes the local steps.
      rule: a rule, such as one of `agn_optax.rules`.
      period: local steps between exchanges, a positive int; or a function from the
        exchanges made so far (int32 scalar) to the length of the next round, such as
        ``lambda k: jnp.where(k < 3, 1, 10)``. A scalar array is not checked.
        Under ``inject_hyperparams`` a function becomes a schedule of STEPS, as every
        callable does; name ``period`` in its ``static_args`` to keep a schedule of
        exchanges.
      axis_name: name of the mesh axis whose members are the workers, bound by vmap,
        pmap or shard_map around ``update``; None for one worker. Every member must
        start from the same center and update at every step: if ``apply_if_finite``
        skipped a step on one member only, the others would wait forever.
      center_dtype: floating dtype of center and center optimizer; None keeps the
        parameters'. Give it as a string under ``inject_hyperparams``, which takes
        callables for schedules.
      placement: where on a mesh the center lives, a `Placement`; None keeps it whole on
        every device.
      fragments: parts of the parameters that are exchanged in turn, a `Fragments`; None
        exchanges all at once.
      moments: fields of the inner optimizer's state that workers exchange, too, each
        with its period :math:`k` in exchanges of the parameters, such as ``{"mu": 3,
        "nu": 6}``: names of NamedTuple fields, anywhere in that state, with floating
        arrays. At every k-th exchange a field becomes its plain mean over the workers
        of the exchange, :math:`s_i \leftarrow \tfrac1n \sum_j s_j`, whatever the rule,
        its codec and the ``weight`` of a worker are. With gossip, these workers are the
        two partners. With fragments, the leaves of a field are exchanged with the
        fragments of their parameters, or with the last one if these are random
        elements, and without delay. None keeps the inner optimizer's state with its
        worker.

    Returns:
      An optax optimizer with `ExchangeState`, or with `FragmentsState`; updates have
      the dtypes of the parameters.

    Raises:
      InvalidArgumentError: ``period`` is not a positive whole number, or
        ``jax.vmap(tx.init)`` got workers that begin with different parameters; or the
        rule, its center optimizer, the placement, the fragments, the period and the
        parameters cannot be used together.
      InvalidTypeError: ``inner`` is not an optimizer, or ``rule`` not a rule.
      MissingArgumentError: ``update`` was called without ``params``.
      TreeMismatchError: gradients, parameters and state do not match, or have leaves
        that are not real floating arrays.
      UnboundAxisError: ``axis_name`` is not bound around ``update``.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> rule = agn_optax.rules.downpour()
      >>> tx = agn_optax.exchange_every(optax.sgd(0.25), rule, period=2)
      >>> params = jnp.array([1.0])
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.array([1.0]), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, agn_optax.center_params(state))
      [0.5] [0.5]

      DES-LOC: parameters are averaged every 10 steps, Adam's first moments every 30,
      and its second moments every 60.

      >>> tx = agn_optax.exchange_every(
      ...     optax.adam(1e-3),
      ...     agn_optax.rules.average(),
      ...     period=10,
      ...     axis_name="workers",
      ...     moments={"mu": 3, "nu": 6},
      ... )

    References:
      Alex Iacob et al., *DES-LOC: Desynced Low Communication Adaptive Optimizers for
      Training Foundation Models*, 2025 (the abstract, and its equations in a summary by
      others, were read: means are taken before a step, here after the step before it).

      Ziheng Cheng, Margalit Glasgow, *Convergence of Distributed Adaptive Optimization
      with Local Updates*, 2024 (Local Adam: all periods are those of the parameters).
    """
    period_of = _period.as_schedule(period)
    split = phases(
        inner,
        rule,
        axis_name=axis_name,
        center_dtype=center_dtype,
        placement=placement,
        fragments=fragments,
        moments=moments,
    )
    moments = _moments.checked_periods(moments)
    if fragments is not None and not check.is_traced(first := period_of(0)):
        fragments.check_period(int(first))
    mixing = 0.0 if fragments is None else fragments.mixing

    layout = layout_of(axis_name, placement)
    # If the exchange reads the state only, and the adopted parameters are in the new
    # state, the loop need not carry the updates.
    adopts_from_state = (
        not rule.needs_params
        and rule.adopt is None
        and rule.adopts == "after"
        and layout.is_default
        and not mixing
    )
    # Likewise, the loop that sends a message need not carry the updates. (If it read
    # updates outside the loop, XLA would compute the message before it, at every step.)
    sends_from_state = not rule.needs_params and rule.adopts == "after"

    def exchange_state_only(
        due: jax.Array,
        act: Callable[[Any], tuple[PyTree, ExchangeState]],
        updates: PyTree,
        state: ExchangeState,
        params: PyTree,
    ) -> tuple[PyTree, ExchangeState]:
        """Run ``act`` on (updates, state) where due, and adopt the state's center."""
        # The message does not read the parameters, so the loop need not wait until the
        # updates are written to memory: they stay fused with their application, and
        # only `where` reads the center.
        moved = _collectives.when(due, lambda state: act((updates, state))[1], state)
        answer = _round.answer_of(rule, moved.center)
        adopted = _round.adopt(rule, params, answer)
        adopting = optax.tree.sub(adopted, params)
        return optax.tree.where(due, adopting, updates), moved

    def exchange_one(
        due: jax.Array,
        updates: PyTree,
        state: ExchangeState,
        params: PyTree,
        extra_args: dict[str, Any],
    ) -> tuple[PyTree, ExchangeState]:
        """Exchange a whole tree or a fragment, where due."""
        exchange, *_ = _halves(rule, layout, extra_args, fragments)
        act = functools.partial(_on_updates, exchange)
        if not adopts_from_state:
            return _leafwise.when(
                due,
                act,
                (updates, state),
                params,
                state.exchanges,
                functools.partial(_elementwise.is_leafwise, rule),
            )
        act = functools.partial(act, params=params)
        return exchange_state_only(due, act, updates, state, params)

    def exchange_late(
        due: jax.Array,
        is_received: jax.Array,
        updates: PyTree,
        state: ExchangeState,
        params: PyTree,
        extra_args: dict[str, Any],
    ) -> tuple[PyTree, ExchangeState]:
        """Run the halves of an exchange where due, with local steps between them."""
        send, receive = (
            functools.partial(_on_updates, half, params=params)
            for half in _halves(rule, layout, extra_args, fragments)[1:]
        )
        if adopts_from_state:
            updates, state = exchange_state_only(
                is_received, receive, updates, state, params
            )
        else:
            updates, state = _collectives.when(is_received, receive, (updates, state))
        if not sends_from_state:
            return _collectives.when(due, send, (updates, state))
        return updates, _collectives.when(
            due, lambda state: send((updates, state))[1], state
        )

    def exchange_elements(
        parts: _parts.Parts,
        number: int,
        due: jax.Array,
        updates: PyTree,
        state: ExchangeState,
        params: PyTree,
        extra_args: dict[str, Any],
    ) -> tuple[PyTree, ExchangeState]:
        """Exchange a fragment of random elements of the tree, where due.

        The elements are taken and put back within the loop, so only where due: unlike
        whole leaves, they must be copied.
        """
        assert fragments is not None

        def on_tree(half: _Act, carry: Any) -> tuple[PyTree, ExchangeState]:
            updates, state = carry
            part = parts.take(number, updates), state
            changed, state = _on_updates(half, part, parts.take(number, params))
            return parts.put(number, updates, changed), state

        exchange, send, receive = (
            functools.partial(on_tree, half)
            for half in _halves(rule, layout, extra_args, fragments)
        )
        if state.in_flight is None:
            return _collectives.when(due, exchange, (updates, state))
        is_received = fragments.is_received(state, due)
        received = _collectives.when(is_received, receive, (updates, state))
        return _collectives.when(due, send, received)

    def update_fn(
        updates: PyTree, state: State, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, State]:
        check.axis_bound(axis_name)
        updates, state = split.update(updates, state, params, **extra_args)

        average = functools.partial(_moments.average, moments, layout)
        # A restored state may be on the device, also the parts that belong on the host.
        state = trees.map_nodes(to_host, state, OnHost)
        if isinstance(state, ExchangeState):
            steps = _period.steps_of(period_of(state.exchanges))
            due = state.local.local_steps >= steps
            inner_state, state = state.local.inner_state, with_inner(state, None)
            inner_state = average(inner_state, state.exchanges, due)
            updates, state = exchange_one(due, updates, state, params, extra_args)
            return updates, with_inner(state, inner_state)

        assert fragments is not None
        parts, moved, inner_state = fragments.divide(params), [], state.inner_state
        owners = _moments.owners(moments, parts, params)
        for p, fragment in enumerate(state.fragments):
            due = fragments.is_due(p, fragment, period_of)
            inner_state = average(inner_state, fragment.exchanges, due, owners[p])
            if fragments.seed is not None:
                updates, fragment = exchange_elements(
                    parts, p, due, updates, fragment, params, extra_args
                )
                moved.append(fragment)
                continue
            part = parts.take(p, updates), fragment, parts.take(p, params), extra_args
            if fragment.in_flight is None:
                changed, fragment = exchange_one(due, *part)
            else:
                is_received = fragments.is_received(fragment, due)
                changed, fragment = exchange_late(due, is_received, *part)
            updates = parts.put(p, updates, changed)
            moved.append(fragment)
        return updates, FragmentsState(inner_state, tuple(moved))

    return optax.GradientTransformationExtraArgs(split.init, update_fn)


# (params, state, data) -> (params, state, metrics)
Step = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]]


def scan_round(
    local_step: Step,
    exchange: Callable[..., tuple[PyTree, PyTree]],
    *,
    unroll: int | bool = 1,
    fragments: Fragments | None = None,
) -> Step:
    """Make one function of a whole round: a scan of local steps, then the exchange.

    With fragments, local steps are scanned from one exchange to the next, so the
    program has a scan for each time in the round at which an exchange is due. Messages
    in flight are not carried through these scans. Local steps do not depend on them, so
    the compiler may overlap communication and local steps.

    Args:
      local_step: ``(params, state, batch) -> (params, state, metrics)``, which calls
        ``phases(...).update`` and applies the updates.
      exchange: ``phases(...).exchange``; with fragments, it is called with
        ``fragment=p`` and ``receive=p``.
      unroll: local steps per iteration of the scan, as `jax.lax.scan` takes it.
      fragments: the fragments of `phases`; None exchanges all at once.

    Returns:
      ``(params, state, batches) -> (params, state, metrics)``. Every leaf of
      ``batches`` has the period as its first dimension; ``metrics`` come back stacked
      the same way.

    Raises:
      InvalidArgumentError: (when called) fragments do not fit into the period, or
        leaves of ``batches`` differ in their first dimension.

    Example:
      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> tx = agn_optax.phases(optax.sgd(0.1), agn_optax.rules.average())
      >>> def local_step(params, state, target):
      ...     objective = lambda p: 0.5 * (p - target) ** 2
      ...     loss, grads = jax.value_and_grad(objective)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, loss
      >>> whole_round = agn_optax.scan_round(local_step, tx.exchange)
      >>> run = jax.jit(whole_round, donate_argnums=(0, 1))
      >>> params = jnp.asarray(1.0)
      >>> params, state, losses = run(params, tx.init(params), jnp.zeros(3))
      >>> print(losses.shape, state.exchanges)
      (3,) 1
    """
    _fragments.check_fragments(fragments)

    def calls_after(step: int, period: int) -> tuple[dict[str, int], ...]:
        """Return the arguments of each call of ``exchange`` after a local step."""
        if fragments is None:
            return ({},) if step == period else ()
        # Step `period + step`, because only later rounds than the first receive
        # messages of the round before.
        return fragments.due(period + step, period)

    def round_fn(
        params: PyTree, state: PyTree, batches: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batches)}
        if len(lengths) != 1 or () in lengths:
            raise errors.InvalidArgumentError(
                "batches must have the period as the first dimension of every leaf, "
                f"got {sorted(lengths)}"
            )
        ((period,),) = lengths
        if period == 0:
            raise errors.InvalidArgumentError(
                "batches must have at least one batch, got a period of 0"
            )

        def body(carry: Any, batch: PyTree) -> Any:
            if fragments is not None:
                index = functools.partial(
                    jax.lax.dynamic_index_in_dim, index=batch, keepdims=False
                )
                batch = jax.tree.map(index, batches)
            params, state, metrics = local_step(carry[0], carry[1], batch)
            return (params, state), metrics

        begin, metrics = 0, []
        for end in range(1, period + 1):
            calls = calls_after(end, period)
            if not calls and end < period:
                continue
            in_flight, state = _fragments.remove_in_flight(state)
            # A round of fragments is several scans, none of which copies its batches.
            steps = batches if fragments is None else jnp.arange(begin, end)
            (params, state), scanned = jax.lax.scan(
                body, (params, state), steps, unroll=unroll
            )
            state, begin = _fragments.restore_in_flight(in_flight, state), end
            metrics.append(scanned)
            for call in calls:
                params, state = exchange(params, state, **call)
        metrics = jax.tree.map(lambda *rows: jnp.concatenate(rows), *metrics)
        return params, state, metrics

    return round_fn


def center_params(opt_state: PyTree, params: PyTree = None) -> PyTree:
    """Return the center held by an optimizer state.

    It is found inside ``chain``, ``masked``, ``multi_transform``,
    ``inject_hyperparams``, ``MultiSteps`` and any other wrapper whose state is a
    pytree.

    Args:
      opt_state: state of one of this package's optimizers, or a state that contains
        one.
      params: current parameters, which replace the leaves that a mask excludes from the
        center. None leaves these as ``optax.MaskedNode()``.

    Returns:
      The center, with the structure and shapes of the parameters and the center's
      dtypes. The arrays are those of the state itself: copy them if you donate it. If
      every worker has its own center (``Placement(gossip=...)``), the mean of the
      centers if the workers' axis is bound here, else the center in the state.

    Raises:
      CenterNotFoundError: the state has no center.
      TreeMismatchError: ``params`` has another structure than the center.
      AmbiguousCenterError: the state has more than one center; pass the part of the
        state with the one that you want.
      UnboundAxisError: the center is in shards, and their axis is not bound here;
        `Towers.center_params` reads such a center outside the mesh.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> tx = optax.chain(optax.clip(1.0), agn_optax.agn(optax.sgd(0.1), period=4))
      >>> print(agn_optax.center_params(tx.init(jnp.array([1.0, 2.0]))))
      [1. 2.]
    """
    if _is_followed(opt_state):
        _log.warning(
            "a chain has more transformations after a rule. After a drop-in rule, they "
            "change the updates that set the parameters to the center, which must stay "
            "as they are: put the rule last. (After the local phase of phases(), they "
            "are fine)"
        )
    center = _whole_center(find_state(opt_state))
    if params is None:
        return center

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    try:
        return jax.tree.map(
            lambda c, p: p if is_masked(c) else c, center, params, is_leaf=is_masked
        )
    except ValueError as error:
        raise errors.TreeMismatchError(
            f"params and center are different trees: {error}"
        ) from error


def _inner_state(state: State) -> PyTree:
    if isinstance(state, ExchangeState):
        return state.local.inner_state
    return state.inner_state


def _whole_center(state: State) -> PyTree:
    if isinstance(state, ExchangeState):
        return as_stored(state.center).whole()
    return _parts.join(list(map(_whole_center, state.fragments)))


def find_state(opt_state: PyTree) -> State:
    """Find the one state of a rule in an optimizer state, inside any wrappers."""
    found = trees.nodes(opt_state, State)
    if not found:
        raise errors.CenterNotFoundError(
            f"no center in this {type(opt_state).__name__}: expected the state of one "
            "of agn_optax's optimizers, or of a chain, mask or other wrapper around "
            "it. The center of a Worker is center.pull().params"
        )
    if len(found) > 1:
        places = ", ".join(f"opt_state{keystr(path)}" for path, _ in found)
        raise errors.AmbiguousCenterError(
            f"expected one center, found {len(found)}: at {places}; pass one of them"
        )
    return found[0][1]


def _is_followed(node: PyTree) -> bool:
    """Return whether a chain in the state has a transformation after a rule."""
    if isinstance(node, State):
        return False
    is_chain = type(node) is tuple and all(isinstance(child, tuple) for child in node)
    if is_chain and trees.nodes(node[:-1], State):
        return True
    level = jax.tree_util.default_registry.flatten_one_level(node)
    return level is not None and any(map(_is_followed, level[0]))


_Act = Callable[[PyTree, Any], tuple[PyTree, ExchangeState]]


def _halves(
    rule: Rule,
    layout: Layout,
    extra_args: dict[str, Any],
    fragments: Fragments | None,
) -> tuple[_Act, _Act, _Act]:
    """Return exchange, sending and receiving as functions of (params, state)."""
    mixing = 0.0 if fragments is None else fragments.mixing

    def bind(act: Callable[..., Any], **options: float) -> _Act:
        return functools.partial(act, rule, layout, extra_args=extra_args, **options)

    return (
        bind(_round.exchange, mixing=mixing),
        bind(_round.send),
        bind(_round.receive_late, mixing=mixing),
    )


def _on_updates(act: _Act, carry: Any, params: Any) -> tuple[PyTree, ExchangeState]:
    """Call ``act(params, state)`` on (updates, state), before updates are applied."""
    updates, state = carry
    adopted, state = act(optax.apply_updates(params, updates), state)
    return optax.tree.sub(adopted, params), state
