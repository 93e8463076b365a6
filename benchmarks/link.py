"""Exchanges over a link that is slower than loopback: codecs and shards.

The kernel paces the sockets of both ends (SO_MAX_PACING_RATE), which limits the rate at
which each connection sends bytes; nothing is lost, and there is no further latency. A
raw socket that sends, adds and sends back is paced the same way. Exchanges go over
sockets, with contributions of normal random numbers, which the codecs encode first;
"bfloat16, cast when sent" is cast by the connection instead. Centers in shards have a
process each, and a connection each, like connections to hosts with separate links.

"speed" is relative to the peer's, the median of neighbors in time with its quartiles.

    python benchmarks/link.py --codecs bfloat16 int8 int4
    python benchmarks/link.py --megabytes 400 --gigabits 1 10 --codecs
    python benchmarks/link.py --gigabits 0 0.32 --codecs --shards 1 8
"""

from collections.abc import Sequence

import centers
import jax
import peers
from measuring import Benchmark, Form, Process

from examples.pacing import pace

RAW, PLAIN, CAST = "raw TCP", "float32", "bfloat16, cast when sent"


class Link(Benchmark, quick="--megabytes 1 --gigabits 10 --codecs int4 --shards 2"):
    """Exchanges over a slower link.

    Args:
      megabytes: size of the model.
      gigabits: rates of the link, a second, in rising order; first 0 for loopback's.
      codecs: names of codecs, as of the command line's ``--codec``.
      shards: numbers of shards.
    """

    megabytes: float = 40.0
    gigabits: Sequence[float] = (0.1, 1.0, 10.0)
    codecs: Sequence[str] = ("bfloat16", "int8", "int4")
    shards: Sequence[int] = (2,)

    def run(self) -> None:
        """Measure all forms at each rate."""
        size = round(1e6 * self.megabytes)
        # By form: the codec and the shards.
        cases = {PLAIN: ("", 1), CAST: ("bfloat16", 1)}
        cases |= {codec: (codec, 1) for codec in self.codecs}
        cases |= {f"{n} shards": ("", n) for n in self.shards}
        shape = centers.LEAVES, size // 4 // centers.LEAVES
        numbers = list(1e-3 * jax.random.normal(jax.random.key(0), shape))
        processes = [self.use(Process())]
        forms = [Form(RAW, RAW, peers.raw_socket(processes[0], size)(self.stack))]
        for name, (codec, shards) in cases.items():
            served = [self.use(Process()) for _ in range(shards)]
            addresses = [process.call(centers.serve, codec=codec) for process in served]
            connection = self.use(centers.connect(addresses, "socket", codec))
            connection.initialize(numbers, worker=name)
            version = connection.describe().version
            encoding = codec if name == codec else ""
            run = centers.exchanging(connection, numbers, name, version, encoding)
            forms.append(Form(name, RAW if name == PLAIN else PLAIN, run))
            processes += served
        cases[RAW] = cases[PLAIN]
        for form in forms:
            form.run()  # opens all connections
        rows = []
        for gigabits in self.gigabits:
            rate = 1e9 * gigabits / 8 or centers.LOOPBACK  # bytes/s
            if gigabits:
                pace(rate)
                for process in processes:
                    process.call(pace, rate)
            for row in self.turns(forms).rows(forms, size):
                codec, _ = cases[row["form"]]
                message = centers.message_bytes(size, codec)
                rows.append({"Gbit/s": gigabits, **row, "message_MB": message / 1e6})
        title = f"{self.megabytes:g} MB in {centers.LEAVES} leaves, sockets with a rate"
        self.add("link", title, rows)


if __name__ == "__main__":
    Link.main()
