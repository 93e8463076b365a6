"""The embedded center: atomic versions with any number of threads."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared
from helpers.support import RULES, assert_close, assert_identical, tree
from hypothesis import given, settings
from hypothesis import strategies as st

import agn_optax
from agn_optax import errors, service
from agn_optax.center import BoundedStaleness, Submission, Synchronous


def threads(*targets):
    """Run all targets concurrently; raise the first exception."""
    failures = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=guarded, args=(t,)) for t in targets]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(timeout=120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_local_center_is_a_center():
    assert isinstance(
        agn_optax.LocalCenter(shared.downpour(), jnp.ones(2)), agn_optax.Center
    )


def test_device_may_be_the_name_of_a_platform():
    first = jax.devices("cpu")[0]
    for device in ("cpu", first):
        center = agn_optax.LocalCenter(shared.downpour(), tree(), device=device)
        for leaf in jax.tree.leaves(center.pull().params):
            assert leaf.devices() == {first}
    with pytest.raises(errors.InvalidArgumentError, match="device must be"):
        agn_optax.LocalCenter(shared.downpour(), tree(), device="abacus")


def test_versions_are_immutable_and_count_exchanges():
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    kept = [center.pull()]
    for version in range(1, 6):
        answer = sessions.exchange(
            center, tree(seed=version), anchor_version=0, worker="w"
        )
        assert answer.version == version
        assert answer.staleness == version - 1
        kept.append(center.pull())
    assert [snapshot.version for snapshot in kept] == list(range(6))
    expected = tree()
    for version, snapshot in enumerate(kept):
        if version:
            message = tree(seed=version)
            expected = jax.tree.map(lambda c, m: c - m, expected, message)
        assert_close(snapshot.params, expected)


def test_initial_params_are_copied():
    params = tree()
    center = agn_optax.LocalCenter(shared.downpour(), params)
    jax.tree.map(lambda x: x.delete(), params)
    assert_identical(center.pull().params, tree())


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES)
def test_exchange_returns_the_version_that_the_rule_adopts(rule):
    center = agn_optax.LocalCenter(RULES[rule](), tree())
    before = center.pull()
    answer = sessions.exchange(center, tree(seed=1), anchor_version=0, worker="w")
    if "easgd" in rule:
        assert answer.version == 0
        assert_identical(answer.params, before.params)
    else:
        assert answer.version == 1
        assert_identical(answer.params, center.pull().params)
    assert center.version == 1


@pytest.mark.parametrize("version", [-1, 1, 7])
def test_anchor_version_of_the_future_is_rejected(version):
    center = agn_optax.LocalCenter(shared.downpour(), tree())
    with pytest.raises(errors.InvalidArgumentError, match=r"must be .*got"):
        sessions.exchange(center, tree(), anchor_version=version, worker="w")
    assert center.version == 0
    assert_identical(center.pull().params, tree())


def test_uninitialized_center_raises():
    center = agn_optax.LocalCenter(shared.downpour())
    for call in (
        center.pull,
        center.save,
        lambda: center.version,
        lambda: sessions.exchange(center, tree(), anchor_version=0, worker="w"),
        lambda: center.wait(timeout=0.0),
    ):
        with pytest.raises(errors.NotInitializedError, match="chief=True"):
            call()


def test_only_one_worker_can_initialize():
    center = agn_optax.LocalCenter(shared.downpour())
    center.initialize(tree(), worker="anna")
    sessions.exchange(center, tree(seed=1), anchor_version=0, worker="anna")
    moved = center.pull()
    # The chief may return after a crash and finds the current center.
    center.initialize(tree(), worker="anna")
    assert_identical(center.pull().params, moved.params)
    with pytest.raises(errors.AlreadyInitializedError, match=r"'bert'.*'anna'"):
        center.initialize(tree(), worker="bert")
    assert center.version == 1
    with pytest.raises(
        errors.AlreadyInitializedError, match="created with its parameters"
    ):
        agn_optax.LocalCenter(shared.downpour(), tree()).initialize(tree(), worker="a")


def test_exchanges_of_threads_are_atomic_and_counted():
    """Integers in float32 make the sum exact in any order."""
    workers, exchanges = 8, 40
    center = agn_optax.LocalCenter(shared.downpour(), {"w": jnp.zeros(1000)})
    seen = [[] for _ in range(workers)]

    def work(number):
        message = {"w": jnp.full(1000, float(number + 1))}
        version = 0
        for _ in range(exchanges):
            answer = sessions.exchange(
                center, message, anchor_version=version, worker=f"w{number}"
            )
            assert answer.staleness == answer.version - 1 - version
            version = answer.version
            seen[number].append(version)
            whole = np.asarray(answer.params["w"])
            assert whole.min() == whole.max()

    threads(*[lambda n=n: work(n) for n in range(workers)])
    assert sorted(v for versions in seen for v in versions) == list(
        range(1, workers * exchanges + 1)
    )
    assert all(versions == sorted(versions) for versions in seen)
    total = exchanges * workers * (workers + 1) / 2
    np.testing.assert_array_equal(center.pull().params["w"], -total)


def test_readers_see_whole_versions_while_threads_write():
    center = agn_optax.LocalCenter(
        shared.downpour(), {"a": jnp.zeros(100_000), "b": jnp.zeros(3)}
    )
    done = threading.Event()

    def write():
        one = {"a": jnp.ones(100_000), "b": jnp.ones(3)}
        for _ in range(60):
            sessions.exchange(center, one, anchor_version=0, worker="w")
        done.set()

    def read():
        while not done.is_set():
            snapshot = center.pull()
            for leaf in jax.tree.leaves(snapshot.params):
                np.testing.assert_array_equal(leaf, -float(snapshot.version))

    threads(write, read, read)
    assert center.version == 60


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-8, 8)), min_size=1, max_size=20)
)
def test_sum_of_messages_is_exact_in_any_order(exchanges):
    """For sum rules, the center's displacement is exactly the sum of the messages."""
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(4))
    anchors = [center.pull() for _ in range(4)]
    for worker, value in exchanges:
        message = jnp.full(4, float(value))
        anchors[worker] = sessions.exchange(
            center, message, anchor_version=anchors[worker].version, worker=str(worker)
        )
    assert center.version == len(exchanges)
    np.testing.assert_array_equal(
        center.pull().params, -float(sum(value for _, value in exchanges))
    )


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(-4, 4, width=32)),
        min_size=1,
        max_size=12,
    )
)
def test_easgd_conserves_the_sum_at_every_exchange(exchanges):
    """Law 5 for a center outside the program: an exchange does not change Σx + c."""
    center = agn_optax.LocalCenter(shared.easgd(0.25), jnp.zeros(2))
    workers = [agn_optax.Worker(center, shared.sgd(1.0), period=1) for _ in range(3)]
    loops = [worker.start() for worker in workers]
    for number, value in exchanges:
        params, state = loops[number]
        updates, state = workers[number].tx.update(jnp.full(2, value), state, params)
        loops[number] = optax.apply_updates(params, updates), state
        before = sum(np.asarray(x) for x, _ in loops) + center.pull().params
        loops[number] = workers[number].exchange(*loops[number])
        after = sum(np.asarray(x) for x, _ in loops) + center.pull().params
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("again", [False, True])
def test_message_of_a_worker_that_leaves_while_examined_is_dropped(again, monkeypatch):
    center = agn_optax.LocalCenter(shared.downpour(), jnp.zeros(4))
    store = center.core.store
    measure, asked, goes_on = store.measure, threading.Event(), threading.Event()

    def slow(*args, **options):
        asked.set()
        assert goes_on.wait(60)
        return measure(*args, **options)

    monkeypatch.setattr(store, "measure", slow)
    session = center.join("anna")

    def exchange():
        error = "was replaced" if again else "is not registered at this center"
        with pytest.raises(errors.WorkerStateError, match=error):
            session.exchange(Submission(1, jnp.ones(4), anchor_version=0))

    def leave():
        assert asked.wait(60)
        session.leave()
        if again:
            center.join("anna")
        goes_on.set()

    threads(exchange, leave)
    assert center.version == 0
    assert center.workers == ({"anna"} if again else set())


