"""The worker's side of an embedded or served center: one class for both."""

from agn_optax.worker._fragment import FragmentState
from agn_optax.worker._programs import StreamingState
from agn_optax.worker._shardings import ParamShardings, shardings_of
from agn_optax.worker._worker import Worker, WorkerState

__all__ = [
    "FragmentState",
    "ParamShardings",
    "StreamingState",
    "Worker",
    "WorkerState",
    "shardings_of",
]
