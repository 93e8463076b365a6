"""Compositions of codecs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from agn_optax import errors
from agn_optax._internal import combinations
from agn_optax.rules._declared import widest
from agn_optax.rules.codecs._codec import Codec, check_codec

PyTree = Any


def chain_codecs(*codecs: Codec) -> Codec:
    r"""Chain codecs: each one encodes the floating arrays that the one before sends.

    .. math:: m = \text{encode}_2(\text{encode}_1(k)); \qquad
        \hat k = \text{decode}_1(\text{decode}_2(m))

    Integer arrays, such as the indices of `top_k` or packed codes, are not encoded
    again. For example, ``chain_codecs(top_k(64), quantize(2))`` sends 2 bits for each
    value of the top-k elements, and ``error_feedback`` around the chain keeps the
    losses of both codecs.

    Args:
      *codecs: one or more codecs; the first one encodes the contribution.

    Returns:
      A codec whose state contains the states of all codecs.

    Raises:
      InvalidTypeError: an argument is not a codec.
      InvalidArgumentError: there are no arguments, or one is an `error_feedback`, which
        belongs around the chain to keep the losses of all its codecs.

    Example:
      >>> import jax.numpy as jnp
      >>> from agn_optax import codecs
      >>> codec = codecs.chain_codecs(codecs.top_k(2), codecs.cast("bfloat16"))
      >>> like = jnp.zeros(4)
      >>> sent, _ = codec.encode(jnp.array([1.0, -3.0, 0.5, 2.0]), codec.init(like))
      >>> print(sent["values"].dtype, codec.decode(sent, like))
      bfloat16 [ 0. -3.  0.  2.]
    """
    if not codecs:
        raise errors.InvalidArgumentError("chain_codecs needs at least one codec")
    for i, codec in enumerate(codecs):
        check_codec(codec, f"codec {i} of chain_codecs")
        if codec.returned is not None:
            combinations.reject("error_feedback", "a chain around it", f"{codec}")
    answers = [codec.answers for codec in codecs if codec.answers is not None]
    return dataclasses.replace(
        functools.reduce(_pair, codecs),
        name=f"chain_codecs({', '.join(map(str, codecs))})",
        answers=answers[0] if answers else None,
        of_differences=any(codec.of_differences for codec in codecs),
        reads=widest(*(codec.reads for codec in codecs)),
    )


def _pair(first: Codec, second: Codec) -> Codec:
    def abstract(like: PyTree) -> tuple[PyTree, list[Any]]:
        """Return the abstract output of the first codec, and its floating arrays."""
        sent, _ = jax.eval_shape(lambda x: first.encode(x, first.init(x)), like)
        return sent, [leaf for leaf in jax.tree.leaves(sent) if _is_floating(leaf)]

    def init(params: PyTree) -> PyTree:
        _, floating = abstract(params)
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in floating]
        return first.init(params), second.init(zeros)

    def encode(contribution: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        sent, first_state = first.encode(contribution, state[0])
        leaves, treedef = jax.tree.flatten(sent)
        floating = [leaf for leaf in leaves if _is_floating(leaf)]
        encoded, second_state = second.encode(floating, state[1])
        values = iter(encoded)
        leaves = [next(values) if _is_floating(leaf) else leaf for leaf in leaves]
        return jax.tree.unflatten(treedef, leaves), (first_state, second_state)

    def decode(encoded: PyTree, like: PyTree) -> PyTree:
        sent, floating = abstract(like)
        wanted = jax.tree.leaves(sent)
        treedef: Any = jax.tree.structure(sent)
        pairs = list(zip(treedef.flatten_up_to(encoded), wanted, strict=True))
        parts = [part for part, leaf in pairs if _is_floating(leaf)]
        values = iter(second.decode(parts, floating))
        leaves = [next(values) if _is_floating(leaf) else part for part, leaf in pairs]
        return first.decode(jax.tree.unflatten(treedef, leaves), like)

    return Codec(init, encode, decode, name="pair")


def _is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
