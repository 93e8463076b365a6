"""The table of transformations, proved by numbers, and what runs on parts by it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import leaf_groups, shared, support

import agn_optax
from agn_optax import center_optimizers as outer
from agn_optax import codecs, errors, rules
from agn_optax._internal import trees
from agn_optax.center import ShardedCenter, Store
from agn_optax.round import _elementwise, _parts
from agn_optax.rules import _declared

# At least 256 rows, because some optimizers treat large leaves differently.
SHAPES = {"a": (256, 130), "b": (256,), "c": (256, 2, 3), "d": (260, 3)}
STEPS = 4
ROUNDING = 3e-4  # a few units in the last place of the largest parameters
EXTRA = {
    "staleness": 1,
    "steps": np.int32(2),
    "weight": 3.0,
    "workers": 4,
    "value": 0.5,
}


def matrices(tree):
    """Say which dimensions Muon multiplies; it needs matrices."""
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), tree)


def every_second(step, **_):
    return step % 2 == 0


# Arguments of the functions of the table that need some.
SGD = shared.sgd(0.1, momentum=0.9)
ARGUMENTS = {
    "agn_optax.buffered": lambda make: make(SGD, 2),
    "agn_optax.by_local_steps": lambda make: make(optax.adam(lambda t: 0.1 / (t + 1))),
    "agn_optax.delayed_nesterov": lambda make: make(delay=2),
    "agn_optax.elastic_pull": lambda make: make(0.5),
    "agn_optax.elementwise": lambda make: make(optax.stateless(lambda u, _: u)),
    "agn_optax.heloco": lambda make: make(messages=2),
    "agn_optax.ordered_momentum": lambda make: make(messages=2),
    "agn_optax.rennala": lambda make: make(SGD, 2),
    "agn_optax.restart_momentum": lambda make: make(SGD, 2),
    "optax.adaptive_grad_clip": lambda make: make(0.1),
    "optax.add_decayed_weights": lambda make: make(0.1),
    "optax.apply_every": lambda make: make(2),
    "optax.chain": lambda make: make(SGD, optax.scale_by_adam()),
    "optax.clip": lambda make: make(0.1),
    "optax.clip_by_block_rms": lambda make: make(0.1),
    "optax.clip_by_global_norm": lambda make: make(0.1),
    "optax.conditionally_mask": lambda make: make(SGD, every_second),
    "optax.conditionally_transform": lambda make: make(SGD, every_second),
    "optax.ema": lambda make: make(0.9),
    "optax.inject_hyperparams": lambda make: make(optax.adam)(lambda t: 0.1 / (t + 1)),
    "optax.masked": lambda make: make(SGD, True),
    "optax.named_chain": lambda make: make(("a", SGD), ("b", optax.scale_by_adam())),
    "optax.scale": lambda make: make(-0.1),
    "optax.scale_by_madgrad": lambda make: make(0.1),
    "optax.scale_by_muon": lambda make: make(weight_dimension_numbers=matrices),
    "optax.scale_by_rprop": lambda make: make(0.1),
    "optax.scale_by_schedule": lambda make: make(lambda t: 0.1 / (t + 1)),
    "optax.schedule_free": lambda make: make(optax.scale_by_adam(), 0.1),
    "optax.trace": lambda make: make(0.9),
    "optax.with_extra_args_support": lambda make: make(optax.scale(2.0)),
}


def constructed(name):
    """Return a transformation of the table, made by its public function."""
    package, function = name.split(".")
    places = {"agn_optax": (agn_optax, outer), "optax": (optax, optax.contrib)}[package]
    if name == "agn_optax.stateless":  # not public
        return agn_optax.scale_by_staleness()
    makers = [getattr(p, function) for p in places if hasattr(p, function)]
    assert makers, f"{name} of the table is not public in this version: adapt the table"
    return ARGUMENTS.get(name, lambda make: make())(makers[0])


def numbers(seed, names):
    """Return a tree of numbers of very different magnitudes."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(
            10 ** rng.uniform(-3, 3, shape) * rng.choice([-1, 1], shape), jnp.float32
        )
        for name, shape in SHAPES.items()
        if name in names
    }


