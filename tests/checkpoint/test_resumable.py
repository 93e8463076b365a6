"""Resumable workers: a killed worker resumes without losing or repeating a message."""

import contextlib
import shutil

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sessions, shared

import agn_optax
from agn_optax import checkpoint, errors
from agn_optax.center import Session, Submission

SAMPLES, PERIOD = 7, 2


class Killed(BaseException):
    """Stand-in for SIGKILL; no cleanup code may matter after it."""


@pytest.fixture
def journaled(tmp_path):
    """Return a center that outlives its workers, as a served one does."""
    durability = agn_optax.center.Journal(tmp_path / "center")
    center = agn_optax.LocalCenter(
        shared.downpour(), jnp.zeros(SAMPLES), durability=durability
    )
    yield center
    center.close()


def resumable(center, folder, overlap=False, period=PERIOD, **others):
    worker = agn_optax.Worker(
        center, shared.sgd(1.0), period=period, name="w", overlap=overlap
    )
    data = iter(grain.MapDataset.range(SAMPLES).to_iter_dataset())
    return checkpoint.Resumable(worker, folder, data=data, **others), data


def train_step(loop, params, state, sample):
    """Train on a sample, which adds one to its own element of each leaf."""
    grad = -jax.nn.one_hot(sample, SAMPLES)
    grads = jax.tree.map(lambda leaf: grad.reshape(leaf.shape), params)
    updates, state = loop.tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train_epoch(loop, data, before=lambda sample: None, **start):
    """Train over an epoch; each sample adds one to its own element of the center."""
    params, state = loop.start(**start)
    for sample in data:
        before(int(sample))
        params, state = train_step(loop, params, state, sample)
        params, state = loop.exchange(params, state)
    loop.flush(params, state)


def test_checkpoint_is_refused_by_an_old_copy_of_its_center(tmp_path):
    """It has what the worker has seen of the center: see docs/tape.md."""
    journal = agn_optax.center.Journal

    def serve(folder):
        return agn_optax.LocalCenter(
            shared.downpour(), jnp.zeros(SAMPLES), durability=journal(tmp_path / folder)
        )

    center = serve("a")
    loop, data = resumable(center, tmp_path / "w")
    params, state = loop.start()
    for i, sample in enumerate(data):
        if i == PERIOD:
            shutil.copytree(tmp_path / "a", tmp_path / "old")
        params, state = train_step(loop, params, state, sample)
        params, state = loop.exchange(params, state)
    center.close()
    with serve("old") as old:
        for version in range(old.version, center.version):  # as old as the worker
            message = jnp.zeros(SAMPLES)
            sessions.exchange(old, message, anchor_version=version, worker="other")
        loop, _ = resumable(old, tmp_path / "w")
        with pytest.raises(errors.OtherHistoryError, match="worker 'w' has seen: rec"):
            loop.start()
    with serve("a") as again:
        resumable(again, tmp_path / "w")[0].start()


def kill(*args, **kwargs):
    raise Killed


def kill_in_a_local_step(loop, monkeypatch):
    def before(sample):
        if sample == 5:  # after two exchanges; a local step is lost
            kill()

    return before


def kill_before_sending(loop, monkeypatch):
    """Kill after the checkpoint is written and before the center gets the message."""
    join, sessions = loop.worker.center.join, []

    def recorded_join(*args, **kwargs):
        sessions.append(join(*args, **kwargs))
        return sessions[-1]

    monkeypatch.setattr(loop.worker.center, "join", recorded_join)

    def before(sample):
        if sample == 3:
            monkeypatch.setattr(sessions[-1], "exchange", kill)

    return before


def kill_before_the_response(loop, monkeypatch):
    """Kill after the center applied the message and before the worker knows."""
    before = kill_before_sending(loop, monkeypatch)

    def and_apply(sample):
        before(sample)
        if sample == 3:
            session = sessions.of_worker(loop.worker)
            exchange = type(session).exchange

            def applied(*args, **kwargs):
                exchange(session, *args, **kwargs)
                kill()

            monkeypatch.setattr(session, "exchange", applied)

    return and_apply