def test_dynsgd_divides_by_the_staleness_plus_one():
    center = agn_optax.LocalCenter(shared.dynsgd(), jnp.zeros(()))
    expected = 0.0
    for staleness in range(5):  # the anchor stays at version 0
        answer = sessions.exchange(
            center, jnp.float32(1.0), anchor_version=0, worker="slow"
        )
        assert answer.staleness == staleness
        expected -= 1 / (staleness + 1)
        np.testing.assert_allclose(center.pull().params, expected, rtol=1e-6)


def test_worker_and_center_may_be_on_different_devices():
    here, there = jax.devices()[0], jax.devices()[5]
    center = agn_optax.LocalCenter(
        shared.downpour(), jax.device_put({"w": jnp.ones(3)}, here)
    )
    worker = agn_optax.Worker(center, shared.sgd(0.5), period=1)
    params, state = worker.start(jax.device_put({"w": jnp.zeros(3)}, there))
    assert params["w"].devices() == {there}
    grads = jax.device_put({"w": jnp.ones(3)}, there)
    for _ in range(2):
        updates, state = jax.jit(worker.tx.update)(grads, state, params)
        params, state = worker.exchange(optax.apply_updates(params, updates), state)
    assert params["w"].devices() == {there}
    assert center.pull().params["w"].devices() == {here}
    np.testing.assert_allclose(center.pull().params["w"], 0.0)


