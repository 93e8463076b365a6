"""Replay the golden tapes in this process: run by tests/center/test_golden_tapes.py."""

import json
import pathlib
import runpy

from agn_optax import tape
from agn_optax.center import stack

FOLDER = pathlib.Path(__file__).parent
RULES = runpy.run_path(str(FOLDER / "make.py"))["RULES"]

if __name__ == "__main__":
    for name, make_rule in RULES.items():
        # Raises unless each snapshot has the bits that are computed here, if the tape
        # was made on the same stack.
        for _ in tape.read(FOLDER / name).run(make_rule()):
            pass
        print(json.dumps({"name": name, "stack": stack()}))  # noqa: T201 read by the test
