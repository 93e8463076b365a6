"""A little of `make fuzz`: what is nearly right is read or refused, and hurts none."""

import logging
import sys

import pytest
from fuzz import live, mutate, parsers

pytestmark = pytest.mark.slow

SEED, COUNT = 0, 600


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """A journal says what it leaves out, which here is hundreds of times."""
    monkeypatch.setattr(logging.getLogger("agn_optax"), "disabled", True)


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_what_is_nearly_right_is_read_or_refused(name):
    parser = parsers.PARSERS[name]
    for sample in parser.samples:
        parser.read(sample)
    refused, found = parsers.fuzz(parser, SEED, name, COUNT)
    assert not found, found[:3]
    if parser.refuses and name != "record":  # a record that is none is just not there
        assert 0 < refused < COUNT


def test_the_same_seed_is_the_same_input():
    samples = parsers.PARSERS["packets"].samples
    one, other = (
        [mutate.mutated(rng, samples) for _ in range(50)]
        for rng in (mutate.generator(1, "a"), mutate.generator(1, "a"))
    )
    assert one == other
    assert len(set(one)) > 40


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize("kind", live.KINDS)
def test_a_center_is_hurt_by_nothing(kind):
    result = live.fuzz(SEED, 150, warm=100, kind=kind)
    assert result.answers > 5
