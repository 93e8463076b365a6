"""A center and its workers as tasks of an engine, such as SLURM or Kubernetes.

`Run` describes a run for every engine, with the commands and the environment of each
task. `Engine` is the interface, and each engine has a file: `_local`, processes of this
machine; `_kubernetes`, pods of a cluster; `_slurm`, jobs of SLURM. Names that are
imported `as` themselves are for the layers above.
"""

from agn_optax.ops.engines._engine import Engine
from agn_optax.ops.engines._kubernetes import Kubernetes
from agn_optax.ops.engines._local import Local
from agn_optax.ops.engines._local import local_address as local_address
from agn_optax.ops.engines._local import serving_event as serving_event
from agn_optax.ops.engines._run import Resources, Run
from agn_optax.ops.engines._run import worker_limit as worker_limit
from agn_optax.ops.engines._slurm import Slurm

__all__ = [
    "Engine",
    "Kubernetes",
    "Local",
    "Resources",
    "Run",
    "Slurm",
]

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (Local, Kubernetes, Slurm)
}
