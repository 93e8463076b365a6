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
from agn_optax.service import LONGEST_GRACE, tokens

if TYPE_CHECKING:
    from agn_optax.ops.engines._kubernetes import KubernetesSettings

Manifest = dict[str, Any]

# Ports of the center's pod, which has addresses of its own and listens at all of them.
PORT, DIRECT_PORT, HEALTH_PORT, PAGE_PORT = 5000, 5001, 5002, 8080
_ANY = "0.0.0.0"  # noqa: S104 inside a pod
# Mount paths in a pod.
KEYS = pathlib.PurePosixPath("/etc/agn-optax")
STORAGE = pathlib.PurePosixPath("/storage")
_SCRATCH = "/tmp"  # noqa: S108 private to a pod
_USER = 1000  # user and group of all pods
_MARGIN = 15.0  # seconds for the work before and after a drain
_MOST = 2**31 - 1  # failures: a backoff limit that is never reached
_TOLD = 143  # exit code of a center that was told to end: a shell's for SIGTERM
# Default requests of a center: a pod without requests is evicted first when a node runs
# short.
_LEAST = {"cpu": "1", "memory": "2Gi"}

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_FAILURES = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
_SET = "metadata.annotations['jobset.sigs.k8s.io/{}']"
_RANK = "$(AGN_OPTAX_RANK)"

