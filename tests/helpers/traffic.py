"""Traffic of a compiled program: its collectives, counted and weighed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

# Bytes sent by a device in the best algorithms (ring, pairwise exchange), in units of
# the bytes of the result; n is the number of devices that take part.
_SHARED = ("all-gather", "all-to-all", "ragged-all-to-all", "collective-broadcast")
_SENT = dict.fromkeys(_SHARED, lambda n: (n - 1) / n) | {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1.0,
    "collective-permute": lambda n: 1.0,
}

_OPERATION = re.compile(
    rf"= (?P<result>.*?) (?P<kind>{'|'.join(_SENT)})(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,<=]*)\]")
# The devices of a group in XLA's notations: a list, a reshaped range, axes of a mesh
# (one of them may be split), all devices.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]*)\}|\[\d+,(?P<size>\d+)\]"
    r"|mesh\[(?P<mesh>[^\]]*)\] ?\{(?P<axes>[^}]*)\}|(?P<all>\{\}|(?!\S)))"
)
_AXIS = re.compile(r"'(?P<name>[^']*)'(?:(?:=|:\(\d+\))(?P<size>\d+))?")
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Traffic(NamedTuple):
    """Traffic of one execution of a program."""

    collectives: int  # number of collective operations
    bytes_sent: int  # by each device, with the best algorithm for each
    kinds: dict[str, int]  # collectives by kind


def traffic(compiled: Any) -> Traffic:
    r"""Count the collectives of a compiled program, and the bytes a device sends.

    With n devices and S bytes each, the best all-reduce sends
    :math:`2 S (n - 1) / n` from every device, reduce-scatter and all-gather half of it.
    Operations in a scan count as often as they are repeated. A loop of unknown length
    counts as one iteration; the exchange of a drop-in optimizer, which is made once a
    period, is such a loop.

    Args:
      compiled: ``jitted.lower(...).compile()``, or its ``as_text()``.

    Returns:
      ``Traffic(collectives, bytes_sent, kinds)``.

    Raises:
      TypeError: ``compiled`` is something else.
      ValueError: a group of devices has an unknown notation.

    References:
      Rajeev Thakur, Rolf Rabenseifner, William Gropp, *Optimization of Collective
      Communication Operations in MPICH*, 2005.
    """
    if not (isinstance(compiled, str) or hasattr(compiled, "as_text")):
        raise TypeError(f"compiled must be a compiled program, got {compiled!r}")
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    devices = math.prod(int(n) for n in _DEVICES.findall(text.partition("\n")[0]))
    kinds: Counter[str] = Counter()
    sent = 0.0
    for line, times in _executed(text):
        line = line.partition(", metadata=")[0]  # metadata may mention anything
        operation = _OPERATION.search(line)
        if operation is None:
            continue
        kind, arrays = operation["kind"], _ARRAY.findall(operation["result"])
        if operation["start"] and kind != "all-reduce":
            # (operands, results, and perhaps contexts)
            arrays = [array for array in arrays if array != ("u32", "")]
            arrays = arrays[len(arrays) // 2 :]
        members = 2 if kind == "collective-permute" else _members(line, devices)
        if members > 1:
            kinds[kind] += times
            sent += (
                times * _SENT[kind](members) * sum(_nbytes(*each) for each in arrays)
            )
    return Traffic(kinds.total(), round(sent), dict(kinds))


def _executed(text: str) -> Iterator[tuple[str, int]]:
    """Yield every operation of a program, and how often one execution runs it."""
    # A single computation, as in a test, is the entry.
    entry, lines = "", list[str]()
    computations = {entry: lines}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        else:
            lines.append(line)

    def walk(name: str, times: int) -> Iterator[tuple[str, int]]:
        for line in computations.get(name, ()):
            yield line, times
            trips = _TRIPS.search(line)
            for called, branches in _CALLED.findall(line):
                for each in [called] if called else branches.split(","):
                    inner = times * int(trips[1]) if trips else times
                    yield from walk(each.strip(" %"), inner)

    return walk(entry, 1)


def _nbytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    elements = math.prod(int(n) for n in shape.replace("<=", "").split(",") if n)
    return elements * bits // 8


def _members(line: str, devices: int) -> int:
    """Return the number of devices that take part in a collective together."""
    found = _GROUPS.search(line)
    if found is None:
        raise ValueError(
            "compiled has a collective whose devices cannot be read: "
            f"{line.strip()[:200]}"
        )
    if found["axes"] is not None:
        sizes = dict(_AXIS.findall(found["mesh"]))
        axes = _AXIS.findall(found["axes"])
        return math.prod(int(split or sizes[name]) for name, split in axes)
    if found["first"] is not None:
        return len(found["first"].split(","))
    return devices if found["all"] is not None else int(found["size"])
