"""Import of gRPC with gRPC's own log off.

That log has a line for each failed connection, which the exceptions already report.
``GRPC_VERBOSITY`` in the environment turns the log back on. gRPC reads the
variable when it is imported, so this module must be imported before any other module
that imports gRPC.
"""

import os

from agn_optax._internal import extras

extras.require("service", "grpc", "grpc_health", "google.protobuf")
if "GRPC_VERBOSITY" in os.environ:
    import grpc
else:
    os.environ["GRPC_VERBOSITY"] = "NONE"
    import grpc  # noqa: F401

    del os.environ["GRPC_VERBOSITY"]