def kill_while_writing_a_checkpoint(loop, monkeypatch):
    def before(sample):
        if sample == 5:
            monkeypatch.setattr(loop.checkpoints, "write", kill)

    return before


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("killed", "period"),
    [
        (kill_in_a_local_step, PERIOD),
        (kill_before_sending, PERIOD),
        (kill_before_the_response, PERIOD),
        (kill_before_the_response, 1),
        (kill_while_writing_a_checkpoint, PERIOD),
    ],
)
def test_every_sample_counts_once_after_a_kill(
    killed, period, journaled, tmp_path, monkeypatch
):
    exchanges = -(-SAMPLES // period)
    loop, data = resumable(journaled, tmp_path / "own", period=period)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        train_epoch(loop, data, killed(loop, patched))
    loop, data = resumable(journaled, tmp_path / "own", period=period)
    train_epoch(loop, data)
    assert loop.resumed
    np.testing.assert_array_equal(journaled.pull().params, np.ones(SAMPLES))
    assert (loop.exchanges, journaled.version) == (exchanges, exchanges)
    # Started again after the epoch, it has nothing to do.
    loop, data = resumable(journaled, tmp_path / "own", period=period)
    train_epoch(loop, data)
    assert journaled.version == exchanges


def test_resumed_worker_may_have_another_period(journaled, tmp_path):
    """The first message is that of the interrupted round; the next ones are shorter."""
    loop, data = resumable(journaled, tmp_path / "own", period=3)
    with contextlib.suppress(Killed):
        train_epoch(loop, data, kill_in_a_local_step(loop, None))
    assert journaled.version == 1  # one exchange of three samples
    loop, data = resumable(journaled, tmp_path / "own", period=1)
    train_epoch(loop, data)
    np.testing.assert_array_equal(journaled.pull().params, np.ones(SAMPLES))
    assert journaled.version == 1 + SAMPLES - 3


def test_resumed_worker_must_have_the_same_name(journaled, tmp_path):
    loop, data = resumable(journaled, tmp_path / "own")
    with contextlib.suppress(Killed):
        train_epoch(loop, data, kill_in_a_local_step(loop, None))
    worker = agn_optax.Worker(journaled, shared.sgd(1.0), period=PERIOD, name="v")
    loop = checkpoint.Resumable(worker, tmp_path / "own", data=data)
    with pytest.raises(errors.WorkerStateError, match=r"'w'.*'v'"):
        loop.start()


def test_worker_resumes_with_a_restarted_center(tmp_path):
    durability = agn_optax.center.Journal(tmp_path / "center")
    for ends in (kill_in_a_local_step, None):
        center = agn_optax.LocalCenter(
            shared.downpour(), jnp.zeros(SAMPLES), durability=durability
        )
        loop, data = resumable(center, tmp_path / "own")
        with contextlib.closing(center), contextlib.suppress(Killed):
            train_epoch(loop, data, ends(loop, None) if ends else lambda sample: None)
    np.testing.assert_array_equal(center.pull().params, np.ones(SAMPLES))
    assert loop.exchanges == 4


def test_overlapping_worker_resumes(journaled, tmp_path):
    loop, data = resumable(journaled, tmp_path / "own", overlap=True)
    with pytest.raises(Killed):
        train_epoch(loop, data, kill_in_a_local_step(loop, None))
    loop, data = resumable(journaled, tmp_path / "own", overlap=True)
    train_epoch(loop, data)
    np.testing.assert_array_equal(journaled.pull().params, np.ones(SAMPLES))


def test_checkpoint_is_written_before_every_message(journaled, tmp_path, monkeypatch):
    """It is written once for a retried message, and not for an empty flush."""
    loop, data = resumable(journaled, tmp_path / "own")
    # Otherwise it would continue without the center.
    sessions.fragment(loop.worker).machine.patience = 0
    train_epoch(loop, data)
    params, state = loop.flush(*loop.worker.start())
    wrote = []
    write = loop.checkpoints.write

    def counted(*args, **kwargs):
        wrote.append(journaled.version)
        write(*args, **kwargs)

    monkeypatch.setattr(loop.checkpoints, "write", counted)
    session = sessions.of_worker(loop.worker)
    for lost in (True, False):
        with monkeypatch.context() as patched:
            if lost:

                def unreachable(*args, **kwargs):
                    raise errors.CenterUnreachableError("gone")

                patched.setattr(session, "submit", unreachable)
                params, state = loop.exchange(params, state)
                with pytest.raises(errors.CenterUnreachableError):
                    loop.exchange(params, state)
            else:
                params, state = loop.exchange(params, state)
    assert wrote == [4]  # once, before the message was sent
    assert journaled.version == 5


def test_dict_of_arrays_is_restored_in_place(journaled, tmp_path):
    stats = {"mean": jnp.zeros(2)}
    loop, data = resumable(journaled, tmp_path / "own", kept=stats)
    params, state = loop.start()
    for sample in data:
        if sample == 5:
            break
        stats["mean"] = stats["mean"] + 1.0
        params, state = train_step(loop, params, state, sample)
        params, state = loop.exchange(params, state)
    stats = {"mean": jnp.zeros(2)}
    loop, data = resumable(journaled, tmp_path / "own", kept=stats)
    train_epoch(loop, data)
    np.testing.assert_array_equal(loop.center.pull().params, np.ones(SAMPLES))
    np.testing.assert_array_equal(
        stats["mean"], [4.0, 4.0]
    )  # the value at the last checkpoint


def test_center_that_would_be_lost_with_the_process_is_rejected(tmp_path):
    whole = agn_optax.LocalCenter(shared.downpour())
    shards = [agn_optax.LocalCenter(shared.downpour()) for _ in range(2)]
    for center in (whole, agn_optax.center.ShardedCenter(shards)):
        with pytest.raises(
            errors.InvalidArgumentError, match=r"got worker 'w' .*would be lost"
        ):
            resumable(center, tmp_path)


def test_checkpoint_of_another_center_or_older_state_is_rejected(journaled, tmp_path):
    loop, data = resumable(journaled, tmp_path / "own")
    with contextlib.suppress(Killed):
        train_epoch(loop, data, kill_in_a_local_step(loop, None))
    another = agn_optax.center.Journal(tmp_path / "another")
    with contextlib.closing(
        agn_optax.LocalCenter(shared.downpour(), jnp.zeros(SAMPLES), durability=another)
    ) as center:
        for _ in range(2):  # otherwise the worker would know a later version
            session = center.join("x")
            session.exchange(Submission(1, jnp.zeros(SAMPLES), anchor_version=0))
        loop, _ = resumable(center, tmp_path / "own")
        with pytest.raises(
            errors.WorkerStateError, match=r"'w' cannot resume.*has restarted"
        ):
            loop.start()
    # Its own center, after later exchanges.
    shutil.copytree(tmp_path / "own", tmp_path / "old")
    loop, data = resumable(journaled, tmp_path / "own")
    train_epoch(loop, data)
    loop, _ = resumable(journaled, tmp_path / "old")
    with pytest.raises(errors.WorkerStateError, match=r"exchanges that worker 'w'"):
        loop.start()
    with pytest.raises(errors.InvalidTypeError, match="worker must be"):
        checkpoint.Resumable(journaled, tmp_path)


# With fragments, each sample has an element in both halves of the center.
HALVES = {"a": jnp.zeros(SAMPLES), "b": jnp.zeros((1, SAMPLES))}


@pytest.fixture
def halved(tmp_path):
    """Return two centers that outlive their worker, with half of the params each."""
    centers = [
        agn_optax.LocalCenter(
            shared.downpour(), durability=agn_optax.center.Journal(tmp_path / name)
        )
        for name in HALVES
    ]
    fragments = agn_optax.Fragments(len(centers))
    center = agn_optax.center.ShardedCenter(centers, fragments=fragments)
    center.initialize(HALVES, worker="chief")
    yield center
    for center in centers:
        center.close()


def by_fragments(center, folder, *, overlap=False, period=4, **late):
    fragments = agn_optax.Fragments(2, **late)
    settings = {"period": period, "name": "w", "overlap": overlap}
    worker = agn_optax.Worker(center, shared.sgd(1.0), fragments=fragments, **settings)
    data = iter(grain.MapDataset.range(SAMPLES).to_iter_dataset())
    return checkpoint.Resumable(worker, folder, data=data), data


def killed_at(place, loop, monkeypatch):
    """Kill in a step, before a fragment's message is sent, or after it is applied."""
    if place == "step":
        return kill_in_a_local_step(loop, monkeypatch)
    sent = []
    send = Session.exchange

    def exchange(self, *args, **kwargs):
        sent.append(1)
        if len(sent) == 3 and place == "sending":  # the first half's second message
            kill()
        answer = send(self, *args, **kwargs)
        if len(sent) >= 3:
            kill()
        return answer

    monkeypatch.setattr(Session, "exchange", exchange)
    return lambda sample: None


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("place", "late"),
    [
        ("step", {"overlap": True}),
        ("sending", {}),
        ("sending", {"delay": 1}),
        ("applied", {}),
        ("applied", {"overlap": True}),
        ("applied", {"delay": 1, "mixing": 0.5}),
    ],
)
def test_every_sample_counts_once_in_each_fragment_after_a_kill(
    place, late, halved, tmp_path, monkeypatch
):
    loop, data = by_fragments(halved, tmp_path / "own", **late)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        train_epoch(loop, data, killed_at(place, loop, patched))
    before = [center.version for center in halved.centers]
    assert sum(before) == {"step": 2, "sending": 2, "applied": 3}[place]
    loop, data = by_fragments(halved, tmp_path / "own", **late)
    train_epoch(loop, data)
    assert loop.resumed
    # Steps between a send and its receive count only with the mixing weight.
    meanwhile = {"a": [2, 6], "b": [4]} if "delay" in late else {"a": [], "b": []}
    for name, half in halved.pull().params.items():
        counts = np.asarray(half).ravel()
        once = np.delete(counts, meanwhile[name])
        np.testing.assert_array_equal(once, np.ones(len(once)))
        assert set(counts) <= {1.0, late.get("mixing", 0.0)}
    assert [center.version for center in halved.centers] == [3, 2]
    # Started again after the epoch, it has nothing to do.
    loop, data = by_fragments(halved, tmp_path / "own", **late)
    train_epoch(loop, data)
    assert [center.version for center in halved.centers] == [3, 2]


