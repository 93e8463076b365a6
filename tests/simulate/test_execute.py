"""Executed schedules: traces, digests, targets, drawings and bad input."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, shared
from helpers.support import assert_close, assert_identical, compilations
from jax.tree_util import Partial

import agn_optax
from agn_optax import errors, simulate
from agn_optax.center import (
    BoundedStaleness,
    Journal,
    Limits,
    MessageLimits,
    Synchronous,
)
from agn_optax.round import Fragments
from agn_optax.simulate import Cluster, Fixed, Link, LogNormal

CLUSTER = Cluster(workers=6, speed=LogNormal(0.1, 0.3), link=Link(latency=0.1))
RULE = shared.agn(shared.sgd(0.1))


def data(worker, step):
    key = jax.random.fold_in(jax.random.key(worker), step)
    x = jax.random.normal(key, (8, 3))
    return {"x": x, "y": jnp.sin(x.sum(axis=-1, keepdims=True))}


def evaluate(params):
    return problem.loss(params, data(1000, 0))


def planned(rule=RULE, exchanges=60, **settings):
    settings = {"period": 3, "params": problem.params(), **settings}
    return simulate.schedule(CLUSTER, rule=rule, exchanges=exchanges, **settings)


def execute(schedule, **settings):
    settings = {
        "params": problem.params(),
        "loss": problem.loss,
        "data": data,
    } | settings
    return simulate.execute(schedule, shared.sgd(0.05), **settings)


def run(data=data, **settings):
    return simulate.run(
        RULE,
        shared.sgd(0.05),
        problem.loss,
        data,
        problem.params(),
        **{"cluster": CLUSTER, "period": 3, "exchanges": 60, **settings},
    )


def test_traces_have_an_entry_for_each_settled_message():
    found = run(evaluate=evaluate, every=20)
    assert len(found) == 60
    np.testing.assert_array_equal(found.steps, 3 * np.arange(1, 61))
    np.testing.assert_array_equal(found.samples, 8 * found.steps)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(problem.params()))
    np.testing.assert_array_equal(found.bytes, 2 * size * np.arange(1, 61))
    assert np.all(np.diff(found.seconds) >= 0)
    assert found.seconds[-1] == pytest.approx(found.schedule.duration)
    np.testing.assert_array_equal(found.evaluation_versions, [20, 40, 60])
    np.testing.assert_array_equal(found.evaluation_seconds, found.seconds[[19, 39, 59]])
    assert found.evaluations[-1] == evaluate(found.center.params)
    assert found.evaluations[-1] < found.evaluations[0] < evaluate(problem.params())
    assert found.staleness.max() > 1
    assert found.waiting.shape == (6,)


def test_loss_of_a_message_is_the_mean_over_its_local_steps():
    schedule = planned(exchanges=1)
    found = execute(schedule)
    (worker,) = schedule.worker[schedule.order >= 0]
    params, losses = problem.params(), []
    for step in range(3):
        value, grads = jax.value_and_grad(problem.loss)(params, data(worker, step))
        losses.append(value)
        params = jax.tree.map(lambda x, g: x - 0.05 * g, params, grads)
    assert found.loss[0] == pytest.approx(np.mean(losses), rel=1e-5)


SAYS_DIGEST = """
import sys
sys.path[:0] = {path!r}
from simulate.test_execute import run
print(run(evaluate=None, seed=3).digest)
"""


@pytest.mark.slow
def test_seed_gives_the_same_digest_in_another_process():
    tests = str(pathlib.Path(__file__).parents[1])
    code = SAYS_DIGEST.format(path=[tests])
    said = subprocess.run(  # noqa: S603 our own program
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == run(seed=3).digest
    assert run(seed=4).digest != run(seed=3).digest


def test_other_numbers_give_another_digest():
    schedule = planned()
    first = execute(schedule).digest
    assert execute(schedule).digest == first
    scaled = jax.tree.map(lambda x: 1.001 * x, problem.params())
    assert execute(schedule, params=scaled).digest != first


def test_widths_agree_to_rounding():
    schedule = planned()
    whole, narrow = execute(schedule), execute(schedule, width=1)
    np.testing.assert_allclose(whole.loss, narrow.loss, rtol=1e-5)


def test_later_runs_compile_nothing():
    run()
    with compilations() as compiled:
        run(seed=1)
        larger = Cluster(workers=7, speed=LogNormal(0.2, 0.3), link=Link(latency=0.2))
        run(cluster=larger, exchanges=90, period=5)
    assert compiled == []


def test_data_with_other_arrays_compile_nothing():
    def batch(y, worker, step):
        return data(worker, step) | {"y": y + jnp.zeros((8, 1))}

    found = run(Partial(batch, np.float32(0.5)))
    with compilations() as compiled:
        again = run(Partial(batch, np.float32(0.5)))
        other = run(Partial(batch, np.float32(2.0)))
    assert compiled == []
    assert again.digest == found.digest
    constant = run(lambda worker, step: batch(2.0, worker, step))
    np.testing.assert_allclose(other.loss, constant.loss, rtol=1e-5)


def test_data_of_the_host_compile_nothing():
    first = jax.tree.map(np.asarray, data(0, 0))

    def run_from(shift):
        return run(lambda worker, step: first | {"y": first["y"] + shift + int(step)})

    found = run_from(0)
    with compilations() as compiled:
        other = run_from(1)
    assert compiled == []
    assert np.all(other.loss != found.loss)


def test_another_center_optimizer_compiles_only_the_center():
    def run_with(rate):
        rule = dataclasses.replace(RULE, center=optax.sgd(rate))
        return simulate.run(
            rule,
            shared.sgd(0.05),
            problem.loss,
            data,
            problem.params(),
            cluster=CLUSTER,
            period=3,
            exchanges=60,
        )

    run()
    with compilations() as compiled:
        found = run_with(0.2)
    assert compiled
    assert "stretch" not in str(compiled)
    assert_close(found.params, run_with(0.2).params)
    assert np.all(found.loss[-5:] != run().loss[-5:])


def test_steps_end_a_run():
    found = run(exchanges=None, steps=61)
    assert found.steps[-1] == 63
    assert found.digest == run(exchanges=21).digest


def test_target_ends_the_execution_and_changes_nothing_before():
    whole = run(evaluate=evaluate, every=5)
    target = float(whole.evaluations[3])
    assert np.all(whole.evaluations[:3] > target)
    found = run(evaluate=evaluate, every=5, target=target)
    assert found.center.version == found.evaluation_versions[-1] == 20
    np.testing.assert_array_equal(found.loss, whole.loss[:20])
    np.testing.assert_array_equal(found.evaluations, whole.evaluations[:4])


def test_real_center_goes_on_from_a_simulated_one(tmp_path):
    found = run()
    journal = Journal(tmp_path / "center")
    agn_optax.LocalCenter.restore(RULE, found.center, durability=journal).close()
    with agn_optax.LocalCenter(RULE, problem.params(), durability=journal) as center:
        assert center.version == found.center.version
        assert_identical(center.save(), found.center)


@pytest.mark.slow
def test_worker_that_begins_at_a_later_version_adopts_it():
    cluster = Cluster(workers=2, speed=LogNormal(0.1, 0.1), joins={"worker-1": 3.0})
    schedule = simulate.schedule(
        cluster, period=3, rule=RULE, params=problem.params(), exchanges=30
    )
    first = np.flatnonzero(schedule.worker == 1)[0]
    assert schedule.anchor_version[first] > 3
    exact, fast = execute(schedule, exact=True), execute(schedule)
    np.testing.assert_allclose(fast.loss, exact.loss, rtol=1e-5)


@pytest.mark.slow
def test_traces_are_drawn(tmp_path):
    run(evaluate=evaluate).draw(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_progress_is_reported_to_its_end():
    fractions = []
    schedule = planned(exchanges=600)
    execute(schedule, progress=fractions.append)
    assert fractions == sorted(fractions)
    assert 0.3 < fractions[0] <= fractions[-1] <= 1


@pytest.mark.slow
def test_message_that_a_center_rejects_is_an_error_in_a_schedule_without_numbers():
    explode = lambda params, batch: 1e12 * problem.loss(params, batch)  # noqa: E731
    with pytest.raises(errors.SimulationError, match=r"rejects message 1 of worker"):
        execute(planned(), loss=explode)
    limits = Limits(messages=MessageLimits(norm=1e-6))
    with pytest.raises(errors.SimulationError, match=r"takes 1e-06 at most"):
        execute(planned(limits=limits))
    # The message of an elastic rule depends on the newest center.
    with pytest.raises(errors.SimulationError, match=r"not finite"):
        execute(planned(shared.easgd(0.3)), loss=explode)


@pytest.mark.slow
def test_run_without_rejections_is_the_execution_of_its_schedule():
    schedule = planned(overlap=True)
    found = run(overlap=True)
    assert found.schedule.digest == schedule.digest
    assert execute(schedule).digest == found.digest


def test_schedule_after_a_rejection_is_executed():
    limits = Limits(messages=MessageLimits(norm=1.3))
    found = run(limits=limits)
    rejected = found.schedule.outcome == simulate.Outcome.REJECTED
    assert 0 < np.sum(rejected) < 60
    assert found.center.version == 60 - np.sum(rejected)
    assert execute(found.schedule).digest == found.digest


def test_run_in_which_all_workers_are_rejected_cannot_end():
    limits = Limits(messages=MessageLimits(norm=1e-6, in_a_row=2))
    with pytest.raises(errors.SimulationError, match="6 of 6 workers have left"):
        run(limits=limits)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 2])
def test_fragments_with_overlap_agree_to_rounding(delay):
    settings = {"fragments": Fragments(2, delay=delay), "overlap": not delay}
    exact, fast = (run(period=6, exact=e, **settings) for e in (True, False))
    assert fast.schedule.digest == exact.schedule.digest
    assert np.any(fast.schedule.steps_since > 0)
    assert_close(fast.params, exact.params)
    np.testing.assert_allclose(fast.loss, exact.loss, rtol=1e-4, atol=1e-5)


def test_evaluations_of_fragments_count_the_versions_of_all():
    found = run(period=4, fragments=Fragments(2), evaluate=evaluate, every=20)
    assert found.steps[-1] == sum(found.schedule.steps[found.rows]) // 2
    np.testing.assert_array_equal(found.evaluation_versions, [20, 40, 60])
    assert sum(center.version for center in found.center) == 60
    assert found.evaluations[-1] == evaluate(found.params)


def test_tape_of_a_run_with_fragments_is_rejected_before_it_begins(tmp_path):
    journal = Journal(tmp_path / "center")
    with pytest.raises(errors.InvalidArgumentError, match="needs workers without"):
        run(fragments=Fragments(2), period=4, durability=journal)
    assert not journal.directory.exists()


def test_fragments_with_a_delay_and_overlap_are_rejected():
    with pytest.raises(errors.InvalidArgumentError, match="overlap=True"):
        run(fragments=Fragments(2, delay=1), overlap=True)


def test_center_that_takes_all_messages_gets_them():
    limits = Limits(messages=MessageLimits(nonfinite=False))
    explode = lambda params, batch: 1e30 * problem.loss(params, batch)  # noqa: E731
    found = execute(planned(limits=limits), loss=explode)
    assert not np.isfinite(found.center.params["s"])


def host_data(worker, step):
    """Return a batch that only NumPy can make."""
    random = np.random.default_rng([worker, step])
    x = random.standard_normal((8, 3), np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=-1, keepdims=True))}


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_rounds_are_steps_of_gradients_averaged_over_all_workers(exact):
    schedule = simulate.schedule(
        Cluster(workers=3, speed=LogNormal(0.1, 0.3)),
        period=1,
        rule=shared.average(),
        params=problem.params(),
        mode=Synchronous(),
        exchanges=60,
    )
    found = execute(schedule, data=host_data, exact=exact)
    params = problem.params()
    for step in range(20):
        grads = [jax.grad(problem.loss)(params, host_data(w, step)) for w in range(3)]
        mean = jax.tree.map(lambda *g: sum(g) / 3, *grads)
        params = jax.tree.map(lambda x, g: x - 0.05 * g, params, mean)
    assert found.center.version == 20
    assert_close(found.center.params, params)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_overlap_of_one_worker_sends_each_step_once(exact):
    schedule = simulate.schedule(
        Cluster(workers=1, speed=Fixed(0.1), link=Link(latency=0.15)),
        period=lambda k: 3 if k % 2 else 4,
        rule=shared.downpour(),
        params=problem.params(),
        overlap=True,
        exchanges=20,
    )
    assert set(schedule.steps_since[:-1]) == {0, 2}
    found = execute(schedule, data=host_data, exact=exact)
    params = problem.params()
    for step in range(int(schedule.steps[schedule.order >= 0].sum())):
        grads = jax.grad(problem.loss)(params, host_data(0, step))
        params = jax.tree.map(lambda x, g: x - 0.05 * g, params, grads)
    assert_close(found.center.params, params)


def test_evaluation_may_be_of_any_code():
    schedule = planned(exchanges=12)
    host = execute(schedule, evaluate=lambda p: float(evaluate(p)), every=4)
    traced = execute(schedule, evaluate=evaluate, every=4)
    np.testing.assert_allclose(host.evaluations, traced.evaluations, rtol=1e-5)


def test_evaluation_is_that_of_the_message_before_one_that_was_dropped():
    mode = BoundedStaleness(versions=1)
    found = run(mode=mode, evaluate=evaluate, every=1)
    again = execute(found.schedule, evaluate=evaluate, every=1)
    assert np.any(found.schedule.outcome == simulate.Outcome.DROPPED)
    np.testing.assert_array_equal(again.evaluation_seconds, found.evaluation_seconds)


def test_data_may_be_an_object_without_a_hash():
    @dataclasses.dataclass
    class Data:
        x: np.ndarray

        def __call__(self, worker, step):
            return {"x": self.x, "y": self.x.sum(axis=-1, keepdims=True)}

    batches = Data(np.ones((8, 3), np.float32))
    found = run(data=batches, exchanges=6)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: planned(None, params=None), r"made with rule=None"),
        (
            lambda: planned(fragments=Fragments(2), period=4),
            r"without fragments",
        ),
    ],
)
def test_schedules_that_cannot_be_executed_are_rejected(schedule, message):
    with pytest.raises(errors.InvalidArgumentError, match=message):
        execute(schedule())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"loss": lambda params, batch: batch["y"]},
            errors.InvalidArgumentError,
            r"loss must return a scalar, got an array of shape \(8, 1\)",
        ),
        (
            {"loss": lambda params, batch: (0.0, batch)},
            errors.InvalidArgumentError,
            "loss must return a scalar, got tuple",
        ),
        ({"loss": 3}, errors.InvalidTypeError, "loss must be a function, got 3"),
        ({"data": 3}, errors.InvalidTypeError, "data must be a function, got 3"),
        (
            {"evaluate": lambda params: params["hidden"]["w"]},
            errors.InvalidArgumentError,
            "evaluate must return a scalar, got an array",
        ),
        (
            {"evaluate": lambda params: str(np.asarray(params["s"])), "every": 1},
            errors.InvalidArgumentError,
            "evaluate must return a scalar, got str",
        ),
        (
            {"evaluate": evaluate, "target": float("nan")},
            errors.InvalidArgumentError,
            "target must be a number",
        ),
        (
            {
                "data": lambda worker, step: {
                    "x": np.ones((8 + int(step) % 2, 3), np.float32),
                    "y": np.ones((8 + int(step) % 2, 1), np.float32),
                }
            },
            errors.TreeMismatchError,
            "the batch of worker . for its step 1",
        ),
        ({"params": {"w": jnp.zeros(3, int)}}, errors.TreeMismatchError, "params"),
        ({"params": {"w": jnp.zeros(3)}}, errors.InvalidArgumentError, "have 12 bytes"),
        ({"target": 0.1}, errors.InvalidArgumentError, "target needs evaluate"),
        ({"every": 0}, errors.InvalidArgumentError, "every"),
        ({"width": 0}, errors.InvalidArgumentError, "width"),
    ],
)
def test_bad_arguments_are_rejected(settings, error, message):
    with pytest.raises(error, match=message):
        execute(planned(), **settings)


@pytest.mark.slow
def test_run_that_does_not_fit_into_memory_is_rejected_before_it_begins(tmp_path):
    params = jnp.zeros(1 << 22)
    schedule = simulate.schedule(
        Cluster(workers=20_000, speed=Fixed(0.1)),
        period=3,
        rule=RULE,
        params=params,
        exchanges=1,
    )
    with pytest.raises(errors.InvalidArgumentError, match="20000 workers need"):
        execute(
            schedule,
            params=params,
            loss=lambda params, batch: jnp.sum(params),
            data=lambda worker, step: step,
            durability=Journal(tmp_path / "run"),
        )
    assert not (tmp_path / "run").exists()
