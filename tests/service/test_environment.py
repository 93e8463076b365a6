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
# The second of four nodes of a TrainJob of Kubeflow.
NODE = {
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "1",
    "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:29500",
    "JOB_COMPLETION_INDEX": "1",
}
# The slice was the second of three, whose coordinator has ended.
MULTISLICE = {
    "MEGASCALE_COORDINATOR_ADDRESS": "old-0",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_PORT": "8081",
    "MEGASCALE_SLICE_ID": "1",
}
# The process of a worker of three slices with two hosts each.
SEVERAL = {
    "AGN_OPTAX_PROCESSES": "6",
    "AGN_OPTAX_PROCESS": "4",
    "AGN_OPTAX_COORDINATOR": "x:9",
}
UNNUMBERED = {"RANK": None, "WORKERS": None, "WORKER": None}


def joined(host, process, processes, port=20001):
    return {
        "coordinator_address": f"{host}:{port}",
        "num_processes": processes,
        "process_id": process,
    }


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    engines = "SLURM_", "TPU_", "JOB", "MEGASCALE_", "REPLICATED_JOB_NAME"
    jax_job = "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR"
    for name in os.environ:
        if name.startswith(("AGN_OPTAX_", *engines, *jax_job)):
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        # All nodes are one worker, whose rank the TrainJob sets.
        (NODE, (1, 2, joined("run-node-0-0.run", 1, 4, port=29500))),
        (NODE | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, (1, 2, ALONE)),
        (NODE | SLICE, (1, 2, joined("run-node-0-0.run", 1, 4, port=29500))),
        # What a JobSet or SLURM says of this process is never older than the process.
        (NODE | SET | {"AGN_OPTAX_PROCESSES": "4"},
         (1, 2, joined("run-worker-3-0.run", 1, 4))),
        (NODE | STEP | {"AGN_OPTAX_PROCESSES": "4"}, (1, 2, joined("node007", 3, 4))),
        (NODE | {"AGN_OPTAX_COORDINATOR": "x"}, (1, 2, joined("x", 1, 4))),
    ],
)  # fmt: skip
def test_nodes_of_kubeflow_are_one_worker(given, set_environment, variables, expected):
    set_environment()
    env = given(variables)
    assert (env.rank, env.workers, env.distributed) == expected
    assert service.environment() == env  # variables that were unset are not needed


def test_nodes_of_kubeflow_are_workers_if_each_has_one_process(given, set_environment):
    set_environment(**UNNUMBERED)
    env = given(NODE, AGN_OPTAX_PROCESSES="1")
    assert (env.rank, env.workers, env.worker, env.distributed) == (
        *(1, 4, "worker-1"),
        ALONE,
    )
    assert service.environment() == env


@pytest.mark.parametrize(
    "variables",
    [
        {"AGN_OPTAX_WORKERS": "8"},  # of two TrainJobs, whose nodes have equal numbers
        {"AGN_OPTAX_RANK": "1"},
        {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},  # one of several TrainJobs
        {"AGN_OPTAX_PROCESSES": "4"},
    ],
)
def test_number_of_a_node_is_no_rank_if_other_jobs_may_have_it(
    given, set_environment, variables
):
    set_environment(**UNNUMBERED)
    wanted = "AGN_OPTAX_(RANK|WORKERS) is not set"
    with pytest.raises(errors.InvalidArgumentError, match=wanted):
        given(NODE, {"AGN_OPTAX_PROCESSES": "1"}, variables)


@pytest.mark.parametrize("variables", [{}, STEP, SET, SLICE, NODE])
def test_stale_variables_are_unset(given, set_environment, caplog, variables):
    set_environment()
    given(variables, MULTISLICE, JAX_COORDINATOR_ADDRESS="old-0:1234")
    assert not [name for name in os.environ if name.startswith("MEGASCALE_")]
    assert "unset MEGASCALE_COORDINATOR_ADDRESS=old-0, MEGASCALE_NUM_SLICES=3" in (
        caplog.text
    )
    # A TrainJob sets the address for each of its pods.
    kept = variables is NODE
    assert ("JAX_COORDINATOR_ADDRESS" in os.environ) == kept
    assert ("unset JAX_COORDINATOR_ADDRESS=old-0:1234" in caplog.text) != kept


