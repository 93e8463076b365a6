"""Trees as bytes.

`_schema` has the layout of leaves in one buffer (and knows numpy only), `_casting`
other dtypes, by XLA, `_trees` JAX's trees, `_packets` what travels, `_buffers` the
memory that it is received in.
"""

from agn_optax.service.wire._trees import from_bytes as from_bytes
