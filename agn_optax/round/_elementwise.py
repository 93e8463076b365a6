"""Checks whether a rule may move parts of a center, or all its leaves as one array.

The checks run exchanges on small random trees, whole and in parts, and compare the
numbers. The trees have the paths, dtypes and dimensions of the parameters, but few
elements, of very different magnitudes, so that clipping by a norm has an effect. A rule
passes if the results for a part are that part of the results for the whole: until the
center has moved, for one more message, and for one with a NaN in one element. An
optimizer that reads several elements at a time only later, or only of larger leaves, is
not noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax._internal import combinations, tracing
from agn_optax.round import _parts, _round
from agn_optax.round._parts import Parts, Piece
from agn_optax.rules import Rule, codecs

PyTree = Any
Cut = Callable[[PyTree], list[PyTree]]  # a tree -> its parts

_MESSAGES = 100  # the most until the center moves
_LENGTH = 3  # the most elements of a probe along a dimension
_TOLERANCE = 1e-3  # relative; programs for other shapes may round differently


def check(rule: Rule, params: PyTree, parts: Sequence[PyTree]) -> None:
    """Check that the exchange of ``rule`` may run on each part of a tree by itself.

    Args:
      rule: the rule.
      params: the whole tree, which may be abstract.
      parts: trees like ``params``, with pieces of some leaves and None for others;
        abstract.

    Raises:
      InvalidArgumentError: the exchange may not run on parts.
    """
    cuts: list[Cut] = [_by_leaves] if len(parts) > 1 else []
    kept = jax.eval_shape(rule.center.init, params)
    if _shapes(parts) != _shapes(params):
        cuts.append(_halves)
        kept = kept, _round.contribution_like(rule, params)
    elif _is_leaf_by_leaf(rule.codec, params):
        rule = dataclasses.replace(rule, codec=codecs.identity())
    rule = dataclasses.replace(rule, adopt=None)  # workers adopt the whole center
    if not {(), *_shapes(params)}.issuperset(_shapes(kept)) or not all(
        _is_same_in_parts(rule, params, cut) for cut in cuts
    ):
        combinations.reject(
            "a center in shards",
            "a rule that is not elementwise",
            f"rule {rule.name!r}, whose center optimizer or codec reads more than one "
            "element at a time, or treats leaves by their shape or their number",
        )


def is_leafwise(rule: Rule, params: PyTree) -> bool:
    """Return whether ``rule`` moves each leaf of ``params`` by itself."""
    return rule.combines_elements and _is_same_in_parts(rule, params, _by_leaves)


def is_uniform(
    rule: Rule, params: PyTree, pack: Callable[[np.ndarray], PyTree]
) -> bool:
    """Return whether ``rule`` moves all elements of a center in the same way.

    Args:
      rule: the rule.
      params: the center, which may be abstract.
      pack: makes another tree of elements in one array.
    """

    def cut(tree: PyTree) -> list[PyTree]:
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        return [pack(half) for half in np.array_split(flat, 2)]

    center_only = dataclasses.replace(
        rule,
        record=optax.identity(),
        contribution=lambda record, params, anchor, steps: params,
        needs_params=True,
        adopt=None,
    )
    has_scalars = () in _shapes(params)
    return not has_scalars and _is_same_in_parts(center_only, params, cut)


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return sorted(jnp.shape(leaf) for leaf in jax.tree.leaves(tree))


def _alternate(tree: PyTree) -> list[PyTree]:
    """Divide a tree into every second leaf, and the others."""
    pieces = [Piece(leaf) for leaf in range(len(jax.tree.leaves(tree)))]
    return Parts((tuple(pieces[::2]), tuple(pieces[1::2]))).cut(tree)


def _by_leaves(tree: PyTree) -> list[PyTree]:
    return [part for part in _alternate(tree) if jax.tree.leaves(part)]


def _halves(tree: PyTree) -> list[PyTree]:
    """Cut every leaf into two flat pieces with its number of dimensions."""

    def half(leaf: Any, number: int) -> Any:
        if leaf.size < 2:
            return leaf
        piece = np.array_split(np.ravel(leaf), 2)[number]
        return piece.reshape((1,) * (leaf.ndim - 1) + (-1,))

    return [jax.tree.map(lambda x, n=n: half(x, n), tree) for n in (0, 1)]


def _is_same_in_parts(rule: Rule, params: PyTree, cut: Cut) -> bool:
    """Return whether exchanges of each part are the parts of exchanges of the whole."""

    def compare() -> bool:
        probes = [_probe(params, seed) for seed in range(7)]
        probes[-2:] = map(_with_nan, probes[-2:])
        whole = list(map(cut, _exchanges(rule, *probes)))
        for n, _ in enumerate(whole[0]):
            found = _exchanges(rule, *(cut(tree)[n] for tree in probes))
            if not _is_close(found, [made[n] for made in whole]):
                raise tracing.UnfitError("a part with other results than in the whole")
        return True

    return bool(tracing.unless_unfit(f"rule {rule.name!r} in parts", compare))


def _is_leaf_by_leaf(codec: codecs.Codec, params: PyTree) -> bool:
    """Return whether a codec encodes and decodes each leaf by itself."""

    def travelled(tree: PyTree) -> PyTree:
        return codec.decode(codec.encode(tree, codec.init(tree))[0], tree)

    def compare() -> bool:
        first, other = _probe(params, 0), _probe(params, 1)
        run = _traced(travelled, first)
        for kept in (0, 1):
            parts = _alternate(first)
            parts[1 - kept] = _alternate(other)[1 - kept]
            pair = first, _parts.join(parts)
            alone, beside = (_alternate(run(tree))[kept] for tree in pair)
            if not _is_close(alone, beside):
                raise tracing.UnfitError("a leaf that depends on another leaf")
        return True

    return bool(tracing.unless_unfit(f"codec {codec} leaf by leaf", compare))


def _exchanges(rule: Rule, center: PyTree, *given: PyTree) -> list[PyTree]:
    """Return how the center moves, and what workers adopt, in several exchanges.

    ``given`` are the parameters and the gradients of three messages. The first is sent
    until the center moves, and then the others.
    """

    def begin(center: PyTree) -> Any:
        local = _round.init_local(rule, optax.identity(), center, None)
        return (
            center,
            rule.center.init(center),
            _round.init_broadcast(rule, center),
            local,
        )

    def exchange(carry: Any, params: PyTree, grads: PyTree) -> Any:
        center, state, broadcast, local = carry
        about = {"steps": jnp.ones((), jnp.int32)}
        record = _round.add_to_record(rule, local.record, grads, params)
        local = local._replace(record=record, local_steps=about["steps"])
        sent, codec_state = _round.contribute(rule, local, params, center)
        message = _round.message_of(rule, sent, center)
        message = _round.weigh(rule, optax.tree.cast_like(message, center), about)
        updates, state = _round.descend(rule, message, center, state, about)
        center = optax.apply_updates(center, updates)
        broadcast, _ = _round.publish(rule, center, broadcast)
        answer = _round.answer_of(rule, center, broadcast)
        local = _round.empty_record(rule, local, params, center)
        local = local._replace(codec_state=codec_state)
        adopted = _round.adopt(rule, params, answer)
        return (center, state, broadcast, local), updates, adopted

    carry = _traced(begin, center)(center)
    program = _traced(exchange, carry, *given[:2])
    made: list[PyTree] = []
    for _ in range(_MESSAGES):
        carry, updates, adopted = program(carry, *given[:2])
        made += [updates, adopted]
        if any(map(np.any, jax.tree.leaves(updates))):
            break
    for message in (given[2:4], given[4:]):
        carry, *results = program(carry, *message)
        made += results
    return made


def _probe(params: PyTree, seed: int) -> PyTree:
    """Return a small tree like ``params`` of random numbers from 1e-3 to 1e3."""
    rng = np.random.default_rng(seed)

    def numbers(leaf: Any) -> np.ndarray:
        shape = tuple(min(length, _LENGTH) for length in jnp.shape(leaf))
        size = 10 ** rng.uniform(-3, 3, shape) * rng.choice([-1, 1], shape)
        return np.asarray(size, jnp.result_type(leaf))

    return jax.tree.map(numbers, params)


def _with_nan(tree: PyTree) -> PyTree:
    """Replace the first element of the first leaf, which must not change the others."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves[0].flat[:1] = np.nan
    return jax.tree.unflatten(treedef, leaves)


def _traced(
    function: Callable[..., PyTree], *arguments: PyTree
) -> Callable[..., PyTree]:
    """Trace a function to one that computes numbers, also while something is traced.

    A traced number that the function reads, such as an injected learning rate, is 0.5.
    """
    program, like = jax.make_jaxpr(function, return_shape=True)(*arguments)
    consts = [
        np.full(value.shape, 0.5, value.dtype)
        if isinstance(value, jax.core.Tracer)
        else value
        for value in program.consts
    ]

    def run(*arguments: PyTree) -> PyTree:
        with jax.ensure_compile_time_eval():
            leaves = jax.tree.leaves(arguments)
            made = jax.core.eval_jaxpr(program.jaxpr, consts, *leaves)
        return jax.tree.unflatten(jax.tree.structure(like), map(np.asarray, made))

    return run


def _is_close(found: PyTree, expected: PyTree) -> bool:
    close = jax.tree.map(
        lambda a, b: np.allclose(
            np.float64(a), np.float64(b), rtol=_TOLERANCE, atol=0, equal_nan=True
        ),
        found,
        expected,
    )
    return all(jax.tree.leaves(close))
