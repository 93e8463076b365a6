"""The worker's side of an embedded or served center: one class for both."""

from agn_optax.worker._fragment import FragmentState
from agn_optax.worker._layout import Layout, layout_of
from agn_optax.worker._programs import StreamingState
from agn_optax.worker._worker import Worker, WorkerState

__all__ = [
    "FragmentState",
    "Layout",
    "StreamingState",
    "Worker",
    "WorkerState",
    "layout_of",
]