def test_worker_of_several_slices_keeps_their_variables(given, set_environment, caplog):
    set_environment()
    env = given(SLICE, MULTISLICE, SEVERAL, AGN_OPTAX_SLICES="3")
    assert env.distributed == joined("x", 4, 6, port=9)
    assert {name: os.environ[name] for name in MULTISLICE} == MULTISLICE
    assert "unset" not in caplog.text


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        # A slice of the job before was still there (ray#62893).
        ({"AGN_OPTAX_SLICES": "2"}, "NUM_SLICES must be AGN_OPTAX_SLICES, 2, got '3'"),
        ({"AGN_OPTAX_SLICES": "3", "MEGASCALE_SLICE_ID": "3"}, "SLICE_ID .* below 3"),
        # The host's number is one of its slice, and other slices have it, too.
        ({"AGN_OPTAX_SLICES": "3", "AGN_OPTAX_PROCESS": ""}, "PROCESS is not set"),
        ({"AGN_OPTAX_SLICES": "4"}, "multiple of AGN_OPTAX_SLICES, 4, got 6"),
        ({"AGN_OPTAX_SLICES": "0"}, "AGN_OPTAX_SLICES must be a whole number >= 1"),
        ({"JAX_COORDINATOR_BIND_ADDRESS": "[::]:8"}, r"port 9 of .* got '\[::\]:8'"),
    ],
)  # fmt: skip
def test_variables_that_would_hang_are_rejected(
    given, set_environment, variables, message
):
    set_environment()
    with pytest.raises(errors.InvalidArgumentError, match=message):
        given(SLICE, MULTISLICE, SEVERAL, variables)
    assert MULTISLICE.keys() <= os.environ.keys()  # nothing has changed


@pytest.mark.parametrize(
    ("address", "process", "warns"),
    [
        ("127.0.0.1:9", "0", False),
        ("198.51.100.7:9", "0", True),  # an address for documentation
        ("198.51.100.7:9", "1", False),
    ],
)
def test_old_address_of_a_coordinator_is_named(
    given, set_environment, caplog, address, process, warns
):
    set_environment()
    with caplog.at_level("INFO", "agn_optax"):
        given(NODE, JAX_PROCESS_ID=process, AGN_OPTAX_COORDINATOR=address)
    named = f"the coordinator's address {address} belongs to another machine"
    assert (named in caplog.text) == warns
    # The processes that hang at an old address log it, too.
    joins = f"process {process} joins the others of its worker at {address}:"
    assert (joins in caplog.text) != warns


def test_restarts_of_a_job_of_slurm_are_counted(set_environment, given):
    set_environment(RESTARTS=None)
    assert given(SLURM_RESTART_COUNT="2").restarts == 2
    assert given(AGN_OPTAX_RESTARTS="1").restarts == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "AGN_OPTAX_COORDINATOR is not set"),
        ({"AGN_OPTAX_COORDINATOR": "x:9"}, "AGN_OPTAX_PROCESS is not set"),
        (STEP, "AGN_OPTAX_PROCESS must be .* below 2, got '3' from SLURM_PROCID"),
        (STEP | {"SLURM_PROCID": "x"}, "AGN_OPTAX_PROCESS must be a whole"),
        (NODE | {"JAX_PROCESS_ID": "9"}, "below 2, got '9' from JAX_PROCESS_ID"),
        (SET | {"JOB_COMPLETION_INDEX": ""}, "AGN_OPTAX_PROCESS is not set"),
        (STEP | {"SLURM_STEP_NODELIST": ""}, "AGN_OPTAX_COORDINATOR is not set"),
    ],
)
def test_missing_or_bad_process_is_rejected(given, set_environment, variables, message):
    set_environment()
    with pytest.raises(errors.InvalidArgumentError, match=message):
        given(variables, AGN_OPTAX_PROCESSES="2")


def test_bad_number_of_processes_of_an_engine_is_named(given, set_environment):
    set_environment()
    wanted = "AGN_OPTAX_PROCESSES must be .* got 'x' from .*JAX_NUM_PROCESSES"
    with pytest.raises(errors.InvalidArgumentError, match=wanted):
        given(NODE, JAX_NUM_PROCESSES="x")


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