def test_killed_flush_of_fragments_is_completed_once(halved, tmp_path, monkeypatch):
    """The resumed process has another period."""
    loop, data = by_fragments(halved, tmp_path / "own")
    params, state = loop.start()
    for _, sample in zip(range(3), data, strict=False):
        params, state = train_step(loop, params, state, sample)
        params, state = loop.exchange(params, state)
    monkeypatch.setattr(sessions.of_worker(loop.worker, 1), "exchange", kill)
    with pytest.raises(Killed):
        loop.flush(params, state)
    assert [center.version for center in halved.centers] == [1, 0]
    loop, data = by_fragments(halved, tmp_path / "own", period=2)
    train_epoch(loop, data)
    assert [center.version for center in halved.centers] == [4, 3]
    for half in jax.tree.leaves(halved.pull().params):
        np.testing.assert_array_equal(half.ravel(), np.ones(SAMPLES))


def test_fragment_with_an_unacknowledged_message_is_sent_first(
    halved, tmp_path, monkeypatch
):
    """Another fragment would be due first if local steps were counted at each call."""
    loop, data = by_fragments(halved, tmp_path / "own", offsets=(4, 2))
    sessions.fragment(loop.worker, 1).machine.patience = 0
    params, state = loop.start()
    numbers = []
    write = loop.checkpoints.write

    def written(number, **parts):
        numbers.append(number)
        write(number, **parts)

    monkeypatch.setattr(loop.checkpoints, "write", written)

    def unreachable(*args, **kwargs):
        raise errors.CenterUnreachableError("gone")

    for _, sample in zip(range(3), data, strict=False):
        params, state = train_step(loop, params, state, sample)
        with monkeypatch.context() as patched:
            session = sessions.of_worker(loop.worker, 1)
            patched.setattr(session, "submit", unreachable)
            for _ in range(3 if sample == 1 else 0):
                with pytest.raises(errors.CenterUnreachableError):
                    loop.exchange(params, state)
                assert [center.version for center in halved.centers] == [0, 0]
        params, state = loop.exchange(params, state)
        made = tuple(worker.machine.committed.steps for worker in loop.worker._workers)
        assert made == [(1, 1), (2, 0), (3, 1)][int(sample)]
    assert numbers == [0]
    loop, data = by_fragments(halved, tmp_path / "own", offsets=(4, 2))
    train_epoch(loop, data)
    for half in jax.tree.leaves(halved.pull().params):
        np.testing.assert_array_equal(half.ravel(), np.ones(SAMPLES))


