"""The Kubernetes objects of a run, as dicts.

The objects have two forms with the same pods: a StatefulSet for the center and an
Indexed Job for the workers, which are built-in kinds; or one JobSet of both, whose
workers may have several pods each. The objects contain no secrets.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agn_optax.ops.engines._run import Resources, Run
from agn_optax.service import DEFAULT_GRACE, tokens

if TYPE_CHECKING:
    from agn_optax.ops.engines._kubernetes import KubernetesSettings

Manifest = dict[str, Any]

# Ports of the center's pod, which has addresses of its own and listens at all of them.
PORT, DIRECT_PORT, HEALTH_PORT, PAGE_PORT = 5000, 5001, 5002, 8080
_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 inside a pod
# Mount paths in a pod.
KEYS = pathlib.PurePosixPath("/etc/agn-optax")
STORAGE = pathlib.PurePosixPath("/storage")
_SCRATCH = "/tmp"  # noqa: S108 private to a pod
_USER = 1000  # user and group of all pods
_MARGIN = 15.0  # seconds for the work before and after a drain
_UNLIMITED = 2**31 - 1  # failures: a backoff limit that is never reached
_EXIT_AFTER_SIGTERM = 143  # as in a shell
# Default requests of a center: a pod without requests is evicted first when a node runs
# short.
_DEFAULT_REQUESTS = {"cpu": "1", "memory": "2Gi"}

_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_FAILURES_ANNOTATION = (
    "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
)
_JOBSET_ANNOTATION = "metadata.annotations['jobset.sigs.k8s.io/{}']"
_RANK = "$(AGN_OPTAX_RANK)"

# The center may start after its workers, or be down when a worker is restarted. Without
# waiting, the worker would fail, and the number of failures is limited.
_WAIT_FOR_CENTER = """\
import os, socket, time
host, port = os.environ["AGN_OPTAX_CENTER"].rsplit(":", 1)
while True:
    try:
        socket.create_connection((host, int(port)), 5).close()
        break
    except OSError as error:
        print(f"{host}:{port}: {error}", flush=True)
        time.sleep(2)
