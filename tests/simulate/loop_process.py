"""A process with a training loop that makes steps on command, for test_tapes.py."""

from helpers import children, loops, shared

from agn_optax import service


class Commands:
    """The commands that the test sends."""

    def start(self, address, index, first=0):
        rule = shared.agn(shared.sgd(0.1))
        center = service.connect(address, rule, timeout=60)
        self._loop = loops.Loop(center, index, first=first)
        return {}

    def run(self, steps):
        self._loop.run(steps)
        return {}


if __name__ == "__main__":
    me = Commands()
    children.serve_commands({"start": me.start, "run": me.run})
