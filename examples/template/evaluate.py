"""Evaluate a saved center: `python evaluate.py output/model OPTIONS`."""

from __future__ import annotations

import functools
import pathlib
import sys

import config as settings
import data
import jax
import model
import numpy as np
import sharding
from orbax.checkpoint import v1 as ocp


def main() -> None:
    path, *options = sys.argv[1:]
    config = settings.parse(options)
    mesh = sharding.make_mesh(config)
    graph, params = model.create(config)
    params = ocp.load(pathlib.Path(path).resolve(), params)  # with these shardings
    loss = jax.jit(functools.partial(model.loss_fn, graph))
    batches = data.held_out_batches(config)
    losses = [float(loss(params, sharding.place_rows(mesh, rows))) for rows in batches]
    print(f"loss of the center on held-out text: {np.mean(losses):.3f} nats per byte")


if __name__ == "__main__":
    main()
