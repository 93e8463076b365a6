"""Cost of encoding and decoding, relative to a copy of the same numbers in memory.

Programs are compiled for leaves of one size and run alone. Speeds are those of the
float32 numbers that go in or come out, relative to numpy's copy of them: 1 is as fast
as memory. Copies and decoded numbers go into memory that is allocated already. Times
are CPU times of all threads, so that other programs do not count; give the benchmark
one core.

    taskset -c 0 python benchmarks/encoding.py --millions 10
    taskset -c 0 python benchmarks/encoding.py --leaf 1000
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import Benchmark, Form

from agn_optax import codecs

CODECS = [
    codecs.cast("bfloat16"),
    *(codecs.quantize(bits) for bits in (8, 4)),
    codecs.quantize(4, format="e3m0"),
    codecs.sign(),
    codecs.top_k(64),
    codecs.chain_codecs(codecs.top_k(64), codecs.quantize(2, format="codebook")),
    codecs.error_feedback(codecs.quantize(8)),
]


class Encoding(Benchmark, quick="--millions 0.02 --leaf 64"):
    """Speed of codecs.

    Args:
      millions: parameters.
      leaf: rows and columns of a leaf.
    """

    millions: float = 10.0
    leaf: int = 1024

    def run(self) -> None:
        """Measure a copy, and every codec in both directions."""
        count = max(1, round(self.millions * 1e6 / self.leaf**2))
        rng, shape = np.random.default_rng(0), (self.leaf, self.leaf)
        arrays = [rng.normal(size=shape).astype(np.float32) for _ in range(count)]
        copies = [np.empty_like(array) for array in arrays]
        forms = [form("copy", lambda: list(map(np.copyto, copies, arrays)))]
        for codec in CODECS:
            forms += forms_of(codec, list(map(jnp.asarray, arrays)))
        rows = self.turns(forms).rows(forms, size=0)
        title = f"{count} leaves of {self.leaf} by {self.leaf}, float32"
        self.add("codecs", f"{title}: speed beside a copy", rows)


def form(name: str, run: Callable[[], Any]) -> Form:
    """Return a form that measures its own CPU time."""

    def seconds() -> float:
        begin = time.process_time()
        run()
        return time.process_time() - begin

    return Form(name, "copy", seconds)


def forms_of(codec: codecs.Codec, leaves: list[jax.Array]) -> list[Form]:
    """Return the forms of encoding and decoding."""
    encode = jax.jit(codec.encode, donate_argnums=1)
    # Into memory that is allocated already, like numpy's copy.
    decode = jax.jit(codec.decode, donate_argnums=1, keep_unused=True)
    sent, state = encode(leaves, codec.init(leaves))
    into = jax.tree.map(jnp.zeros_like, leaves)

    def encoding() -> None:
        nonlocal state
        _, state = jax.block_until_ready(encode(leaves, state))

    def decoding() -> None:
        nonlocal into
        into = jax.block_until_ready(decode(sent, into))

    return [form(f"{codec}, encode", encoding), form(f"{codec}, decode", decoding)]


if __name__ == "__main__":
    Encoding.main()