@pytest.mark.few(1)
@pytest.mark.parametrize("killed", ["then", "after it"])
def test_flush_after_an_unacknowledged_fragment_is_resumed(
    killed, halved, tmp_path, monkeypatch
):
    """The other fragment, which flush also sends, is not in the last checkpoint."""
    loop, data = by_fragments(halved, tmp_path / "own", offsets=(4, 2))
    workers = loop.worker._workers
    workers[1].machine.patience = 0
    params, state = loop.start()
    for sample in data:
        params, state = train_step(loop, params, state, sample)
        if sample == 1:
            break
        params, state = loop.exchange(params, state)

    def unreachable(*args, **kwargs):
        raise errors.CenterUnreachableError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(workers[1].session, "submit", unreachable)
        with pytest.raises(errors.CenterUnreachableError):
            loop.exchange(params, state)
        with pytest.raises(errors.CenterUnreachableError):
            loop.flush(params, state)
        assert [center.version for center in halved.centers] == [0, 0]
    if killed == "then":
        monkeypatch.setattr(workers[0].session, "collect", kill)
        with pytest.raises(Killed):
            loop.flush(params, state)
    else:
        loop.flush(params, state)
    assert [center.version for center in halved.centers] == [1, 1]
    loop, data = by_fragments(halved, tmp_path / "own", offsets=(4, 2))
    train_epoch(loop, data)
    for half in jax.tree.leaves(halved.pull().params):
        np.testing.assert_array_equal(half.ravel(), np.ones(SAMPLES))


