"""The environment of a launched program, set by agn-optax or by other engines."""

import itertools
import os

import pytest

import agn_optax
from agn_optax import errors, service

GOOD = {"CENTER": "h:1", "RANK": "1", "WORKERS": "2", "WORKER": "w", "RESTARTS": "3"}
ALONE = {"num_processes": 1}
# Variables of one worker as each engine sets them.
ARRAY = {
    "SLURM_JOB_ID": "77",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_COUNT": "8",
    "SLURM_RESTART_COUNT": "2",
}
STEP = {
    "SLURM_JOB_ID": "78",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[007-008,011],other",
}
# As set by SLURM 22.05 in a step of all components.
HETEROGENEOUS = {
    "SLURM_JOB_ID": "1",
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS_HET_GROUP_0": "1",
    "SLURM_NTASKS_HET_GROUP_1": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "2",
}
JOB = {"JOB_COMPLETION_INDEX": "3", "AGN_OPTAX_WORKERS": "8"}
SET = {
    "JOBSET_NAME": "run",
    "REPLICATED_JOB_NAME": "worker",
    "JOB_INDEX": "3",
    "JOB_COMPLETION_INDEX": "1",
    "AGN_OPTAX_WORKERS": "8",
    "AGN_OPTAX_PROCESSES": "2",
}
GROUP = {
    "LWS_LEADER_ADDRESS": "run-3.run.default",
    "LWS_GROUP_SIZE": "5",
    "LWS_WORKER_INDEX": "2",
}
SLICE = {
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "t0,t1",
    "MEGASCALE_SLICE_ID": "3",
    "MEGASCALE_NUM_SLICES": "8",
}
NODES = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}


def joined(host, process, processes, rank=3):
    return {
        "coordinator_address": f"{host}:{20_000 + rank}",
        "num_processes": processes,
        "process_id": process,
    }


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    for name in os.environ:
        if name.startswith(
            ("AGN_OPTAX_", "SLURM_", "RAY_", "TPU_", "SKYPILOT_", "MEGASCALE_")
        ):
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
    wanted = f"AGN_OPTAX_{name} is not set, and no .*agn-optax launch"
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
    with pytest.raises(errors.InvalidArgumentError, match=r"below AGN_OPTAX_WORKERS"):
        service.environment()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (ARRAY, ("c:1", 3, 8, "worker-3", 2, ALONE)),
        # Each task of a step is a worker, or all tasks are one.
        (STEP | {"AGN_OPTAX_PROCESSES": "1"}, ("c:1", 3, 4, "worker-3", 0, ALONE)),
        (
            STEP | {"AGN_OPTAX_PROCESSES": "4"},
            ("c:1", 0, 1, "worker-0", 0, joined("node007", 3, 4, rank=0)),
        ),
        # A step within a task of an array: processes of one worker.
        (ARRAY | STEP, ("c:1", 3, 8, "worker-3", 2, joined("node007", 3, 4))),
        # An array that has grown.
        (
            ARRAY
            | {
                "SLURM_ARRAY_TASK_MIN": "2",
                "SLURM_ARRAY_TASK_MAX": "9",
                "AGN_OPTAX_WORKERS": "10",
            },
            ("c:1", 3, 10, "worker-3", 2, ALONE),
        ),
        (JOB, ("c:1", 3, 8, "worker-3", 0, ALONE)),
        (SET, ("c:1", 3, 8, "worker-3", 0, joined("run-worker-3-0.run", 1, 2))),
        (
            GROUP | {"AGN_OPTAX_PROCESSES": "5", "AGN_OPTAX_WORKERS": "4"},
            ("c:1", 3, 4, "worker-3", 0, joined("run-3.run.default", 2, 5)),
        ),
        (SLICE, ("c:1", 3, 8, "worker-3", 0, joined("t0", 1, 2))),
        # A slice as pods of a Job: the completion index is that of a host.
        (
            SLICE | {"JOB_COMPLETION_INDEX": "1"},
            ("c:1", 3, 8, "worker-3", 0, joined("t0", 1, 2)),
        ),
        (
            NODES | {"AGN_OPTAX_RANK": "3", "AGN_OPTAX_WORKERS": "4"},
            ("c:1", 3, 4, "worker-3", 0, joined("10.0.0.1", 1, 2)),
        ),
        # One slice per job, as xpk starts it: its hosts are pods of a Job.
        (
            SLICE
            | {
                "MEGASCALE_SLICE_ID": "0",
                "MEGASCALE_NUM_SLICES": "1",
                "JOB_COMPLETION_INDEX": "1",
                "AGN_OPTAX_RANK": "3",
                "AGN_OPTAX_WORKERS": "8",
            },
            ("c:1", 3, 8, "worker-3", 0, joined("t0", 1, 2)),
        ),
        # A Ray actor uses its own variables, not those of its node's engine.
        (
            ARRAY
            | STEP
            | {"RAY_JOB_ID": "1", "AGN_OPTAX_RANK": "0", "AGN_OPTAX_WORKERS": "2"},
            ("c:1", 0, 2, "worker-0", 0, ALONE),
        ),
    ],
)
def test_variables_of_engines_are_understood(given, variables, said):
    assert given(variables, AGN_OPTAX_CENTER="c:1") == said


