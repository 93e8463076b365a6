"""Pytest: eight devices where there is one CPU, and programs that compile quickly."""

import os

# Tests compile hundreds of tiny programs and run each a few times. What they say of
# memory and collectives is settled before these passes.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
)

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)

# An example may compile something, which takes as long as it takes.
hypothesis.settings.register_profile("compiling", deadline=None)
hypothesis.settings.load_profile("compiling")