def rows(tree):
    """Cut each leaf of a tree into two pieces with some of its rows."""
    return [
        jax.tree.map(lambda x: x[:100], tree),
        jax.tree.map(lambda x: x[100:], tree),
    ]


def packed(tree):
    """Return two parts, each with elements of several leaves in one array."""
    flat = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])
    return [flat[:20_000], flat[20_000:]]


def leaves(tree):
    """Return two parts, each with some of the leaves."""
    return [
        {name: x if (name == "a") == chosen else None for name, x in tree.items()}
        for chosen in (True, False)
    ]


def updates_of(tx, params, messages):
    """Return the updates of several steps."""
    tx, made = optax.with_extra_args_support(tx), []
    state = tx.init(params)
    for message in messages:
        center = jax.tree.map(lambda x: 0.5 * x, params)
        updates, state = tx.update(message, state, params, center=center, **EXTRA)
        params = optax.apply_updates(params, updates)
        made.append(updates)
    return made


def is_same_in_parts(tx, cut, names=tuple(SHAPES)):
    """Return whether updates of parts are the parts of the updates of a whole tree."""
    params, *messages = [numbers(seed, names) for seed in range(STEPS + 1)]
    whole = [cut(updates) for updates in updates_of(tx, params, messages)]
    both = zip(cut(params), zip(*map(cut, messages), strict=True), strict=True)
    return all(
        np.allclose(one, other, rtol=1e-4, atol=ROUNDING, equal_nan=True)
        for n, (part, sent) in enumerate(both)
        for one, other in zip(
            jax.tree.leaves(updates_of(tx, part, sent)),
            jax.tree.leaves([cuts[n] for cuts in whole]),
            strict=True,
        )
    )


def reads_of(optimizer, trusting=False):
    parts = _declared.parts_of(optimizer, trusting=trusting)
    return rules.widest(*(part.reads for part in parts))


CUTS = {"element": (rows, packed), "leaf": (leaves,), "tree": ()}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", _declared.TABLE)
def test_transformation_reads_no_more_than_the_table_says(name):
    tx = constructed(name)
    parts = list(_declared.parts_of(tx))
    assert name in [part.maker for part in parts], (
        f"{name} is not recognised in this version: its update is now made by "
        f"{parts[0].maker}. Adapt the table in agn_optax/rules/_declared.py"
    )
    names = ("a", "d") if name == "optax.scale_by_muon" else tuple(SHAPES)
    for cut in CUTS[reads_of(tx, trusting=True)]:
        assert is_same_in_parts(tx, cut, names), f"{name} in {cut.__name__}"


@pytest.mark.slow
def test_numbers_show_what_the_table_must_not_contain():
    """The comparison notices factors of large leaves, and norms of all leaves."""
    adafactor, clip = optax.adafactor(0.1), optax.clip_by_global_norm(1.0)
    assert is_same_in_parts(adafactor, leaves)
    assert not is_same_in_parts(adafactor, rows)
    assert not is_same_in_parts(clip, leaves)


OPTIMIZERS = {
    "element": (
        "acprop adabelief adadelta adagrad adam adamax adamaxw adamw adan ademamix "
        "adopt amsgrad cocob freeze lion madgrad nadam nadamw optimistic_adam_v2 "
        "optimistic_gradient_descent radam rmsprop rprop "
        "schedule_free_adamw schedule_free_sgd sgd sign_sgd signum "
        "simplified_ademamix yogi"
    ),
    "leaf": "adafactor fromage lamb lars novograd sm3",
    "tree": (
        "add_noise clip_by_global_norm dog dowg flatten galore "
        "lbfgs momo muon normalize_by_update_norm polyak_sgd prodigy"
    ),
}


