"""What a launched program is told."""

import pytest

from agn_optax import errors, service

GOOD = {"CENTER": "h:1", "RANK": "1", "WORKERS": "2", "WORKER": "w", "RESTARTS": "3"}


@pytest.fixture
def set_environment(monkeypatch):
    def set_(**changes):
        for name, value in (GOOD | changes).items():
            if value is None:
                monkeypatch.delenv(f"AGN_OPTAX_{name}", raising=False)
            else:
                monkeypatch.setenv(f"AGN_OPTAX_{name}", value)

    return set_


def test_environment(set_environment):
    set_environment()
    assert service.environment() == ("h:1", 1, 2, "w", 3)
    set_environment(RESTARTS=None)
    assert service.environment().restarts == 0


@pytest.mark.parametrize("name", ["CENTER", "RANK", "WORKERS", "WORKER"])
def test_what_is_missing_is_named(set_environment, name):
    set_environment(**{name: None})
    wanted = f"AGN_OPTAX_{name} is not in the environment: .*agn-optax launch"
    with pytest.raises(errors.InvalidArgumentError, match=wanted):
        service.environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "2"), ("RANK", "-1"), ("RANK", "²"), ("WORKERS", "0"), ("WORKERS", "x")],
)
def test_what_makes_no_sense_is_named(set_environment, name, value):
    set_environment(**{name: value})
    with pytest.raises(errors.InvalidArgumentError, match=f"AGN_OPTAX_{name} must be"):
        service.environment()


def test_the_rule_is_given_once(set_environment, monkeypatch):
    set_environment()
    with pytest.raises(errors.MissingArgumentError, match="make the rule here"):
        _ = service.environment().rule
    monkeypatch.setenv("AGN_OPTAX_RULE", '{"rule": "easgd", "moving_rate": 0.25}')
    assert service.environment().rule.name == "easgd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be an object of JSON"),
        ("[]", "must be an object of JSON"),
        ("{}", "no rule"),
        ('{"rule": "easgd"}', "rule easgd needs moving_rate"),
        ('{"rule": ["agn"]}', "rule must be one of"),
        ('{"rule": "downpour", "moving_rate": 1}', "moving_rate does not apply"),
        ('{"rule": "downpour", "other": 1}', "other does not apply"),
    ],
)
def test_a_rule_that_makes_no_sense(set_environment, monkeypatch, text, message):
    set_environment()
    monkeypatch.setenv("AGN_OPTAX_RULE", text)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        _ = service.environment().rule
