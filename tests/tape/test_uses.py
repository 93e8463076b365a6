"""Audits, differences, forks, what-ifs and evaluations of tapes."""

import dataclasses
import math
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import shared
from helpers.support import RULES, assert_identical
from helpers.tapes import DOWNPOUR, PARAMS, Recording, record
from helpers.waiting import wait_until

import agn_optax
from agn_optax import errors, robust, rules, tape
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    Limits,
    LocalCenter,
    MessageLimits,
    Synchronous,
)

ADAM = shared.agn(shared.adam(0.05))
SGD = shared.agn(shared.sgd(0.5))


def apart(a, b):
    """Return the norm of the difference of two centers."""
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a.params, b.params)))


# Audit.


def test_audit_has_what_each_worker_did(tmp_path):
    limits = Limits(messages=MessageLimits(norm=100.0))
    mode = BoundedStaleness(versions=1)
    with Recording(tmp_path, ADAM, mode=mode, limits=limits) as run:
        run.send("a", steps=3, weight=2.0)
        run.send("b")
        run.send("a", scale=1e4)
        for _ in range(3):
            run.send("a", steps=5, weight=1.0)
        assert not run.send("b", steps=9).applied
        run.leave("b")
        run.send("b")
    found = tape.audit(tape.read(tmp_path), ADAM)
    assert found.version == 6
    assert found.kinds["exchange"] == 6
    a, b = found.workers
    assert (a.worker, a.exchanges, a.dropped, a.rejected) == ("a", 4, 0, 1)
    assert (b.worker, b.exchanges, b.dropped, b.rejected) == ("b", 2, 1, 0)
    assert (a.steps, a.weight, a.sessions) == (18, 5.0, 1)
    assert (b.steps, b.sessions) == (4, 2)
    assert b.max_staleness == 3
    assert "its norm is" in a.reasons[0]
    moved = [apart(run.states[i], run.states[i + 1]) for i in range(6)]
    assert a.moved == pytest.approx(sum(moved[i] for i in (0, 2, 3, 4)), rel=1e-5)
    assert b.moved == pytest.approx(moved[1] + moved[5], rel=1e-5)
    assert 0 < a.interval <= a.max_interval


def test_audit_without_the_rule_leaves_out_moves(tmp_path):
    record(tmp_path, ADAM, exchanges=2, workers=1)
    (worker,) = tape.audit(tape.read(tmp_path)).workers
    assert worker.moved is None
    assert worker.exchanges == 2


def test_round_is_shared_by_its_messages(tmp_path):
    run = _rounds(tmp_path, shared.average(), rounds=2)
    found = tape.audit(tape.read(tmp_path), shared.average())
    total = sum(apart(run.states[i], run.states[i + 1]) for i in range(2))
    assert [each.moved for each in found.workers] == pytest.approx([total / 3] * 3)


def _rounds(path, rule, rounds):
    workers = ("a", "b", "c")
    with Recording(path, rule, mode=Synchronous()) as run:
        for worker in workers:
            run.join(worker)
        for _ in range(rounds):
            for worker in workers:
                run.submit(worker)
            for worker in workers:
                run.collect(worker)
    return run


# Differences.


def trained(path, *, seed=0, workers=1, rule=ADAM, rounds=6):
    """Train with real workers, which take turns; return the path."""
    durability = Journal(path, keep="contributions")
    random = np.random.default_rng(seed)
    with LocalCenter(rule, PARAMS, durability=durability) as center:
        running = []
        for i in range(workers):
            worker = agn_optax.Worker(center, shared.sgd(0.1), period=2, name=f"w{i}")
            running.append([worker, *worker.start()])
        for _ in range(rounds):
            for each in running:
                worker, params, state = each
                for _ in range(2):
                    grads = jax.tree.map(
                        lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype),
                        params,
                    )
                    updates, state = worker.tx.update(grads, state, params)
                    params = optax.apply_updates(params, updates)
                    params, state = worker.exchange(params, state)
                each[1:] = params, state
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_of_the_same_seed_and_order_are_the_same(workers, tmp_path):
    a = trained(tmp_path / "a", workers=workers)
    b = trained(tmp_path / "b", workers=workers)
    assert tape.diff(tape.read(a), tape.read(b)) is None