def optimizer_of_optax(name):
    """Return an optimizer of optax by its name, with a rate if it needs one."""
    place = optax if hasattr(optax, name) else optax.contrib
    make = getattr(place, name)
    arguments = {"add_noise": (0.1, 0.1, 0), "flatten": (SGD,), "freeze": (True,)}
    try:
        return make(*arguments.get(name, (0.1,)))
    except TypeError:
        return make()


@pytest.mark.parametrize(
    ("reads", "name"),
    [(reads, name) for reads, names in OPTIMIZERS.items() for name in names.split()],
)
def test_optimizer_of_optax_reads_what_is_known_of_it(reads, name):
    tx = optimizer_of_optax(name)
    makers = [part.maker for part in _declared.parts_of(tx) if part.reads == "tree"]
    assert reads_of(tx) == reads, (
        f"optax's {name} has parts that are not recognised: {makers}. Adapt the table "
        "in agn_optax/rules/_declared.py"
    )


def test_every_scale_by_of_optax_is_in_the_table_or_known_to_read_the_tree():
    whole = {
        "scale_by_backtracking_linesearch",
        "scale_by_dog",
        "scale_by_dowg",
        "scale_by_galore",  # it cannot leave out leaves
        "scale_by_lbfgs",
        "scale_by_polyak",
        "scale_by_sophia",
        "scale_by_zoom_linesearch",
    }
    made_by_others = {"scale_by_learning_rate"}  # makes `scale` or `scale_by_schedule`
    public = {
        name
        for place in (optax, optax.contrib, optax.transforms)
        for name in dir(place)
        if name.startswith("scale_by_")
    }
    known = {name.removeprefix("optax.") for name in _declared.TABLE}
    new = sorted(public - known - whole - made_by_others)
    assert not new, (
        f"optax has new transformations: {new}. Read what they do and add them to the "
        "table in agn_optax/rules/_declared.py, or to this test"
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adafactor(0.1),
        optax.clip_by_global_norm(1.0),
        optax.apply_if_finite(SGD, 3),
        optax.MultiSteps(SGD, 2).gradient_transformation(),
        optax.masked(SGD, {"a": True, "b": False}),
        optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.stateless(lambda updates, _: updates),
        optax.inject_hyperparams(optax.adafactor)(0.1),
        optax.inject_hyperparams(lambda rate: optax.lamb(1.0 / (rate - 0.5)))(0.1),
        optax.chain(SGD, optax.named_chain(("clip", optax.clip_by_global_norm(1.0)))),
        agn_optax.by_local_steps(optax.lamb(0.1)),
        outer.buffered(optax.clip_by_global_norm(1.0), 2),
        outer.scale_by_drift(history=2),
        outer.isoloco(),
        outer.rennala(optax.clip_by_global_norm(1.0), 2),
        outer.ringleader(SGD, 2),
    ],
)
def test_optimizer_that_reads_more_is_not_elementwise(optimizer):
    assert reads_of(optimizer) != "element"


def test_decorated_optimizer_is_not_taken_for_the_one_inside():
    inner = optax.scale_by_adam()

    @functools.wraps(inner.update)
    def update(updates, state, params=None):
        norm = optax.tree.norm(updates)
        return inner.update(jax.tree.map(lambda u: u / norm, updates), state, params)

    tx = optax.GradientTransformation(inner.init, update)
    assert reads_of(optax.chain(tx)) == "tree"
    jitted = optax.GradientTransformation(inner.init, jax.jit(inner.update))
    assert reads_of(optax.chain(jitted)) == "tree"


def test_declared_optimizer_counts_as_elementwise_with_the_same_numbers():
    twice = optax.MultiSteps(SGD, 2).gradient_transformation()
    declared = agn_optax.elementwise(twice)
    assert reads_of(declared, trusting=True) == "element"
    assert reads_of(declared) == "tree"
    around = optax.chain(declared, optax.clip_by_global_norm(1.0))
    assert reads_of(around, trusting=True) == "tree"
    params, *messages = [numbers(seed, "b") for seed in range(4)]
    support.assert_identical(
        updates_of(declared, params, messages), updates_of(twice, params, messages)
    )
    with pytest.raises(errors.InvalidTypeError, match="optimizer must be"):
        agn_optax.elementwise(0.1)


