"""Fragments: parts of the parameters that are exchanged in turn, each at its offset.

Each fragment has its own `ExchangeState`, without an inner state: one inner optimizer
updates the whole tree. The exchange itself is in `_round`, and the three forms are in
`_forms`. This module only decides which leaves a fragment has, and when it is due.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agn_optax import errors
from agn_optax._internal import attempt, check, combinations, trees
from agn_optax.round import _elementwise, _parts, _period, _round
from agn_optax.round._parts import Parts
from agn_optax.round._round import ExchangeState
from agn_optax.round.placements import WHOLE, Layout
from agn_optax.rules import Rule

PyTree = Any


class FragmentsState(NamedTuple):
    """State of a worker that exchanges its parameters by fragments."""

    inner_state: PyTree  # state of the inner optimizer, for the whole tree
    # One state for each fragment, without an inner state; trees have None in place of
    # the other fragments' leaves.
    fragments: tuple[ExchangeState, ...]


@dataclasses.dataclass(frozen=True)
class Fragments:
    r"""Parts of the parameters that are exchanged in turn: Streaming DiLoCo.

    .. math::
        \text{after local step } t \equiv t_p \pmod \lambda: \quad
            & m_p = \text{the message of all workers for fragment } p \\
        \text{and } \tau \text{ local steps later:} \quad
            & c_p \leftarrow c_p + \text{center}(m_p), \quad
            x_p \leftarrow \alpha x_p + (1 - \alpha) \, \text{adopt}(x_p, c_p)

    Every fragment is exchanged once per period, as the rule defines it; fragments with
    different offsets are sent at different steps. Each fragment has its own record,
    anchor, codec state and center optimizer state. Therefore a global norm in a rule,
    codec or center optimizer is that of one fragment, and a schedule counts the
    exchanges of one fragment. The inner optimizer sees the whole tree.

    With a ``delay``, workers make further local steps between sending a message and
    adopting the center that it moves. The share :math:`1 - \alpha` of the progress in
    these steps is lost.

    Rules that adopt the center as it was before their message (``easgd``) do not wait
    for the message: with a delay, only the center moves later.

    With a ``seed``, each fragment is a random part of all elements of the parameters,
    and every element belongs to one fragment: workers adopt the elements that were
    exchanged, and keep their own values of the others (partial adoption).

    Args:
      parts: the number of fragments, a positive int: each leaf goes whole, in the order
        of size, to the smallest fragment so far; or a sequence of regular expressions,
        one for each fragment: a leaf goes to the fragment of the first expression found
        anywhere in its path, such as ``layers/0/w``.
      offsets: :math:`t_p` of each fragment, in local steps from 1 to the period; None
        spreads them evenly over the period, the last one at its end.
      delay: :math:`\tau`, in local steps, less than the period.
      mixing: :math:`\alpha` in [0, 1): share of its own parameters that a worker keeps.
      seed: seed of the random elements, an int >= 0, the same for all workers of a
        center; None for fragments of whole leaves. The rule must be elementwise.

    Raises:
      InvalidArgumentError: an argument is out of range.
      InvalidTypeError: ``parts`` is neither a number nor a sequence of strings.

    Example:
      Two fragments in a period of 4, each in flight for one step:

      >>> import jax.numpy as jnp, optax, agn_optax
      >>> fragments = agn_optax.Fragments(["^embed", "."], delay=1, mixing=0.5)
      >>> for step in range(1, 5):
      ...     print(step, fragments.due(step, period=4))
      1 ()
      2 ({'fragment': 0},)
      3 ({'receive': 0},)
      4 ({'fragment': 1},)
      >>> rule = agn_optax.rules.diloco()
      >>> tx = agn_optax.exchange_every(optax.adam(0.1), rule, 4, fragments=fragments)
      >>> state = tx.init({"embed": jnp.ones(3), "head": jnp.ones(2)})
      >>> print(state.fragments[0].center)
      {'embed': Array([1., 1., 1.], dtype=float32), 'head': None}

    References:
      Arthur Douillard et al., *Streaming DiLoCo with Overlapping Communication: Towards
      a Distributed Free Lunch*, 2025.
    """

    parts: int | Sequence[str]
    offsets: Sequence[int] | None = None
    _: dataclasses.KW_ONLY
    delay: int = 0
    mixing: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parts, str | bytes) or not isinstance(
            self.parts, int | Sequence
        ):
            raise errors.InvalidTypeError(
                "parts must be a number of fragments, or a sequence of regular "
                f"expressions, got {check.show(self.parts)}"
            )
        if isinstance(self.parts, int):
            check.positive_int(self.parts, "parts")
        else:
            object.__setattr__(self, "parts", _parts.patterns(self.parts, "parts"))
        check.whole_number(self.seed, "seed", least=0)
        if self.seed is not None and not isinstance(self.parts, int):
            raise errors.InvalidArgumentError(
                "a seed divides the elements of all leaves, so parts must be a number, "
                f"got {self.parts} and seed={self.seed}"
            )
        if self.offsets is not None:
            offsets = tuple(self.offsets)
            for offset in offsets:
                check.positive_int(offset, "each of offsets")
            if len(offsets) != len(self):
                raise errors.InvalidArgumentError(
                    f"offsets must have {len(self)} numbers, one for each fragment, "
                    f"got {len(offsets)}"
                )
            object.__setattr__(self, "offsets", offsets)
        check.whole_number(self.delay, "delay", least=0, optional=False)
        mixing = check.rate(self.mixing, "mixing", low=0.0, high=1.0)
        if mixing == 1.0:
            raise errors.InvalidArgumentError(
                "mixing must be below 1, or workers would never adopt anything, got "
                f"{mixing!r}"
            )

    def __len__(self) -> int:
        """The number of fragments."""
        return self.parts if isinstance(self.parts, int) else len(self.parts)

    def divide(self, params: PyTree) -> Parts:
        """Divide the leaves of a tree, or their elements, among the fragments.

        Raises:
          InvalidArgumentError: a fragment would have no leaf, or a leaf no fragment.
        """
        if not isinstance(self.parts, int):
            return _parts.by_path(params, self.parts)
        if self.seed is not None:
            divided = _parts.of_random_elements(params, self.parts, self.seed)
            if not all(divided):
                sizes = map(jnp.size, jax.tree.leaves(params))
                raise errors.InvalidArgumentError(
                    f"the parameters have {sum(sizes)} elements, too few for "
                    f"{self.parts} fragments"
                )
            return divided
        divided = Parts(sorted(_parts.balanced(params, self.parts, rows=False)))
        if not all(divided):
            raise errors.InvalidArgumentError(
                f"the parameters have {sum(map(len, divided))} leaves, too few for "
                f"{self.parts} fragments: a leaf is not divided"
            )
        return divided

    def due(self, step: int, period: int) -> tuple[dict[str, int], ...]:
        """List the exchanges due after a local step, for loops that count their steps.

        Args:
          step: local steps made, including this one: 1 at the first.
          period: local steps of a round, the same for all rounds.

        Returns:
          The arguments of `Phases.exchange` for each call that is due, in order:
          ``{"fragment": p}`` begins the exchange of a fragment (and completes it, if
          there is no delay), ``{"receive": p}`` completes it.

        Raises:
          InvalidArgumentError: ``step`` or ``period`` is not positive, or offsets or
            delay do not fit into the period.
        """
        check.positive_int(step, "step")
        self.check_period(check.positive_int(period, "period"))
        ends = [self._offset(fragment, period) for fragment in range(len(self))]
        receiving = [
            {"receive": p}
            for p, end in enumerate(ends)
            if self.delay and step > end and (step - end - self.delay) % period == 0
        ]
        sending = [
            {"fragment": p}
            for p, end in enumerate(ends)
            if step >= end and (step - end) % period == 0
        ]
        return (*receiving, *sending)

    def check_period(self, period: int) -> None:
        """Check that the delay and all offsets fit into a period."""
        if self.delay >= period or any(t > period for t in self.offsets or ()):
            raise errors.InvalidArgumentError(
                "a fragment's exchange must be complete before its next one begins, "
                f"and its offset must be in the period: got delay={self.delay}, "
                f"offsets={self.offsets} and a period of {period}"
            )

    def check(self, rule: Rule, layout: Layout = WHOLE) -> None:
        """Check that a rule and a layout can be used with these fragments.

        Raises:
          InvalidArgumentError: the rule or the layout cannot be used.
        """
        got = f"rule {rule.name!r}"
        if self.delay and not layout.is_default:
            combinations.reject(
                "fragments with a delay", "a placement", f"{layout.placement}"
            )
        if self.mixing and rule.adopts == "before":
            combinations.reject(
                "fragments with mixing",
                "a rule that adopts the center before its message",
                f"{got}, mixing={self.mixing}",
            )
        got = f"{got} with {rule.combine}"
        if rule.combine_reads == "tree":
            combinations.reject("fragments", "a combine of whole messages", got)
        if self.seed is None:
            return
        unfit = _elementwise.reads_more_than_elements(rule)
        if unfit is not None:
            combinations.reject(
                "fragments of random elements", "a rule that is not elementwise", unfit
            )

    def is_due(
        self, fragment: int, state: ExchangeState, period: _period.PeriodSchedule
    ) -> jax.Array:
        """Return whether an exchange of a fragment begins now, in a traced program."""
        this_round = _period.steps_of(period(state.exchanges))
        last_round = _period.steps_of(period(jnp.maximum(state.exchanges - 1, 0)))
        steps = jnp.where(
            state.exchanges > 0,
            self._steps_between(fragment, this_round, last_round),
            self._steps_between(fragment, this_round),
        )
        return state.local.local_steps >= steps

    def periods(
        self, fragment: int, period: _period.PeriodSchedule
    ) -> Callable[[int], int]:
        """Return a fragment's period: exchanges made so far -> steps until the next."""

        def steps(exchanges: int) -> int:
            last_round = int(period(exchanges - 1)) if exchanges else None
            this_round = int(period(exchanges))
            return int(self._steps_between(fragment, this_round, last_round))

        return steps

    def _steps_between(
        self, fragment: int, this_round: Any, last_round: Any = None
    ) -> Any:
        """Return the local steps from a fragment's last exchange to its next.

        Args:
          fragment: index of the fragment.
          this_round: local steps of the round with the next exchange.
          last_round: local steps of the round with the last exchange. None before the
            first exchange: steps are counted from the beginning.
        """
        rest = 0
        if last_round is not None:
            rest = last_round - self._offset(fragment, last_round)
        return rest + self._offset(fragment, this_round)

    def is_received(self, state: ExchangeState, due: jax.Array) -> jax.Array:
        """Return whether a message in flight is applied now, in a traced program.

        It is applied after the delay, or earlier if the next message is due.
        """
        assert state.in_flight is not None
        is_delayed = state.local.local_steps >= self.delay
        return state.in_flight.is_sent & (is_delayed | due)

    def _offset(self, fragment: int, period: Any) -> Any:
        """Return the step of a period after which a fragment is exchanged."""
        if self.offsets is None:
            return -(-(fragment + 1) * period // len(self))
        offset = self.offsets[fragment]
        if isinstance(period, int):
            return min(offset, period)
        return jnp.minimum(jnp.int32(offset), period)


def check_fragments(value: Any) -> None:
    """Check that ``value`` is a `Fragments` or None."""
    if value is not None:
        such_as = "an agn_optax.Fragments or None, such as Fragments(4)"
        check.instance(value, Fragments, f"fragments must be {such_as}")


def fragments_to_exchange(
    fragments: Fragments | None, fragment: int | None, receive: int | None
) -> Sequence[int]:
    """Return the indices of the fragments that a call of ``exchange`` is for.

    If neither ``fragment`` nor ``receive`` is given, these are all fragments.

    Raises:
      InvalidArgumentError: both indices are given, or there is no such fragment.
      InvalidTypeError: an index is traced.
    """
    given = [index for index in (fragment, receive) if index is not None]
    if any(map(check.is_traced, given)):
        raise errors.InvalidTypeError(
            "fragment and receive must be static, got a traced value: use jax.jit("
            'tx.exchange, static_argnames=("fragment", "receive"))'
        )
    indices = range(0 if fragments is None else len(fragments))
    if len(given) > 1 or any(
        isinstance(index, bool) or index not in indices for index in given
    ):
        has = f"there are {len(indices)}" if indices else "there are no fragments"
        raise errors.InvalidArgumentError(
            f"fragment or receive must be the index of one fragment, and {has}: got "
            f"fragment={fragment!r}, receive={receive!r}"
        )
    return given or indices


def init_fragments(
    fragments: Fragments,
    rule: Rule,
    inner: optax.GradientTransformationExtraArgs,
    params: PyTree,
    init: Callable[[PyTree, Any], ExchangeState],
) -> FragmentsState:
    """Return the state before the first step.

    ``init(params, inner)`` makes the state of one fragment.

    Raises:
      InvalidArgumentError: the parameters cannot be divided into these fragments, or
        the rule cannot be initialized with a part of them.
    """
    parts = fragments.divide(params).cut(params)
    no_inner = optax.with_extra_args_support(optax.identity())

    def init_part(part: PyTree) -> ExchangeState:
        return _round.with_inner(init(part, no_inner), None)

    states = attempt(
        f"rule {rule.name!r} by fragments", lambda: tuple(map(init_part, parts))
    )
    if states is None:
        jax.eval_shape(lambda: init(params, no_inner))  # raises if the whole fails too
        combinations.reject(
            "fragments",
            "a center optimizer with a tree as its mask",
            f"rule {rule.name!r}",
        )
    # A copy, because some optimizers keep the parameters passed to their init.
    return FragmentsState(inner.init(trees.copy(params)), states)


def check_state(
    fragments: Fragments, state: FragmentsState, params: PyTree, layout: Layout
) -> None:
    """Check that a state and parameters match, and that they match these fragments.

    Raises:
      TreeMismatchError: they do not match.
    """
    if len(state.fragments) != len(fragments):
        raise errors.TreeMismatchError(
            f"the state must have {len(fragments)} fragments, got "
            f"{len(state.fragments)}"
        )
    parts = fragments.divide(params).cut(params)
    for part, fragment in zip(parts, state.fragments, strict=True):
        layout.check_center(part, fragment.center)


def exchange_fragments(
    fragments: Fragments,
    exchange: Callable[[PyTree, ExchangeState], tuple[PyTree, ExchangeState]],
    params: PyTree,
    state: FragmentsState,
    indices: Sequence[int],
) -> tuple[PyTree, FragmentsState]:
    """Call ``exchange`` for some fragments, each with its part of the parameters.

    Raises:
      TreeMismatchError: the state is of fragments with a delay and ``fragments`` have
        none, or the reverse.
    """
    parts, states = fragments.divide(params), list(state.fragments)
    for index in indices:
        if (states[index].in_flight is None) != (not fragments.delay):
            raise errors.TreeMismatchError(
                f"the state is of fragments {'without' if fragments.delay else 'with'} "
                f"a delay, but here delay={fragments.delay}"
            )
        part, states[index] = exchange(parts.take(index, params), states[index])
        params = parts.put(index, params, part)
    return params, state._replace(fragments=tuple(states))


def remove_in_flight(state: PyTree) -> tuple[list[Any], PyTree]:
    """Return the messages in flight of all states, and the states without them.

    The states are found inside any wrappers.
    """
    messages = [node.in_flight for _, node in trees.nodes(state, ExchangeState)]
    return messages, trees.map_nodes(
        lambda node: node._replace(in_flight=None), state, ExchangeState
    )


def restore_in_flight(messages: list[Any], state: PyTree) -> PyTree:
    """Undo `remove_in_flight`, such as after local steps."""
    order = iter(messages)
    return trees.map_nodes(
        lambda node: node._replace(in_flight=next(order)), state, ExchangeState
    )
