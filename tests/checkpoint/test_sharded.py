"""Checkpoints of workers of several processes, which continue with another number."""

import pytest
from helpers import resumed_pod
from helpers.resumed_groups import (
    LIMIT,
    Group,
    address_of,
    assert_equal_centers,
    undisturbed,
    versions,
)
from helpers.waiting import wait_until

from agn_optax import errors
from agn_optax.service.server._assembly import Groups

FRAGMENTS = {"parts": 2}
DELAYED = {"parts": 2, "delay": 1, "mixing": 0.5}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rule", "groups", "shards", "how", "tolerance"),
    [
        ("downpour", [(2, "columns"), (1, "rows")], 1, {"overlap": True}, 0.0),
        ("agn", [(4, "rows"), (2, "columns"), (1, "rows")], 1, {}, 1e-5),
        ("diloco", [(1, "rows"), (4, "columns"), (2, "columns")], 1, {}, 0.0),
        # The leaf "w" is cut in other rows than those of the processes.
        ("diloco", [(4, "columns"), (2, "rows")], 3, {}, 0.0),
        ("downpour", [(1, "rows"), (2, "columns")], 2, {"overlap": True}, 0.0),
        ("diloco", [(4, "rows"), (2, "columns")], 2, {"streaming": FRAGMENTS}, 0.0),
        ("agn_fixed", [(2, "rows"), (4, "columns")], 2, {"streaming": DELAYED}, 0.0),
    ],
)
def test_killed_worker_continues_with_another_number_of_processes(
    stack, served, tmp_path, rule, groups, shards, how, tolerance
):
    folder, servers, sessions = tmp_path / "worker", served(rule, shards), set()
    connect = {"do": "connect", "address": address_of(servers), "rule": rule, **how}
    steps = 6 * resumed_pod.PERIOD * len(groups)
    for number, (count, layout) in enumerate(groups):
        group = Group(stack, count)
        group.ask(**connect, layout=layout)
        sessions.add(tuple(group.ask(do="start", folder=str(folder))["session"]))
        if number == len(groups) - 1:
            group.ask(do="train", until=steps)
            last = group.ask(do="flush")
            break
        group.send(do="train", until=steps)
        goal = min(versions(servers)) + 2
        wait_until(lambda goal=goal: min(versions(servers)) >= goal, LIMIT)
        if number:  # kill it while it writes a checkpoint
            wait_until(lambda: any(folder.glob("*tmp*")), LIMIT)
        group.kill()
        assert max(versions(servers)) < steps // resumed_pod.PERIOD
    assert len(sessions) == 1
    assert last["step"] == steps
    assert last["exchanges"] == min(versions(servers))
    streaming = how.get("streaming")
    expected = undisturbed(rule, steps, shards, streaming)
    assert_equal_centers(servers, rule, expected, tolerance, streaming)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rule", "shards", "streaming"),
    [
        ("diloco", 1, None),
        ("diloco", 3, None),
        ("diloco", 2, FRAGMENTS),
        ("agn_fixed", 2, DELAYED),
    ],
    ids=["whole", "shards", "fragments", "delay"],
)
def test_sharded_checkpoint_is_loaded_by_another_number_of_processes(
    stack, served, tmp_path, rule, shards, streaming
):
    servers, path = served(rule, shards), str(tmp_path / "saved")
    connect = {"do": "connect", "address": address_of(servers), "rule": rule}
    connect["streaming"] = streaming
    two = Group(stack, 2)
    two.ask(**connect, layout="rows")
    two.ask(do="start", folder=str(tmp_path / "worker"))
    two.ask(do="train", until=5)  # in the middle of a round
    saved = two.ask(do="receive")
    two.ask(do="save", path=path)
    for error in two.errors(do="save", path=path):
        assert "exists already" in error
    two.kill()
    one = Group(stack, 1)
    one.ask(**connect, layout="columns")
    loaded = one.ask(do="load", path=path)
    assert (loaded["step"], loaded["exchanges"]) == (5, 2)
    assert loaded["session"] != saved["session"]
    one.ask(do="train", until=8)
    assert one.ask(do="flush")["exchanges"] == min(versions(servers)) == 4
    expected = undisturbed(rule, 8, shards, streaming)
    assert_equal_centers(servers, rule, expected, streaming=streaming)


