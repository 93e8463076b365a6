"""The engine for Kubernetes, whose tasks are pods."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from agn_optax import errors
from agn_optax._internal import extras
from agn_optax.ops.engines._engine import Engine, Output
from agn_optax.ops.engines._manifests import Manifest, Manifests
from agn_optax.ops.engines._run import Run, arguments

SECRETS = "secrets.sh"
_OPERATOR = "operator"
# Options of `serve` that the manifests set: a pod's addresses and its key files.
_SET_BY_MANIFESTS = (
    *("address", "direct_address", "health_address", "page_address", "address_file"),
    *("tokens", "tls_certificate", "tls_key", "tls_client_ca"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Settings of the engine for Kubernetes.

    Attributes:
      image: image of center and workers, with agn_optax[cli] and, in its working
        directory, the program.
      namespace: namespace of all objects; None for that of kubectl's context.
      jobset: whether to make a JobSet, which must be installed in the cluster.
      storage_class: storage class of the center's claim; None for the cluster's
        default.
      storage_size: size of the center's claim, as a Kubernetes quantity.
      claims: mount paths in the workers, by the names of existing volume claims.
      secret: Secret for workers whose center is elsewhere, with ``ca.pem``, and
        ``worker-0.pem``, ``worker-0.key``, ``worker-0.token`` and so on.
      service_account: service account of all pods.
      pull_secret: Secret with which the image is pulled.
      node_selector: labels of the nodes for workers.
      tolerations: tolerations of workers for nodes with taints, each a table with the
        fields of Kubernetes:
        ``{key = "nvidia.com/gpu", operator = "Exists", effect = "NoSchedule"}``.
      center_tolerations: tolerations of the center, likewise.
      environment_secrets: environment variables of workers whose values come from a
        Secret and its key: ``{WANDB_API_KEY = "wandb/key"}``.
      gpu: name of the resource that ``gpus`` counts.
      queue: queue of Kueue in which the workers (or the whole JobSet) wait for
        admission.
    """

    image: str | None = None
    namespace: str | None = None
    jobset: bool = False
    storage_class: str | None = None
    storage_size: str = "10Gi"
    claims: dict[str, str] = dataclasses.field(default_factory=dict)
    secret: str | None = None
    service_account: str | None = None
    pull_secret: str | None = None
    node_selector: dict[str, str] = dataclasses.field(default_factory=dict)
    tolerations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    center_tolerations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    environment_secrets: dict[str, str] = dataclasses.field(default_factory=dict)
    gpu: str = "nvidia.com/gpu"
    queue: str | None = None