# The center may start after its workers, or be away when a worker is restarted. Waiting
# here is no failure; the number of failures of a worker is limited.
_WAIT = """\
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
    """

    def __init__(self, run: Run, settings: KubernetesSettings) -> None:
        self._run, self._settings = run, settings
        self.is_encrypted = run.has_center and not run.is_insecure
        self._secret = settings.secret
        if self.is_encrypted or run.is_closed:
            self._secret = self.workers

    # Names.

    @property
    def center(self) -> str:
        """The name of the center's objects, and of its Secret."""
        return f"{self._run.name}-center"

    @property
    def workers(self) -> str:
        """The name of the workers' objects, and of their Secret."""
        return f"{self._run.name}-workers"

    @property
    def host(self) -> str:
        """The host name by which pods of the namespace reach the center."""
        return self.hosts[1 if self._settings.jobset else 0]

    @property
    def hosts(self) -> list[str]:
        """The host names of the center in either form, and in its own pod."""
        names = [self.center, f"{self.center}-0-0.{self._run.name}"]
        space = self._settings.namespace
        full = [f"{name}.{space}.svc" for name in names] if space else []
        return [*names, *full, "localhost"]

    # The objects of each form.

    def storage_objects(self) -> list[Manifest]:
        """Return what outlives the run: the claim of the center's journal."""
        claim = self._object("v1", "PersistentVolumeClaim", self.center, "center")
        claim["spec"] = {
            "accessModes": ["ReadWriteOnce"],
            **_given(storageClassName=self._settings.storage_class),
            "resources": {"requests": {"storage": self._settings.storage_size}},
        }
        return [claim]

    def center_objects(self) -> list[Manifest]:
        """Return the center's objects without a JobSet: Service and pod."""
        return [self._service(), self._stateful_set()]

    def worker_objects(self) -> list[Manifest]:
        """Return the workers' objects without a JobSet."""
        job = self._object("batch/v1", "Job", self.workers, "worker")
        spec = self._worker_job(_INDEX, self._run.workers)
        return [self._told(), self._queued(job) | {"spec": spec}]

    def jobset_objects(self) -> list[Manifest]:
        """Return the objects of center and workers as a JobSet."""
        run = self._run
        jobs = []
        if run.has_center:
            jobs.append(("center", 1, self._center_job()))
        spec = self._worker_job(
            _SET.format("job-index"), run.worker_resources.processes
        )
        if run.worker_resources.processes > 1:
            spec["maxFailedIndexes"] = 0  # the other processes cannot go on without it
        jobs.append(("worker", run.workers, spec))
        made = self._object("jobset.x-k8s.io/v1alpha2", "JobSet", run.name)
        made = self._queued(made) | {
            "spec": {
                # The Job of a worker restarts it after a failure. Only a worker that
                # fails after its last restart ends the set, which must not restart.
                "failurePolicy": {"maxRestarts": 0},
                # The workers alone decide, because the center does not end by itself.
                "successPolicy": {
                    "operator": "All",
                    "targetReplicatedJobs": ["worker"],
                },
                "network": {
                    "enableDNSHostnames": True,
                    "publishNotReadyAddresses": True,
                },
                "replicatedJobs": [
                    {"name": name, "replicas": replicas, "template": {"spec": spec}}
                    for name, replicas, spec in jobs
                ],
            }
        }
        return [self._told(), made]

    # The center.

    def _service(self) -> Manifest:
        made = self._object("v1", "Service", self.center, "center")
        made["spec"] = {
            "clusterIP": "None",  # the name resolves to the pod, with all its ports
            # Also while the center reads its journal, when workers wait for it.
            "publishNotReadyAddresses": True,
            "selector": self._labels("center"),
            "ports": [
                {"name": name, "port": port, "targetPort": name}
                for name, port in self._ports().items()
            ],
        }
        return made

    def _stateful_set(self) -> Manifest:
        made = self._object("apps/v1", "StatefulSet", self.center, "center")
        made["spec"] = {
            "replicas": 1,
            "serviceName": self.center,
            "selector": {"matchLabels": self._labels("center")},
            "template": self._center_pod(self._serve()),
        }
        return made

    def _center_job(self) -> Manifest:
        return {
            **_JOB,
            "backoffLimit": _MOST,
            "completions": 1,
            "parallelism": 1,
            # A pod that exits with 0 is complete and is not replaced. A center that is
            # told to end, such as one that is moved, must exit with another code.
            "template": self._center_pod(
                self._serve(signal_exit_code=_TOLD), restartPolicy="Never"
            ),
        }

    def _center_pod(self, command: Sequence[str], **more: Any) -> Manifest:
        storage = str(self._run.storage or STORAGE)
        volumes = [_volume("storage", persistentVolumeClaim={"claimName": self.center})]
        mounts: list[Manifest] = [{"name": "storage", "mountPath": storage}]
        if self.is_encrypted or self._run.is_closed:
            # Mounted as a whole, because only then are changes for new workers seen.
            volumes.append(_secret("keys", self.center))
            mounts.append({"name": "keys", "mountPath": str(KEYS), "readOnly": True})
        container = {
            "name": "center",
            "command": _verbatim(command),
            "env": [_variable("HOME", _SCRATCH), _variable("PYTHONUNBUFFERED", "1")],
            "ports": [
                {"name": name, "containerPort": port, "protocol": "TCP"}
                for name, port in {**self._ports(), "health": HEALTH_PORT}.items()
            ],
            # The center listens after it has read its journal, within half an hour.
            "startupProbe": _probe(periodSeconds=5, failureThreshold=360),
            "readinessProbe": _probe(periodSeconds=10, failureThreshold=3),
            "livenessProbe": _probe(periodSeconds=20, failureThreshold=6),
        }
        if self._settings.center_tolerations:
            more["tolerations"] = list(self._settings.center_tolerations)
        return self._pod(
            "center",
            container,
            volumes,
            mounts,
            _resources(self._run.center_resources, self._settings.gpu, _LEAST),
            # A drain lasts until its last answers, and LONGEST_GRACE at most.
            max(LONGEST_GRACE, self._run.stop_grace) + _MARGIN,
            **more,
        )

    def _serve(self, **more: Any) -> list[str]:
        options: dict[str, Any] = {"address": f"{_ANY}:{PORT}"}
        ports = self._ports()
        if "direct" in ports:
            options["direct_address"] = f"{_ANY}:{DIRECT_PORT}"
        if "page" in ports:
            options["page_address"] = f"{_ANY}:{PAGE_PORT}"
        options["health_address"] = f"{_ANY}:{HEALTH_PORT}"
        if self._run.is_closed:
            options["tokens"] = KEYS / "tokens"
        if self.is_encrypted:
            options |= {
                "tls_certificate": KEYS / "center.pem",
                "tls_key": KEYS / "center.key",
                "tls_client_ca": KEYS / "ca.pem",
            }
        storage = pathlib.Path(self._run.storage or STORAGE)
        durable = dataclasses.replace(self._run, storage=storage).durable()
        return self._run.serve_command(**options, **durable, **more)

    def _ports(self) -> dict[str, int]:
        """Return the ports that others connect to, by name."""
        serve = self._run.serve
        ports = {"grpc": PORT}
        if serve.get("direct") is not False:
            ports["direct"] = DIRECT_PORT
        if serve.get("page"):
            ports["page"] = PAGE_PORT
        return ports

    # The workers.

    def _told(self) -> Manifest:
        """Return the workers' common environment as a ConfigMap.

        Unlike the environment in a pod's template, it can be changed.
        """
        run = self._run
        told = {"HOME": _SCRATCH, "PYTHONUNBUFFERED": "1"}
        told |= run.worker_environment(_RANK)
        for name in ("AGN_OPTAX_RANK", "AGN_OPTAX_WORKER"):
            del told[name]
        if run.has_center:
            told["AGN_OPTAX_CENTER"] = f"{self.host}:{PORT}"
        made = self._object("v1", "ConfigMap", self.workers, "worker")
        return made | {"data": told}

    def _worker_job(self, rank: str, pods: int) -> Manifest:
        return {
            **_JOB,
            "completions": pods,
            "parallelism": pods,
            # Counted for each worker alone: the others go on when one has failed.
            "backoffLimitPerIndex": self._run.restarts,
            **_given(activeDeadlineSeconds=_seconds(self._run.worker_resources)),
            "template": self._worker_pod(rank),
        }

    def _worker_pod(self, rank: str) -> Manifest:
        run, settings = self._run, self._settings
        volumes, mounts, variables = self._own_keys()
        for name, path in settings.claims.items():
            volumes.append(_volume(name, persistentVolumeClaim={"claimName": name}))
            mounts.append({"name": name, "mountPath": path})
        told = [
            _from_field("AGN_OPTAX_RANK", rank),
            _variable("AGN_OPTAX_WORKER", run.worker_name(_RANK)),
            _from_field("AGN_OPTAX_RESTARTS", _FAILURES),
        ]
        if settings.jobset:
            told += [
                _from_field("JOBSET_NAME", _SET.format("jobset-name")),
                _from_field("REPLICATED_JOB_NAME", _SET.format("replicatedjob-name")),
                _from_field("JOB_INDEX", _SET.format("job-index")),
            ]
        common = {"envFrom": [{"configMapRef": {"name": self.workers}}]}
        container = {
            "name": "worker",
            "command": _verbatim(run.worker_command("python")),
            **common,
            "env": told + variables + self._from_secrets(),
        }
        more: dict[str, Any] = {"restartPolicy": "Never"}
        if run.has_center:
            waits = {"name": "center-is-there", "command": ["python", "-c", _WAIT]}
            more["initContainers"] = [self._secured(waits | common)]
        if settings.node_selector:
            more["nodeSelector"] = dict(settings.node_selector)
        if settings.tolerations:
            more["tolerations"] = list(settings.tolerations)
        needed = _resources(run.worker_resources, settings.gpu)
        grace = run.stop_grace + _MARGIN
        return self._pod("worker", container, volumes, mounts, needed, grace, **more)

    def _from_secrets(self) -> list[Manifest]:
        made = []
        for variable, where in self._settings.environment_secrets.items():
            name, _, key = where.partition("/")
            source = {"secretKeyRef": {"name": name, "key": key}}
            made.append({"name": variable, "valueFrom": source})
        return made

    def _own_keys(self) -> tuple[list[Manifest], list[Manifest], list[Manifest]]:
        """Return volumes, mounts and variables by which a worker sees only its keys."""
        if self._secret is None:
            return [], [], []
        own = self._run.worker_name(_RANK)
        files = {"token": (f"{own}.token", tokens.TOKEN_FILE)}
        if self.is_encrypted or not self._run.has_center:
            files |= {
                "ca.pem": ("ca.pem", "AGN_OPTAX_TLS_CA"),
                "certificate.pem": (f"{own}.pem", "AGN_OPTAX_TLS_CERTIFICATE"),
                "key.pem": (f"{own}.key", "AGN_OPTAX_TLS_KEY"),
            }
        mounts = [
            {
                "name": "keys",
                "mountPath": str(KEYS / name),
                "subPathExpr": key,
                "readOnly": True,
            }
            for name, (key, _) in files.items()
        ]
        variables = [
            _variable(variable, str(KEYS / name))
            for name, (_, variable) in files.items()
        ]
        return [_secret("keys", self._secret)], mounts, variables

    # Common parts.

    def _pod(
        self,
        component: str,
        container: Manifest,
        volumes: Sequence[Manifest],
        mounts: Sequence[Manifest],
        resources: Manifest | None,
        grace: float,
        **more: Any,
    ) -> Manifest:
        settings = self._settings
        scratch = {"name": "scratch", "mountPath": _SCRATCH}
        pull = settings.pull_secret
        container = self._secured(container) | {
            **_given(resources=resources),
            "volumeMounts": [scratch, *mounts],
        }
        return {
            "metadata": {"labels": self._labels(component)},
            "spec": {
                "terminationGracePeriodSeconds": math.ceil(grace),
                # If a program without a handler is process 1, it ignores SIGTERM.
                "shareProcessNamespace": True,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,  # no variables of other Services
                **_given(serviceAccountName=settings.service_account),
                **_given(imagePullSecrets=[{"name": pull}] if pull else None),
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": _USER,
                    "runAsGroup": _USER,
                    "fsGroup": _USER,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                **more,
                "containers": [container],
                "volumes": [_volume("scratch", emptyDir={}), *volumes],
            },
        }

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

    def _object(
        self, version: str, kind: str, name: str, component: str | None = None
    ) -> Manifest:
        return {
            "apiVersion": version,
            "kind": kind,
            "metadata": {
                "name": name,
                **_given(namespace=self._settings.namespace),
                "labels": self._labels(component),
            },
        }

    def _queued(self, made: Manifest) -> Manifest:
        if self._settings.queue is not None:
            labels = made["metadata"]["labels"]
            labels["kueue.x-k8s.io/queue-name"] = self._settings.queue
        return made

    def _labels(self, component: str | None = None) -> dict[str, str]:
        own = {
            "app.kubernetes.io/name": "agn-optax",
            "app.kubernetes.io/instance": self._run.name,
        }
        return own | _given(**{"app.kubernetes.io/component": component})


