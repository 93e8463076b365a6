"""Fingerprints of rules, numbers by which a worker and a center compare their rules.

Functions cannot be sent, and their programs differ between versions of JAX. Therefore
each part of a rule is run on a small probe, and the results are compared: a learning
rate of 0.1 in the worker and of 0.2 in the center is found, and named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agn_optax._internal import attempt
from agn_optax.rules._rule import Rule, discounted, extra_arguments
from agn_optax.rules.codecs import Codec

PyTree = Any
# By part of the rule: the value of a setting, or the part's result on the probe.
Fingerprint = Mapping[str, Any]

# The parts that workers run; a center may have others for the same contributions.
_AT_WORKERS = {"contribution", "encoding", "adopt", "penalty", "adopts", "codec"}
_AT_WORKERS |= {"needs_params", "needs_anchor", "replaces"}
SETTINGS = (
    *("name", "combine", "adopts", "replaces"),
    *("needs_params", "needs_anchor", "codec"),
)


@functools.lru_cache(maxsize=32)
def fingerprint(rule: Rule) -> Fingerprint:
    """Return the fingerprint of ``rule``.

    A part that cannot be run on the probe, such as a center optimizer with a mask for
    the tree of one model, is left out and not compared; the log has the reason.
    """
    prints: dict[str, Any] = {name: str(getattr(rule, name)) for name in SETTINGS}
    for name, run in _PARTS.items():
        what = f"comparison of the {name} of rule {rule.name!r}"
        values = attempt(what, jax.jit(functools.partial(run, rule)))
        if values is not None:
            leaves = map(np.ravel, jax.tree.leaves(values))
            prints[name] = [float(x) for leaf in leaves for x in leaf]
    return prints


def difference(other: Fingerprint, rule: Rule) -> str | None:
    """Return a text that names the differences of two rules; None if there are none.

    The text names each part that differs, with both values, or with the first numbers
    that differ. If the names of the rules differ, it has only the names.

    Args:
      other: the fingerprint of the other rule.
      rule: this rule.
    """
    differences = {
        part: _part_difference(part, other[part], value)
        for part, value in fingerprint(rule).items()
        if part in other
    }
    if differences.get("name"):  # other differences follow from this one
        return differences["name"]
    if differences.get("codec"):
        differences["encoding"] = None
    return "; ".join(filter(None, differences.values())) or None


def workers_difference(other: Fingerprint, rule: Rule) -> str | None:
    """Return `difference` of the parts that workers run; None if they are the same."""
    parts = {name: value for name, value in other.items() if name in _AT_WORKERS}
    return difference(parts, rule)


def _part_difference(part: str, other: Any, own: Any) -> str | None:
    """Return a text with both values, or with the first numbers that differ."""
    if own == other:
        return None
    if part in SETTINGS:
        return f"its {part} is {other!r}, and here it is {own!r}"
    if len(other) == len(own):
        differing = ~np.isclose(own, other, rtol=1e-4, atol=1e-6, equal_nan=True)
        if not differing.any():
            return None
        other, own = np.asarray(other)[differing], np.asarray(own)[differing]
    what = "center optimizer" if part == "center" else part
    return (
        f"its {what} turns test values into {_show(other)}, and here into {_show(own)}"
    )


def _show(numbers: Any) -> str:
    if not len(numbers):
        return "nothing"
    shown = ", ".join(f"{number:.4g}" for number in numbers[:4])
    return f"[{shown}, ...]" if len(numbers) > 4 else f"[{shown}]"


def _probe(seed: float) -> PyTree:
    """Return a tree of two leaves whose elements all differ and are not zero."""
    w = jnp.sin(seed + jnp.arange(1.0, 7.0, dtype=jnp.float32)).reshape(3, 2)
    return {"b": w[:, 0] * 0.5, "w": w}


def _contribution(rule: Rule) -> PyTree:
    params, anchor = _probe(1.0), _probe(2.0)
    record = rule.record.init(params)
    for seed in (3.0, 4.0):
        _, record = rule.record.update(_probe(seed), record, params)
    return rule.contribution(
        record,
        params if rule.needs_params else None,
        anchor if rule.needs_anchor else None,
        jnp.asarray(2, jnp.int32),
    )


def _encoded(codec: Codec) -> PyTree:
    state = codec.init(_probe(2.0))
    sent = []
    for seed in (1.0, 2.0):
        encoded, state = codec.encode(_probe(seed), state)
        sent.append((encoded, codec.decode(encoded, _probe(2.0))))
    return sent


def _called(function: Callable[[PyTree, PyTree], PyTree] | None) -> PyTree:
    return function(_probe(1.0), _probe(2.0)) if function else ()


def _penalty(rule: Rule) -> PyTree:
    if rule.penalty is None:
        return ()
    params = _probe(1.0)
    state = rule.penalty.init(params)
    return rule.penalty.update(_probe(3.0), state, params, center=_probe(2.0))[0]


def _weight(rule: Rule) -> PyTree:
    if rule.weight is None:
        return ()
    return [jnp.asarray(rule.weight(weight, 2.0)) for weight in (2.0, 3.0)]


def _center(rule: Rule) -> PyTree:
    center, results = _probe(2.0), []
    state = rule.center.init(center)
    for staleness, seed in enumerate((3.0, 4.0, 5.0)):
        # First a combined message, which every center optimizer applies at once.
        metadata = {"since": 1, "workers": 3, "worker": min(staleness - 1, 0)}
        metadata["staleness"] = staleness
        extra_args = extra_arguments(
            metadata | {"steps": 2 + staleness, "weight": 0.5 + staleness}
        )
        message = discounted(rule, _probe(seed), **extra_args)
        updates, state = rule.center.update(message, state, center, **extra_args)
        center = optax.apply_updates(center, updates)
        results.append(updates)
    return results


# Each part of a rule, as a function that runs it on the probe.
_PARTS: Mapping[str, Callable[[Rule], PyTree]] = {
    "contribution": _contribution,
    "encoding": lambda rule: _encoded(rule.codec),
    "message": lambda rule: _called(rule.message),
    "adopt": lambda rule: _called(rule.adopt),
    "weight": _weight,
    "penalty": _penalty,
    "center": _center,
}
