"""The worker's side of an embedded or served center: one class for both.

Names imported `as` themselves are not public: the layers above use them.
"""

from agn_optax.worker._fragment import FragmentState
from agn_optax.worker._machine import Counts as Counts
from agn_optax.worker._machine import ExchangeMachine as ExchangeMachine
from agn_optax.worker._machine import State as State
from agn_optax.worker._machine import due_fragments as due_fragments
from agn_optax.worker._programs import StreamingState
from agn_optax.worker._programs import programs as programs
from agn_optax.worker._shardings import ParamShardings as ParamShardings
from agn_optax.worker._shardings import shardings_of as shardings_of
from agn_optax.worker._worker import Worker, WorkerState
from agn_optax.worker._worker import check_fragments as check_fragments

__all__ = [
    "FragmentState",
    "StreamingState",
    "Worker",
    "WorkerState",
]
