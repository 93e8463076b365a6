"""A process with one worker of a recorded trajectory: run by test_parity.py."""

from helpers import children, parity_records

from agn_optax import service


class Commands:
    """The commands that the test sends."""

    def connect(self, address, record, number):
        record = parity_records.load(record)
        self._center = service.connect(
            address, parity_records.rule_of(record), timeout=60
        )
        self._participant = parity_records.Participant(self._center, record, number)

    def start(self):
        self._participant.start()

    def step(self, event):
        return children.as_hex(self._participant.step(event))

    def close(self):
        self._participant.worker.leave()
        self._center.close()


if __name__ == "__main__":
    me = Commands()
    children.serve_commands(
        {name: getattr(me, name) for name in ("connect", "start", "step", "close")}
    )
