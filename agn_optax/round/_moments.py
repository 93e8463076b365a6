"""Exchange of chosen fields of the inner optimizer's state, such as Adam's moments.

On a mesh, `average` replaces them by their mean over the workers, at every k-th
exchange. Around a center outside the program they are the parameters of a second
worker, whose center has the rule ``moments``: `moments_of` takes them out of a state,
and `with_moments` puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import (
    GetAttrKey,
    keystr,
    tree_flatten_with_path,
    tree_leaves_with_path,
)

from agn_optax import errors
from agn_optax._internal import check, trees
from agn_optax.round import _collectives, _round
from agn_optax.round._parts import Parts
from agn_optax.round.placements import Layout

PyTree = Any
Periods = Mapping[str, int]  # name of a field -> exchanges of the parameters
_Path = tuple[Any, ...]  # keys of JAX
Owns = Callable[[_Path], bool]


def checked_periods(moments: Periods | None) -> Periods:
    """Return ``moments`` as a new dict, empty for None.

    Raises:
      InvalidTypeError: it is not a mapping from names.
      InvalidArgumentError: a period is not a positive whole number.
    """
    if moments is None:
        return {}
    such_as = "a dict from fields to periods, such as {'mu': 3, 'nu': 6}"
    check.instance(moments, Mapping, f"moments must be {such_as}")
    for name, period in moments.items():
        if not isinstance(name, str):
            raise errors.InvalidTypeError(
                f"moments must be {such_as}, got the name {check.show(name)}"
            )
        check.whole_number(period, f"moments[{name!r}]", least=1, optional=False)
    return dict(moments)


def check_fields(moments: Periods, inner_state: PyTree) -> None:
    """Check that a state of the inner optimizer has the fields of ``moments``."""
    for name in moments:
        _indices(inner_state, name)


def average(
    moments: Periods,
    layout: Layout,
    inner_state: PyTree,
    exchanges: jax.Array,
    due: jax.Array | None = None,
    owns: Owns | None = None,
) -> PyTree:
    """Replace the fields that are due by their means over the workers of an exchange.

    Args:
      moments: the periods of the fields.
      layout: layout of the center. With gossip, the workers are the two partners.
      inner_state: state of the inner optimizer.
      exchanges: earlier exchanges, an int32 scalar.
      due: whether an exchange is made, a bool scalar; None if it is.
      owns: whether the exchange is that of a leaf, by its path in its field; None for
        an exchange of all leaves.
    """
    if not moments or not layout.workers:
        return inner_state

    def mean(leaf: jax.Array) -> jax.Array:
        return layout.mean_over_participants(trees.widened(leaf), exchanges)

    def act(leaves: list[jax.Array]) -> list[jax.Array]:
        means: list[jax.Array] = _round.overwrite(leaves, jax.tree.map(mean, leaves))
        return means

    leaves, treedef = jax.tree.flatten(inner_state)
    for name, period in moments.items():
        chosen = _indices(inner_state, name, owns)
        own = [leaves[i] for i in chosen]
        turn = due
        if period > 1:
            is_turn = (exchanges + 1) % period == 0
            turn = is_turn if due is None else due & is_turn
        own = act(own) if turn is None else _collectives.when(turn, act, own)
        for i, leaf in zip(chosen, own, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def owners(moments: Periods, parts: Parts, params: PyTree) -> list[Owns]:
    """Return, for each part of the parameters, which leaves of a field it owns.

    A leaf at the path of a parameter belongs to the part with that parameter. All other
    leaves belong to the last part.
    """
    if not moments:
        return [lambda _: False for _ in parts]
    cut = jax.eval_shape(parts.cut, params)  # moves no elements
    paths = [{path for path, _ in tree_leaves_with_path(part)} for part in cut]
    others = set[_Path]().union(*paths[:-1])
    return [*(part.__contains__ for part in paths[:-1]), lambda p: p not in others]


def moments_of(inner_state: PyTree, *names: str) -> dict[str, jax.Array]:
    """Return fields of an inner optimizer's state, to exchange them like parameters.

    Args:
      inner_state: state of any optax optimizer, such as ``state.inner_state`` of a
        `Worker`.
      *names: names of fields, as in the argument ``moments`` of `phases`. Every field
        of the name is taken, at any depth.

    Returns:
      The leaves of these fields by their paths: a tree that a `Worker` can exchange.
      The arrays are those of the state itself.

    Raises:
      InvalidArgumentError: the state has no field of a name, or one that has other
        arrays than real floating ones, such as a count; or no name is given.

    Example:
      >>> import jax.numpy as jnp, optax, agn_optax
      >>> state = optax.adam(0.1).init({"w": jnp.ones(2)})
      >>> print(*agn_optax.moments_of(state, "mu", "nu"))
      0/mu/w 0/nu/w
    """
    if not names:
        raise errors.InvalidArgumentError(
            "moments_of needs the names of fields, such as moments_of(state, 'mu'), "
            "got none"
        )
    chosen = {i for name in names for i in _indices(inner_state, name)}
    found = tree_leaves_with_path(inner_state)
    return {_text(path): leaf for i, (path, leaf) in enumerate(found) if i in chosen}


def with_moments(inner_state: PyTree, moments: Mapping[str, Any]) -> PyTree:
    """Return an inner optimizer's state with other values of some fields.

    Args:
      inner_state: state of an optax optimizer.
      moments: leaves by their paths, as `moments_of` returns them.

    Returns:
      The new state, with the dtypes of ``inner_state``. All other leaves are those of
      ``inner_state``.

    Raises:
      TreeMismatchError: the state has no leaf at a path, or one with another shape.

    Example:
      The second moments of Adam are exchanged at every sixth exchange of the
      parameters, around centers in this process:

      >>> import jax, jax.numpy as jnp, optax, agn_optax
      >>> in_rounds = agn_optax.center.Synchronous()
      >>> center = agn_optax.LocalCenter(
      ...     agn_optax.rules.average(), jnp.ones(2), mode=in_rounds
      ... )
      >>> second = agn_optax.LocalCenter(agn_optax.rules.moments(), mode=in_rounds)
      >>> worker = agn_optax.Worker(center, optax.adam(0.1), period=2)
      >>> nu_worker = agn_optax.Worker(second, optax.identity(), period=6 * 2)
      >>> params, state = worker.start()
      >>> nu, nu_state = nu_worker.start(
      ...     agn_optax.moments_of(state.inner_state, "nu"), chief=True
      ... )
      >>> for _ in range(24):
      ...     updates, state = worker.tx.update(params, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     params, state = worker.exchange(params, state)
      ...     nu = agn_optax.moments_of(state.inner_state, "nu")
      ...     nu, nu_state = nu_worker.exchange(nu, nu_state)
      ...     inner_state = agn_optax.with_moments(state.inner_state, nu)
      ...     state = state._replace(inner_state=inner_state)
      >>> worker.exchanges, nu_worker.exchanges
      (12, 2)
    """
    found, treedef = tree_flatten_with_path(inner_state)
    replaced = {_text(path): leaf for path, leaf in found if _text(path) in moments}
    check.same_tree(dict(moments), replaced, "moments", "inner_state")
    new = optax.tree.cast_like(dict(moments), replaced)
    leaves = [new.get(_text(path), leaf) for path, leaf in found]
    return jax.tree.unflatten(treedef, leaves)


def _text(path: _Path) -> str:
    return keystr(path, simple=True, separator="/")


def _indices(inner_state: PyTree, name: str, owns: Owns | None = None) -> list[int]:
    """Return the indices of the leaves of all fields of a name.

    Raises:
      InvalidArgumentError: there are none, or not all are real floating arrays.
    """
    field, found = GetAttrKey(name), tree_leaves_with_path(inner_state)
    chosen = [i for i, (path, _) in enumerate(found) if field in path]
    wrong = [
        f"{_text(path)} of {getattr(leaf, 'dtype', type(leaf).__name__)}"
        for path, leaf in map(found.__getitem__, chosen)
        if not _is_float(leaf)
    ]
    if wrong or not chosen:
        got = f", got {wrong[0]}" if wrong else f", got {name!r}, which has none"
        raise errors.InvalidArgumentError(
            "moments must be fields of the inner optimizer's state with real floating "
            f"arrays only{got}; such fields are: {', '.join(_fields(found)) or 'none'}"
        )
    if owns is None:
        return chosen

    def is_owned(path: _Path) -> bool:
        return owns(path[path.index(field) + 1 :])

    return [i for i in chosen if is_owned(found[i][0])]


def _fields(found: list[tuple[_Path, Any]]) -> list[str]:
    """Return the names of the fields that have real floating arrays only."""
    fields = dict[str, bool]()
    for path, leaf in found:
        for key in path:
            if isinstance(key, GetAttrKey):
                fields[key.name] = fields.get(key.name, True) and _is_float(leaf)
    return [name for name, is_float in fields.items() if is_float]


def _is_float(leaf: Any) -> bool:
    return not trees.is_key(leaf) and jnp.issubdtype(
        jnp.result_type(leaf), jnp.floating
    )
