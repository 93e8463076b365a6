"""What all processes of a scenario know: its model, its rules, its clock."""

import functools
import time
import types

import numpy as np
from grpc import _channel

from agn_optax import codecs, rules

WORKERS = 4  # rows of the model, one for each worker
MOVING_RATE = 0.25  # of easgd

_CODECS = {
    "none": codecs.identity(),
    "bfloat16": codecs.cast("bfloat16"),
    "int8": codecs.error_feedback(codecs.quantize(8)),
}


def params(slots):
    return {"b": np.zeros(3, np.float32), "w": np.zeros((WORKERS, slots), np.float32)}


@functools.cache  # which programs are kept by
def rule(name, codec):
    """The one that the command makes of the same names."""
    settings = {"moving_rate": MOVING_RATE} if name == "easgd" else {}
    return getattr(rules, name)(**settings, codec=_CODECS[codec])


@functools.cache  # once in each process
def step_clock(path):
    """The time of day is what it is, and as many seconds more as a file says."""
    # What gRPC makes of it is compared with the kernel's, which has not jumped.
    _channel.time = types.SimpleNamespace(**vars(time))
    real, more = time.time, np.memmap(path, np.float64, "r", shape=(1,))
    time.time = lambda: real() + float(more[0])
