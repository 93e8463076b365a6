"""Pytest: eight devices where there is one CPU."""

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)

# An example may compile something, which takes as long as it takes.
hypothesis.settings.register_profile("compiling", deadline=None)
hypothesis.settings.load_profile("compiling")