def test_group_whose_session_was_resumed_cannot_take_it_back():
    groups = Groups(max_workers=1)
    groups.join("w", "session", "old")
    groups.check("w", "session", "old")  # joins again after its connection broke
    groups.join("w", "session", "new")
    with pytest.raises(errors.WorkerStateError, match="have resumed the session"):
        groups.check("w", "session", "old")
    assert not groups.may_leave("w", "session", "old")
    assert groups.may_leave("w", "session", "new")
    groups.join("w", "session", "")  # one process
    assert groups.may_leave("w", "session", "")
    with pytest.raises(errors.WorkerStateError, match="have resumed the session"):
        groups.check("w", "session", "new")
    groups.check("w", "another session", "old")
    groups.join("v", "session", "new")  # forgets the other worker
    groups.check("w", "session", "old")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_survivors_of_a_killed_process_do_not_end_the_resumed_session(
    stack, served, tmp_path
):
    (server,), folder = served("downpour"), str(tmp_path / "worker")
    connect = {"do": "connect", "address": server.address, "rule": "downpour"}
    old = Group(stack, 2, heartbeat_timeout=LIMIT)
    old.ask(**connect, layout="rows")
    old.ask(do="start", folder=folder)
    session = old.ask(do="train", until=3)["session"]
    survivor, killed = old.processes
    killed.ask(do="die_when_sending")
    old.send(do="train", until=8)  # the survivor waits for the other one's pieces
    new = Group(stack, 2)
    new.ask(**connect, layout="columns")
    assert new.ask(do="start", folder=folder)["session"] == session
    new.send(do="train", until=8)
    assert all(answer["exchanges"] == 4 for answer in new.answers())
    with pytest.raises(AssertionError, match="CenterError"):
        survivor.answer()
    survivor.ask(do="leave")
    assert set(server.center.workers) == {"w"}
    assert_equal_centers([server], "downpour", undisturbed("downpour", 8))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_message_that_one_of_two_shards_has_applied_is_completed_by_one_process(
    stack, served, tmp_path
):
    servers, folder = served("diloco", 2), str(tmp_path / "worker")
    connect = {"do": "connect", "address": address_of(servers), "rule": "diloco"}
    two = Group(stack, 2)
    two.ask(**connect, layout="columns")
    two.ask(do="start", folder=folder)
    two.ask(do="train", until=3)
    two.processes[1].ask(do="die_between_shards")
    two.send(do="train", until=8)
    wait_until(lambda: not two.processes[1].is_running, LIMIT)
    assert versions(servers) == [2, 1]
    two.kill()
    one = Group(stack, 1)
    one.ask(**connect, layout="rows")
    assert one.ask(do="start", folder=folder)["exchanges"] == 2
    assert versions(servers) == [2, 2]
    one.ask(do="train", until=8)
    assert_equal_centers(servers, "diloco", undisturbed("diloco", 8, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bad_input_raises_in_all_processes(stack, served, tmp_path):
    (server,), path, folder = (
        served("agn"),
        str(tmp_path / "saved"),
        str(tmp_path / "w"),
    )
    connect = {"do": "connect", "address": server.address, "rule": "agn"}
    two = Group(stack, 2)
    two.ask(**connect, layout="rows")
    for error in two.errors(do="start", folder=str(tmp_path / "{process}")):
        assert "need one shared directory" in error
    two.ask(do="start", folder=str(tmp_path / "own"), others="own")
    for error in two.errors(do="train", until=2):
        assert "mean['m'] is an array of this process alone" in error
    two.ask(**connect, layout="rows")
    two.ask(do="start", folder=folder, others="data")
    two.ask(do="train", until=2)
    two.ask(do="save", path=path)
    for error in two.errors(do="load_without_shardings", path=path):
        assert "a worker of a part of its job's processes" in error
    two.kill()
    one = Group(stack, 1)
    one.ask(**connect, layout="rows")
    (error,) = one.errors(do="start", folder=folder, others="data")
    assert "another number of processes" in error
    assert "['data']" in error
