"""``python -m agn_optax.cli`` is ``agn-optax``."""

from agn_optax.cli import main

if __name__ == "__main__":
    main()
