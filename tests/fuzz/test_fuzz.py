"""A short run of `make fuzz`: mutated input is parsed or rejected, without harm."""

import logging
import sys

import pytest
from fuzz import live, mutate, parsers

pytestmark = pytest.mark.slow

SEED, COUNT = 0, 600


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Disable the log, in which journals would report hundreds of damaged records."""
    monkeypatch.setattr(logging.getLogger("agn_optax"), "disabled", True)


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_mutated_input_is_parsed_or_rejected(name):
    parser = parsers.PARSERS[name]
    for sample in parser.samples:
        parser.read(sample)
    rejected, found = parsers.fuzz(parser, SEED, name, COUNT)
    assert not found, found[:3]
    if parser.rejects and name != "record":  # a damaged record counts as missing
        assert 0 < rejected < COUNT


def test_same_seed_gives_the_same_input():
    samples = parsers.PARSERS["frames"].samples
    one, other = (
        [mutate.mutated(rng, samples) for _ in range(50)]
        for rng in (mutate.generator(1, "a"), mutate.generator(1, "a"))
    )
    assert one == other
    assert len(set(one)) > 40


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
@pytest.mark.parametrize("kind", live.KINDS)
def test_live_center_survives_mutated_conversations(kind):
    result = live.fuzz(SEED, 150, warm=100, kind=kind)
    assert result.answers > 5
