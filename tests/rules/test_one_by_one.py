"""Rules for rounds at an asynchronous center, and what to use instead of them."""

import dataclasses
import re
from fractions import Fraction

import jax.numpy as jnp
import optax
import pytest
from helpers import sessions, shared

import agn_optax
from agn_optax import center_optimizers as outer
from agn_optax import rules
from agn_optax.rules import instead_one_by_one

SGD = "rules.diloco(optax.sgd(1/4))"
GRADIENTS = dataclasses.replace(shared.agn(shared.sgd(0.1)), combine="mean")
BY_STALENESS = optax.chain(shared.sgd(1.0), agn_optax.scale_by_staleness())
RULES = {
    "average": (shared.average(), SGD),
    "diloco": (shared.diloco(), SGD),
    "adam": (rules.diloco(shared.adam(0.05)), SGD),
    "nesterov, low rate": (
        rules.diloco(optax.sgd(0.2, momentum=0.9, nesterov=True)),
        SGD,
    ),
    "for one tree": (
        rules.diloco(optax.masked(shared.sgd(0.1), {"w": True, "b": False})),
        SGD,
    ),
    "gradients": (GRADIENTS, "1/4 of the learning rate of its center optimizer"),
    "gradients, by staleness": (
        dataclasses.replace(shared.agn(BY_STALENESS), combine="mean"),
        "",
    ),
    "low rate": (rules.diloco(shared.sgd(0.25)), ""),
    "by staleness": (rules.diloco(BY_STALENESS), ""),
    "discount": (
        dataclasses.replace(shared.average(), discount=agn_optax.scale_by_staleness()),
        "",
    ),
    "delayed": (rules.diloco(outer.delayed_nesterov(delay=4)), ""),
    "buffered": (
        rules.diloco(optax.chain(outer.buffered(shared.sgd(0.7), 4))),
        "",
    ),
    "ordered": (rules.diloco(outer.ordered_momentum(messages=4)), ""),
    "lookahead": (rules.diloco(outer.momentum_lookahead()), ""),
    "rennala": (rules.diloco(outer.rennala(shared.sgd(0.7), 4)), ""),
    "ringleader": (rules.diloco(outer.ringleader(shared.sgd(0.7), 4)), ""),
    "sum": (shared.downpour(), ""),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_rule_that_moves_the_center_too_far_gets_another_one(name):
    rule, instead = RULES[name]
    assert instead_one_by_one(rule, 4) == instead
    if instead:
        assert instead_one_by_one(rule, 0) == instead.replace("1/4", "1/n")


def test_rate_is_low_enough_for_some_numbers_of_workers():
    rule = rules.diloco(shared.sgd(0.25))
    assert [bool(instead_one_by_one(rule, n)) for n in (1, 2, 4, 5)] == [
        *(False, False, False, True)
    ]


def distance(rule, workers, turns):
    """Return the center's distance from the minimum, at 0, and its notices.

    Workers take turns. Each has made nine tenths of the way from its anchor.
    """
    center = agn_optax.LocalCenter(rule, jnp.ones(()))
    anchors = [center.pull()] * workers
    for turn in range(turns):
        worker = turn % workers
        params, version = anchors[worker]
        answer = sessions.exchange(
            center, 0.9 * params, anchor_version=version, worker=f"w{worker}", steps=1
        )
        anchors[worker] = answer.params, answer.version
    return abs(float(center.pull().params)), center.notices


@pytest.mark.parametrize("rule", ["average", "diloco"])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_rule_that_a_notice_names_converges(rule, workers):
    far, (notice,) = distance(getattr(shared, rule)(), workers, turns=60)
    assert (notice.check, notice.worker) == ("one_by_one", "")
    assert f"{workers} workers move the center {workers} times" in notice.text
    named = re.search(r"rules\.diloco\(optax\.sgd\((.*?)\)\) would do", notice.text)
    rate = float(Fraction(named[1]))
    near, notices = distance(rules.diloco(shared.sgd(rate)), workers, turns=200)
    assert near < 1e-3
    assert notices == []
    if workers > 2:
        assert far > 1.0
