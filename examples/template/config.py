"""The settings of a run: `train.py --steps 1000 --width 512`."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; all workers of a run need the same ones."""

    # Model
    layers: int = 2
    width: int = 64
    heads: int = 4
    # Mesh: devices of this worker per tensor-parallel group; the rest are for FSDP
    tensor: int = 2
    # Data
    context: int = 64  # bytes per row
    batch: int = 16  # rows per step of a worker, on all of its devices
    # Optimizer
    steps: int = 400  # local steps of each worker
    period: int = 10  # local steps per exchange
    warmup: int = 20  # the first local steps, in which the learning rate rises
    learning_rate: float = 1e-3
    clip: float = 1.0  # maximum global norm of the gradients
    # Output: a folder that outlives the processes, and that all of them can reach
    output: pathlib.Path = pathlib.Path("output")


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Read options with the names of the fields; the defaults are those above."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for field in dataclasses.fields(Config):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help=" ",  # so that the default is shown
        )
    config = Config(**vars(parser.parse_args(arguments)))
    for name, value in dataclasses.asdict(config).items():
        if not isinstance(value, pathlib.Path) and value <= 0:
            parser.error(f"{name} must be positive, got {value}")
    if config.width % config.heads:
        parser.error(
            f"width must be a multiple of heads, got {config.width}, {config.heads}"
        )
    if config.steps <= config.warmup:
        parser.error(f"steps must be above warmup, got {config.steps}, {config.warmup}")
    return config
