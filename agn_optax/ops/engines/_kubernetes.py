"""The engine for Kubernetes, whose tasks are pods.

A StatefulSet is for the center, and an Indexed Job for the workers. The manifests
contain no secrets.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agn_optax import errors
from agn_optax._internal import combinations, extras
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._run import Resources, Run, arguments
from agn_optax.service import DEFAULT_GRACE, TLS_CA, tokens

_SECRETS = "secrets.sh"
_PATCHES = "kustomization.yaml"  # of the user, in the folder of the manifests
# Options that the manifests set.
_NOT_SETTINGS = (
    *("address", "direct_address", "page_address", "address_file"),
    *("tokens", "tls_certificate", "tls_key", "tls_client_ca", "tls_ca"),
)

_Manifest = dict[str, Any]

# Ports of the center's pod, which has addresses of its own and listens at all of them.
_PORT, _DIRECT_PORT, _PAGE_PORT = 5000, 5001, 8080
_ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 inside a pod
# Mount paths in a pod.
_KEYS = pathlib.PurePosixPath("/etc/agn-optax")
_STORAGE = pathlib.PurePosixPath("/storage")
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
_CONNECT = "import socket; socket.create_connection('{address}'.split(':'), 5)"
_WAIT_FOR_CENTER = 'until python -c "$0"; do sleep 2; done'


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Settings of the engine for Kubernetes.

    Attributes:
      image: image of center and workers, with agn_optax[cli] and, in its working
        directory, the program.
      namespace: namespace of all objects; None for that of kubectl's context.
      storage_class: storage class of the center's claim; None for the cluster's
        default.
      storage_size: size of the center's claim, as a Kubernetes quantity.
      gpu: name of the resource that ``gpus`` counts.
    """

    image: str | None = None
    namespace: str | None = None
    storage_class: str | None = None
    storage_size: str = "10Gi"
    gpu: str = "nvidia.com/gpu"


