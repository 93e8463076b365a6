"""The command ``agn-optax``, run as ``python -m agn_optax.cli``."""

from agn_optax.cli import main

if __name__ == "__main__":
    main()