def test_restore_rejects_the_state_of_another_rule():
    saved = agn_optax.LocalCenter(shared.agn(shared.adam(0.1)), tree()).save()
    with pytest.raises(errors.TreeMismatchError, match="center_state"):
        agn_optax.LocalCenter.restore(shared.downpour(), saved)


def test_saved_state_is_a_copy():
    center = agn_optax.LocalCenter(shared.diloco(), tree())
    saved = center.save()
    expected = jax.tree.map(np.array, saved)
    for seed in range(3):
        sessions.exchange(center, tree(seed=seed), anchor_version=0, worker="w")
    assert_identical(saved, expected)


@pytest.mark.parametrize(
    ("rule", "settings", "warning"),
    [
        (shared.average, {}, "average is a rule for rounds.*mode Asynchronous"),
        (shared.diloco, {"mode": BoundedStaleness(versions=2)}, "diloco is.*BoundedS"),
        (shared.diloco, {"mode": Synchronous()}, ""),
        (shared.downpour, {}, ""),
    ],
)
@pytest.mark.parametrize("make", [agn_optax.LocalCenter, service.serve])
def test_rule_for_rounds_used_one_by_one_gives_a_warning(
    make, rule, settings, warning, caplog
):
    with make(rule(), jnp.zeros(2), **settings):
        messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == bool(warning)
    assert all(
        re.search(f"{warning}.*n workers move the center n", line) for line in messages
    )


def test_center_is_closed_at_the_end_of_its_block():
    with agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2)) as center:
        session = center.join("anna")
        session.exchange(Submission(1, jnp.ones(2), anchor_version=0))
    with pytest.raises(errors.CenterClosedError):
        session.exchange(Submission(2, jnp.ones(2), anchor_version=1))
    np.testing.assert_array_equal(center.pull().params, -1.0)


def aligned(count):
    """Return zeros aligned such that XLA reads NumPy's memory in place."""
    raw = np.zeros(4 * count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 4 * count].view(np.float32)


@pytest.mark.parametrize("rule", ["downpour", "easgd"])
def test_contribution_of_numpy_may_be_overwritten_once_collected(rule):
    count = 1 << 21  # large enough that reading takes a while
    center = agn_optax.LocalCenter(RULES[rule](), jnp.zeros(count))
    session, message = center.join("anna"), aligned(count)
    for sequence in range(1, 11):
        message[:] = 1.0
        session.exchange(Submission(sequence, message, anchor_version=center.version))
        message[:] = np.nan
        params = np.asarray(center.pull().params)
        assert np.all(params == params[0])


@pytest.mark.parametrize("durable", [False, True])
def test_numbers_of_numpy_are_accepted(durable, tmp_path):
    """The journal writes JSON, which does not support NumPy's numbers."""
    kept = agn_optax.center.Journal(tmp_path) if durable else None
    with agn_optax.LocalCenter(shared.downpour(), jnp.zeros(2), durability=kept) as one:
        answer = one.join("anna").exchange(
            Submission(
                np.int64(1),
                jnp.ones(2),
                anchor_version=np.int32(0),
                steps=np.int64(3),
                weight=np.float32(0.5),
            )
        )
        assert answer.applied
        assert (
            one.join("bert")
            .exchange(Submission(1, jnp.ones(2), anchor_version=1))
            .applied
        )


def test_interrupt_at_a_barrier_removes_the_worker(monkeypatch):
    """Otherwise other workers would wait for it forever."""
    center = agn_optax.LocalCenter(
        shared.downpour(), jnp.zeros(2), mode=Synchronous(), barrier=2
    )

    def interrupt(timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(center.core, "wait_for_barrier", interrupt)
    with pytest.raises(KeyboardInterrupt):
        center.join("anna")
    assert not center.workers
