"""The pairs of features that do not go together, each with the reason.

The checks raise their errors by `refuse`, and docs/combinations.md prints the table in
Markdown. Values that are out of range are not here; `check` is for these.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from agn_optax import errors


class Combination(NamedTuple):
    """Two features that do not go together."""

    first: str
    second: str
    reason: str
    instead: str  # what to do, a sentence
    error: type[errors.AgnOptaxError] = errors.InvalidArgumentError


_DISPLACEMENTS = (
    "Give the parent a rule that sends displacements, such as `downpour` or `diloco`"
)
_ELEMENTWISE = (
    "take `robust.median()` or `robust.trimmed_mean()`, which combine each element by "
    "itself"
)

COMBINATIONS = (
    # Placements.
    Combination(
        "gossip",
        "a center in shards",
        "gossip keeps a whole center with every worker",
        "Leave out one of them",
    ),
    Combination(
        "gossip",
        "a codec",
        "gossip sends centers along with messages, and the codec would lose bits of "
        "them",
        "Leave out one of them",
    ),
    Combination(
        "gossip",
        "a robust combine",
        "two workers meet at a time, and the combine chooses among more messages",
        "Change `combine`: it must be `'sum'` or `'mean'`",
    ),
    Combination(
        "gossip",
        "workers of several axes under `vmap`",
        "JAX mistakes pairs over several axes for pairs over the other axes",
        "Use `shard_map` for all axes, or give `axis_name` one axis for all workers",
    ),
    Combination(
        "a codec that answers in differences",
        "a placement",
        "the differences need one center, whole on the device",
        "Leave the placement out, or take a codec without such answers",
    ),
    Combination(
        "`measure`",
        "a center in shards or on the host",
        "`measure` needs the center whole on every device",
        "Leave the placement out",
    ),
    Combination(
        "a center in shards",
        "a rule that is not elementwise",
        "each shard has only a part of the elements",
        "Take a center optimizer and a codec that read one element at a time, such as "
        "`optax.sgd` and `cast`, or keep the center whole",
    ),
    Combination(
        "a center in shards",
        "a combine of whole messages",
        "each shard has a part of every message",
        f"Keep the center whole, or {_ELEMENTWISE}",
    ),
    # Fragments.
    Combination(
        "fragments",
        "a combine of whole messages",
        "a fragment has a part of every message",
        f"Exchange the whole tree, or {_ELEMENTWISE}",
    ),
    Combination(
        "fragments with a delay",
        "a placement",
        "a message in flight needs one center, whole on every device",
        "Leave out one of them",
    ),
    Combination(
        "fragments with a delay",
        "`overlap=True`",
        "with overlap an answer is adopted when it arrives, and with a delay a number "
        "of local steps after its message",
        "Leave out one of them",
    ),
    Combination(
        "fragments with mixing",
        "a rule that adopts the center before its message",
        "the rule moves worker and center by the same force, which mixing would "
        "reduce at the worker only",
        "Leave `mixing` out",
    ),
    Combination(
        "fragments",
        "steps or weight of a flush",
        "the rounds of fragments began at different times",
        "Leave both out: `steps` and `weight` must be None",
    ),
    Combination(
        "eager updates",
        "mixing",
        "eager updates keep all local steps, so they leave nothing to mix",
        "Leave out one of them",
    ),
    Combination(
        "eager updates",
        "a rule with an adoption of its own",
        "eager updates adopt the whole center",
        "Leave `eager` out",
    ),
    Combination(
        "eager updates",
        "a robust combine",
        "eager updates adopt a worker's own share of a message, and a robust combine "
        "has no such shares",
        "Leave `eager` out, or combine by `'sum'` or `'mean'`",
    ),
    Combination(
        "eager updates",
        "a `Worker`",
        "eager updates move the center by the worker's own share, and a worker outside "
        "its program has no center optimizer",
        "Give `overlap=True`, which goes on while a message is in flight, and keeps "
        "all local steps",
    ),
    Combination(
        "`dynamic_period`",
        "fragments",
        "the turns of fragments need the length of a period before it begins",
        "Give `dynamic_period` to a worker that exchanges all at once",
        errors.InvalidTypeError,
    ),
    Combination(
        "`dynamic_period`",
        "workers of one program",
        "such workers make their steps together, and only a center outside measures "
        "the speed of each",
        "Give an int or a function of the exchanges made so far",
        errors.InvalidTypeError,
    ),
    # Codecs.
    Combination(
        "a codec that leaves out elements",
        "a rule that sends parameters",
        "contributions of the rule are not differences, so elements that are left out "
        "would count as zero",
        "The codec must send all elements, as `quantize(8)` and `cast('bfloat16')` do",
    ),
    Combination(
        "`error_feedback`",
        "a chain around it",
        "it keeps the loss of its own codec, but not the losses of the others in the "
        "chain",
        "Instead, put `error_feedback` around `chain_codecs`",
    ),
    Combination(
        "`error_feedback`",
        "answers of a codec",
        "each difference is taken from the exact center, so it already contains all "
        "earlier losses",
        "Give the codec without `error_feedback`",
    ),
    Combination(
        "a codec that is not exact",
        "answers of a codec",
        "two programs decode it equally only up to rounding, and the broadcast "
        "parameters must be equal bit for bit at all workers",
        "Take another codec than `low_rank`",
    ),
    Combination(
        "a codec with answers",
        "answers of a codec",
        "an answer travels one way, and nothing answers it",
        "Give a codec that has no answers",
    ),
    Combination(
        "a codec for matrices",
        "`all_reduce`",
        "gradients are reduced by pieces, which are vectors, and the codec compresses "
        "only matrices",
        "Take a codec that works by blocks, such as `codecs.quantize(8)`",
    ),
    Combination(
        "row-sparse gradients",
        "`all_reduce` with a codec",
        "the codec encodes whole gradients, and rows are sent as they are, or by "
        "`codecs.cast`",
        "Put `densify()` first, or give such gradients an `all_reduce` of their own",
        errors.TreeMismatchError,
    ),
    Combination(
        "row-sparse gradients",
        "`all_reduce` with a delay",
        "rows cannot wait, because they change from step to step",
        "Leave `delay` out, or put `densify()` first",
        errors.TreeMismatchError,
    ),
    # Centers outside the program, and their workers.
    Combination(
        "a robust combine",
        "a center that is not synchronous",
        "the combine needs all messages of a round, and the center applies them one "
        "by one",
        "Give the center `mode=Synchronous()` (`--mode synchronous`)",
    ),
    Combination(
        "`by_local_steps`",
        "a center outside the program",
        "such a center cannot count local steps, because its workers have made "
        "different numbers of them",
        "Give the optimizer as it is: its schedules count the messages that the center "
        "has applied",
    ),
    Combination(
        "a `Worker`",
        "an inner optimizer that exchanges with a center of its own",
        "`inner` must be an optimizer that makes local steps alone",
        "Give the optimizer inside it, as in "
        "`Worker(center, optax.adam(1e-3), period=10)`",
    ),
    Combination(
        "durability",
        "a center with a parent",
        "exchanges that were not yet sent to the parent would be lost with the process",
        "Give the parent a durability",
    ),
    Combination(
        "a parent whose rule sums gradients",
        "a center whose rule sends no gradients",
        "the center would have no gradients to send to the parent",
        _DISPLACEMENTS,
    ),
    Combination(
        "a parent whose rule sums gradients",
        "a robust combine",
        "the parent would also sum the gradients that the combine leaves out",
        _DISPLACEMENTS,
    ),
    Combination(
        "`Resumable` with a center in memory",
        "other workers of the center",
        "the center is saved with its only worker",
        "Give the center `durability=agn_optax.center.Journal(...)`",
    ),
    # The service.
    Combination(
        "`tls`",
        "`credentials`",
        "gRPC's credentials are made from `tls`",
        "Give one of them, not both",
    ),
)


def plain(text: str) -> str:
    """Return a text of the table without the marks of Markdown around code."""
    return text.replace("`", "")


_BY_FEATURES = {(plain(row.first), plain(row.second)): row for row in COMBINATIONS}


def refuse(first: str, second: str, got: str) -> NoReturn:
    """Raise the error of two features that do not go together.

    Args:
      first: a feature.
      second: the other feature, as a row of `COMBINATIONS` has them.
      got: settings that the caller has given.
    """
    row = _BY_FEATURES[first, second]
    raise row.error(
        f"{first} and {second} do not go together, got {got}: "
        + plain(f"{row.reason}. {row.instead}")
    )