CODECS = [
    codecs.identity(),
    codecs.cast("bfloat16"),
    codecs.quantize(4, block=64),
    codecs.top_k(3, block=64),
    codecs.sign(),
    codecs.error_feedback(codecs.quantize(2)),
    codecs.error_feedback(codecs.cast("float16")),
    codecs.chain_codecs(codecs.top_k(3), codecs.cast("bfloat16")),
    codecs.chain_codecs(codecs.cast("float16"), codecs.cast("bfloat16")),
    codecs.two_way(codecs.quantize(8), None),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codec_reads_no_more_than_it_says(codec):
    tree, other = numbers(0, "bcd"), numbers(1, "bcd")

    def travelled(tree):
        return codec.decode(codec.encode(tree, codec.init(tree))[0], tree)

    found = travelled(tree)
    beside = travelled({**other, "c": tree["c"]})
    support.assert_identical(found["c"], beside["c"])
    is_cast = "cast" in str(codec) and "top_k" not in str(codec)
    assert (codec.reads == "element") == (is_cast or codec == codecs.identity())
    if codec.reads == "element":
        support.assert_identical(rows(found)[0], travelled(rows(tree)[0]))


def test_codec_of_a_user_counts_as_one_that_reads_the_tree():
    own = codecs.Codec(
        codecs.identity().init,
        codecs.identity().encode,
        lambda encoded, like: encoded,
        name="own",
    )
    assert own.reads == "tree"
    assert codecs.error_feedback(own).reads == "tree"
    assert codecs.chain_codecs(codecs.cast("bfloat16"), own).reads == "tree"
    with pytest.raises(errors.InvalidArgumentError, match="reads of codec 'own'"):
        dataclasses.replace(own, reads="all")


PARAMS = {"a": jnp.ones((4, 4)), "b": jnp.ones(4), "c": jnp.ones((2, 4))}


def rejection(rule, params=PARAMS, shards=2, *, cuts=True):
    """Return the error raised for a rule on shards, or "" for none."""
    divided = _parts.balanced(params, shards, rows=cuts)
    try:
        _elementwise.check(rule, params, jax.eval_shape(divided.cut, params))
    except errors.InvalidArgumentError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", rules.__all__)
def test_rules_of_the_package_run_on_shards_leaf_by_leaf_and_packed(name):
    if name == "Rule":
        return
    for center in (optax.sgd(0.1), optax.adam(0.1)):
        settings = {"agn": [center], "easgd": [0.1]}
        rule = getattr(rules, name)(*settings.get(name, ()))
        rule = rule if name == "easgd" else dataclasses.replace(rule, center=center)
        assert not rejection(rule)
        assert _elementwise.is_leafwise(rule)
        # A radial mean needs the leaves apart.
        is_radial = name == "decoupled_diloco"
        assert _elementwise.is_uniform(rule, PARAMS) != is_radial


def test_rule_on_shards_is_rejected_with_the_part_that_reads_more():
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    text = rejection(rules.agn(clip))
    assert "center optimizer with optax.clip_by_global_norm(...)" in text
    assert "agn_optax.elementwise(optimizer), Rule(elementwise=True)" in text
    own = dataclasses.replace(rules.average(), elementwise=False)
    assert "contribution, message or adopt is not known to work" in rejection(own)
    record = dataclasses.replace(rules.agn(SGD), record=optax.add_noise(0.1, 0.1, 0))
    assert "record with optax.add_noise(...)" in rejection(record)
    discount = dataclasses.replace(rules.agn(SGD), discount=optax.add_noise(0.1, 0, 0))
    assert "discount with optax.add_noise(...)" in rejection(discount)
    assert "codec quantize(8, block=4096)" in rejection(
        rules.average(codec=codecs.quantize(8))
    )


def test_whole_leaves_need_a_rule_that_works_leaf_by_leaf():
    for rule in (
        rules.agn(optax.adafactor(0.1)),
        rules.average(codec=codecs.quantize(8)),
    ):
        assert not rejection(rule, cuts=False)
        assert "is not known to work element by element" in rejection(rule)
    whole = rules.agn(optax.clip_by_global_norm(1.0))
    assert "is not known to work leaf by leaf" in rejection(whole, cuts=False)
    assert not rejection(whole, shards=1)


def test_declared_parts_run_on_shards():
    twice = optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()
    assert rejection(rules.agn(twice))
    assert not rejection(rules.agn(agn_optax.elementwise(twice)))
    own = dataclasses.replace(rules.average(), elementwise=False)
    assert not rejection(dataclasses.replace(own, elementwise=True))


def test_declared_mask_does_not_make_a_center_uniform():
    """A mask by dimensions is right for shards, but not for flattened leaves."""
    masked = optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    rule = rules.agn(agn_optax.elementwise(masked))
    assert not rejection(rule)
    assert not _elementwise.is_uniform(rule, PARAMS)
    declared = rules.agn(agn_optax.elementwise(optax.adam(0.1)))
    assert _elementwise.is_uniform(declared, PARAMS)


def test_rule_with_a_traced_setting_is_looked_up():
    @jax.jit
    def is_leafwise(rate):
        whole = rules.agn(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate)))
        assert _elementwise.is_leafwise(rules.easgd(rate))
        assert not _elementwise.is_leafwise(whole)
        return rate

    is_leafwise(0.1)


