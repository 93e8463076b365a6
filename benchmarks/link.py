"""Exchanges over a link that is slower than loopback: codecs and shards.

The kernel paces the sockets of both ends (SO_MAX_PACING_RATE), which limits the rate at
which each connection sends bytes; nothing is lost, and there is no further latency. A
raw socket that sends, adds and sends back is paced the same way. Exchanges go over
sockets, with contributions of normal random numbers, which the codecs encode first;
"bfloat16, cast when sent" is cast by the connection instead. Centers in shards have a
process each, and a connection each, like connections to hosts with separate links.

"speed" is relative to the peer's, the median of neighbors in time with its quartiles.
"planned" is the prediction of `agn_optax.planning` in milliseconds, from this machine's
constants and the codec's speed, which are measured first. "pays below" is the rate of a
link at which, by that plan, an exchange takes as long as one in float32.

    python benchmarks/link.py --codecs bfloat16 int8 int4
    python benchmarks/link.py --megabytes 400 --gigabits 1 10 --codecs
    python benchmarks/link.py --gigabits 0 0.32 --codecs --shards 1 8
"""

from collections.abc import Sequence
from dataclasses import replace

import centers
import jax
import peers
from measuring import Benchmark, Form, Process

from agn_optax import rules
from agn_optax.ops.cli import _calibrate
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
        size, machine = round(1e6 * self.megabytes), _calibrate.calibrate()
        # By form: the codec, the shards, and the constants of the machine.
        cases = {PLAIN: ("", 1, machine), CAST: ("bfloat16", 1, machine)}
        for codec in self.codecs:
            rates = _calibrate.coding_rates(rules.CODECS[codec])
            cases[codec] = codec, 1, replace(machine, **rates)
        cases |= {f"{n} shards": ("", n, machine) for n in self.shards}
        shape = centers.LEAVES, size // 4 // centers.LEAVES
        numbers = list(1e-3 * jax.random.normal(jax.random.key(0), shape))
        processes = [self.use(Process())]
        forms = [Form(RAW, RAW, peers.raw_socket(processes[0], size)(self.stack))]
        for name, (codec, shards, _) in cases.items():
            served = [self.use(Process()) for _ in range(shards)]
            addresses = [process.call(centers.serve, codec=codec) for process in served]
            connection = self.use(centers.connect(addresses, "socket", codec))
            version = connection.initialize(numbers, worker=name).version
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
                codec, shards, constants = cases[row["form"]]
                ways = {"bandwidth": shards * rate, "center_bandwidth": rate}
                cost = centers.plan(size, constants, codec, shards=shards, **ways)
                below = cost.coding.pays_below if cost.coding else 0.0
                rows.append(
                    {
                        "Gbit/s": gigabits,
                        **row,
                        "message_MB": cost.message / 1e6,
                        "planned": 1e3 * cost.exchange,
                        "pays_below_Gbit/s": "any" if below is None else 8e-9 * below,
                    }
                )
        title = f"{self.megabytes:g} MB in {centers.LEAVES} leaves, sockets with a rate"
        self.add("link", title, rows)


if __name__ == "__main__":
    Link.main()
