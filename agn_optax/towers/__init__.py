"""Programs on many devices: data-parallel towers, and workers on the axes of a mesh.

- `Towers`: the mesh, with its state, data and programs
- `all_reduce`: reduce the gradients of a worker's towers
- `reduce_loss`: each tower's share of the loss of a whole batch
- `loss_scaling`: loss scaling that skips bad steps on all towers together

The names that are imported ``as`` themselves are for other layers.
"""

from agn_optax.towers._all_reduce import AllReduceState, all_reduce, densify
from agn_optax.towers._loss import reduce_loss
from agn_optax.towers._loss_scale import LossScaleState, loss_scale, loss_scaling
from agn_optax.towers._programs import MeshProgram
from agn_optax.towers._replicas import Agreement
from agn_optax.towers._replicas import common_leaves as common_leaves
from agn_optax.towers._towers import Towers

__all__ = [
    "Agreement",
    "AllReduceState",
    "LossScaleState",
    "MeshProgram",
    "Towers",
    "all_reduce",
    "densify",
    "loss_scale",
    "loss_scaling",
    "reduce_loss",
]
