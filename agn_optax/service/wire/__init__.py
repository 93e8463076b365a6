"""Trees as bytes.

`_schema` has the layout of leaves in one buffer (and knows numpy only), `_casting`
other dtypes, by XLA, `_frames` the control parts of protobuf around it, `_trees` JAX's
trees.
"""

from agn_optax.service.wire._schema import CHUNK_SIZE
from agn_optax.service.wire._trees import from_proto

__all__ = ["CHUNK_SIZE", "from_proto"]
