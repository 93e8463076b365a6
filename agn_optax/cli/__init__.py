"""The command ``agn-optax``."""
