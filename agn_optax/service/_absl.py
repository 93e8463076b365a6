"""Imports gRPC with its own log off: a line for each peer that it cannot talk to.

What matters of it is in the exceptions. ``GRPC_VERBOSITY`` in the environment has it
back; gRPC looks at that when it is imported, so this is before all else that does.
"""

import os

from agn_optax._internal import extras

extras.require(
    "service",
    *("grpc", "grpc_channelz", "grpc_health", "grpc_reflection"),
    "google.protobuf",
)
if "GRPC_VERBOSITY" in os.environ:
    import grpc
else:
    os.environ["GRPC_VERBOSITY"] = "NONE"
    import grpc  # noqa: F401

    del os.environ["GRPC_VERBOSITY"]