def test_runs_of_other_seeds_part_at_the_first_contribution(tmp_path):
    a, b = (trained(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    found = tape.diff(tape.read(a), tape.read(b))
    assert (found.kind, found.number, found.version) == ("content", 1, 0)
    assert "sent something else" in str(found)


def test_rounds_of_threads_are_the_same_in_every_run(tmp_path):
    """The order in which workers come does not matter to a round of all workers."""
    a, b = (
        trained_by_threads(tmp_path / name, ("w0", "w1", "w2"), reverse)
        for name, reverse in (("a", False), ("b", True))
    )
    assert tape.diff(tape.read(a), tape.read(b)) is None
    joined = [
        [e.workers for e in tape.read(x).events() if not e.messages] for x in (a, b)
    ]
    assert joined[0] != joined[1]


def trained_by_threads(path, names, reverse):
    """Train in synchronous rounds; the workers join in turn, perhaps in reverse."""
    durability = Journal(path, keep="contributions")
    rule, mode = shared.average(), Synchronous()
    with LocalCenter(
        rule, PARAMS, durability=durability, mode=mode, barrier=len(names)
    ) as center:

        def train(name):
            worker = agn_optax.Worker(center, shared.sgd(0.1), period=1, name=name)
            params, state = worker.start()
            random = np.random.default_rng([ord(c) for c in name])
            for _ in range(3):
                grads = jax.tree.map(
                    lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), params
                )
                updates, state = worker.tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
                params, state = worker.exchange(params, state)

        threads = []
        for i, name in enumerate(sorted(names, reverse=reverse)):
            threads.append(threading.Thread(target=train, args=(name,)))
            threads[-1].start()
            wait_until(lambda i=i: len(center.workers) == i + 1)
        for thread in threads:
            thread.join()
        assert center.version == 3
    return path


def run_of(path, order, *, mode=None, params=PARAMS, scales=None):
    """Send messages in an order of workers; a worker's messages are its own."""
    with Recording(
        path, mode=mode or agn_optax.center.Asynchronous(), params=params
    ) as run:
        for worker in "ab":
            run.join(worker)
        for i, worker in enumerate(order):
            count = order[:i].count(worker)
            run._random = np.random.default_rng([ord(worker), count])
            run.send(worker, anchor=0, scale=(scales or {}).get(i, 1.0))
    return tape.read(path)


@pytest.mark.parametrize(
    ("order", "kind", "number"),
    [
        ("abab", None, None),
        ("abba", "order", 4),
        ("baab", "order", 2),
        ("aba", "end", 5),
        ("ababa", "end", 6),
    ],
)
def test_difference_of_order_is_found(order, kind, number, tmp_path):
    found = tape.diff(run_of(tmp_path / "a", "abab"), run_of(tmp_path / "b", order))
    if kind is None:
        assert found is None
    else:
        assert (found.kind, found.number) == (kind, number)


def test_difference_of_content_is_found(tmp_path):
    a = run_of(tmp_path / "a", "abab")
    b = run_of(tmp_path / "b", "abab", scales={2: 2.0})
    found = tape.diff(a, b)
    assert (found.kind, found.number, found.version) == ("content", 4, 2)


@pytest.mark.parametrize(
    ("changed", "number", "only"),
    [
        ("joins later", 2, ((), ("c",))),
        ("has another name", 3, (("d",), ("c",))),
        ("leaves earlier", 6, ((), ("c",))),
    ],
)
def test_difference_of_the_registered_workers_is_found(changed, number, only, tmp_path):
    """A worker without messages; all messages are the same."""

    def run(path, changed):
        with Recording(path) as run:
            for worker in "ab":
                run.join(worker)
            other = "d" if changed == "has another name" else "c"
            if changed != "joins later":
                run.join(other)
            run.send("a", anchor=0)
            if changed == "joins later":
                run.join(other)
            run.send("b", anchor=0)
            if changed == "leaves earlier":
                run.leave(other)
            run.send("a", anchor=0)
            if changed != "leaves earlier":
                run.leave(other)
        return tape.read(path)

    found = tape.diff(run(tmp_path / "a", changed), run(tmp_path / "b", ""))
    assert (found.kind, found.number) == ("order", number)
    assert (found.only_first, found.only_second) == only
    assert "other workers were registered (order)" in str(found)
    assert "only here: c" in str(found)


def test_joins_and_leaves_between_two_messages_may_differ(tmp_path):
    for name, workers in (("a", "xyz"), ("b", "zyx")):
        with Recording(tmp_path / name) as run:
            for worker in workers:
                run.join(worker)
            run.send("x")
            if name == "b":
                run.join("w")
                run.leave("w")
            run.send("y")
    assert tape.diff(*(tape.read(tmp_path / name) for name in "ab")) is None


def test_difference_of_the_answer_is_found(tmp_path):
    a = run_of(tmp_path / "a", "aabb")
    b = run_of(tmp_path / "b", "aabb", mode=BoundedStaleness(versions=1))
    found = tape.diff(a, b)
    assert (found.kind, found.number, found.version) == ("answer", 4, 2)
    assert found.second.messages[0].outcome == "dropped"


def test_difference_of_the_first_parameters_is_found(tmp_path):
    other = jax.tree.map(lambda x: x + 1, PARAMS)
    a = run_of(tmp_path / "a", "ab")
    b = run_of(tmp_path / "b", "ab", params=other)
    assert tape.diff(a, b).kind == "start"


def test_fork_is_compared_with_its_parent_from_its_beginning_on(tmp_path):
    run_of(tmp_path / "a", "abab")
    parent = tape.read(tmp_path / "a")
    tape.fork(parent, DOWNPOUR, tmp_path / "b", 2)
    with Recording(tmp_path / "b") as run:
        run.send("c")
    found = tape.diff(parent, tape.read(tmp_path / "b"))
    assert (found.kind, found.number) == ("order", 4)


# Forks.


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_fork_goes_on_as_the_recorded_center_did(name, tmp_path):
    """The same messages lead a fork to the same versions, bit for bit."""
    rule = RULES[name]()
    run = record(tmp_path / "a", rule, exchanges=6)
    parent = tape.read(tmp_path / "a")
    made = tape.fork(parent, rule, tmp_path / "b", 3)
    store_of_parent = {}
    with LocalCenter(
        rule, durability=Journal(tmp_path / "b", keep="contributions")
    ) as center:
        assert center.center_id == made.center_id != parent.center_id
        assert_identical(center.save(), run.states[3])
        assert not center.workers
        for event in parent.events():
            for message, arrays in zip(
                event.messages, event.contributions(), strict=True
            ):
                if event.version <= 3:
                    continue
                session = store_of_parent.get(message.worker)
                if session is None:
                    session = [center.join(message.worker), 0]
                    store_of_parent[message.worker] = session
                session[1] += 1
                like = center.core.store.contribution_like
                contribution = jax.tree.unflatten(jax.tree.structure(like), arrays)
                session[0].exchange(
                    agn_optax.center.Submission(
                        session[1], contribution, message.anchor_version, message.steps
                    )
                )
        assert_identical(center.save(), run.states[6])
    fork = tape.read(tmp_path / "b")
    assert fork.parent == (made.parent[0], made.parent[1])
    assert fork.snapshots[0].number == made.parent[0]
    before = next(parent.events(made.parent[0] - 1))
    assert made.parent[1] == before.digest
    fork.check()
    assert_identical(fork.replay(rule, whole=True), run.states[6])


def test_fork_may_have_another_center_optimizer_once(tmp_path):
    run = record(tmp_path / "a", ADAM, exchanges=4)
    tape.fork(tape.read(tmp_path / "a"), ADAM, tmp_path / "b", 2)
    journal = Journal(tmp_path / "b", keep="contributions")
    with LocalCenter(SGD, durability=journal) as center:
        assert "optimizer begins with a new state" in center.core.keeper.restore_message
        saved = center.save()
        assert saved.version == 2
        np.testing.assert_array_equal(saved.params["w"], run.states[2].params["w"])
    with LocalCenter(SGD, durability=journal) as center:
        assert "new state" not in center.core.keeper.restore_message
    with pytest.raises(errors.RuleMismatchError, match="another rule"):
        LocalCenter(ADAM, durability=journal)


def test_fork_is_not_continued_with_another_rule_of_workers(tmp_path):
    record(tmp_path / "a", ADAM, exchanges=1)
    tape.fork(tape.read(tmp_path / "a"), ADAM, tmp_path / "b")
    with pytest.raises(errors.RuleMismatchError, match="another rule"):
        LocalCenter(DOWNPOUR, durability=Journal(tmp_path / "b"))


def test_continued_fork_keeps_its_rule_after_a_kill(tmp_path):
    record(tmp_path / "a", ADAM, exchanges=2)
    tape.fork(tape.read(tmp_path / "a"), ADAM, tmp_path / "b")
    with Recording(tmp_path / "b", ADAM, keep=None) as run:
        run.send()
        run.write()
        killed = shutil.copytree(tmp_path / "b", tmp_path / "killed")
    with pytest.raises(errors.RuleMismatchError, match="another rule"):
        LocalCenter(SGD, durability=Journal(killed))
    with LocalCenter(ADAM, durability=Journal(killed)) as center:
        assert center.version == 3
    assert tape.read(killed).parent == tape.read(tmp_path / "b").parent is not None


def test_fork_of_the_first_version(tmp_path):
    run = record(tmp_path / "a", ADAM, exchanges=1)
    parent = tape.read(tmp_path / "a")
    made = tape.fork(parent, ADAM, tmp_path / "b", 0)
    assert made.parent == (0, parent.center_id)
    with LocalCenter(ADAM, durability=Journal(tmp_path / "b")) as center:
        assert_identical(center.save(), run.states[0])


def test_sessions_of_the_recorded_center_are_not_resumed(tmp_path):
    with Recording(tmp_path / "a") as run:
        run.send("a")
        token = run._sessions["a"].resume_token
        run.write()
        tape.fork(tape.read(tmp_path / "a"), DOWNPOUR, tmp_path / "b")
    with (
        LocalCenter(DOWNPOUR, durability=Journal(tmp_path / "b")) as center,
        pytest.raises(errors.WorkerStateError, match="another one"),
    ):
        center.join("a", resume_token=token)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_fork_into_a_directory_with_files_is_an_error(kind, tmp_path):
    record(tmp_path / "a", exchanges=1)
    found, to = tape.read(tmp_path / "a"), tmp_path / "b"
    if kind == "directory":
        to.mkdir()
        (to / "notes.txt").write_text("mine")
    else:
        to.write_text("mine")
    with pytest.raises(errors.InvalidArgumentError, match="new or an empty directory"):
        tape.fork(found, DOWNPOUR, to)
    assert not list(tmp_path.glob("b/snapshot*"))


def test_fork_at_a_missing_version_writes_nothing(tmp_path):
    record(tmp_path / "a", exchanges=1)
    with pytest.raises(errors.InvalidArgumentError, match="version"):
        tape.fork(tape.read(tmp_path / "a"), DOWNPOUR, tmp_path / "b", 7)
    assert not (tmp_path / "b").exists()


# What-ifs.


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_what_if_nothing_changes_repeats_the_run(name, tmp_path):
    rule = RULES[name]()
    run = record(tmp_path, rule, exchanges=9, workers=3)
    found = tape.what_if(tape.read(tmp_path), rule)
    assert found.parted is None
    assert_identical(found.state, run.states[9])
    assert {n: each.applied for n, each in found.workers.items()} == {
        "w0": 3,
        "w1": 3,
        "w2": 3,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": BoundedStaleness(versions=0)},
        {"limits": Limits(messages=MessageLimits(norm=2.5))},
    ],
    ids=["dropped", "rejected"],
)
def test_what_if_repeats_drops_and_rejections(settings, tmp_path):
    run = record(tmp_path, ADAM, exchanges=12, workers=3, **settings)
    found = tape.what_if(tape.read(tmp_path), ADAM, **settings)
    assert found.parted is None
    assert sum(each.dropped + each.rejected for each in found.workers.values()) > 2
    assert_identical(found.state, run.states[max(run.states)])