@pytest.mark.parametrize("make", [by_fragments, resumable])
@pytest.mark.few(1)
def test_failed_checkpoint_write_loses_no_sample(
    make, journaled, halved, tmp_path, monkeypatch
):
    """A response was adopted before the failure, and the loop's arrays were donated."""
    center = halved if make is by_fragments else journaled
    loop, data = make(center, tmp_path / "own", overlap=True)
    write, failed = loop.checkpoints.write, []

    def fails_at_times(number, **parts):
        if number >= 2 and len(failed) < number - 1:
            failed.append(number)
            raise errors.DurabilityError("no space left")
        write(number, **parts)

    monkeypatch.setattr(loop.checkpoints, "write", fails_at_times)
    params, state = loop.start()
    for sample in data:
        params, state = train_step(loop, params, state, sample)
        while True:
            with contextlib.suppress(errors.DurabilityError):
                params, state = loop.exchange(params, state)
                break
    while True:
        with contextlib.suppress(errors.DurabilityError):
            loop.flush(params, state)
            break
    assert failed
    for half in jax.tree.leaves(center.pull().params):
        np.testing.assert_array_equal(half.ravel(), np.ones(SAMPLES))


def test_invalid_exchange_writes_no_checkpoint(halved, journaled, tmp_path):
    by_parts, _ = by_fragments(halved, tmp_path / "halves")
    whole, _ = resumable(journaled, tmp_path / "whole", period=1)
    for loop in (by_parts, whole):
        params, state = loop.start()
        with pytest.raises(errors.InvalidArgumentError, match="weight must be"):
            loop.exchange(params, state, steps=4, weight=-1.0)
        with pytest.raises(errors.InvalidArgumentError, match=r"steps.* must be"):
            loop.exchange(params, state, steps=-1)
        assert loop.checkpoints.latest is None
    params, state = whole.exchange(params, state, weight=np.float32(2.0))
    assert whole.checkpoints.latest[0] == 0


