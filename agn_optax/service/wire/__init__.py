"""Trees as bytes.

`_schema` is the layout of leaves in one buffer (and depends on NumPy only), `_casting`
casts dtypes by XLA, `_trees` converts JAX trees, `_submission` the records of an
exchange, `_frames` has the frames that are sent, `_buffers` the memory in which they
are received, and `_errors` the exceptions of the other end.
"""

from agn_optax.service.wire._trees import from_bytes as from_bytes
