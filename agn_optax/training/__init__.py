"""A training loop for workers and towers alike: `fit`, and it alone is for users.

`_fit` is the loop; `_places` what differs between a worker and towers, `_progress` how
it is watched. It has nothing that a loop of one's own could not have.
"""

from agn_optax.training._fit import Fitted, fit

__all__ = ["Fitted", "fit"]
