"""A short run of `make chaos`; and tests that the invariants detect violations."""

import dataclasses
import sys

import numpy as np
import pytest
from chaos import growth, invariants, model, runner, scenario
from chaos.processes import ProcessPool
from chaos.scenario import PLAIN, Fault
from chaos.tally import Tally, in_turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="its proxies and its full disk are Linux's"
    ),
]
# More time to recover than in `make chaos`: the machine may be busy.
PATIENT = dataclasses.replace(PLAIN, recovers=60.0)
CHOSEN = {
    "a killed center": {
        "faults": (
            Fault(0.3, "kill center", 0),
            Fault(0.6, "replay", 1),
            Fault(0.6, "replay", 2),
        ),
    },
    "a full disk": {"overlap": True, "faults": (Fault(0.3, "disk", 0),)},
    "killed workers in rounds": {
        "mode": "synchronous",
        "faults": (Fault(0.3, "kill", 0, amount=1), Fault(0.5, "kill", 1)),
    },
    "broken connections to shards": {
        "centers": "shards",
        "codec": "bfloat16",
        "overlap": True,
        "faults": (
            Fault(0.3, "cut inside", 1, amount=300),
            Fault(0.4, "close half", 2, there=False),
            Fault(0.5, "stop", 0, seconds=0.5),
        ),
    },
    "elastic averaging": {
        "rule": "easgd",
        "faults": (
            Fault(0.3, "outage", 1, seconds=0.5),
            Fault(0.5, "hold", 0, seconds=0.5, there=False),
        ),
    },
}


KILLS = (Fault(0.4, "kill", 0, amount=1), Fault(0.8, "kill center", 0))
CHOSEN |= {
    "top-k and killed workers": {"codec": "top_k", "faults": KILLS},
    "chained codecs and a cut": {
        "codec": "chained",
        "mode": "quorum-drop",
        "faults": (Fault(0.4, "cut", 0), Fault(0.7, "stop", 1, seconds=0.5)),
    },
    "fragments in flight": {
        "centers": "shards",
        "delay": 1,
        "faults": (*KILLS, Fault(0.6, "leave", 1)),
    },
    "workers that resume": {"resumes": True, "faults": KILLS},
    "TLS and tokens": {"secure": True, "faults": (*KILLS, Fault(0.6, "replay", 1))},
    "weights": {"weighs": True, "faults": KILLS},
    "messages that are rejected": {
        "rejects": True,
        "faults": (Fault(0.4, "outage", 1, seconds=0.5), *KILLS),
    },
}


@pytest.fixture(scope="module")
def spares():
    with ProcessPool(workers=3, centers=1) as made:
        yield made


@pytest.mark.parametrize("name", CHOSEN)
def test_invariants_hold_under_faults(name, spares):
    outcome = runner.run(dataclasses.replace(PATIENT, **CHOSEN[name]), spares)
    assert not outcome.broken
    assert outcome.exchanges > len(CHOSEN[name]["faults"])


def test_conservation_is_not_required_after_answers_were_given_up():
    elastic = dataclasses.replace(PATIENT, **CHOSEN["elastic averaging"])
    assert elastic.conserves
    for fault in (Fault(0.0, "disk", 0), Fault(0.0, "stop", 0, seconds=5.0)):
        assert not dataclasses.replace(elastic, faults=(fault,)).conserves


def test_resources_do_not_grow(spares):
    outcome = growth.run(300, spares)
    assert not outcome.broken
    assert outcome.exchanges >= 300


def test_seed_determines_a_scenario():
    seeds = range(300)
    assert scenario.drawn(7) == scenario.drawn(7)
    drawn = [scenario.drawn(seed) for seed in seeds]
    names = "mode rule codec centers durability size overlap delay resumes secure"
    for name in [*names.split(), "weighs", "rejects"]:
        kinds = {getattr(each, name) for each in drawn}
        assert len(kinds) > 1, name
    kinds = {fault.kind for each in drawn for fault in each.faults}
    acts = {name[1:].replace("_", " ") for name in vars(runner.Run)}
    assert kinds <= acts
    assert len(kinds) == 17


# The checks detect violations.


