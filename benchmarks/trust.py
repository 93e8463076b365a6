"""Cost of a token and of TLS in an exchange, relative to an open center.

Every form has its own center in a second process, and one worker that exchanges with it
for a while. "speed" is relative to the same transport in plain text and without a
token: the median of neighbors in time with its quartiles.

    python benchmarks/trust.py
    python benchmarks/trust.py --megabytes 40 --repeats 9
"""

import functools
import tempfile

import centers
from measuring import Benchmark, Form, Process, Row

TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105 opens nothing else


class Trust(Benchmark, quick="--megabytes 0.04 --window 0.1"):
    """Exchanges with tokens and TLS.

    Args:
      megabytes: size of the model.
      window: seconds in which exchanges are counted.
    """

    megabytes: float = 40.0
    window: float = 0.5

    def run(self) -> None:
        """Add the table."""
        size, process, forms = 1e6 * self.megabytes, self.use(Process()), []
        own, tls = centers.certificates(self.use(tempfile.TemporaryDirectory()))
        tokens = f"worker * {TOKEN}"
        ways: dict[str, tuple[Row, Row]] = {  # options of a center, and of its worker
            "open": ({}, {}),
            "a token": ({"tokens": tokens}, {"token": TOKEN}),
            "TLS": ({"tls": own}, {"tls": tls}),
            "TLS, a token": (
                {"tls": own, "tokens": tokens},
                {"tls": tls, "token": TOKEN},
            ),
        }
        for transport in ("socket", "grpc"):
            for way, (theirs, ours) in ways.items():
                address = process.call(centers.serve, size, **theirs)
                how: Row = {"stack": self.stack, **ours}
                run = centers.worker(address, transport, size, **how)
                some = functools.partial(centers.seconds_of_one, run, self.window)
                forms.append(Form(f"{transport}, {way}", f"{transport}, open", some))
        rows = self.turns(forms).rows(forms, size)
        self.add("trust", f"{self.megabytes:g} MB, both ways", rows)


if __name__ == "__main__":
    Trust.main()