def test_center_address_of_a_jobset(given):
    assert given(SET).address == "run-center-0-0.run:5000"
    assert given(SET, AGN_OPTAX_PORT="6000").address == "run-center-0-0.run:6000"


def test_heterogeneous_slurm_job(given):
    said = given(HETEROGENEOUS, AGN_OPTAX_PROCESSES="1")
    assert said == ("n1:5000", 1, 2, "worker-1", 0, ALONE)
    said = given(AGN_OPTAX_PROCESSES="2")
    assert said == ("n1:5000", 0, 1, "worker-0", 0, joined("n2", 1, 2, rank=0))
    # A step of the second component alone.
    said = given(
        SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1", SLURM_STEP_NODELIST="n[2-3]"
    )
    assert said == ("n1:5000", 0, 1, "worker-0", 0, joined("n2", 1, 2, rank=0))
    with pytest.raises(errors.InvalidArgumentError, match="first component"):
        given(HETEROGENEOUS, SLURM_PROCID="0")


def test_center_address_of_a_leader_worker_set(given):
    assert given(GROUP)[:4] == ("run-3.run.default:5000", 1, 4, "worker-1")
    with pytest.raises(errors.InvalidArgumentError, match="this is the leader"):
        given(LWS_WORKER_INDEX="0")


def test_explicit_variables_override_the_engine(given):
    said = given(ARRAY, STEP, {f"AGN_OPTAX_{name}": GOOD[name] for name in GOOD})
    assert said[:5] == ("h:1", 1, 2, "w", 3)
    assert given(AGN_OPTAX_PROCESSES="1").distributed == ALONE
    said = given(
        AGN_OPTAX_PROCESSES="3", AGN_OPTAX_PROCESS="2", AGN_OPTAX_COORDINATOR="x:9"
    )
    assert said.distributed == {
        "coordinator_address": "x:9",
        "num_processes": 3,
        "process_id": 2,
    }


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (STEP, "SLURM has started 4 processes together.*AGN_OPTAX_PROCESSES=1 if"),
        (NODES, "SkyPilot has started 2 processes together"),
        (STEP | {"AGN_OPTAX_PROCESSES": "3"}, "got 3"),
        (
            ARRAY | JOB | {"JOB_COMPLETION_INDEX": "4"},
            "Kubernetes.*SLURM.*disagree",
        ),
        (SLICE | NODES | {"SKYPILOT_NODE_RANK": "0"}, "SkyPilot.*TPU.*disagree"),
        (ARRAY | {"SLURM_ARRAY_TASK_MIN": "1"}, "may be only a part"),
        (ARRAY | {"SLURM_ARRAY_TASK_COUNT": "4"}, "may be only a part"),
        ({"JOB_COMPLETION_INDEX": "3"}, "AGN_OPTAX_WORKERS is not set"),
        ({"SLURM_JOB_ID": "5"}, "AGN_OPTAX_RANK is not set"),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "x"}, "SLURM_ARRAY_TASK_ID must be a whole"),
        (ARRAY | {"AGN_OPTAX_PROCESSES": "2"}, "AGN_OPTAX_PROCESS is not set"),
    ],
)
def test_ambiguous_variables_are_rejected(given, variables, said):
    with pytest.raises(errors.InvalidArgumentError, match=said):
        given(variables, AGN_OPTAX_CENTER="c:1")


def test_sources_of_rank_and_workers_are_logged(given, caplog):
    with caplog.at_level("INFO", "agn_optax"):
        given(ARRAY, AGN_OPTAX_CENTER="c:1")
    assert "worker 'worker-3', rank 3 of 8 by SLURM_ARRAY_TASK_ID=3" in caplog.text


def test_workers_of_one_step_are_not_joined_by_accident(given):
    env = given(ARRAY, STEP, AGN_OPTAX_CENTER="c:1")
    with pytest.raises(errors.InvalidArgumentError, match="would become one job"):
        agn_optax.initialize_distributed()
    assert env.distributed["num_processes"] == 4
    alone = given(AGN_OPTAX_PROCESSES="1").distributed
    assert agn_optax.initialize_distributed(**alone) == 1


def test_rule_is_read_from_the_environment(set_environment, monkeypatch):
    set_environment()
    with pytest.raises(
        errors.MissingArgumentError, match="Make the rule of the center"
    ):
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