def test_sharded_center_rejects_optimizer_that_counts_leaves():
    """Each shard would be moved by the number of its own leaves."""
    count = optax.stateless(
        lambda u, _: jax.tree.map(lambda x: x / len(jax.tree.leaves(u)), u)
    )
    center = ShardedCenter([agn_optax.LocalCenter(rules.agn(count)) for _ in range(2)])
    with pytest.raises(
        errors.InvalidArgumentError, match=r"optax\.stateless\(\.\.\.\)"
    ):
        center.initialize(PARAMS, worker="anna")


def test_log_reports_skipped_optimization_of_masked_optimizer(caplog):
    mask = {"a": True, "b": False, "c": True}
    rule = rules.agn(optax.masked(optax.adam(0.1), mask))
    with caplog.at_level("DEBUG", "agn_optax"):
        assert not _elementwise.is_uniform(rule, PARAMS)
    (record,) = caplog.records
    assert record.message.startswith("not done: a center in two arrays, because of")


def test_failed_exchange_by_groups_of_leaves_is_a_warning(monkeypatch, caplog):
    def update(updates, state, params=None):
        if None in updates.values():
            raise ValueError("part of a tree")
        return updates, state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    leaf_groups.allow(monkeypatch)
    center = agn_optax.elementwise(optimizer)
    tx = agn_optax.diloco(optax.sgd(0.1), 2, center=center)
    params = numbers(0, ("a", "b"))
    jax.jit(tx.update)(params, tx.init(params), params)
    warnings = {r.message for r in caplog.records if r.levelname == "WARNING"}
    (warning,) = (each for each in warnings if "part of a tree" in each)
    assert warning.startswith("not done: an exchange by groups of leaves (ValueError")


@pytest.mark.few(12)
@pytest.mark.parametrize("name", _declared.TABLE)
def test_center_in_two_arrays_has_the_state_of_one_in_leaves(name):
    rule = shared.agn(constructed(name))
    params = numbers(0, ("a", "b"))
    kept, flat = (Store(rule, params, flatten=flatten) for flatten in (False, True))
    assert trees.kinds(flat.save()) == trees.kinds(kept.save())
    again = Store.restore(rule, flat.save(), flatten=True)
    support.assert_identical(again.save(), flat.save())
