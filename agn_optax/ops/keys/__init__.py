"""Certificates and tokens for a center, its workers and its operators.

Needs the extra ``agn_optax[keys]``.
"""

from agn_optax._internal import extras

extras.require("keys", "cryptography")

from agn_optax.ops.keys._make import make as make  # noqa: E402 after this check
