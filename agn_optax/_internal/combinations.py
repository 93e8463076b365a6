"""The pairs of features that do not go together, each with the reason.

The checks raise their errors by `reject`, and docs/combinations.md prints the table in
Markdown. Values that are out of range are not here; `check` is for these. Nor are
settings that an engine of `agn-optax launch` makes itself, such as addresses.
"""

from __future__ import annotations

from typing import NoReturn

from agn_optax import errors

_ELEMENTWISE = "take `robust.median()`, which combines each element by itself"

# The reason of each, and what to do instead, unless one of the two is left out.
COMBINATIONS = {
    # Placements.
    ("gossip", "a center in shards"): "gossip keeps a whole center with every worker",
    ("gossip", "a codec"): (
        "gossip sends centers along with messages, and a codec loses bits of them"
    ),
    ("gossip", "a robust combine"): (
        "only two workers meet at a time, and the combine chooses among more messages. "
        "Change `combine`: it must be `'sum'` or `'mean'`"
    ),
    ("gossip", "workers of several axes under `vmap`"): (
        "JAX mistakes pairs over several axes for pairs over the other axes. Use "
        "`shard_map` for all axes, or give `axis_name` one axis for all workers"
    ),
    ("a center in shards", "a rule that is not elementwise"): (
        "each shard has only a part of the elements. Take a center optimizer and a "
        "codec that read one element at a time, such as `optax.sgd` and `cast`, or "
        "keep the center whole. If yours work element by element, say so: "
        "`agn_optax.elementwise(optimizer)`, `Rule(elementwise=True)` or "
        "`Codec(reads='element')`"
    ),
    ("a center in shards", "a combine of whole messages"): (
        "each shard has a part of every message. Keep the center whole, or "
        + _ELEMENTWISE
    ),
    # Fragments.
    ("fragments", "a combine of whole messages"): (
        "a fragment has a part of every message. Exchange the whole tree, or "
        + _ELEMENTWISE
    ),
    ("fragments", "a center optimizer with a tree as its mask"): (
        "a fragment has None in place of the other leaves, so the optimizer cannot "
        "begin with it. Give masks and labels as functions of the parameters"
    ),
    ("fragments of random elements", "a rule that is not elementwise"): (
        "a fragment has elements of every leaf, without their places in it. Take an "
        "optimizer that reads one element at a time, or leave `seed` out, so that "
        "fragments have whole leaves. If yours work element by element, say so: "
        "`agn_optax.elementwise(optimizer)` or `Rule(elementwise=True)`"
    ),
    (
        "fragments of random elements",
        "a worker that encodes the whole model",
    ): (
        "its message cannot be divided among the fragments. Give the worker the same "
        "fragments, or the rule a codec that sends one array for each leaf"
    ),
    ("fragments of random elements", "a worker of several processes"): (
        "a process has rows of a leaf and no single elements. Leave `seed` out, so "
        "that fragments have whole leaves"
    ),
    ("fragments with a delay", "a placement"): (
        "a message in flight needs one center, whole on every device"
    ),
    ("fragments with a delay", "`overlap=True`"): (
        "with overlap an answer is adopted when it arrives, not after a fixed delay"
    ),
    ("fragments with mixing", "a rule that adopts the center before its message"): (
        "the rule moves worker and center by the same force, and mixing would reduce "
        "the force on the worker alone"
    ),
    ("`dynamic_period`", "fragments"): (
        "the turns of fragments need the length of a period before it begins. Give "
        "`dynamic_period` to a worker that exchanges all at once"
    ),
    ("`dynamic_period`", "workers of one program"): (
        "such workers make their steps together. Give an int or a function of the "
        "exchanges made so far"
    ),
    # Codecs.
    ("a codec that leaves out elements", "a rule that sends parameters"): (
        "elements that are left out of its contributions would count as zero. The "
        "codec must send all elements, as `quantize(8)` and `cast('bfloat16')` do"
    ),
    ("`error_feedback`", "a chain around it"): (
        "it keeps the loss of its own codec only, not those of the others. Instead, "
        "put `error_feedback` around `chain_codecs`"
    ),
    ("row-sparse gradients", "`all_reduce` with a delay"): (
        "rows cannot wait, because they change from step to step. Leave `delay` out, "
        "or put `densify()` first"
    ),
    # Centers outside the program, and their workers.
    ("a robust combine", "a center that is not synchronous"): (
        "the combine needs a whole round, and the center applies messages one by one. "
        "Give the center `mode=Synchronous()` (`--mode synchronous`)"
    ),
    ("a rule with a weight", "a center that is not synchronous"): (
        "the weight of a message is relative to the others of its round, and the "
        "center applies messages one by one. Give the center `mode=Synchronous()` "
        "(`--mode synchronous`), or the center optimizer `agn_optax.scale_by_weight`"
    ),
    ("`by_local_steps`", "a center outside the program"): (
        "such a center cannot count local steps, because its workers have made "
        "different numbers of them. Give the optimizer as it is: its schedules count "
        "the messages applied"
    ),
    ("a `Worker`", "an inner optimizer that exchanges with a center of its own"): (
        "`inner` must be an optimizer that makes local steps alone. Give the optimizer "
        "inside it, as in `Worker(center, optax.adam(1e-3), period=10)`"
    ),
    ("`Resumable`", "a center in memory"): (
        "such a center would be lost with this process. Give it "
        "`durability=agn_optax.center.Journal(...)`"
    ),
    ("a checkpoint", "a worker of a part of its job's processes"): (
        "Orbax saves and loads with all processes of `jax.distributed` together. Shard "
        "or replicate the parameters over a mesh of all their devices, also those that "
        "you give to `start` or as `like`, or make the worker a job of its own"
    ),
    ("another number of processes", "an object that each process saves by itself"): (
        "the positions of the saved processes do not say where these are. Save a dict "
        "with a position in the whole data instead, such as the number of steps, and "
        "let each process begin there"
    ),
    ("`page`", "a Unix socket"): (
        'browsers open a page at a port. `page` must be `"host:port"`'
    ),
    ("`direct_address`", "a Unix socket"): (
        "a center at a Unix socket chooses another one for direct connections itself. "
        'At a port `direct_address` must be `"host:port"`'
    ),
    ("a worker of several processes", "a center in this process"): (
        "each process would have a center of its own. Serve the center, with "
        "`agn_optax.service.serve` in one process, and connect all to it"
    ),
    ("a worker of several processes", "a codec that reads the whole tree"): (
        "each process encodes its own pieces. Take a codec that works by elements or "
        "blocks, such as `quantize`, `top_k`, `sign` and `cast`"
    ),
    ("a worker of several processes", "an engine other than SLURM"): (
        "a worker is one process on this machine, and one pod on Kubernetes. Take "
        "`--on slurm`, or leave `processes` out"
    ),
}


def plain(text: str) -> str:
    """Return a text of the table without the marks of Markdown around code."""
    return text.replace("`", "")


_BY_PLAIN_NAMES = {
    (plain(first), plain(second)): plain(reason)
    for (first, second), reason in COMBINATIONS.items()
}


def reject(
    first: str,
    second: str,
    got: str,
    error: type[errors.AgnOptaxError] = errors.InvalidArgumentError,
) -> NoReturn:
    """Raise the error of two features that do not go together.

    Args:
      first: the first feature of a row of `COMBINATIONS`, without backquotes.
      second: the second feature of the same row.
      got: settings that the caller has given.
      error: the type of the error.
    """
    reason = _BY_PLAIN_NAMES[first, second]
    raise error(f"{first} and {second} do not go together, got {got}: {reason}")
