"""Codecs: how workers encode their contributions, and how the center decodes them.

A codec is functional, like an optax transformation. If a rule has a codec, a worker
encodes its contribution once for each exchange, and the center decodes it;
`agn_optax.round` has the order of these steps.

`_codec` has the record `Codec` and the simple codecs. `_quantize` and `_sparse` are
lossy; `_error_feedback` keeps their losses for the next contribution,
and `_chain` composes codecs.
"""

from agn_optax.rules.codecs._chain import chain_codecs
from agn_optax.rules.codecs._codec import (
    Codec,
    cast,
    identity,
    two_way,
)
from agn_optax.rules.codecs._codec import cast_dtype as cast_dtype
from agn_optax.rules.codecs._codec import check_codec as check_codec
from agn_optax.rules.codecs._error_feedback import ErrorFeedbackState, error_feedback
from agn_optax.rules.codecs._pieces import by_pieces as by_pieces
from agn_optax.rules.codecs._quantize import quantize
from agn_optax.rules.codecs._sparse import sign, top_k

__all__ = [
    "Codec",
    "ErrorFeedbackState",
    "cast",
    "chain_codecs",
    "error_feedback",
    "identity",
    "quantize",
    "sign",
    "top_k",
    "two_way",
]
