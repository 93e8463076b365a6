"""Cost of encoding and decoding, relative to a copy of the same numbers in memory.

Programs are compiled for leaves of one size and run alone. Speeds are those of the
float32 numbers that go in or come out, relative to numpy's copy of them: 1 is as fast
as memory. Copies and decoded numbers go into memory that is allocated already. Times
are CPU times of all threads, so that other programs do not count; give the benchmark
one core. Bits are the bits sent per parameter.

    taskset -c 0 python benchmarks/encoding.py --millions 10
    taskset -c 0 python benchmarks/encoding.py --leaf 1000 --only quantize
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
from report import Report, Row, parse
from side_by_side import Form

from agn_optax import codecs

CODECS = [
    codecs.cast("bfloat16"),
    codecs.quantize(8),
    codecs.quantize(4),
    codecs.quantize(2),
    codecs.quantize(4, format="e3m0"),
    codecs.quantize(4, format="codebook"),
    codecs.quantize(4, rounding="stochastic"),
    codecs.sign(),
    codecs.top_k(64),
    codecs.chain_codecs(codecs.top_k(64), codecs.quantize(2, format="codebook")),
    codecs.random_k(64),
    codecs.low_rank(4),
    codecs.error_feedback(codecs.quantize(8)),
    codecs.error_feedback(codecs.quantize(4)),
]


def forms_of(codec: codecs.Codec, leaves: list[Any]) -> tuple[list[Form], float]:
    """Return forms of encoding and decoding, and the bits per parameter."""
    state = codec.init(leaves)
    encode = jax.jit(codec.encode, donate_argnums=1)
    # Into memory that is allocated already, like numpy's copy.
    decode = jax.jit(codec.decode, donate_argnums=1, keep_unused=True)
    sent, state = encode(leaves, state)
    kept = [state, jax.tree.map(jnp.zeros_like, leaves)]

    def encoding() -> None:
        made, kept[0] = encode(leaves, kept[0])
        jax.block_until_ready((made, kept[0]))

    def decoding() -> None:
        kept[1] = jax.block_until_ready(decode(sent, kept[1]))

    size = sum(leaf.size for leaf in leaves)
    bits = 8 * sum(array.nbytes for array in jax.tree.leaves(sent)) / size
    return [_form("encode", encoding), _form("decode", decoding)], bits


def _form(name: str, run: Callable[[], None]) -> Form:
    """Return a form that measures its own CPU time."""

    def seconds() -> float:
        begin = time.process_time()
        run()
        return time.process_time() - begin

    return Form(name, "copy", seconds)


def measure(codec: codecs.Codec, leaves: list[Any], args: Any, report: Report) -> Row:
    """Return one row: bits, and the speeds of both directions."""
    arrays = [np.asarray(leaf) for leaf in leaves]
    copies = [np.empty_like(array) for array in arrays]

    def copy() -> None:
        for array, into in zip(arrays, copies, strict=True):
            np.copyto(into, array)

    forms, bits = forms_of(codec, leaves)
    rows = side_by_side.measure(
        [_form("copy", copy), *forms], args.repeats, report.console
    )
    found: Row = {"codec": str(codec), "bits": round(bits, 3)}
    for name in ("encode", "decode"):
        row = side_by_side.speed(rows[name])
        found |= {name: row["ratio"], f"{name}_quartiles": row["quartiles"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of codecs.")
    add = parser.add_argument
    add("--millions", type=float, default=10, help="of parameters")
    add("--leaf", type=int, default=1024, help="rows and columns of a leaf")
    add("--repeats", type=int, default=15)
    add("--only", default="", help="codecs whose names have this in them")
    args = parse(parser, millions=0.02, leaf=64, repeats=1)
    report = Report(args.json)
    shape = (args.leaf, args.leaf)
    count = max(1, round(args.millions * 1e6 / args.leaf**2))
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(count)]
    chosen = [codec for codec in CODECS if args.only in codec.name]
    if not chosen:
        parser.error(f"no codec has {args.only!r} in its name")
    rows = [measure(codec, leaves, args, report) for codec in chosen]
    title = (
        f"{count} leaves of {args.leaf} by {args.leaf}, float32: speed beside a copy"
    )
    report.add("codecs", title, rows)
    report.write()


if __name__ == "__main__":
    main()
