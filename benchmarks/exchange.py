"""Exchanges with a center in another process, and bare transports of the same bytes.

Each transport of `agn_optax.service.connect`, over TCP loopback and over a Unix socket,
takes turns with

    gRPC stream      raw bytes there and back in chunks of 1 MiB, without an addition;
                     by the synchronous and by the asyncio client; the one with the
                     smaller median is the peer
    raw socket       send, add, send back, 4 MiB at a time
    shared memory    the worker writes, the other process adds, the worker reads
    torch rpc        push, add, pull by torch.distributed.rpc, if `--torch-python` names
                     a Python that has torch

and so do contributions in bfloat16 and in float32. "speed" is relative to the peer's,
the median of neighbors in time with its quartiles; "of gRPC" is the same relative to
the bare gRPC stream. GB/s count both directions. In a second table centers have tokens
and TLS, and the peer is the same transport in plain text and open.

    python benchmarks/exchange.py --megabytes 400
    python benchmarks/exchange.py --torch-python ~/torch/bin/python
"""

import functools
import tempfile

import centers
import numpy as np
import peers
from measuring import Benchmark, Form, Process, Row

STREAM = "gRPC stream"
TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105 opens nothing else


class Exchange(Benchmark, quick="--megabytes 0.1"):
    """Exchanges beside bare transports.

    Args:
      megabytes: size of the model.
      torch_python: a Python that has torch.
    """

    megabytes: float = 40.0
    torch_python: str = ""

    def run(self) -> None:
        """Measure all forms in turns, over each network, and with tokens and TLS."""
        size = round(1e6 * self.megabytes)
        for network in ("TCP", "Unix socket"):
            forms = self.forms(network, size)
            times = self.turns(forms)
            best = min(peers.CLIENTS, key=times.median)
            times[STREAM] = times[best]  # the peer of the other forms
            rows = times.rows(forms, size)
            for row in rows:
                ratios = np.divide(times[STREAM], times[row["form"]])
                row["of_gRPC"] = round(float(np.median(ratios)), 3)
            key = f"{network}, {self.megabytes:g} MB"
            self.add(key, f"{key} in {centers.LEAVES} leaves; {best} is the peer", rows)
            del forms  # frees their buffers
        if size <= 1e8:  # all six centers are there at once
            forms = self.trusted(size)
            rows = self.turns(forms).rows(forms, size)
            self.add("trust", f"{self.megabytes:g} MB, with tokens and TLS", rows)

    def forms(self, network: str, size: int) -> list[Form]:
        """Return all ways to exchange ``size`` bytes over TCP or a Unix socket."""
        folder = self.use(tempfile.TemporaryDirectory())
        is_tcp, raw = network == "TCP", f"raw {network}"
        center, peer = self.use(Process()), self.use(Process())

        def address(name: str) -> str:
            return "127.0.0.1:0" if is_tcp else f"unix:{folder}/{name}"

        stream = peer.call(peers.serve_grpc, size, address("grpc"))
        clients = peers.CLIENTS.items()
        forms = [Form(name, name, client(stream, size)) for name, client in clients]
        connect = peers.raw_socket(peer, size, "" if is_tcp else f"{folder}/raw")
        forms.append(Form(raw, STREAM, connect(self.stack)))
        memory = self.use(peers.shared_memory(peer, size, f"{folder}/turns"))
        forms.append(Form("shared memory", STREAM, memory))
        if self.torch_python and is_tcp:
            run = self.use(peers.torch_rpc(self.torch_python, size))
            forms.append(Form("torch rpc", STREAM, run))
        bounds = {"grpc": STREAM, "socket": raw, "memory": "shared memory"}
        for codec in ("", "bfloat16"):
            options: Row = {"address": address(f"center{codec}"), "codec": codec}
            served = center.call(centers.serve, size, **options)
            for transport, bound in bounds.items():
                wide = f"agn_optax, {transport}"
                name, bound = (f"{wide}, {codec}", wide) if codec else (wide, bound)
                how: Row = {"name": name, "stack": self.stack, "codec": codec}
                run = centers.worker(served, transport, size, **how)
                forms.append(Form(name, bound, run))
        return forms

    def trusted(self, size: int) -> list[Form]:
        """Return exchanges with tokens and TLS, each with its own center."""
        forms, process = [], self.use(Process())
        server_tls, worker_tls = centers.certificates(
            self.use(tempfile.TemporaryDirectory())
        )
        # The token, and the TLS settings of the center and of its worker.
        ways: Row = {"open": ("", None, None), "a token": (TOKEN, None, None)}
        ways["TLS"] = "", server_tls, worker_tls
        for transport in ("socket", "grpc"):
            for way, (token, theirs, ours) in ways.items():
                tokens = f"worker * {token}" if token else ""
                address = process.call(centers.serve, size, tokens=tokens, tls=theirs)
                how: Row = {"stack": self.stack, "tls": ours, "token": token or None}
                run = centers.worker(address, transport, size, **how)
                some = functools.partial(centers.seconds_of_one, run, 0.1)
                forms.append(Form(f"{transport}, {way}", f"{transport}, open", some))
        return forms


if __name__ == "__main__":
    Exchange.main()