class Kubernetes(Engine):
    """Pods on Kubernetes: a StatefulSet and an Indexed Job.

    Submitted pods run by themselves. A run that is submitted again is changed to its
    new description. If workers are added, the others continue, and the center restarts
    to read the new tokens.
    """

    name = "kubernetes"
    Settings = KubernetesSettings
    settings: KubernetesSettings

    def __init__(self, run: Run) -> None:
        extras.require("kubernetes", "yaml")
        super().__init__(run)
        self._check()
        self._is_encrypted = not run.is_insecure
        self._has_keys = self._is_encrypted or run.uses_tokens
        self._folder = pathlib.Path(f"{run.name}-kubernetes")  # also has the keys
        # Names of objects and Secrets.
        self._center, self._workers = f"{run.name}-center", f"{run.name}-workers"
        self._address = f"{self._center}:{_PORT}"

    def files(self) -> Mapping[str, str]:
        """Return the manifests, and the script that makes their Secrets."""
        secrets = {_SECRETS: self._secrets()} if self._has_keys else {}
        return {
            **secrets,
            "storage.yaml": _yaml(self._claim()),
            "center.yaml": _yaml(self._service(), self._stateful_set()),
            "workers.yaml": _yaml(self._worker_environment(), self._job()),
        }

    def commands(self) -> list[str]:
        """Return the commands that make the Secrets and submit the manifests."""
        if (self._folder / _PATCHES).exists():
            secrets = [f"sh {_SECRETS}"] if self._has_keys else []
            return [*secrets, self._kubectl("apply", kustomize=".")]
        return [
            f"sh {name}" if name == _SECRETS else self._kubectl("apply", filename=name)
            for name in self.files()
        ]

    def launch(self, output: Output) -> dict[str, Any]:
        """Write the files and submit them; the cluster does the rest."""
        if shutil.which("kubectl") is None:
            raise errors.InvalidArgumentError(
                "kubectl cannot be found: install it, or submit the output of "
                "--dry-run elsewhere"
            )
        self._folder.mkdir(exist_ok=True)
        for name, text in self.files().items():
            (self._folder / name).write_text(text)
        output(self.name, f"the files are in {self._folder}/")
        done = subprocess.run(  # noqa: S603 the commands of --dry-run
            ["sh", "-exc", "\n".join(self.commands())],  # noqa: S607 the system's shell
            cwd=self._folder,
            env={**os.environ, "PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            output(self.name, line)
        return {"returncode": done.returncode, "folder": str(self._folder)}

    def _kubectl(self, verb: str, **options: str) -> str:
        if self.settings.namespace:
            options = {"namespace": self.settings.namespace, **options}
        return shlex.join(["kubectl", verb, *arguments(options)])

    def _check(self) -> None:
        """Raise if the run cannot be one of pods."""
        run = self.run
        if not self.settings.image:
            problem = 'the table [kubernetes] must have an image, as image = "NAME:TAG"'
        elif not run.name[0].isalpha():
            problem = f"on Kubernetes names begin with a letter, got {run.name!r}"
        elif (processes := run.worker_resources.processes) > 1:
            combinations.reject(
                "a worker of several processes",
                "an engine other than SLURM",
                f"processes = {processes} on Kubernetes",
            )
        elif run.storage is not None and not run.storage.is_absolute():
            problem = (
                "storage is where the center's pod mounts its claim, so it must be an "
                f"absolute path, got {str(run.storage)!r}"
            )
        elif run.serve.get("open") and not run.is_insecure:
            problem = "an open center needs insecure = true, in a network you trust"
        else:
            given = {**run.serve, "tls_ca": run.tls_ca}
            names = [name for name in _NOT_SETTINGS if given.get(name) is not None]
            if not names:
                return
            problem = (
                f"{names[0].replace('_', '-')} cannot be set on Kubernetes: manifests "
                f"set addresses and key files, got {str(given[names[0]])!r}"
            )
        raise errors.InvalidArgumentError(problem)

    def _secrets(self) -> str:
        """Return a script that makes missing keys, and Secrets from all keys."""
        workers = self.run.worker_names
        hosts = [self._center, "localhost"]
        if self.settings.namespace:
            hosts.append(f"{self._center}.{self.settings.namespace}.svc")
        kinds = ("pem", "key", "token")
        keys = [f"{worker}.{kind}" for worker in workers for kind in kinds]
        center = self._secret(
            self._center, ["ca.pem", "center.pem", "center.key", "tokens"]
        )
        return f"""\
#!/bin/sh
# Makes the certificates and tokens of this run in the folder keys, and two Secrets from
# them: one for the center, one for the workers. It keeps existing files. The
# operator's files, and keys/ca.key, which signs all certificates, stay on this machine.
set -eu

missing=
add() {{
  role=$1; shift
  for name; do [ -e keys/$name.pem ] || missing="$missing --$role=$name"; done
}}
[ -e keys/center.pem ] || missing="{" ".join(f"--host={host}" for host in hosts)}"
add operator operator
add chief {workers[0]}
add worker {" ".join(workers[1:])}
[ -z "$missing" ] || "${{PYTHON:-python}}" -m agn_optax.ops.cli keys keys $missing

{center}
{self._secret(self._workers, ["ca.pem", *keys])}
"""

    def _secret(self, name: str, files: Sequence[str]) -> str:
        """Return the command that makes a Secret of files in the folder keys."""
        sources = " ".join(f"--from-file=keys/{file}" for file in files)
        options = f"{sources} --dry-run=client --output=yaml"
        # Without --server-side, an annotation would hold the Secret's data once more.
        apply = self._kubectl("apply", filename="-") + " --server-side"
        return f"{self._kubectl('create')} secret generic {name} {options} | {apply}"

    # The center.

    def _claim(self) -> _Manifest:
        """Return the claim of the center's journal, which outlives the run."""
        spec = {
            "accessModes": ["ReadWriteOnce"],
            **_present(storageClassName=self.settings.storage_class),
            "resources": {"requests": {"storage": self.settings.storage_size}},
        }
        return self._object("v1", "PersistentVolumeClaim", "center", spec=spec)

    def _service(self) -> _Manifest:
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

    def _stateful_set(self) -> _Manifest:
        storage = pathlib.Path(self.run.storage or _STORAGE)
        claim = {"persistentVolumeClaim": {"claimName": self._center}}
        volumes, mounts = [{"name": "storage", **claim}], [_mount("storage", storage)]
        if self._has_keys:
            volumes.append(_secret_volume(self._center))
            mounts.append(_mount("keys", _KEYS, readOnly=True))
        container = {
            "name": "center",
            "command": _escaped(self._serve_command(storage)),
            "env": [_variable("HOME", _SCRATCH), _variable("PYTHONUNBUFFERED", "1")],
            "ports": [
                {"name": name, "containerPort": port, "protocol": "TCP"}
                for name, port in self._ports().items()
            ],
            # The center listens after it has read its journal, within half an hour.
            "startupProbe": _probe(periodSeconds=5, failureThreshold=360),
            "readinessProbe": _probe(periodSeconds=10, failureThreshold=3),
            "livenessProbe": _probe(periodSeconds=20, failureThreshold=6),
            **self._resources(self.run.center_resources, _DEFAULT_REQUESTS),
        }
        # A drain lasts until the last answers are sent, at most DEFAULT_GRACE.
        grace = max(DEFAULT_GRACE, self.run.stop_grace)
        template = self._pod("center", container, volumes, mounts, grace)
        if self.run.uses_tokens:
            # A center reads its tokens once: another number of workers restarts it.
            workers = {"agn-optax/workers": str(self.run.workers)}
            template["metadata"]["annotations"] = workers
        spec = {
            "replicas": 1,
            "serviceName": self._center,
            "selector": {"matchLabels": self._labels("center")},
            "template": template,
        }
        return self._object("apps/v1", "StatefulSet", "center", spec=spec)

    def _serve_command(self, storage: pathlib.Path) -> list[str]:
        names = {"grpc": "address", "direct": "direct_address", "page": "page_address"}
        options: dict[str, Any] = {
            names[name]: f"{_ALL_ADDRESSES}:{port}"
            for name, port in self._ports().items()
        }
        if self.run.uses_tokens:
            options["tokens"] = _KEYS / "tokens"
        if self._is_encrypted:
            options["tls_certificate"] = _KEYS / "center.pem"
            options["tls_key"] = _KEYS / "center.key"
            options["tls_client_ca"] = _KEYS / "ca.pem"
        run = dataclasses.replace(self.run, storage=storage)
        return run.serve_command(address_file=None, **options)

    def _ports(self) -> dict[str, int]:
        """Return the ports that others connect to, by name."""
        serve = self.run.serve
        direct = {} if serve.get("direct") is False else {"direct": _DIRECT_PORT}
        page = {"page": _PAGE_PORT} if serve.get("page") else {}
        return {"grpc": _PORT} | direct | page

    # The workers.

    def _worker_environment(self) -> _Manifest:
        """Return the workers' common environment as a ConfigMap.

        Unlike the template of a Job's pods, a ConfigMap can be changed.
        """
        data = {"HOME": _SCRATCH, "PYTHONUNBUFFERED": "1"}
        data |= self.run.worker_environment(_RANK)
        for name in ("AGN_OPTAX_RANK", "AGN_OPTAX_WORKER"):
            del data[name]
        data["AGN_OPTAX_CENTER"] = self._address
        return self._object("v1", "ConfigMap", "worker", data=data)

    def _job(self) -> _Manifest:
        run = self.run
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

    def _worker_pod(self) -> _Manifest:
        run = self.run
        keys = self._worker_keys()
        container = {
            "name": "worker",
            "command": _escaped(run.worker_command("python")),
            "envFrom": [{"configMapRef": {"name": self._workers}}],
            "env": [
                _field("AGN_OPTAX_RANK", _INDEX_ANNOTATION),
                _field("AGN_OPTAX_RESTARTS", _FAILURES_ANNOTATION),
                _variable("AGN_OPTAX_WORKER", run.worker_name(_RANK)),
                *(_variable(name, str(_KEYS / path)) for name, path, _ in keys),
            ],
            **self._resources(run.worker_resources),
        }
        mounts = [
            _mount("keys", _KEYS / path, subPathExpr=key, readOnly=True)
            for _, path, key in keys
        ]
        volumes = [_secret_volume(self._workers)] if keys else []
        pod = self._pod("worker", container, volumes, mounts, run.stop_grace)
        pod["spec"]["restartPolicy"] = "Never"
        connect = _CONNECT.format(address=self._address)
        command = ["sh", "-c", _WAIT_FOR_CENTER, connect]
        wait = {"name": "wait-for-center", "command": command}
        pod["spec"]["initContainers"] = [self._secured(wait)]
        return pod

    def _worker_keys(self) -> list[tuple[str, str, str]]:
        """Return each file of a worker: variable, path, and key in the Secret."""
        worker, keys = self.run.worker_name(_RANK), []
        if self.run.uses_tokens:
            keys.append((tokens.TOKEN_FILE, "token", f"{worker}.token"))
        if self._is_encrypted:
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
        container: _Manifest,
        volumes: Sequence[_Manifest],
        mounts: Sequence[_Manifest],
        grace: float,
    ) -> _Manifest:
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

    def _secured(self, container: _Manifest) -> _Manifest:
        return {
            **container,
            "image": self.settings.image,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }

    def _resources(
        self, needed: Resources, defaults: Mapping[str, str] | None = None
    ) -> _Manifest:
        """Return requests and limits: memory and devices are limited, cores are not.

        ``defaults`` has the default requests.
        """
        limited = {"memory": needed.memory, self.settings.gpu: needed.gpus}
        limits = {name: str(value) for name, value in limited.items() if value}
        cores = {} if needed.cpus is None else {"cpu": str(needed.cpus)}
        requests = {**(defaults or {}), **cores, **limits}
        if not requests:
            return {}
        return {"resources": {"requests": requests, **_present(limits=limits or None)}}

    def _object(
        self, version: str, kind: str, component: str, **content: Any
    ) -> _Manifest:
        metadata = {
            "name": self._center if component == "center" else self._workers,
            **_present(namespace=self.settings.namespace),
            "labels": self._labels(component),
        }
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def _labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "agn-optax",
            "app.kubernetes.io/instance": self.run.name,
            "app.kubernetes.io/component": component,
        }


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _variable(name: str, value: str) -> _Manifest:
    return {"name": name, "value": value}


def _field(name: str, path: str) -> _Manifest:
    """Return a variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _secret_volume(secret: str) -> _Manifest:
    return {"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o440}}


def _mount(name: str, path: object, **more: Any) -> _Manifest:
    return {"name": name, "mountPath": str(path), **more}


def _probe(**times: int) -> _Manifest:
    return {"tcpSocket": {"port": _PORT}, "timeoutSeconds": 10, **times}


def _escaped(command: Iterable[str]) -> list[str]:
    """Return a command escaped so that Kubernetes leaves ``$(NAME)`` and $$ as is."""
    return [word.replace("$", "$$") for word in command]


def _yaml(*objects: _Manifest) -> str:
    """Return objects as documents of YAML."""
    import yaml  # noqa: PLC0415 an optional dependency

    return str(yaml.safe_dump_all(objects, sort_keys=False, width=1000))
