"""The pairs of features that do not go together, each with the reason.

The checks raise their errors by `reject`, and docs/combinations.md prints the table in
Markdown. Values that are out of range are not here; `check` is for these.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from agn_optax import errors


class Combination(NamedTuple):
    """The reason why two features do not go together, and what to do instead."""

    reason: str
    instead: str = "Leave out one of them"  # what to do, a sentence
    error: type[errors.AgnOptaxError] = errors.InvalidArgumentError


_ELEMENTWISE = "take `robust.median()`, which combines each element by itself"

COMBINATIONS = {
    # Placements.
    ("gossip", "a center in shards"): Combination(
        "gossip keeps a whole center with every worker",
    ),
    ("gossip", "a codec"): Combination(
        "gossip sends centers along with messages, and a codec loses bits of them",
    ),
    ("gossip", "a robust combine"): Combination(
        "only two workers meet at a time, and the combine chooses among more messages",
        "Change `combine`: it must be `'sum'` or `'mean'`",
    ),
    ("gossip", "workers of several axes under `vmap`"): Combination(
        "JAX mistakes pairs over several axes for pairs over the other axes",
        "Use `shard_map` for all axes, or give `axis_name` one axis for all workers",
    ),
    ("a codec that answers in differences", "a placement"): Combination(
        "the differences need one center, whole on the device",
        "Leave the placement out, or take a codec without such answers",
    ),
    ("a center in shards", "a rule that is not elementwise"): Combination(
        "each shard has only a part of the elements",
        "Take a center optimizer and a codec that read one element at a time, such as "
        "`optax.sgd` and `cast`, or keep the center whole. If yours work element by "
        "element, say so: `agn_optax.elementwise(optimizer)`, `Rule(elementwise=True)` "
        "or `Codec(reads='element')`",
    ),
    ("a center in shards", "a combine of whole messages"): Combination(
        "each shard has a part of every message",
        f"Keep the center whole, or {_ELEMENTWISE}",
    ),
    # Fragments.
    ("fragments", "a combine of whole messages"): Combination(
        "a fragment has a part of every message",
        f"Exchange the whole tree, or {_ELEMENTWISE}",
    ),
    ("fragments with a delay", "a placement"): Combination(
        "a message in flight needs one center, whole on every device",
    ),
    ("fragments with a delay", "`overlap=True`"): Combination(
        "with overlap an answer is adopted when it arrives, not after a fixed delay",
    ),
    (
        "fragments with mixing",
        "a rule that adopts the center before its message",
    ): Combination(
        "the rule moves worker and center by the same force, and mixing would reduce "
        "the force on the worker alone",
        "Leave `mixing` out",
    ),
    ("`dynamic_period`", "fragments"): Combination(
        "the turns of fragments need the length of a period before it begins",
        "Give `dynamic_period` to a worker that exchanges all at once",
        errors.InvalidTypeError,
    ),
    ("`dynamic_period`", "workers of one program"): Combination(
        "such workers make their steps together",
        "Give an int or a function of the exchanges made so far",
        errors.InvalidTypeError,
    ),
    # Codecs.
    ("a codec that leaves out elements", "a rule that sends parameters"): Combination(
        "elements that are left out of its contributions would count as zero",
        "The codec must send all elements, as `quantize(8)` and `cast('bfloat16')` do",
    ),
    ("`error_feedback`", "a chain around it"): Combination(
        "it keeps the loss of its own codec only, not those of the others",
        "Instead, put `error_feedback` around `chain_codecs`",
    ),
    ("`error_feedback`", "answers of a codec"): Combination(
        "each difference is taken from the exact center and contains earlier losses",
        "Give the codec without `error_feedback`",
    ),
    ("a codec with answers", "answers of a codec"): Combination(
        "an answer travels one way, and nothing answers it",
        "Give a codec that has no answers",
    ),
    ("a codec that is not a cast", "`all_reduce`"): Combination(
        "collectives add up gradients, and a sum of codes means nothing",
        "Take `codecs.cast`, or make the towers workers that exchange at every step by "
        "a rule with that codec, such as `rules.agn(codec=...)` with a period of 1",
    ),
    ("row-sparse gradients", "`all_reduce` with a delay"): Combination(
        "rows cannot wait, because they change from step to step",
        "Leave `delay` out, or put `densify()` first",
        errors.TreeMismatchError,
    ),
    # Centers outside the program, and their workers.
    ("a robust combine", "a center that is not synchronous"): Combination(
        "the combine needs a whole round, and the center applies messages one by one",
        "Give the center `mode=Synchronous()` (`--mode synchronous`)",
    ),
    ("`by_local_steps`", "a center outside the program"): Combination(
        "such a center cannot count local steps, because its workers have made "
        "different numbers of them",
        "Give the optimizer as it is: its schedules count the messages applied",
    ),
    (
        "a `Worker`",
        "an inner optimizer that exchanges with a center of its own",
    ): Combination(
        "`inner` must be an optimizer that makes local steps alone",
        "Give the optimizer inside it, as in "
        "`Worker(center, optax.adam(1e-3), period=10)`",
    ),
    ("`Resumable` with a center in memory", "other workers of the center"): Combination(
        "the center is saved with its only worker",
        "Give the center `durability=agn_optax.center.Journal(...)`",
    ),
}


def plain(text: str) -> str:
    """Return a text of the table without the marks of Markdown around code."""
    return text.replace("`", "")


_BY_PLAIN_NAMES = {
    (plain(first), plain(second)): row for (first, second), row in COMBINATIONS.items()
}


def reject(first: str, second: str, got: str) -> NoReturn:
    """Raise the error of two features that do not go together.

    Args:
      first: the first feature of a row of `COMBINATIONS`, without backquotes.
      second: the second feature of the same row.
      got: settings that the caller has given.
    """
    row = _BY_PLAIN_NAMES[first, second]
    raise row.error(
        f"{first} and {second} do not go together, got {got}: "
        + plain(f"{row.reason}. {row.instead}")
    )
