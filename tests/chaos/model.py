"""What all processes of a scenario know: its model, its rules, its clock."""

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
REFUSED_NORM = 100.0  # above it a center that refuses does so
BAD = (1e3, np.nan)  # what a step moves its slot by that is to be refused

# Two, as the two leaves that a table has, of a period of four steps.
PERIOD, OFFSETS = 4, (2, 4)


def fragments(delay):
    """A worker's turns: the first half of its slots, then the second with the rest."""
    return agn_optax.Fragments(["^u", "."], OFFSETS, delay=delay)


CODECS = {
    "none": codecs.identity(),
    "bfloat16": codecs.cast("bfloat16"),
    "int8": codecs.error_feedback(codecs.quantize(8)),
    "top_k": codecs.error_feedback(codecs.top_k(1, block=64)),
    "chained": codecs.error_feedback(
        codecs.chain_codecs(codecs.top_k(1, block=64), codecs.quantize(8))
    ),
    "two_way": codecs.two_way(
        codecs.error_feedback(codecs.quantize(8)), answers=codecs.quantize(8)
    ),
}
# Those that leave elements out, which are then owed.
SPARSE = ("top_k", "chained")
# Those that the command does not know by a name.
_OWN = ("top_k", "chained", "two_way")


def params(slots):
    """``slots`` for each worker, in two leaves, and some elements that nobody moves."""
    half = slots // 2
    return {
        "b": np.zeros(3, np.float32),
        "u": np.zeros((WORKERS, half), np.float32),
        "w": np.zeros((WORKERS, slots - half), np.float32),
    }


def table(params):
    """The slots of all workers, a row for each."""
    return np.concatenate([np.asarray(params[name]) for name in ("u", "w")], axis=1)


@functools.cache  # which programs are kept by
def rule(name, codec, weighs=False):
    """The one that the command makes of the same names.

    Args:
      name: of the rule.
      codec: its name.
      weighs: whether the center adds up, in the leaf that nobody moves, the weights and
        the steps that messages claim, and their number.
    """
    settings = {"moving_rate": MOVING_RATE} if name == "easgd" else {}
    made = getattr(rules, name)(**settings, codec=CODECS[codec])
    return dataclasses.replace(made, center=_counting()) if weighs else made


def rule_options(name, codec, weighs):
    """Of the command, for the same rule."""
    if codec in _OWN or weighs:
        return [f"--rule-from=chaos.model:{name}__{codec}__{'weighs' * weighs}"]
    named = [f"--rule={name}"]
    named += [f"--moving-rate={MOVING_RATE}"] if name == "easgd" else []
    return named + ([] if codec == "none" else [f"--codec={codec}"])


def __getattr__(name):
    """A rule by the name that the command is told."""
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
    """The time of day is what it is, and as many seconds more as a file says."""
    # What gRPC makes of it is compared with the kernel's, which has not jumped.
    _channel.time = types.SimpleNamespace(**vars(time))
    real, more = time.time, np.memmap(path, np.float64, "r", shape=(1,))
    time.time = lambda: real() + float(more[0])
