"""Replay: the state in a snapshot, and the records that move it on."""

from __future__ import annotations

from typing import Any

import jax

from agn_optax import errors
from agn_optax._internal import check, description, trees
from agn_optax.center._store import CenterState, Store
from agn_optax.center._submission import Submission, plain_fields
from agn_optax.center.durability._records import Record
from agn_optax.round import steps as rounds
from agn_optax.rules import Rule, difference

PyTree = Any


def state_in(
    snapshot: Record, rule: Rule, params: PyTree, dtype: Any, where: str
) -> CenterState:
    """Check a snapshot against rule and parameters; return its center state.

    Args:
      snapshot: the snapshot.
      rule: the rule, which must be that of the snapshot.
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
    if other := difference(about["rule"], rule):
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
    state = rounds.center_state_like(rule, restored)
    rest = snapshot.arrays[count:]
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    if shapes != [array.shape for array in rest]:
        raise errors.RuleMismatchError(
            f"{where} has another rule: its center optimizer has another state. "
            "Use the same optimizer, or another directory"
        )
    center_state = jax.tree.unflatten(jax.tree.structure(state), rest)
    return CenterState(restored, center_state, about["version"])


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
    submissions = []
    for i in applied:
        content, message = record.contents[i], messages[i]
        if content is None or content.arrays is None:
            raise errors.DurabilityError(
                f"the contributions of record {record.number} were not kept"
            )
        is_decoded = message["decoded"]
        like = rounds.Decoded(store.like) if is_decoded else store.contribution_like
        contribution = jax.tree.unflatten(jax.tree.structure(like), content.arrays)
        submissions.append(
            Submission(
                contribution=store.place(contribution),
                **{name: message[name] for name in fields},
            )
        )
    factors = [messages[i]["factor"] for i in applied]
    store.apply(
        submissions,
        [messages[i]["staleness"] for i in applied],
        None if factors[0] is None else factors,
        about["registered"],
    )
