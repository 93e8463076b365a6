"""A warm process that becomes ``agn-optax serve`` once it gets its arguments."""

import json
import pathlib
import sys

from chaos import model

from agn_optax.ops.cli import main

if __name__ == "__main__":
    command = json.loads(sys.stdin.readline())
    model.step_clock(pathlib.Path(command["clock"]))
    sys.argv[1:] = ["serve", "--json", *command["arguments"]]
    main()
