"""Checkpoints: restored runs continue bit for bit; mismatches are rejected by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem, shared, support
from orbax.checkpoint import v1 as ocp

import agn_optax
from agn_optax import checkpoint, errors

RULE = shared.agn(shared.adam(0.05))


def an_inner():
    return shared.adam(0.05)


def a_worker(center, name="w", period=3, **settings):
    return agn_optax.Worker(center, an_inner(), period=period, name=name, **settings)


def train(worker, params, state, feeds):
    return support.run_worker(worker, params, state, feeds)


@pytest.fixture
def saved(tmp_path):
    """Save a worker in the middle of a round and its center, and return all of them."""
    center = agn_optax.LocalCenter(RULE)
    worker = a_worker(center)
    feeds = support.feeds(support.tree(), 5)
    loop = train(worker, *worker.start(support.tree(), chief=True), feeds)
    path = tmp_path / "saved"
    checkpoint.save(path, worker=(worker, *loop), center=center)
    return path, worker, loop, center


def test_restored_worker_and_center_continue_bit_for_bit(saved):
    path, worker, loop, center = saved
    feeds = support.feeds(support.tree(), 7, seed=2)
    other = agn_optax.LocalCenter(RULE)
    again = a_worker(other)
    loaded = checkpoint.load(path, like=support.tree(), worker=again, center=other)
    assert loaded["center"] is other
    support.assert_identical(loaded["worker"], loop)
    resumed = train(again, *loaded["worker"], feeds)
    support.assert_identical(resumed, train(worker, *loop, feeds))
    support.assert_identical(other.pull().params, center.pull().params)
    assert (again.exchanges, other.version) == (worker.exchanges, center.version)


def test_random_keys_of_optimizers_are_restored(tmp_path):
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(3))
    optimizer = optax.chain(noise, shared.sgd(0.1))
    rule, feeds = shared.agn(optimizer), support.feeds(support.tree(), 5)

    def new(center):
        return agn_optax.Worker(center, optimizer, period=3, name="w")

    center, other = agn_optax.LocalCenter(rule), agn_optax.LocalCenter(rule)
    worker, again = new(center), new(other)
    loop = train(worker, *worker.start(support.tree(), chief=True), feeds)
    checkpoint.save(tmp_path / "saved", worker=(worker, *loop), center=center)
    loaded = checkpoint.load(tmp_path / "saved", worker=again, center=other)
    params, _ = train(again, *loaded["worker"], feeds)
    support.assert_identical(params, train(worker, *loop, feeds)[0])
    support.assert_identical(other.pull().params, center.pull().params)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_alone_reads_a_checkpoint(saved):
    """The names in a checkpoint are a contract with existing checkpoints."""
    path, _, (params, _), center = saved
    kept = ocp.load(path, checkpointable_name="worker")
    assert sorted(kept) == ["anchors", "params", "state"]
    assert kept["anchors"] == [None]  # agn reads none
    own = kept["params"]["layers"][0]["w"]
    support.assert_identical(own, params["layers"][0]["w"])
    names = {
        "local_steps",
        "record/sum/layers/0/w",
        "record/sum/scale",
        "inner_state/0/count",
        "inner_state/0/mu/layers/0/w",
        "inner_state/0/mu/scale",
        "inner_state/0/nu/layers/0/w",
        "inner_state/0/nu/scale",
    }
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(kept["state"])
    }
    assert names <= found
    kept = ocp.load(path, checkpointable_name="center")
    assert sorted(kept) == ["center_state", "params"]
    support.assert_identical(kept["params"]["scale"], center.pull().params["scale"])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("rule", "inner", "like", "error", "match"),
    [
        (
            lambda: shared.agn(shared.adam(0.01)),
            an_inner,
            support.tree,
            errors.RuleMismatchError,
            "with another rule: its center optimizer turns",
        ),
        (
            shared.diloco,
            an_inner,
            support.tree,
            errors.RuleMismatchError,
            "its name is 'agn', and here it is 'diloco'",
        ),
        (
            lambda: RULE,
            an_inner,
            lambda: support.tree() | {"scale": jnp.zeros(2)},
            errors.TreeMismatchError,
            r"\['params'\]\['scale'\] float32\[2\], where .*saved has .* float32\[\]",
        ),
        (
            lambda: RULE,
            an_inner,
            lambda: support.tree("bfloat16"),
            errors.TreeMismatchError,
            r"worker 'w' has .*bfloat16.*, where the checkpoint .* float32",
        ),
        (
            lambda: RULE,
            lambda: shared.sgd(0.1),
            support.tree,
            errors.TreeMismatchError,
            r"the optimizer differs.*\['state'\]\.inner_state",
        ),
        (
            lambda: RULE,
            an_inner,
            lambda: None,
            errors.MissingArgumentError,
            "like=params",
        ),
    ],
    ids=["optimizer", "rule", "shape", "dtype", "inner", "containers"],
)
def test_mismatched_checkpoint_is_rejected_by_name(
    saved, rule, inner, like, error, match
):
    center = agn_optax.LocalCenter(rule())
    worker = agn_optax.Worker(center, inner(), period=3, name="w")
    if like() is None:
        (path, *_), like_tree = saved, None
        match = "like=params"
        path = saved_in_own_containers(path)
    else:
        path, like_tree = saved[0], like()
    with pytest.raises(error, match=match):
        checkpoint.load(path, like=like_tree, worker=worker, center=center)
    assert worker.version is None  # nothing was changed
    assert not center.core.is_initialized


def saved_in_own_containers(path):
    """Save a center whose parameters are a NamedTuple; return the path."""
    state = optax.ScaleByAdamState(jnp.zeros(()), jnp.ones(2), jnp.ones(2))
    center = agn_optax.LocalCenter(RULE)
    worker = a_worker(center)
    loop = worker.start(state, chief=True)
    path = path.with_name("named")
    checkpoint.save(path, worker=(worker, *loop), center=center)
    return path


def test_missing_parts_of_a_checkpoint_are_named(saved, tmp_path):
    path, worker, loop, center = saved
    other = agn_optax.LocalCenter(RULE)
    again = a_worker(other)
    with pytest.raises(errors.TreeMismatchError, match=r"\['center'\] \(center\)"):
        checkpoint.load(path, like=support.tree(), worker=again)
    with pytest.raises(
        errors.InvalidArgumentError, match=r"must have a worker 'first'"
    ):
        checkpoint.load(path, like=support.tree(), first=again, center=other)
    with pytest.raises(errors.AlreadyInitializedError, match="at version 1"):
        checkpoint.load(path, like=support.tree(), worker=again, center=center)
    with pytest.raises(errors.DurabilityError, match="no checkpoint of agn_optax"):
        checkpoint.load(tmp_path / "elsewhere", center=other)
    with pytest.raises(errors.InvalidArgumentError, match="exists already"):
        checkpoint.save(path, center=center)
    second = a_worker(center, "second")
    both = tmp_path / "both"
    checkpoint.save(
        both, center=center, w=(worker, *loop), second=(second, *second.start())
    )
    with pytest.raises(errors.TreeMismatchError, match=r"\['second'\] \(worker\)"):
        checkpoint.load(both, like=support.tree(), center=other, w=again)
    loaded = checkpoint.load(
        both, like=support.tree(), center=other, w=again, second=a_worker(other, "s")
    )
    assert sorted(loaded) == ["center", "second", "w"]
    alone = agn_optax.LocalCenter(RULE)  # for example, to evaluate it
    checkpoint.load(both, like=support.tree(), center=alone)
    support.assert_identical(alone.pull().params, center.pull().params)


def towers_tx(axes=None):
    placement = agn_optax.Placement(shard_axis=axes)
    return optax.chain(
        agn_optax.all_reduce("towers"),
        agn_optax.exchange_every(
            shared.adam(0.05), RULE, 3, axis_name="workers", placement=placement
        ),
    )


def begun(towers, tx, **other):
    """Return the initial state, with a random key that each tower folds."""
    params = problem.params() | other
    return towers.create(lambda p: (p, tx.init(p), jax.random.key(0)), params)


def some_steps(towers, tx, state, data):
    step = towers.step(
        lambda state, batch: (
            (*problem.train_step(tx)(state[:2], batch)[0], state[2]),
            None,
        )
    )
    for batch in data:
        state, _ = step(state, towers.shard(batch))
    return state


@pytest.mark.slow
def test_workers_are_restored_exactly_and_continue_on_another_number(tmp_path):
    """Four independent workers with a center in four shards continue on two."""
    tx, data = towers_tx("workers"), problem.batches(4)
    four, two = agn_optax.Towers(4, workers=4), agn_optax.Towers(2, workers=2)
    state = some_steps(four, tx, begun(four, tx), data)
    checkpoint.save(tmp_path / "4", towers=(four, state))
    kept = checkpoint.load(tmp_path / "4", towers=(four, begun(four, tx)))["towers"]
    support.assert_identical(*(jax.tree.map(_numbers, tree) for tree in (kept, state)))
    with pytest.raises(
        errors.TreeMismatchError, match=r"workers=4.*these towers have workers=2"
    ):
        checkpoint.load(tmp_path / "4", towers=(two, begun(two, tx)))
    center = jax.device_get(four.center_params(state[1]))
    fewer = two.replicate(four.unreplicate(kept))
    support.assert_identical(jax.device_get(two.center_params(fewer[1])), center)
    assert two.towers_agree(fewer)
    checkpoint.save(tmp_path / "2", towers=(two, fewer))
    fewer = checkpoint.load(tmp_path / "2", towers=(two, begun(two, tx)))["towers"]
    back = four.replicate(two.unreplicate(fewer))
    support.assert_identical(jax.device_get(four.center_params(back[1])), center)
    # The shards of the center's optimizer are equal, except for their padding.
    first, last = (support.find_state(pair[1]) for pair in (state, back))
    support.assert_identical(last.center, first.center)
    support.assert_identical(*(_whole(state.center_state) for state in (last, first)))


@pytest.mark.slow
def test_data_parallel_towers_are_restored_on_any_number(tmp_path):
    tx, data = towers_tx("towers"), problem.batches(4)
    four, one = agn_optax.Towers(4), agn_optax.Towers(1)
    state = some_steps(four, tx, begun(four, tx), data)
    checkpoint.save(tmp_path / "4", towers=(four, state))
    own = checkpoint.load(tmp_path / "4", towers=(one, begun(one, tx)))["towers"]
    support.assert_identical(
        jax.device_get(one.center_params(own[1])),
        jax.device_get(four.center_params(state[1])),
    )
    islands = agn_optax.Towers(4, workers=2)
    with pytest.raises(errors.TreeMismatchError, match=r"workers=1.*have workers=2"):
        checkpoint.load(tmp_path / "4", towers=(islands, begun(islands, tx)))
    wider = begun(one, tx, out=jnp.zeros((6, 1)))
    with pytest.raises(errors.TreeMismatchError, match=r"\['out'\] float32\[6, 1\]"):
        checkpoint.load(tmp_path / "4", towers=(one, wider))
    other = optax.chain(agn_optax.all_reduce("towers"), shared.sgd(0.1))
    with pytest.raises(errors.TreeMismatchError, match="the towers' state has"):
        checkpoint.load(tmp_path / "4", towers=(one, begun(one, other)))


def _numbers(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _whole(center_state):
    """Return the moments of the center's Adam without padding."""
    sizes = [leaf.size for leaf in jax.tree.leaves(problem.params())]
    (adam,) = [node for node in center_state if hasattr(node, "mu")]
    return [
        np.asarray(leaf).reshape(-1)[:size]
        for moment in (adam.mu, adam.nu)
        for leaf, size in zip(jax.tree.leaves(moment), sizes, strict=True)
    ]