def test_what_if_repeats_rounds(tmp_path):
    rule = shared.average()
    run = _rounds(tmp_path, rule, rounds=3)
    found = tape.what_if(tape.read(tmp_path), rule, mode=Synchronous())
    assert found.parted is None
    assert_identical(found.state, run.states[3])


def test_what_if_equals_another_center_with_the_same_messages(tmp_path):
    """Messages that do not depend on the center have a real run to compare with."""
    with Recording(tmp_path / "a", ADAM) as a, Recording(tmp_path / "b", SGD) as b:
        for _ in range(4):
            for worker in ("w0", "w1"):
                a.send(worker)
                b.send(worker)
    found = tape.what_if(tape.read(tmp_path / "a"), ADAM, SGD)
    assert_identical(found.state, b.states[8])
    # The first answer already is another version.
    assert (found.parted.recorded_version, found.parted.version) == (1, 1)
    assert found.parted.worker == "w0"


def test_what_if_parts_where_the_first_message_would_be_dropped(tmp_path):
    mode = BoundedStaleness(versions=1)
    with Recording(tmp_path / "a") as a, Recording(tmp_path / "b", mode=mode) as b:
        for run in (a, b):
            run.join("w1")
            for _ in range(3):
                run.send("w0")
            run.send("w1", anchor=0)
            run.send("w0")
    found = tape.what_if(tape.read(tmp_path / "a"), DOWNPOUR, mode=mode)
    assert found.parted.worker == "w1"
    assert (found.parted.recorded_version, found.parted.version) == (4, 3)
    assert (found.version, found.recorded_version) == (4, 5)
    assert found.workers["w1"].dropped == 1
    assert_identical(found.state, b.states[4])


