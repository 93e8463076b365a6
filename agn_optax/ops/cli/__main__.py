"""``python -m agn_optax.ops.cli`` is ``agn-optax``."""

from agn_optax.ops.cli import main

if __name__ == "__main__":
    main()
