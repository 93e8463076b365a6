"""The environment of a launched program, set by agn-optax or by other engines."""

import itertools
import os

import pytest

from agn_optax import errors, service

GOOD = {"CENTER": "h:1", "RANK": "1", "WORKERS": "2", "WORKER": "w", "RESTARTS": "3"}
ALONE = {}
# Variables of one process of several as each engine sets them.
STEP = {
    "SLURM_JOB_ID": "78",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[007-008,011],other",
}
SET = {
    "JOBSET_NAME": "run",
    "REPLICATED_JOB_NAME": "worker",
    "JOB_INDEX": "3",
    "JOB_COMPLETION_INDEX": "1",
}
# The pods of a Job that xpk has started, on the hosts of a slice.
SLICE = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "t0,t1",
    "JOB_COMPLETION_INDEX": "1",
}


def joined(host, process, processes):
    return {
        "coordinator_address": f"{host}:20001",
        "num_processes": processes,
        "process_id": process,
    }


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    for name in os.environ:
        if name.startswith(("AGN_OPTAX_", "SLURM_", "TPU_", "JOB")):
            monkeypatch.delenv(name)


@pytest.fixture
def set_environment(monkeypatch):
    def set_(**changes):
        for name, value in (GOOD | changes).items():
            if value is None:
                monkeypatch.delenv(f"AGN_OPTAX_{name}", raising=False)
            else:
                monkeypatch.setenv(f"AGN_OPTAX_{name}", value)

    return set_


@pytest.fixture
def given(monkeypatch):
    def given(*variables, **more):
        for name, value in itertools.chain(
            *(each.items() for each in variables), more.items()
        ):
            monkeypatch.setenv(name, value)
        return service.environment()

    return given


def test_environment_is_read_with_its_defaults(set_environment):
    set_environment()
    assert service.environment() == ("h:1", 1, 2, "w", 3, ALONE)
    set_environment(RESTARTS=None, WORKER=None)
    assert service.environment() == ("h:1", 1, 2, "worker-1", 0, ALONE)


@pytest.mark.parametrize("name", ["CENTER", "RANK", "WORKERS"])
def test_missing_variable_is_named(set_environment, name):
    set_environment(**{name: None})
    wanted = f"AGN_OPTAX_{name} is not set: .*agn-optax launch"
    with pytest.raises(errors.InvalidArgumentError, match=wanted):
        service.environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "-1"), ("RANK", "²"), ("WORKERS", "0"), ("WORKERS", "x")],
)
def test_bad_variable_is_named(set_environment, name, value):
    set_environment(**{name: value})
    with pytest.raises(errors.InvalidArgumentError, match=f"AGN_OPTAX_{name} must be"):
        service.environment()


def test_rank_beyond_the_workers_is_rejected(set_environment):
    set_environment(RANK="2")
    with pytest.raises(errors.InvalidArgumentError, match=r"RANK must be .* below 2"):
        service.environment()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (STEP, joined("node007", 3, 4)),
        (STEP | {"SLURM_STEP_NODELIST": "one"}, joined("one", 3, 4)),
        (SET, joined("run-worker-3-0.run", 1, 4)),
        (SLICE, joined("t0", 1, 4)),
    ],
)
def test_engine_numbers_the_processes_of_a_worker(
    given, set_environment, variables, expected
):
    set_environment()
    assert given(variables).distributed == ALONE
    env = given(AGN_OPTAX_PROCESSES="4")
    assert (env.rank, env.workers) == (1, 2)
    assert env.distributed == expected
    own = given(AGN_OPTAX_PROCESS="2", AGN_OPTAX_COORDINATOR="x:9").distributed
    assert own == {
        "coordinator_address": "x:9",
        "num_processes": 4,
        "process_id": 2,
    }


def test_restarts_of_a_job_of_slurm_are_counted(set_environment, given):
    set_environment(RESTARTS=None)
    assert given(SLURM_RESTART_COUNT="2").restarts == 2
    assert given(AGN_OPTAX_RESTARTS="1").restarts == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "AGN_OPTAX_COORDINATOR is not set"),
        ({"AGN_OPTAX_COORDINATOR": "x:9"}, "AGN_OPTAX_PROCESS is not set"),
        (STEP, "AGN_OPTAX_PROCESS must be .* below 2, got '3'"),
        (STEP | {"SLURM_PROCID": "x"}, "AGN_OPTAX_PROCESS must be a whole"),
        (STEP | {"SLURM_STEP_NODELIST": ""}, "AGN_OPTAX_COORDINATOR is not set"),
    ],
)
def test_missing_or_bad_process_is_rejected(given, set_environment, variables, message):
    set_environment()
    with pytest.raises(errors.InvalidArgumentError, match=message):
        given(variables, AGN_OPTAX_PROCESSES="2")


def test_worker_is_logged(set_environment, caplog):
    set_environment()
    with caplog.at_level("INFO", "agn_optax"):
        service.environment()
    assert "worker 'w', rank 1 of 2, with 1 process(es)" in caplog.text


def test_rule_is_read_from_the_environment(set_environment, monkeypatch):
    set_environment()
    with pytest.raises(errors.MissingArgumentError, match=r"RULE is not set: .*launch"):
        _ = service.environment().rule
    monkeypatch.setenv("AGN_OPTAX_RULE", '{"rule": "easgd", "moving_rate": 0.25}')
    assert service.environment().rule.name == "easgd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ("{}", "no rule"),
        ('{"rule": "easgd"}', "rule easgd needs moving_rate"),
        ('{"rule": ["agn"]}', "rule must be one of"),
        ('{"rule": "downpour", "moving_rate": 1}', "moving_rate does not apply"),
        ('{"rule": "downpour", "other": 1}', "other does not apply"),
    ],
)
def test_bad_rule_is_rejected(set_environment, monkeypatch, text, message):
    set_environment()
    monkeypatch.setenv("AGN_OPTAX_RULE", text)
    with pytest.raises(errors.InvalidArgumentError, match=message):
        _ = service.environment().rule