def test_resuming_with_other_fragments_is_rejected(halved, tmp_path):
    loop, data = by_fragments(halved, tmp_path / "own")
    with contextlib.suppress(Killed):
        train_epoch(loop, data, kill_in_a_local_step(loop, None))
    whole = agn_optax.Worker(halved, shared.sgd(1.0), period=2, name="w")
    other = checkpoint.Resumable(whole, tmp_path / "own", data=data)
    with pytest.raises(errors.TreeMismatchError, match=r"no fragments, and .* has 2"):
        other.start()


@pytest.mark.parametrize("name", ["path", "like", "number", "agn_optax"])
def test_reserved_name_is_rejected_before_anything_is_written(
    name, journaled, tmp_path
):
    worker = agn_optax.Worker(journaled, shared.sgd(1.0), period=PERIOD, name="w")
    with pytest.raises(errors.InvalidArgumentError, match=f"saved as '{name}'.*like"):
        checkpoint.Resumable(worker, tmp_path / "own", **{name: {"mean": jnp.zeros(2)}})
    assert not (tmp_path / "own").exists()


def test_objects_of_any_other_name_are_restored(journaled, tmp_path):
    for mean in (1.0, 0.0):
        others = {
            name: {"mean": jnp.full(2, mean)} for name in ("fragments", "resume_token")
        }
        loop, data = resumable(journaled, tmp_path / "own", **others)
        params, state = loop.start()
        if not loop.resumed:
            params, state = train_step(loop, params, state, next(data))
            loop.flush(*loop.exchange(params, state))
        loop.close()
    assert loop.resumed
    for kept in others.values():
        np.testing.assert_array_equal(kept["mean"], [1.0, 1.0])


def test_worker_started_after_close_writes_checkpoints_again(journaled, tmp_path):
    loop, _ = resumable(journaled, tmp_path / "w", period=1)
    numbers = []
    for _ in range(2):
        params, state = loop.start()
        for sample in range(2):
            params, state = train_step(loop, params, state, sample)
            params, state = loop.exchange(params, state)
        numbers.append(loop.checkpoints.latest[0])
        loop.close()
    assert numbers == [1, 3]


def test_close_leaves_the_hook_of_a_later_resumable(journaled, tmp_path):
    first, _ = resumable(journaled, tmp_path / "a")
    first.start()
    second = checkpoint.Resumable(first.worker, tmp_path / "b")
    second.start()
    first.close()
    assert first.worker.before_send == second._before_send
    second.close()
    assert first.worker.before_send is None


@pytest.mark.slow
def test_checkpoint_is_loaded_onto_the_shardings_of_the_given_params(tmp_path):
    durability = agn_optax.center.Journal(tmp_path / "center")
    rule = shared.agn(shared.adam(0.1))
    center = agn_optax.LocalCenter(rule, durability=durability)

    def start(shape, axes):
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, ("x", "y")[: len(shape)])
        sharding = jax.sharding.NamedSharding(mesh, jax.P(*axes))
        params = {"w": jax.device_put(jnp.ones((8, 4)), sharding)}
        worker = agn_optax.Worker(center, shared.adam(0.1), period=2, name="w")
        loop = checkpoint.Resumable(worker, tmp_path / "worker")
        return loop, loop.start(params, chief=True), sharding

    loop, (params, state), _ = start((8,), ("x",))
    for _ in range(3):
        grads = {"w": jnp.arange(32.0).reshape(8, 4)}
        updates, state = loop.tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        params, state = loop.exchange(params, state)
    loop.save(params, state)
    loop.close()
    _, resumed, sharding = start((2, 4), ("x", "y"))
    for new, old in zip(
        jax.tree.leaves(resumed), jax.tree.leaves((params, state)), strict=True
    ):
        np.testing.assert_array_equal(new, old)
        if new.shape == (8, 4):
            assert new.sharding == sharding
    center.close()
