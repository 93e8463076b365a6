"""Programs side by side on this machine: start, watch, restart and end them.

Callers need only `run`. `_program` has the descriptions of programs, `_launch` keeps
programs running, `_process` is one running program, and `_guard` ends all programs if
the launcher is killed.
"""

from agn_optax.ops.launch._launch import GRACE as GRACE
from agn_optax.ops.launch._launch import run
from agn_optax.ops.launch._program import Outcome, Program

__all__ = ["Outcome", "Program", "run"]
