"""One of two processes is killed at each step of an exchange; the worker resumes."""

import time

import pytest
from helpers import network, resumed_pod, sessions
from helpers.resumed_groups import LIMIT, Group, assert_equal_centers, undisturbed
from helpers.waiting import BUSY, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TIMEOUT = 10.0  # s, of the workers' connections
HALF = 3 << 19  # bytes of a process's pieces
FEW = 32 << 10  # bytes, more than all else that the center sends
# Where a process is killed, and whether the message of that exchange is applied.
STEPS = {
    "it has sent nothing": False,
    "within its pieces": False,
    "it has sent, and the other one never sends": False,
    "it has sent, and the other one sends later": True,
    "the message is applied": True,
    "within its answer": True,
    "it has its answer": True,
}


def stop_at(step, process, own, other, server):
    """Let a process stop at a step of its next exchange, or be killed there.

    Args:
      step: the step.
      process: the process.
      own: the network between the process and the center.
      other: the network between the other process and the center.
      server: the server of the center.

    Returns:
      A function that returns whether the process is at the step.
    """
    before = server.center.version
    if step == "it has sent nothing":
        process.ask(do="die_when_sending")
        return process.answers_already  # it has ended
    if step == "within its pieces":
        own.there.hold_after(HALF)
        assembly = sessions.assembly(server, "w")
        return lambda: own.there.is_holding() and len(assembly._arrived) == 1
    if step.startswith("it has sent, "):
        other.there.hold_after(0)
        assembly = sessions.assembly(server, "w")
        return lambda: other.there.is_holding() and len(assembly._arrived) == 1
    if step == "the message is applied":
        own.back.hold_after(FEW)
        return lambda: server.center.version > before
    if step == "within its answer":
        own.back.hold_after(HALF)
        return own.back.is_holding
    process.ask(do="die_when_agreeing")
    return process.answers_already


@pytest.mark.parametrize("killed", [0, 1])
def test_process_may_be_killed_at_each_step_of_an_exchange(
    killed, stack, served, tmp_path
):
    """The center has moved as a whole or not at all; a new job repeats the message.

    Process 0 has the coordinator of the job, whose end ends the other one. The end of
    process 1 is an error in process 0, whose job allows a long silence.
    """
    (server,), messages = served("downpour"), 1
    nets = [stack.enter_context(network.Network(server)) for _ in range(2)]
    own, other = nets[killed], nets[1 - killed]
    end = ["CenterError: |has ended", r"CenterError: processes \[1\] "][killed]

    def new_job():
        job = Group(stack, 2, heartbeat_timeout=LIMIT)
        addresses = [net.address for net in nets]
        how = {"rule": "downpour", "layout": "rows", "timeout": TIMEOUT}
        job.ask(do="connect", address=addresses, **how)
        job.ask(do="start", folder=str(tmp_path / "worker"))
        return job

    def assert_applied(count):
        expected = undisturbed("downpour", count * resumed_pod.PERIOD)
        assert_equal_centers([server], "downpour", expected)

    job = new_job()
    job.ask(do="train", until=resumed_pod.PERIOD)
    for step, is_applied in STEPS.items():
        if step.endswith("sends later") and killed == 0:
            continue  # the other one ends with the coordinator
        victim, survivor = job.processes[killed], job.processes[1 - killed]
        is_reached = stop_at(step, victim, own, other, server)
        job.send(do="train", until=(messages + 1) * resumed_pod.PERIOD)
        wait_until(is_reached, LIMIT)
        victim.kill()
        begin = time.monotonic()
        own.cut_once()  # held data is lost with the process
        if step.endswith("never sends"):
            job.kill()
            other.cut_once()
        for net in nets:
            net.mend()
        if not step.endswith("never sends"):
            with pytest.raises(AssertionError, match=end):
                survivor.answer()
            assert time.monotonic() - begin < 2 * TIMEOUT + BUSY
            job.kill()
        assert_applied(messages + is_applied)
        job = new_job()
        messages += 1
        assert_applied(messages)
    job.ask(do="train", until=(messages + 1) * resumed_pod.PERIOD)
    assert_applied(messages + 1)