class Kubernetes(Engine):
    """Pods on Kubernetes: a StatefulSet and an Indexed Job, or a JobSet.

    Submitted pods run by themselves. A run that is submitted again is changed to its
    new description: if workers are added, the others continue.
    """

    name = "kubernetes"
    Settings = KubernetesSettings

    def __init__(self, run: Run) -> None:
        extras.require("kubernetes", "yaml")
        super().__init__(run)
        _check(run, self.settings)
        self._manifests = Manifests(run, self.settings)

    @property
    def folder(self) -> pathlib.Path:
        """The folder for the files of `launch`, and for the keys."""
        return pathlib.Path(f"{self.run.name}-kubernetes")

    def files(self) -> Mapping[str, str]:
        """Return the manifests, and the script that makes their Secrets."""
        secrets = {SECRETS: self._secrets()} if self._manifests.has_keys else {}
        files = self._manifests.files()
        return secrets | {name: _yaml(objects) for name, objects in files.items()}

    def commands(self) -> list[str]:
        """Return the commands that make the Secrets and submit the manifests."""
        return [
            f"sh {name}" if name == SECRETS else self._kubectl("apply", filename=name)
            for name in self.files()
        ]

    def launch(self, output: Output) -> dict[str, Any]:
        """Write the files and submit them; the cluster does the rest."""
        if shutil.which("kubectl") is None:
            raise errors.InvalidArgumentError(
                "kubectl cannot be found: install it, or submit the output of "
                "--dry-run elsewhere"
            )
        self.folder.mkdir(exist_ok=True)
        for name, text in self.files().items():
            (self.folder / name).write_text(text)
        output(self.name, f"the files are in {self.folder}/")
        done = subprocess.run(  # noqa: S603 the commands of --dry-run
            ["sh", "-exc", "\n".join(self.commands())],  # noqa: S607 the system's shell
            cwd=self.folder,
            env={**os.environ, "PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            output(self.name, line)
        return {"returncode": done.returncode, "folder": str(self.folder)}

    def _kubectl(self, verb: str, **options: str) -> str:
        if self.settings.namespace:
            options = {"namespace": self.settings.namespace, **options}
        return shlex.join(["kubectl", verb, *arguments(options)])

    def _secrets(self) -> str:
        """Return a script that makes missing keys, and Secrets from all keys."""
        manifests, workers = self._manifests, self.run.worker_names
        hosts = " ".join(f"--host={host}" for host in manifests.hosts)
        create = self._kubectl("create") + " secret generic"
        # Without --server-side, an annotation would hold the Secret's data once more.
        apply = self._kubectl("apply", filename="-") + " --server-side"
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
[ -e keys/center.pem ] || missing="{hosts}"
add operator {_OPERATOR}
add chief {workers[0]}
add worker {" ".join(workers[1:])}
[ -z "$missing" ] || "${{PYTHON:-python}}" -m agn_optax.ops.cli keys keys $missing

secret() {{
  name=$1; shift
  for file; do set -- "$@" --from-file=keys/$file; shift; done
  {create} $name "$@" --dry-run=client --output=yaml |
    {apply}
}}
secret {manifests.center} ca.pem center.pem center.key tokens
files=ca.pem
for name in {" ".join(workers)}; do
  files="$files $name.pem $name.key $name.token"
done
secret {manifests.workers} $files
"""


def _check(run: Run, settings: KubernetesSettings) -> None:
    def reject(problem: str) -> None:
        raise errors.InvalidArgumentError(problem)

    if not settings.image:
        reject('the table [kubernetes] must have an image, as image = "NAME:TAG"')
    if not run.name[0].isalpha():
        reject(f"on Kubernetes names begin with a letter, got {run.name!r}")
    if run.worker_resources.processes > 1 and not settings.jobset:
        reject(
            "workers of several pods need jobset = true in [kubernetes], got "
            f"processes = {run.worker_resources.processes}"
        )
    if run.storage is not None and not run.storage.is_absolute():
        reject(
            "storage is where the center's pod mounts its claim, so it must be an "
            f"absolute path, got {str(run.storage)!r}"
        )
    for name in _SET_BY_MANIFESTS:
        if run.serve.get(name) is not None:
            reject(
                f"{name.replace('_', '-')} of the center is set by the manifests, got "
                f"{str(run.serve[name])!r}"
            )
    if run.serve.get("open") and not run.is_insecure:
        reject("an open center needs insecure = true, in a network that you trust")
    for name in ("token_file", "tls_ca"):
        if (file := getattr(run, name)) is not None:
            reject(
                f"{name.replace('_', '-')} is a file of this machine: name a Secret by "
                f"secret in [kubernetes], got {str(file)!r}"
            )
    if settings.secret is not None and run.has_center:
        reject(
            "secret in [kubernetes] is for workers of a center that is elsewhere; this "
            f"run makes Secrets for its own center, got {settings.secret!r}"
        )
    for name, path in settings.claims.items():
        if not pathlib.PurePosixPath(path).is_absolute():
            reject(
                f"claims in [kubernetes] must have absolute paths, got {path!r} for "
                f"{name}"
            )
    for variable, secret in settings.environment_secrets.items():
        if not re.fullmatch(r"[^/]+/[^/]+", secret):
            reject(
                "environment-secrets in [kubernetes] must name a Secret and its key as "
                f'"SECRET/KEY", got {secret!r} for {variable}'
            )
        if variable in run.environment:
            reject(
                f"{variable} is both in environment and in environment-secrets: give "
                "it in one of them"
            )


def _yaml(objects: Sequence[Manifest]) -> str:
    """Return objects as documents of YAML, with multi-line strings as blocks."""
    import yaml  # noqa: PLC0415 an optional dependency

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1000))
