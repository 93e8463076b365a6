"""Model, rules, codecs and clock that all processes of a scenario share."""

import dataclasses
import functools
import time
import types

import jax.numpy as jnp
import numpy as np
import optax
from grpc import _channel

import agn_optax
from agn_optax import codecs, rules

WORKERS = 4  # rows of the model, one for each worker
MOVING_RATE = 0.25  # of easgd
REJECTED_NORM = 100.0  # maximum norm at a center with message limits
BAD = (1e3, np.nan)  # moves of a step whose message is to be rejected

# Two fragments, one for each leaf of the table, in a period of four steps.
PERIOD, OFFSETS = 4, (2, 4)


def fragments(delay):
    """Return two fragments: the leaf ``u``, and all other leaves."""
    return agn_optax.Fragments(["^u", "."], OFFSETS, delay=delay)


CODECS = {
    "none": codecs.identity(),
    "bfloat16": codecs.cast("bfloat16"),
    "int8": codecs.error_feedback(codecs.quantize(8)),
    "top_k": codecs.error_feedback(codecs.top_k(1, block=64)),
    "chained": codecs.error_feedback(
        codecs.chain_codecs(codecs.top_k(1, block=64), codecs.quantize(8))
    ),
}
# Codecs that leave elements out and keep them in a residual.
SPARSE = ("top_k", "chained")
# Codecs that the command line has no name for.
_OWN = ("top_k", "chained")


def params(slots):
    """Return ``slots`` elements for each worker in two leaves, and an unused leaf."""
    half = slots // 2
    return {
        "b": np.zeros(3, np.float32),
        "u": np.zeros((WORKERS, half), np.float32),
        "w": np.zeros((WORKERS, slots - half), np.float32),
    }


def table(params):
    """Return the slots of all workers, one row per worker."""
    return np.concatenate([np.asarray(params[name]) for name in ("u", "w")], axis=1)


@functools.cache  # compiled programs are cached by the rule's identity
def rule(name, codec, weighs=False):
    """Return the rule that the command line makes of the same names.

    Args:
      name: name of the rule.
      codec: name of the codec.
      weighs: whether the center adds up, in the unused leaf, the weights and steps
        claimed by messages, and the number of messages.
    """
    settings = {"moving_rate": MOVING_RATE} if name == "easgd" else {}
    made = getattr(rules, name)(**settings, codec=CODECS[codec])
    return dataclasses.replace(made, center=_counting()) if weighs else made


def rule_options(name, codec, weighs):
    """Return the command's options for the same rule."""
    if codec in _OWN or weighs:
        return [f"--rule-from=chaos.model:{name}__{codec}__{'weighs' * weighs}"]
    named = [f"--rule={name}"]
    named += [f"--moving-rate={MOVING_RATE}"] if name == "easgd" else []
    return named + ([] if codec == "none" else [f"--codec={codec}"])


def __getattr__(name):
    """Return the rule of a name made by `rule_options`."""
    parts = name.split("__")
    if len(parts) != 3:
        raise AttributeError(name)
    return rule(parts[0], parts[1], bool(parts[2]))


def _counting():
    def update(updates, state, params=None, *, weight, steps, **extra):
        claimed = jnp.stack([weight, steps, 1]).astype(jnp.float32)
        moved = {each: -leaf for each, leaf in updates.items()}
        return {**moved, "b": claimed}, state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@functools.cache  # once in each process
def step_clock(path):
    """Shift ``time.time`` by the number of seconds in a file."""
    # gRPC compares its deadlines with the kernel's clock, which has not jumped.
    _channel.time = types.SimpleNamespace(**vars(time))
    real, more = time.time, np.memmap(path, np.float64, "r", shape=(1,))
    time.time = lambda: real() + float(more[0])
