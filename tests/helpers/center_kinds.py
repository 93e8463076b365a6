"""Centers of every kind, for tests that hold for all of them."""

import contextlib

import agn_optax
from agn_optax import service

KINDS = ["local", "server", "shards"]


@contextlib.contextmanager
def made(kind, rule, params=None, *, messages=None, **settings):
    """Yield a center as a worker sees it: embedded, served or in two shards."""
    limits = agn_optax.center if kind == "local" else service
    settings["limits"] = limits.Limits(messages=messages)
    with contextlib.ExitStack() as stack:

        def serve(rule, params=None, **settings):
            return stack.enter_context(service.serve(rule, params, **settings))

        def connect(address, rule):
            center = service.connect(address, rule, timeout=20)
            stack.callback(center.close)
            return center

        if kind == "local":
            yield agn_optax.LocalCenter(rule, params, **settings)
        elif kind == "server":
            yield connect(serve(rule, params, **settings).address, rule)
        else:
            servers = [serve(rule, **settings) for _ in range(2)]
            center = connect([server.address for server in servers], rule)
            if params is not None:
                center.initialize(params, worker="")
            yield center
