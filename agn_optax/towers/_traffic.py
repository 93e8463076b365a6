"""What a compiled program sends: its collectives, counted and weighed."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from agn_optax import errors
from agn_optax.rules import _check

# Bytes that a device sends in the best algorithms (ring, pairwise exchange), in units
# of the bytes of the result; n is the number of devices that take part.
_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1.0,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: (n - 1) / n,
}

_OPERATION = re.compile(
    rf"= (?P<result>.*?) (?P<kind>{'|'.join(_SENT)})(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=\{\{(?P<first>[\d,]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(?P<size>\d+)\]")


class Traffic(NamedTuple):
    """What one execution of a program sends; loops are counted as one trip."""

    collectives: int  # collective operations
    bytes_sent: int  # by each device, with the best algorithm for each
    kinds: dict[str, int]  # collectives by kind


def traffic(compiled: Any) -> Traffic:
    r"""Counts the collectives of a compiled program, and the bytes a device sends.

    Of n devices with S bytes each, the best all-reduce sends
    :math:`2 S (n - 1) / n` from every device, reduce-scatter and all-gather half of it.
    An operation inside a loop counts once: the exchange of a drop-in optimizer, which
    is made once a period, and the steps of a scan alike.

    Args:
      compiled: ``jitted.lower(...).compile()``, or its ``as_text()``.

    Returns:
      ``Traffic(collectives, bytes_sent, kinds)``.

    Raises:
      InvalidTypeError: ``compiled`` is something else.

    Example:
      >>> import jax, jax.numpy as jnp, agn_optax
      >>> program = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
      >>> agn_optax.towers.traffic(program)
      Traffic(collectives=0, bytes_sent=0, kinds={})

    References:
      Rajeev Thakur, Rolf Rabenseifner, William Gropp, *Optimization of Collective
      Communication Operations in MPICH*, 2005.
    """
    text = compiled if isinstance(compiled, str) else _text(compiled)
    kinds: dict[str, int] = {}
    sent = 0.0
    for line in text.splitlines():
        operation = _OPERATION.search(line)
        if operation is None:
            continue
        kind, arrays = operation["kind"], _ARRAY.findall(operation["result"])
        if operation["start"] and kind != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        members = _members(line, kind)
        if members < 2:
            continue
        kinds[kind] = kinds.get(kind, 0) + 1
        sent += _SENT[kind](members) * sum(_nbytes(*array) for array in arrays)
    return Traffic(sum(kinds.values()), round(sent), kinds)


def _text(compiled: Any) -> str:
    as_text = getattr(compiled, "as_text", None)
    if as_text is None:
        raise errors.InvalidTypeError(
            "compiled must be a compiled program, jitted.lower(...).compile(), got "
            f"{_check.show(compiled)}"
        )
    return as_text()


def _nbytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    elements = math.prod(int(n) for n in shape.split(",") if n)
    return elements * bits // 8


def _members(line: str, kind: str) -> int:
    if kind == "collective-permute":
        return 2
    if found := _GROUPS.search(line):
        return len(found["first"].split(","))
    if found := _IOTA_GROUPS.search(line):
        return int(found["size"])
    return 2  # replica_groups={}: everyone, and there is more than one
