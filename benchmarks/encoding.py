"""What encoding and decoding cost, beside a copy of the same numbers in memory.

Programs are compiled for leaves of one size and run alone, on as many threads as XLA
takes (`taskset -c 0` gives them one core). A speed is that of the float32 numbers that
go in or come out, relative to numpy's copy of them: 1 is as quick as memory. Bits are
those of what is sent, for each parameter.

    taskset -c 0 python benchmarks/encoding.py --millions 10
"""

from __future__ import annotations

import argparse
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
    """Encoding and decoding, and bits a parameter."""
    state = codec.init(leaves)
    encode = jax.jit(codec.encode, donate_argnums=1)
    decode = jax.jit(lambda sent: codec.decode(sent, leaves))
    sent, state = encode(leaves, state)
    kept = [state]

    def encoding() -> None:
        sent, kept[0] = encode(leaves, kept[0])
        jax.block_until_ready((sent, kept[0]))

    def decoding() -> None:
        jax.block_until_ready(decode(sent))

    size = sum(leaf.size for leaf in leaves)
    bits = 8 * sum(array.nbytes for array in jax.tree.leaves(sent)) / size
    forms = [Form("encode", "copy", encoding), Form("decode", "copy", decoding)]
    return forms, bits


def measure(codec: codecs.Codec, leaves: list[Any], args: Any, report: Report) -> Row:
    """One row: bits, and the speeds of both ways."""
    arrays = [np.asarray(leaf) for leaf in leaves]
    copies = [np.empty_like(array) for array in arrays]

    def copy() -> None:
        for array, into in zip(arrays, copies, strict=True):
            np.copyto(into, array)

    forms, bits = forms_of(codec, leaves)
    rows = side_by_side.measure(
        [Form("copy", "copy", copy), *forms], args.repeats, report.console
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
    args = parse(parser, millions=0.02, leaf=64, repeats=1)
    report = Report(args.json)
    shape = (args.leaf, args.leaf)
    count = max(1, round(args.millions * 1e6 / args.leaf**2))
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(count)]
    rows = [measure(codec, leaves, args, report) for codec in CODECS]
    title = (
        f"{count} leaves of {args.leaf} by {args.leaf}, float32: speed beside a copy"
    )
    report.add("codecs", title, rows)
    report.write()


if __name__ == "__main__":
    main()
