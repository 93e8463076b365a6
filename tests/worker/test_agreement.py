"""Processes agree in rounds, and leave no keys in the store of their job."""

import contextlib

import pytest
from helpers import agreeing, children, ports
from helpers.waiting import wait_until

MISSED = 100  # rounds
LIMIT = 60.0  # s


def ask(processes, **command):
    """Send a command to all processes; return their answers."""
    for process in processes:
        process.send(**command)
    return [process.answer() for process in processes]


@contextlib.contextmanager
def job_of(count):
    with children.processes(agreeing.__file__, count) as job:
        address = ports.free_address()
        for number, process in enumerate(job):
            start = {"do": "start", "processes": count, "process": number}
            process.send(coordinator=address, **start)
        assert [process.answer() for process in job] == [{}] * count
        yield job


@pytest.fixture(name="job")
def fixture_job():
    with job_of(2) as job:
        yield job


@pytest.mark.slow
def test_process_that_has_missed_many_rounds_goes_on_with_the_others(job):
    first, other = job
    given = {"do": "gather", "group": "group", "timeout": LIMIT}
    assert ask(job, value=1, times=50, **given) == [{"all": [1, 1]}] * 2
    usual = first.ask(do="keys")["keys"]
    assert usual < 10
    answer = first.ask(**{**given, "timeout": 0.001}, value=2, times=MISSED)
    assert "processes [1] did not take part" in answer["raised"]
    assert first.ask(do="keys")["keys"] > MISSED
    assert ask(job, value=3, times=3, **given) == [{"all": [3, 3]}] * 2
    assert first.ask(do="keys")["keys"] == usual
    # The first process is missing, and takes part again.
    answer = other.ask(**{**given, "timeout": 0.001}, value=4)
    assert "processes [0] did not take part" in answer["raised"]
    assert ask(job, value=5, times=3, **given) == [{"all": [5, 5]}] * 2
    ask(job, do="end")
    ask(job, value=6, times=3, **{**given, "group": "start"})
    assert first.ask(do="keys")["keys"] == usual  # of the other group


@pytest.mark.slow
def test_rounds_that_two_of_three_processes_have_missed_do_not_part_them():
    given = {"do": "gather", "group": "group", "timeout": LIMIT}
    with job_of(3) as job:
        assert ask(job, value=1, times=3, **given) == [{"all": [1, 1, 1]}] * 3
        answer = job[1].ask(**{**given, "timeout": 0.1}, value=2, times=2)
        assert "processes [0] did not take part" in answer["raised"]
        for process in job[:2]:
            process.send(value=3, **given)
        # The first one goes past the rounds 3 and 4, which the third has not seen yet.
        wait_until(lambda: job[2].ask(do="has", group="group", key="5/0")["has"])
        job[2].send(value=3, **given)
        assert [process.answer() for process in job] == [{"all": [3, 3, 3]}] * 3