"""


class Manifests:
    """The objects of one run.

    Args:
      run: a run that the engine can carry out.
      settings: settings of the engine.

    Attributes:
      is_encrypted: whether workers and center speak TLS, with certificates of the run.
      has_keys: whether the run makes certificates or tokens of its own.
      center: name of the center's objects, and of its Secret.
      workers: name of the workers' objects, and of their Secret.
      hosts: host names of the center: of its Service, of its pod in a JobSet, both
        again with the namespace, and inside its pod.
    """

    def __init__(self, run: Run, settings: KubernetesSettings) -> None:
        self._run, self._settings = run, settings
        self.is_encrypted = run.has_center and not run.is_insecure
        self.has_keys = self.is_encrypted or run.uses_tokens
        self.center, self.workers = f"{run.name}-center", f"{run.name}-workers"
        names = [self.center, f"{self.center}-0-0.{run.name}"]
        namespace = settings.namespace
        full_names = [f"{name}.{namespace}.svc" for name in names] if namespace else []
        self.hosts = [*names, *full_names, "localhost"]

    def files(self) -> dict[str, list[Manifest]]:
        """Return the objects of each file, by the file's name."""
        has_center = self._run.has_center
        files = {"storage.yaml": [self._storage_claim()]} if has_center else {}
        environment = self._worker_environment()
        if self._settings.jobset:
            return files | {"jobset.yaml": [environment, self._job_set()]}
        if has_center:
            files["center.yaml"] = [self._service(), self._stateful_set()]
        return files | {"workers.yaml": [environment, self._job()]}

    def _storage_claim(self) -> Manifest:
        """Return the claim of the center's journal, which outlives the run."""
        spec = {
            "accessModes": ["ReadWriteOnce"],
            **_present(storageClassName=self._settings.storage_class),
            "resources": {"requests": {"storage": self._settings.storage_size}},
        }
        name = self.center
        return self._object("v1", "PersistentVolumeClaim", name, "center", spec=spec)

    def _job_set(self) -> Manifest:
        """Return a JobSet of center and workers."""
        run = self._run
        jobs = [("center", 1, self._center_job())] if run.has_center else []
        jobs.append(("worker", run.workers, self._worker_job()))
        spec = {
            # The Job of a worker restarts it after a failure. Only a worker that fails
            # after its last restart ends the set, which must not restart.
            "failurePolicy": {"maxRestarts": 0},
            # The workers alone decide, because the center does not end by itself.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["worker"]},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": name, "replicas": replicas, "template": {"spec": job}}
                for name, replicas, job in jobs
            ],
        }
        version = "jobset.x-k8s.io/v1alpha2"
        return self._object(version, "JobSet", run.name, is_queued=True, spec=spec)

    # The center.

    def _service(self) -> Manifest:
        spec = {
            "clusterIP": "None",  # the name resolves to the pod, with all its ports
            # The name resolves even while the center reads its journal.
            "publishNotReadyAddresses": True,
            "selector": self._labels("center"),
            "ports": [
                {"name": name, "port": port, "targetPort": name}
                for name, port in self._ports().items()
            ],
        }
        return self._object("v1", "Service", self.center, "center", spec=spec)

    def _stateful_set(self) -> Manifest:
        spec = {
            "replicas": 1,
            "serviceName": self.center,
            "selector": {"matchLabels": self._labels("center")},
            "template": self._center_pod(self._serve_command()),
        }
        return self._object("apps/v1", "StatefulSet", self.center, "center", spec=spec)

    def _center_job(self) -> Manifest:
        # A pod that exits with 0 is complete and is not replaced. A center that is told
        # to end, such as one that is moved, must exit with another code.
        command = self._serve_command(signal_exit_code=_EXIT_AFTER_SIGTERM)
        return {
            **_JOB_SPEC,
            "backoffLimit": _UNLIMITED,
            "completions": 1,
            "parallelism": 1,
            "template": self._center_pod(command, restartPolicy="Never"),
        }

    def _center_pod(self, command: Sequence[str], **more: Any) -> Manifest:
        storage = self._run.storage or STORAGE
        volumes = [_claim_volume("storage", self.center)]
        mounts = [_mount("storage", storage)]
        if self.has_keys:
            # Mounted as a whole, so that the center sees the keys of new workers.
            volumes.append(_secret_volume("keys", self.center))
            mounts.append(_mount("keys", KEYS, readOnly=True))
        container = {
            "name": "center",
            "command": _escaped(command),
            "env": [_variable("HOME", _SCRATCH), _variable("PYTHONUNBUFFERED", "1")],
            "ports": [
                {"name": name, "containerPort": port, "protocol": "TCP"}
                for name, port in {**self._ports(), "health": HEALTH_PORT}.items()
            ],
            # The center listens after it has read its journal, within half an hour.
            "startupProbe": _probe(periodSeconds=5, failureThreshold=360),
            "readinessProbe": _probe(periodSeconds=10, failureThreshold=3),
            "livenessProbe": _probe(periodSeconds=20, failureThreshold=6),
            **self._resources(self._run.center_resources, _DEFAULT_REQUESTS),
        }
        return self._pod(
            "center",
            container,
            volumes,
            mounts,
            # A drain lasts until the last answers are sent, at most DEFAULT_GRACE.
            max(DEFAULT_GRACE, self._run.stop_grace),
            tolerations=self._settings.center_tolerations,
            **more,
        )

    def _serve_command(self, **more: Any) -> list[str]:
        ports = self._ports()
        options = {"address": f"{_ALL_ADDRESSES}:{PORT}"}
        if "direct" in ports:
            options["direct_address"] = f"{_ALL_ADDRESSES}:{DIRECT_PORT}"
        if "page" in ports:
            options["page_address"] = f"{_ALL_ADDRESSES}:{PAGE_PORT}"
        options["health_address"] = f"{_ALL_ADDRESSES}:{HEALTH_PORT}"
        if self._run.uses_tokens:
            options["tokens"] = f"{KEYS}/tokens"
        if self.is_encrypted:
            options |= {
                "tls_certificate": f"{KEYS}/center.pem",
                "tls_key": f"{KEYS}/center.key",
                "tls_client_ca": f"{KEYS}/ca.pem",
            }
        storage = pathlib.Path(self._run.storage or STORAGE)
        durability_options = dataclasses.replace(
            self._run, storage=storage
        ).durability_options()
        return self._run.serve_command(**options, **durability_options, **more)

    def _ports(self) -> dict[str, int]:
        """Return the ports that others connect to, by name."""
        serve = self._run.serve
        direct = {} if serve.get("direct") is False else {"direct": DIRECT_PORT}
        page = {"page": PAGE_PORT} if serve.get("page") else {}
        return {"grpc": PORT} | direct | page

    # The workers.

    def _worker_environment(self) -> Manifest:
        """Return the workers' common environment as a ConfigMap.

        Unlike the template of a Job's pods, a ConfigMap can be changed.
        """
        data = {"HOME": _SCRATCH, "PYTHONUNBUFFERED": "1"}
        data |= self._run.worker_environment(_RANK)
        for name in ("AGN_OPTAX_RANK", "AGN_OPTAX_WORKER"):
            del data[name]
        if self._run.has_center:
            host = self.hosts[1 if self._settings.jobset else 0]
            data["AGN_OPTAX_CENTER"] = f"{host}:{PORT}"
        return self._object("v1", "ConfigMap", self.workers, "worker", data=data)

    def _job(self) -> Manifest:
        spec = self._worker_job()
        name = self.workers
        return self._object(
            "batch/v1", "Job", name, "worker", is_queued=True, spec=spec
        )

    def _worker_job(self) -> Manifest:
        """Return a Job of all workers or, in a JobSet, of one worker."""
        run, needs = self._run, self._run.worker_resources
        pods = needs.processes if self._settings.jobset else run.workers
        return {
            **_JOB_SPEC,
            "completions": pods,
            "parallelism": pods,
            # Counted for each worker alone: the others go on when one has failed.
            "backoffLimitPerIndex": run.restarts,
            # If one process of a worker fails, the others cannot go on.
            **({"maxFailedIndexes": 0} if needs.processes > 1 else {}),
            **_present(
                activeDeadlineSeconds=needs.seconds and math.ceil(needs.seconds)
            ),
            "template": self._worker_pod(),
        }

    def _worker_pod(self) -> Manifest:
        run, settings = self._run, self._settings
        volumes, mounts, variables = self._worker_keys()
        volumes += [_claim_volume(name, name) for name in settings.claims]
        mounts += [_mount(name, path) for name, path in settings.claims.items()]
        rank = (
            _JOBSET_ANNOTATION.format("job-index")
            if settings.jobset
            else _INDEX_ANNOTATION
        )
        fields = {"AGN_OPTAX_RANK": rank, "AGN_OPTAX_RESTARTS": _FAILURES_ANNOTATION}
        if settings.jobset:
            fields |= {
                "JOBSET_NAME": _JOBSET_ANNOTATION.format("jobset-name"),
                "REPLICATED_JOB_NAME": _JOBSET_ANNOTATION.format("replicatedjob-name"),
                "JOB_INDEX": rank,
            }
        for variable, secret in settings.environment_secrets.items():
            name, _, key = secret.partition("/")
            source = {"secretKeyRef": {"name": name, "key": key}}
            variables.append({"name": variable, "valueFrom": source})
        common = {"envFrom": [{"configMapRef": {"name": self.workers}}]}
        container = {
            "name": "worker",
            "command": _escaped(run.worker_command("python")),
            **common,
            "env": [
                *(
                    {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                    for name, path in fields.items()
                ),
                _variable("AGN_OPTAX_WORKER", run.worker_name(_RANK)),
                *variables,
            ],
            **self._resources(run.worker_resources),
        }
        wait = {
            "name": "wait-for-center",
            "command": ["python", "-c", _WAIT_FOR_CENTER],
        }
        return self._pod(
            *("worker", container, volumes, mounts, run.stop_grace),
            restartPolicy="Never",
            initContainers=[self._secured(wait | common)] if run.has_center else [],
            nodeSelector=settings.node_selector,
            tolerations=settings.tolerations,
        )

    def _worker_keys(self) -> tuple[list[Manifest], list[Manifest], list[Manifest]]:
        """Return volumes, mounts and variables by which a worker sees only its keys."""
        secret = self.workers if self.has_keys else self._settings.secret
        if secret is None:
            return [], [], []
        worker = self._run.worker_name(_RANK)
        keys = {"token": (f"{worker}.token", tokens.TOKEN_FILE)}
        if self.is_encrypted or not self._run.has_center:
            keys |= {
                "ca.pem": ("ca.pem", "AGN_OPTAX_TLS_CA"),
                "certificate.pem": (f"{worker}.pem", "AGN_OPTAX_TLS_CERTIFICATE"),
                "key.pem": (f"{worker}.key", "AGN_OPTAX_TLS_KEY"),
            }
        mounts, variables = [], []
        for name, (key, variable) in keys.items():
            path = KEYS / name
            mounts.append(_mount("keys", path, subPathExpr=key, readOnly=True))
            variables.append(_variable(variable, str(path)))
        return [_secret_volume("keys", secret)], mounts, variables

    # Common parts.

    def _pod(
        self,
        component: str,
        container: Manifest,
        volumes: Sequence[Manifest],
        mounts: Sequence[Manifest],
        grace: float,
        **more: Any,
    ) -> Manifest:
        """Return a pod's template; empty fields in ``more`` are left out."""
        pull, account = self._settings.pull_secret, self._settings.service_account
        mounted = {"volumeMounts": [_mount("scratch", _SCRATCH), *mounts]}
        spec = {
            "terminationGracePeriodSeconds": math.ceil(grace + _MARGIN),
            # If a program without a handler is process 1, it ignores SIGTERM.
            "shareProcessNamespace": True,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # no variables of other Services
            **_present(serviceAccountName=account),
            **_present(imagePullSecrets=[{"name": pull}] if pull else None),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **{name: value for name, value in more.items() if value},
            "containers": [self._secured(container) | mounted],
            "volumes": [{"name": "scratch", "emptyDir": {}}, *volumes],
        }
        return {"metadata": {"labels": self._labels(component)}, "spec": spec}

    def _secured(self, container: Manifest) -> Manifest:
        return {
            **container,
            "image": self._settings.image,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }

    def _resources(
        self, needed: Resources, defaults: Mapping[str, str] | None = None
    ) -> Manifest:
        """Return requests and limits: memory and devices are limited, cores are not.

        ``defaults`` has the default requests.
        """
        limited = {"memory": needed.memory, self._settings.gpu: needed.gpus}
        limits = {name: str(value) for name, value in limited.items() if value}
        cores = {} if needed.cpus is None else {"cpu": str(needed.cpus)}
        requests = {**(defaults or {}), **cores, **limits}
        if not requests:
            return {}
        return {"resources": {"requests": requests, **_present(limits=limits or None)}}

    def _object(
        self,
        version: str,
        kind: str,
        name: str,
        component: str | None = None,
        *,
        is_queued: bool = False,
        **content: Any,
    ) -> Manifest:
        queue = self._settings.queue if is_queued else None
        labels = _present(**{"kueue.x-k8s.io/queue-name": queue})
        metadata = {
            "name": name,
            **_present(namespace=self._settings.namespace),
            "labels": self._labels(component) | labels,
        }
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def _labels(self, component: str | None) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "agn-optax",
            "app.kubernetes.io/instance": self._run.name,
            **_present(**{"app.kubernetes.io/component": component}),
        }


_JOB_SPEC: Manifest = {
    "completionMode": "Indexed",
    # A pod that is evicted or preempted, as when its node is drained, has not failed.
    "podFailurePolicy": {
        "rules": [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            }
        ]
    },
    "podReplacementPolicy": "Failed",  # never two pods of one worker at a time
}


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _claim_volume(name: str, claim: str) -> Manifest:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def _secret_volume(name: str, secret: str) -> Manifest:
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _mount(name: str, path: object, **more: Any) -> Manifest:
    return {"name": name, "mountPath": str(path), **more}


def _probe(**times: int) -> Manifest:
    return {"grpc": {"port": HEALTH_PORT}, "timeoutSeconds": 10, **times}


def _escaped(command: Iterable[str]) -> list[str]:
    """Return a command escaped so that Kubernetes leaves ``$(NAME)`` and $$ as is."""
    return [word.replace("$", "$$") for word in command]