def test_what_if_with_rounds_waits_for_all_workers(tmp_path):
    run = record(tmp_path, exchanges=8, workers=2)
    found = tape.what_if(tape.read(tmp_path), DOWNPOUR, mode=Synchronous())
    assert (found.version, found.recorded_version) == (1 + 7 // 2, 8)
    assert found.parted is not None
    assert sum(each.applied for each in found.workers.values()) == 8 - 1
    assert run.states.keys() == set(range(9))


def test_messages_that_wait_for_a_missing_worker_are_counted(tmp_path):
    with Recording(tmp_path) as run:
        run.join("late")
        for _ in range(3):
            run.send("w0")
    found = tape.what_if(tape.read(tmp_path), DOWNPOUR, mode=Synchronous())
    assert found.version == 0
    assert found.workers["w0"].waiting == 3


def test_what_if_with_a_quorum_ends_rounds_after_the_grace_period(tmp_path):
    with Recording(tmp_path) as run:
        run.join("late")
        for _ in range(3):
            run.send("w0")
    mode = Synchronous(quorum=1, grace=5.0)
    found = tape.what_if(tape.read(tmp_path), DOWNPOUR, mode=mode)
    assert found.version == 3
    assert found.workers["w0"].waiting == 0


def test_what_if_of_another_combination(tmp_path):
    rule = shared.average()
    _rounds(tmp_path, rule, rounds=2)
    median = dataclasses.replace(rule, combine=robust.median())
    found = tape.what_if(tape.read(tmp_path), rule, median, mode=Synchronous())
    assert found.version == 2
    assert found.parted.version == 1


def test_loss_is_measured_of_both_centers(tmp_path):
    run = record(tmp_path, ADAM, exchanges=6)
    found = tape.what_if(
        tape.read(tmp_path), ADAM, SGD, function=optax.tree.norm, every=3
    )
    recorded = {each.version: each.numbers["value"] for each in found.recorded}
    for version in (0, 3, 6):
        expected = float(optax.tree.norm(run.states[version].params))
        assert recorded[version] == pytest.approx(expected)
    assert [each.version for each in found.measured] == [0, 3, 6]
    end = float(optax.tree.norm(found.state.params))
    assert found.measured[-1].numbers == {"value": pytest.approx(end)}


def test_rule_with_other_workers_does_not_fit_a_what_if(tmp_path):
    record(tmp_path, ADAM, exchanges=1)
    with pytest.raises(errors.RuleMismatchError, match="what workers do"):
        tape.what_if(tape.read(tmp_path), ADAM, DOWNPOUR)
    codec = rules.agn(shared.adam(0.05), codec=agn_optax.codecs.cast("bfloat16"))
    with pytest.raises(errors.RuleMismatchError, match="codec"):
        tape.what_if(tape.read(tmp_path), ADAM, codec)


@pytest.mark.parametrize("keep", ["hashes", None])
def test_what_if_needs_all_contributions(keep, tmp_path):
    mode = BoundedStaleness(versions=0)
    with Recording(tmp_path, keep=keep, mode=mode, size=1000) as run:
        run.join("b")
        for _ in range(6):
            run.send("a")
            run.write()
        run.send("b")
        run.write()
        found = tape.read(tmp_path)
        if found.snapshots[0].number < 8:  # else no record is left
            with pytest.raises(errors.DurabilityError, match="contributions"):
                tape.what_if(found, DOWNPOUR, begin=None)


def test_what_if_begins_at_a_snapshot(tmp_path):
    run = record(tmp_path, ADAM, exchanges=14, size=1000)
    found = tape.read(tmp_path)
    begin = found.snapshots[2].version
    assert_identical(tape.what_if(found, ADAM, begin=begin).state, run.states[14])
    assert tape.what_if(found, ADAM, begin=begin).parted is None
    with pytest.raises(errors.InvalidArgumentError, match="has a snapshot"):
        tape.what_if(found, ADAM, begin=-1)


# Evaluations.


def test_past_versions_are_evaluated(tmp_path):
    run = record(tmp_path, ADAM, exchanges=8)
    found = tape.evaluate(
        tape.read(tmp_path),
        ADAM,
        lambda params: {"norm": optax.tree.norm(params), "one": 1},
        every=3,
    )
    assert [each.version for each in found] == [0, 3, 6, 8]
    for each in found:
        norm = float(optax.tree.norm(run.states[each.version].params))
        assert each.numbers == {"norm": pytest.approx(norm), "one": 1.0}
    assert [each.time for each in found] == sorted(each.time for each in found)


def test_function_that_returns_no_number_is_an_error(tmp_path):
    record(tmp_path, exchanges=1)
    found = tape.read(tmp_path)
    with pytest.raises(errors.InvalidTypeError, match="dict of numbers"):
        tape.evaluate(found, DOWNPOUR, lambda params: "good")
    with pytest.raises(errors.InvalidArgumentError, match="every"):
        tape.evaluate(found, DOWNPOUR, lambda params: 1.0, every=0)
    nan = tape.evaluate(found, DOWNPOUR, lambda params: math.nan)
    assert math.isnan(nan[0].numbers["value"])
