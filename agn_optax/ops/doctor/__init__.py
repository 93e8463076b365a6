"""The checks of the way to a center, and of the center."""

from agn_optax.ops.doctor._checks import Checks as Checks
