"""The checks of the network path to a center, and of the center."""

from agn_optax.ops.doctor._checks import Checks as Checks
