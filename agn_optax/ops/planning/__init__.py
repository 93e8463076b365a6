"""What rare communication costs, before it is paid: time and memory of every rule.

Sizes are read off the rules by abstract evaluation, so a rule of yours is planned as
those of the library are. With `n` workers, step time `t`, period `p`, a message of `m`
bytes and an answer of `b` bytes, links of `B` bytes a second (the center's has `C`, for
all workers), and `u` bytes that the center's arithmetic reads and writes; a center in
`k` shards, each on a host with a link of its own; and, where it keeps a journal, a disk
that takes `D` bytes a second and `y` seconds to sync, of a journal that a snapshot of
`S` bytes replaces when it has `J`:

    an exchange          e = latency + (m + b) / min(B, k C)
                             + (1 + k) / 2 (overhead + (m + b) / (k endpoint_rate))
                             + u / (k apply_rate) + y + m / (k D)
    the center, of it    s = max(m / (k C),  b / (k C),  u / (k apply_rate)
                                 + (overhead + (m + b) / (k endpoint_rate)) / 2,
                                 (1 + S / J) m / (k D))
    a round              R = max(p t + e, n s)           where the worker waits
                         R = max(p t, e, n s)            where exchanges overlap
    utilization          p t / R
    hidden               where max(e, n s) <= p t

A codec makes `m` of the `w` bytes of a contribution. The center decodes it twice, for
its norm and to apply it, as it reads one twice that travels as it is:

    an exchange          + w / encode_rate + 2 w / (k decode_rate)
    the center, of it    + 2 w / (k decode_rate), with u

It pays where an exchange is shorter than `e'`, that of a rule without one, whose
messages have `w` bytes and whose answers `b'`. With everything but the links in `o` and
`o'`, so that `e = o + (m + b) / min(B, k C)`, that is

    pays below           min(B, k C) < (w + b' - m - b) / (o - o')

or over any link where `o <= o'`. One that only rounds to another dtype takes no time of
its own: it is a part of writing the numbers down.

With one shard and no journal an exchange takes `overhead + latency + (m + b) / min(B,
C) + (m + b) / endpoint_rate + u / apply_rate`.

Links carry both directions at once, so the center may receive one message while it
sends the answer to another; half of what the two ends do is taken to be done by the
center, and each shard does its part of that. Parts of an exchange follow each other in
the model; where they are under way at once (chunks on the link while others are
copied), `e` is an upper bound. Workers are taken to be evenly spread in time: near the
center's limit they meet, and wait longer. Exchanges that come while a disk syncs share
the next sync, so a sync makes exchanges longer and not fewer.

In a tree, `n` is what one center of the lowest level has. A center there makes `x = n /
R` exchanges a second. It is a worker of its parent, goes on meanwhile, and meets it
after `P` of them, or later:

    interval             T = max(P / x,  e,  F s)        of F centers at one parent

with `e` and `s` of the parent's links, and `F / T` in place of `x` one level up.

A center that keeps a journal is back after a restart when it has read `S + J` bytes,
applied the `J / m` messages in them, and taken back every worker, each of which joins
and sends again what had not been answered.
"""

from agn_optax.ops.planning._cluster import Cluster, Disk, Machine, Tree
from agn_optax.ops.planning._cost import (
    CenterMemory,
    Coding,
    Cost,
    Kept,
    Level,
    Remedies,
    WorkerMemory,
)
from agn_optax.ops.planning._plan import abstract, all_reduce, built_in_rules, plan

__all__ = [
    "CenterMemory",
    "Cluster",
    "Coding",
    "Cost",
    "Disk",
    "Kept",
    "Level",
    "Machine",
    "Remedies",
    "Tree",
    "WorkerMemory",
    "abstract",
    "all_reduce",
    "built_in_rules",
    "plan",
]
