"""`fit`, a training loop for a worker or for towers.

`_fit` has the loop, and `_trainers` the differences between a worker and towers. `fit`
uses only public functions of the package, so a user's own loop can do the same.
"""

from agn_optax.training._fit import Fitted, fit

__all__ = ["Fitted", "fit"]