@pytest.fixture
def tally(tmp_path):
    """The tally of a worker that has made two steps, one of them acknowledged."""
    made = Tally(tmp_path / "tally", 4)
    made.most[:2] = 1
    made.least[0] = 1
    return made


def broken_by(tally, moved, **changes):
    seen = np.zeros((4, 4), np.float32)
    for element, number in moved.items():
        seen[element] = -number
    broken = []
    invariants.check_counts(
        seen, [tally], dataclasses.replace(PATIENT, **changes), broken
    )
    return broken


@pytest.mark.parametrize("moved", [{(0, 0): 1}, {(0, 0): 1, (0, 1): 1}])
def test_unacknowledged_step_may_be_in_the_center_or_not(tally, moved):
    assert not broken_by(tally, moved)


@pytest.mark.parametrize(
    ("moved", "message"),
    [
        ({}, "1 steps lost"),
        ({(0, 0): 2}, "1 counted twice"),
        ({(0, 0): 1, (0, 2): 1}, "1 counted twice"),
        ({(0, 0): 1, (1, 0): 1}, "nobody has moved"),
    ],
)
def test_lost_and_doubled_steps_are_detected(tally, moved, message):
    (violation,) = broken_by(tally, moved)
    assert message in violation


def test_killed_center_without_durability_may_forget(tally):
    forgets = {"durability": "none", "faults": (Fault(0.0, "kill center", 0),)}
    assert not broken_by(tally, {}, **forgets)
    assert broken_by(tally, {(0, 0): 2}, **forgets)


def test_decreasing_versions_and_lost_centers_are_detected(tally):
    tally.add("backwards")
    tally.add("lost")
    broken = []
    invariants.check_versions([tally], PATIENT, broken)
    assert len(broken) == 2


def test_loss_of_elastic_averaging_is_detected(tally):
    ends = {0: np.zeros((4, 4), np.float32)}
    seen = np.zeros((4, 4), np.float32)
    seen[0, :2] = -1
    broken = []
    invariants.check_conservation(seen, ends, [tally], broken)
    assert not broken
    invariants.check_conservation(seen / 2, ends, [tally], broken)
    assert broken


def test_repeated_step_counts_once_in_the_tally(tally):
    for number in (0, 1, 2, 1, 2, 3):
        tally.begin(number, [number])
    assert tally.steps() == 2 + 4
    tally.settle_first(3)
    tally.settle_first(2)
    assert tally.least.tolist() == [1, 1, 1, 0]


def broken_claims(weight, steps):
    weighs = dataclasses.replace(PATIENT, weighs=True)
    params = model.params(4)
    params["u"][1, 0] = -2  # two steps of the second worker, which weigh 2 each
    params["b"][:] = weight, steps, 1
    broken = []
    invariants.check_claims(params, [None, None], weighs, broken)
    return broken


def test_wrong_claims_of_weight_and_steps_are_detected():
    assert not broken_claims(4, 2)
    assert "weight 6, and moved 4" in broken_claims(6, 2)[0]
    assert "steps 3, and moved 2" in broken_claims(4, 3)[0]


@pytest.mark.parametrize(
    ("moved", "holds"), [([2, 2, 1, 1], True), ([2, 1, 2, 1], False)]
)
def test_steps_out_of_turn_are_detected(moved, holds):
    resumes, broken = dataclasses.replace(PATIENT, resumes=True), []
    invariants.check_turns(-np.array([moved], np.float32), [None], resumes, broken)
    assert bool(broken) != holds
    assert in_turn(6, 4).tolist() == [2, 2, 1, 1]


def test_journal_of_another_center_is_detected(tmp_path):
    rule = runner.model.rule("downpour", "none")
    kept = runner.model.params(4)
    center = invariants.agn_optax.LocalCenter(
        rule, kept, durability=invariants.Journal(tmp_path / "kept")
    )
    center.close()
    broken = []
    invariants.check_journal(kept, tmp_path / "kept", rule, broken)
    assert not broken
    other = {**kept, "w": kept["w"] + 1}
    invariants.check_journal(other, tmp_path / "kept", rule, broken)
    assert broken
