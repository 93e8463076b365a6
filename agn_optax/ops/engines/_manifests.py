"""The Kubernetes objects of a run, as dicts.

A StatefulSet is for the center, and an Indexed Job for the workers. The objects contain
no secrets.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agn_optax.ops.engines._run import Resources, Run
from agn_optax.service import DEFAULT_GRACE, TLS_CA, tokens

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
# Default requests of a center: a pod without requests is evicted first when a node runs
# short.
_DEFAULT_REQUESTS = {"cpu": "1", "memory": "2Gi"}

_INDEX_ANNOTATION = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_FAILURES_ANNOTATION = (
    "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
)
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
    """

    def __init__(self, run: Run, settings: KubernetesSettings) -> None:
        self._run, self._settings = run, settings
        self.is_encrypted = run.has_center and not run.is_insecure
        self.has_keys = self.is_encrypted or run.uses_tokens
        self.center, self.workers = f"{run.name}-center", f"{run.name}-workers"

    def files(self) -> dict[str, list[Manifest]]:
        """Return the objects of each file, by the file's name."""
        workers = {"workers.yaml": [self._worker_environment(), self._job()]}
        if not self._run.has_center:
            return workers
        center = [self._service(), self._stateful_set()]
        return {"storage.yaml": [self._claim()], "center.yaml": center, **workers}

    # The center.

    def _claim(self) -> Manifest:
        """Return the claim of the center's journal, which outlives the run."""
        spec = {
            "accessModes": ["ReadWriteOnce"],
            **_present(storageClassName=self._settings.storage_class),
            "resources": {"requests": {"storage": self._settings.storage_size}},
        }
        return self._object("v1", "PersistentVolumeClaim", "center", spec=spec)

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
        return self._object("v1", "Service", "center", spec=spec)

    def _stateful_set(self) -> Manifest:
        storage = pathlib.Path(self._run.storage or STORAGE)
        claim = {"persistentVolumeClaim": {"claimName": self.center}}
        volumes, mounts = [{"name": "storage", **claim}], [_mount("storage", storage)]
        if self.has_keys:
            # Mounted as a whole, so that the center sees the keys of new workers.
            volumes.append(_secret_volume(self.center))
            mounts.append(_mount("keys", KEYS, readOnly=True))
        ports = {**self._ports(), "health": HEALTH_PORT}
        container = {
            "name": "center",
            "command": _escaped(self._serve_command(storage)),
            "env": [_variable("HOME", _SCRATCH), _variable("PYTHONUNBUFFERED", "1")],
            "ports": [
                {"name": name, "containerPort": port, "protocol": "TCP"}
                for name, port in ports.items()
            ],
            # The center listens after it has read its journal, within half an hour.
            "startupProbe": _probe(periodSeconds=5, failureThreshold=360),
            "readinessProbe": _probe(periodSeconds=10, failureThreshold=3),
            "livenessProbe": _probe(periodSeconds=20, failureThreshold=6),
            **self._resources(self._run.center_resources, _DEFAULT_REQUESTS),
        }
        # A drain lasts until the last answers are sent, at most DEFAULT_GRACE.
        grace = max(DEFAULT_GRACE, self._run.stop_grace)
        spec = {
            "replicas": 1,
            "serviceName": self.center,
            "selector": {"matchLabels": self._labels("center")},
            "template": self._pod("center", container, volumes, mounts, grace),
        }
        return self._object("apps/v1", "StatefulSet", "center", spec=spec)

    def _serve_command(self, storage: pathlib.Path) -> list[str]:
        names = {"grpc": "address", "direct": "direct_address", "page": "page_address"}
        ports = {names[name]: port for name, port in self._ports().items()}
        options: dict[str, Any] = {
            name: f"{_ALL_ADDRESSES}:{port}"
            for name, port in {**ports, "health_address": HEALTH_PORT}.items()
        }
        if self._run.uses_tokens:
            options["tokens"] = KEYS / "tokens"
        if self.is_encrypted:
            options["tls_certificate"] = KEYS / "center.pem"
            options["tls_key"] = KEYS / "center.key"
            options["tls_client_ca"] = KEYS / "ca.pem"
        run = dataclasses.replace(self._run, storage=storage)
        return run.serve_command(**options, **run.durability_options())

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
            data["AGN_OPTAX_CENTER"] = f"{self.center}:{PORT}"
        return self._object("v1", "ConfigMap", "worker", data=data)

    def _job(self) -> Manifest:
        run = self._run
        seconds = run.worker_resources.seconds
        # A pod that is evicted or preempted, as when its node is drained, has not
        # failed.
        evicted = {"type": "DisruptionTarget", "status": "True"}
        spec = {
            "completionMode": "Indexed",
            "completions": run.workers,
            "parallelism": run.workers,
            # Counted for each worker alone: the others go on when one has failed.
            "backoffLimitPerIndex": run.restarts,
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [evicted]}]
            },
            "podReplacementPolicy": "Failed",  # never two pods of one worker at a time
            **_present(activeDeadlineSeconds=seconds and math.ceil(seconds)),
            "template": self._worker_pod(),
        }
        return self._object("batch/v1", "Job", "worker", spec=spec)

    def _worker_pod(self) -> Manifest:
        run = self._run
        common = {"envFrom": [{"configMapRef": {"name": self.workers}}]}
        keys = self._worker_keys()
        container = {
            "name": "worker",
            "command": _escaped(run.worker_command("python")),
            **common,
            "env": [
                _field("AGN_OPTAX_RANK", _INDEX_ANNOTATION),
                _field("AGN_OPTAX_RESTARTS", _FAILURES_ANNOTATION),
                _variable("AGN_OPTAX_WORKER", run.worker_name(_RANK)),
                *(_variable(name, str(KEYS / path)) for name, path, _ in keys),
            ],
            **self._resources(run.worker_resources),
        }
        mounts = [
            _mount("keys", KEYS / path, subPathExpr=key, readOnly=True)
            for _, path, key in keys
        ]
        volumes = [_secret_volume(self.workers)] if keys else []
        pod = self._pod("worker", container, volumes, mounts, run.stop_grace)
        pod["spec"]["restartPolicy"] = "Never"
        if run.has_center:
            command = ["python", "-c", _WAIT_FOR_CENTER]
            wait = {"name": "wait-for-center", "command": command, **common}
            pod["spec"]["initContainers"] = [self._secured(wait)]
        return pod

    def _worker_keys(self) -> list[tuple[str, str, str]]:
        """Return each file of a worker: variable, path, and key in the Secret."""
        worker, keys = self._run.worker_name(_RANK), []
        if self._run.uses_tokens:
            keys.append((tokens.TOKEN_FILE, "token", f"{worker}.token"))
        if self.is_encrypted:
            keys += [
                (TLS_CA, "ca.pem", "ca.pem"),
                ("AGN_OPTAX_TLS_CERTIFICATE", "certificate.pem", f"{worker}.pem"),
                ("AGN_OPTAX_TLS_KEY", "key.pem", f"{worker}.key"),
            ]
        return keys

    # Common parts.

    def _pod(
        self,
        component: str,
        container: Manifest,
        volumes: Sequence[Manifest],
        mounts: Sequence[Manifest],
        grace: float,
    ) -> Manifest:
        """Return a pod's template."""
        mounted = {"volumeMounts": [_mount("scratch", _SCRATCH), *mounts]}
        spec = {
            "terminationGracePeriodSeconds": math.ceil(grace + _MARGIN),
            # If a program without a handler is process 1, it ignores SIGTERM.
            "shareProcessNamespace": True,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # no variables of other Services
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
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
        self, version: str, kind: str, component: str, **content: Any
    ) -> Manifest:
        metadata = {
            "name": self.center if component == "center" else self.workers,
            **_present(namespace=self._settings.namespace),
            "labels": self._labels(component),
        }
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def _labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "agn-optax",
            "app.kubernetes.io/instance": self._run.name,
            "app.kubernetes.io/component": component,
        }


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> Manifest:
    """Return a variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _secret_volume(secret: str) -> Manifest:
    return {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o440}}


def _mount(name: str, path: object, **more: Any) -> Manifest:
    return {"name": name, "mountPath": str(path), **more}


def _probe(**times: int) -> Manifest:
    return {"grpc": {"port": HEALTH_PORT}, "timeoutSeconds": 10, **times}


def _escaped(command: Iterable[str]) -> list[str]:
    """Return a command escaped so that Kubernetes leaves ``$(NAME)`` and $$ as is."""
    return [word.replace("$", "$$") for word in command]