_JOB: Manifest = {
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


def _given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _volume(name: str, **source: Mapping[str, Any]) -> Manifest:
    return {"name": name, **source}


def _secret(name: str, secret: str) -> Manifest:
    return _volume(name, secret={"secretName": secret, "defaultMode": 0o440})


def _probe(**times: int) -> Manifest:
    return {"grpc": {"port": HEALTH_PORT}, "timeoutSeconds": 10, **times}


def _seconds(resources: Resources) -> int | None:
    return None if resources.seconds is None else math.ceil(resources.seconds)


def _resources(
    needed: Resources, gpu: str, least: Mapping[str, str] | None = None
) -> Manifest | None:
    """Return requests and limits; cores have no limit, memory and devices have.

    ``least`` has the default requests.
    """
    firm = _given(memory=needed.memory) | _given(**{gpu: needed.gpus or None})
    firm = {name: str(value) for name, value in firm.items()}
    cores = {} if needed.cpus is None else {"cpu": str(needed.cpus)}
    asked = {**(least or {}), **cores, **firm}
    if not asked:
        return None
    return {"requests": asked, **({"limits": firm} if firm else {})}


def _verbatim(command: Iterable[str]) -> list[str]:
    """Return a command escaped so that Kubernetes leaves ``$(NAME)`` and $$ as is."""
    return [word.replace("$", "$$") for word in command]
