"""Programs side by side on this machine: started, watched, started again, and ended.

`run` is the whole of it for callers. `_program` is what they describe, `_launch` keeps
the programs running, `_process` is one of them, `_signals` has it told of signals, and
`_guard` ends them all with the launcher.
"""

from agn_optax.launch._launch import run
from agn_optax.launch._program import Ended, Program
from agn_optax.launch._signals import handled as handled
from agn_optax.launch._signals import told_to_end as told_to_end

__all__ = ["Ended", "Program", "run"]
