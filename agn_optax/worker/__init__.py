"""The worker's side of a center outside the program: one class for every center."""

from agn_optax.worker._worker import Worker, WorkerState

__all__ = ["Worker", "WorkerState"]
