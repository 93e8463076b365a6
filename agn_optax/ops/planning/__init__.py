"""Plans: the time and memory that rare communication will cost with each rule.

Sizes are read off the rules by abstract evaluation, so a rule of your own is planned
like those of the library. The symbols are

    n       workers
    t       seconds of a local step
    p       period, in local steps
    m, b    bytes of a message, and of an answer
    B       bytes per second of a worker's link
    C       bytes per second of the center's link, which all workers share
    u       bytes that the center's arithmetic reads and writes
    k       shards of the center, each on a host with a link of its own

and the model is

    an exchange          e = latency + (m + b) / min(B, k C)
                             + (1 + k) / 2 (overhead + (m + b) / (k endpoint_rate))
                             + u / (k apply_rate)
    center's part        s = max(m / (k C),  b / (k C),  u / (k apply_rate)
                                 + (overhead + (m + b) / (k endpoint_rate)) / 2)
    a round              R = max(p t + e, n s)           where the worker waits
                         R = max(p t, e, n s)            where exchanges overlap
    utilization          p t / R
    hidden               where max(e, n s) <= p t

A codec encodes the `w` bytes of a contribution in `m` bytes. The center decodes a
message twice, for its norm and to apply it, as it also reads an unencoded message
twice:

    an exchange          + w / encode_rate + 2 w / (k decode_rate)
    center's part        + 2 w / (k decode_rate), in the term with u

A codec that only rounds to another dtype takes no time of its own: rounding is a part
of writing the numbers.

With one shard, an exchange takes `overhead + latency + (m + b) / min(B, C) + (m + b) /
endpoint_rate + u / apply_rate`.

Links carry both directions at once, so the center can receive one message while it
sends the answer to another. The center is assumed to do half of the work of the two
ends, and each shard its part of this half. The parts of an exchange follow one another
in the model; if they overlap (chunks on the link while others are copied), `e` is an
upper bound. Workers are assumed to be evenly spread in time: near the center's limit
they collide, and wait longer.

`advise` says which rule, period, center rate and codec did best in simulated training
in the setting that is nearest to a cluster.
"""

from agn_optax.ops.planning._advice import (
    Advice,
    Choice,
    Loss,
    Setting,
    advise,
)
from agn_optax.ops.planning._cluster import Cluster, Machine
from agn_optax.ops.planning._cost import CenterMemory, Cost, WorkerMemory
from agn_optax.ops.planning._plan import abstract, all_reduce, plan

__all__ = [
    "Advice",
    "CenterMemory",
    "Choice",
    "Cluster",
    "Cost",
    "Loss",
    "Machine",
    "Setting",
    "WorkerMemory",
    "abstract",
    "advise",
    "all_reduce",
    "plan",
]
