"""Time of `import agn_optax` and of `import optax`, in fresh interpreters in turns.

The service, which needs gRPC, is a separate row; jax is imported by optax itself.

    python benchmarks/startup.py
"""

import functools
import os
import subprocess
import sys

from measuring import Benchmark, Form

PROGRAM = """
import time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
"""
# Bytecode files are written, as usual, also if this runs under ``python -B``.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def seconds(module: str) -> float:
    """Return the seconds of an import, without the interpreter's start."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    output = subprocess.check_output(command, env=ENVIRONMENT)  # noqa: S603 our own
    return float(output)


class Startup(Benchmark):
    """Time to import."""

    def run(self) -> None:
        """Add the table."""
        modules = ("optax", "agn_optax", "agn_optax.service")
        forms = [Form(m, "optax", functools.partial(seconds, m)) for m in modules]
        rows = self.turns(forms).rows(forms)
        self.add("startup", "import, in a fresh interpreter", rows)


if __name__ == "__main__":
    Startup.main()
