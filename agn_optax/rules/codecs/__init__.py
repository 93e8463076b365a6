"""Codecs: in which form a contribution leaves its worker, and how it is read.

A codec is as functional as an optax transformation. Where a rule has one, a worker
encodes its contribution once for each exchange, and the center decodes what it gets;
`agn_optax.round` has the order.

`_codec` is the record; `_quantize`, `_sparse` and `_low_rank` lose something, and
`_error_feedback` keeps what they lose; `_chain` puts one behind the other.
"""

from agn_optax.rules.codecs._chain import chain_codecs
from agn_optax.rules.codecs._codec import (
    Codec,
    StochasticState,
    cast,
    identity,
    two_way,
)
from agn_optax.rules.codecs._codec import cast_dtype as cast_dtype
from agn_optax.rules.codecs._codec import check_codec as check_codec
from agn_optax.rules.codecs._error_feedback import ErrorFeedbackState, error_feedback
from agn_optax.rules.codecs._low_rank import LowRankState, low_rank
from agn_optax.rules.codecs._quantize import quantize
from agn_optax.rules.codecs._sparse import random_k, sign, top_k

__all__ = [
    "Codec",
    "ErrorFeedbackState",
    "LowRankState",
    "StochasticState",
    "cast",
    "chain_codecs",
    "error_feedback",
    "identity",
    "low_rank",
    "quantize",
    "random_k",
    "sign",
    "top_k",
    "two_way",
]
