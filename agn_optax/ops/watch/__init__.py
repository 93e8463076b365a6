"""The page of a served center in a browser, and its numbers for Prometheus."""

from agn_optax.ops.watch._page import Page as Page
