"""Replay: the state in a snapshot, and the records that move it on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from agn_optax import errors
from agn_optax._internal import check, description, trees
from agn_optax.center._store import CenterState, Store
from agn_optax.center._submission import Submission, plain_fields
from agn_optax.center.durability._records import Record
from agn_optax.center.durability._stack import stack
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule, difference, fingerprint, workers_difference

PyTree = Any


def state_in(
    snapshot: Record, rule: Rule, params: PyTree, dtype: Any, where: str
) -> CenterState:
    """Check a snapshot against rule and parameters; return its center state.

    Args:
      snapshot: the snapshot.
      rule: the rule, which must be that of the snapshot. The rule of a fork may be
        another one at the center, whose optimizer then has a new state.
      params: parameters with the containers to use, and of the same model; None for
        those of the snapshot.
      dtype: expected dtype of the center; None accepts any.
      where: description of the center, for errors.

    Raises:
      RuleMismatchError: the snapshot has another rule.
      TreeMismatchError: the snapshot has another model.
      DurabilityError: the snapshot cannot be restored here.
    """
    about = snapshot.about
    other = difference(about["rule"], rule)
    is_allowed = is_fork(snapshot) and workers_difference(about["rule"], rule) is None
    if other and not is_allowed:
        raise errors.RuleMismatchError(
            f"{where} has another rule: {other}. Use the same optimizers and "
            "settings, or another directory"
        )
    described = description.Description(
        [description.Leaf(p, dtype, tuple(s)) for p, dtype, s in about["params"]],
        about["containers"],
    )
    count = len(described.leaves)
    for array in snapshot.arrays:
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise errors.DurabilityError(
                f"{where} has {array.dtype} arrays, which need "
                "jax.config.update('jax_enable_x64', True) here"
            )
    if params is not None:
        check.float_leaves(params, "params")
    elif described.structure is None:
        raise errors.DurabilityError(
            f"{where} has parameters in containers other than dicts, lists and tuples; "
            "give the center parameters in the same containers, with any values"
        )
    else:
        params = description.rebuild(described.structure, iter(snapshot.arrays))
    wanted = trees.describe(params, dtype)
    if words := described.difference(wanted, "it has", "the parameters have"):
        raise errors.TreeMismatchError(f"{where} has another model: {words}")
    treedef = jax.tree.structure(params)
    restored = jax.tree.unflatten(treedef, snapshot.arrays[:count])
    if other:
        state = rounds.init_center_state(rule, trees.copy(restored))
        return CenterState(restored, state, about["version"])
    state = rounds.center_state_like(rule, restored)
    rest = snapshot.arrays[count:]
    saved_like = jax.eval_shape(trees.without_keys, state)
    shapes = [leaf.shape for leaf in jax.tree.leaves(saved_like)]
    if shapes != [array.shape for array in rest]:
        raise errors.RuleMismatchError(
            f"{where} has another rule: its center optimizer has another state. "
            "Use the same optimizer, or another directory"
        )
    center_state = jax.tree.unflatten(jax.tree.structure(state), rest)
    center_state = trees.with_keys(center_state, state)
    return CenterState(restored, center_state, about["version"])


def snapshot_of(
    state: CenterState, rule: Rule, **about: Any
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the description and the arrays of a snapshot, for `state_in`.

    Args:
      state: the center's state.
      rule: the center's rule.
      **about: further fields of the description.
    """
    described = trees.describe(state.params)
    described_as = {
        "version": int(state.version),
        "stack": stack(),
        "rule": dict(fingerprint(rule)),
        "params": described.leaves,
        "containers": described.structure,
    }
    leaves = jax.tree.leaves((state.params, trees.without_keys(state.center_state)))
    return {**described_as, **about}, [np.asarray(leaf) for leaf in leaves]


def is_fork(snapshot: Record) -> bool:
    """Return whether a snapshot is that of a fork which no process has continued."""
    return bool(snapshot.about.get("is_fork"))


def contribution_in(record: Record, index: int, store: Store) -> PyTree:
    """Return the contribution of a message, placed where a store takes it.

    Args:
      record: the record.
      index: index of the message.
      store: a store of the same model.

    Raises:
      DurabilityError: the contribution was not kept.
    """
    content = record.contents[index]
    if content is None or content.arrays is None:
        raise errors.DurabilityError(
            f"the contributions of record {record.number} were not kept"
        )
    is_decoded = record.about["messages"][index]["decoded"]
    like = rounds.Decoded(store.like) if is_decoded else store.contribution_like
    return store.place(jax.tree.unflatten(jax.tree.structure(like), content.arrays))


def apply_record(record: Record, store: Store) -> None:
    """Apply the messages of a record as they were applied before.

    Raises:
      DurabilityError: its contributions were not kept.
    """
    about = record.about
    messages = about.get("messages", [])
    applied = [i for i, each in enumerate(messages) if each["outcome"] == "applied"]
    if not applied:
        return
    fields = [name for name in plain_fields(Submission) if name in messages[0]]
    submissions = [
        Submission(
            contribution=contribution_in(record, i, store),
            **{name: messages[i][name] for name in fields},
        )
        for i in applied
    ]
    factors = [messages[i]["factor"] for i in applied]
    store.apply(
        submissions,
        [messages[i]["staleness"] for i in applied],
        None if factors[0] is None else factors,
        about["registered"],
        # Older records lack it, and their center optimizers do not read it.
        [messages[i].get("worker_index", -1) for i in applied],
    )
