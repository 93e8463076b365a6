"""Programs side by side on this machine: started, watched, started again, and ended.

`run` is the whole of it for callers. `_program` is what they describe, `_launch` keeps
the programs running, `_process` is one of them, `_signals` has it told of signals, and
`_guard` ends them all with the launcher.
"""

from agn_optax.ops.launch._launch import run
from agn_optax.ops.launch._program import Ended, Program

__all__ = ["Ended", "Program", "run"]
