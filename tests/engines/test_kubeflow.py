"""The manifests of docs/kubeflow.md, with the variables that their controllers add."""

import os
import pathlib
import re

import pytest
import yaml
from helpers.commands import ROOT
from helpers.pods import Cluster

from agn_optax import service

_BLOCKS = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs/kubeflow.md").read_text(), re.S
)
TRAIN_JOB, JOB_SET = map(yaml.safe_load, _BLOCKS)


def pods_of_train_job(manifest, **variables):
    """Yield the environment of each pod, as the runtime jax-distributed makes it."""
    name, trainer = manifest["metadata"]["name"], manifest["spec"]["trainer"]
    given = {each["name"]: each["value"] for each in trainer["env"]} | variables
    for node in range(trainer["numNodes"]):
        yield given | {
            "JAX_NUM_PROCESSES": str(trainer["numNodes"]),
            "JAX_PROCESS_ID": str(node),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:29500",
            "JOB_COMPLETION_INDEX": str(node),
        }


def pods_of_job_set(manifest, annotations=()):
    """Yield the environment of each pod of the only replicated job."""
    (job,) = manifest["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for replica in range(job["replicas"]):
        own = {
            "jobset-name": manifest["metadata"]["name"],
            "replicatedjob-name": job["name"],
            "replicatedjob-replicas": str(job["replicas"]),
            "job-index": str(replica),
            "restart-attempt": "0",
            **dict(annotations),
        }
        prefixed = {f"jobset.sigs.k8s.io/{name}": value for name, value in own.items()}
        variables = Cluster(pathlib.Path(), [manifest], None).variables(
            pod, container, prefixed
        )
        for index in range(job["template"]["spec"]["completions"]):
            yield variables | {"JOB_COMPLETION_INDEX": str(index)}


@pytest.fixture
def environment(monkeypatch):
    def environment(variables):
        with monkeypatch.context() as patch:
            engines = "AGN_OPTAX_", "SLURM_", "TPU_", "JOB", "REPLICATED_JOB_NAME"
            for name in [each for each in os.environ if each.startswith(engines)]:
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            return service.environment()

    return environment


def test_nodes_of_a_train_job_join_as_one_worker(environment):
    found = [environment(pod) for pod in pods_of_train_job(TRAIN_JOB)]
    assert [each.distributed.pop("process_id") for each in found] == [0, 1]
    assert found[0] == found[1]
    assert found[0] == (
        *("digits-center:5000", 0, 4, "worker-0", 0),
        {
            "coordinator_address": "digits-0-node-0-0.digits-0:29500",
            "num_processes": 2,
        },
    )


def test_nodes_of_a_train_job_can_be_a_worker_each(environment):
    separate = {
        "AGN_OPTAX_PROCESSES": "1",
        "AGN_OPTAX_RANK": "",
        "AGN_OPTAX_WORKERS": "",
    }
    for rank, pod in enumerate(pods_of_train_job(TRAIN_JOB, **separate)):
        env = environment(pod)
        assert (env.rank, env.workers, env.worker) == (rank, 2, f"worker-{rank}")
        assert env.distributed == {}


# The annotation is there only if the feature gate RestartJob is open.
@pytest.mark.parametrize(
    ("annotations", "restarts"), [({}, 0), ({"job-restart-attempt": "3"}, 3)]
)
def test_replicas_of_a_job_set_are_workers(environment, annotations, restarts):
    found = [environment(pod) for pod in pods_of_job_set(JOB_SET, annotations)]
    assert [(each.rank, each.distributed["process_id"]) for each in found] == [
        (rank, process) for rank in range(4) for process in range(2)
    ]
    for each in found:
        assert (each.workers, each.worker) == (4, f"worker-{each.rank}")
        assert each.restarts == restarts
        address = each.distributed["coordinator_address"]
        assert address == f"digits-worker-{each.rank}-0.digits:{20_000 + each.rank}"
        assert each.distributed["num_processes"] == 2


def test_pods_of_a_job_set_on_gke_do_not_wait_for_other_slices(environment, caplog):
    for pod in pods_of_job_set(JOB_SET):
        multislice = {"MEGASCALE_NUM_SLICES": "4", "MEGASCALE_SLICE_ID": "0"}
        environment(pod | multislice)
        assert "unset MEGASCALE_NUM_SLICES=4, MEGASCALE_SLICE_ID=0" in caplog.text
        caplog.clear()
