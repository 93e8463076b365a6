"""Certificates and tokens for a center, its workers and its operators."""

from agn_optax.ops.keys._make import make as make
