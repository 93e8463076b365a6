"""A codec for trees whose pieces are in different places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from agn_optax.rules.codecs._codec import Codec

PyTree = Any
# What an argument or a result is: like the parameters, a state of the codec, or an
# encoded contribution.
Kind = Literal["params", "state", "sent"]
# ``(function, kinds of arguments, kinds of results, arguments)`` -> results.
OnPieces = Callable[
    [Callable[..., Any], tuple[Kind, ...], Any, tuple[PyTree, ...]], Any
]


def by_pieces(codec: Codec, on_pieces: OnPieces) -> Codec:
    """Return a codec that encodes and decodes each piece by itself.

    Args:
      codec: the codec of one piece.
      on_pieces: calls a function for every piece, given the kinds of its arguments and
        results.
    """

    def encode(contribution: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        kinds: tuple[Kind, ...] = ("params", "state")
        return on_pieces(codec.encode, kinds, ("sent", "state"), (contribution, state))

    def decode(encoded: PyTree, like: PyTree) -> PyTree:
        return on_pieces(codec.decode, ("sent", "params"), "params", (encoded, like))

    def returned(encoded: PyTree, state: PyTree) -> PyTree:
        assert codec.returned is not None
        return on_pieces(codec.returned, ("sent", "state"), "state", (encoded, state))

    return dataclasses.replace(
        codec,
        encode=encode,
        decode=decode,
        returned=None if codec.returned is None else returned,
    )
