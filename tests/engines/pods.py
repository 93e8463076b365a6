"""Pods of manifests as processes of this machine: the same commands, told the same.

What a cluster does of it is done here in a few lines: names and ports of the center are
ports of this machine, volumes are folders, what is mounted is found where it lies, and
variables are made as a node makes them.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from concurrent import futures

from helpers.ports import in_a_row

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 240  # seconds, on a busy machine

# What `launch` calls to submit: it keeps files, and makes a folder of a Secret.
KUBECTL = """\
#!/bin/sh
set -eu
case "$*" in
"create secret generic "*)
  folder=$CLUSTER/secrets/$4; shift 4; mkdir -p "$folder"
  for option; do
    case $option in --from-file=*) cp "${option#--from-file=}" "$folder";; esac
  done
  echo "kind: Secret";;
"apply --filename=- --server-side") grep -q "kind: Secret";;
"apply --filename="*) cp "${2#--filename=}" "$CLUSTER";;
*) echo "unexpected: $*" >&2; exit 64;;
esac
"""


class Cluster:
    """This machine.

    Args:
      folder: for volumes.
      objects: of all manifests.
      workdir: of the image, where programs are.
      ports: that pods listen at; each is another one here, always the same.
    """

    def __init__(self, folder, objects, workdir, ports=()):
        self.folder, self.objects, self.workdir = folder, objects, workdir
        here = map(str, in_a_row(len(ports)))
        self.ports = dict(zip(map(str, ports), here, strict=True))
        self._scratches = 0

    def object(self, kind, name):
        """One of the objects."""
        found = [o for o in self.objects if o["kind"] == kind]
        return next(o for o in found if o["metadata"]["name"] == name)

    def variables(self, pod, container, annotations):
        """What a container finds in its environment."""
        made = {}
        for each in container.get("envFrom", ()):
            made |= self.object("ConfigMap", each["configMapRef"]["name"])["data"]
        for each in container.get("env", ()):
            if "value" in each:
                made[each["name"]] = expanded(each["value"], made)
            elif "secretKeyRef" in each["valueFrom"]:
                secret = each["valueFrom"]["secretKeyRef"]
                path = self.folder / "secrets" / secret["name"] / secret["key"]
                made[each["name"]] = path.read_text()
            else:
                path = each["valueFrom"]["fieldRef"]["fieldPath"]
                key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]
                made[each["name"]] = annotations.get(key, "")
        return made

    def mounts(self, pod, container, variables):
        """Where on this machine a container's paths are."""
        volumes = {each["name"]: each for each in pod["volumes"]}
        self._scratches += 1
        made = {}
        for each in container.get("volumeMounts", ()):
            volume = volumes[each["name"]]
            if "secret" in volume:
                path = self.folder / "secrets" / volume["secret"]["secretName"]
                assert path.is_dir(), path
            elif "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                self.object("PersistentVolumeClaim", claim)
                path = self.folder / "claims" / claim
            else:
                assert volume["emptyDir"] == {}
                path = self.folder / "scratch" / str(self._scratches)
            if "subPathExpr" in each:
                path = path / expanded(each["subPathExpr"], variables)
                assert path.is_file(), path
            else:
                path.mkdir(parents=True, exist_ok=True)
            made[each["mountPath"]] = str(path)
        return made

    def start(self, pod, container, annotations=(), out=None):
        """A container as a process."""
        variables = self.variables(pod, container, dict(annotations))
        mounts = self.mounts(pod, container, variables)
        here = self._here(mounts)
        variables = {name: here(value) for name, value in variables.items()}
        command = [here(word) for word in container["command"]]
        assert command[0] == "python"
        own = {name: os.environ[name] for name in _OURS if name in os.environ}
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(self.workdir)])}
        return subprocess.Popen(  # noqa: S603 what a manifest says
            [sys.executable, *command[1:]],
            env=own | path | variables,
            cwd=self.workdir,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
        )

    def _here(self, mounts):
        """A function of texts, which puts this machine's paths and ports into them."""
        ports = "|".join(self.ports)
        paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        paths = paths or "(?!)"  # which is found nowhere
        pattern = re.compile(rf"(?<![\w/])({paths})(?![\w.-])|[\w.-]+:({ports})\b")

        def found(match):
            if match[1]:
                return mounts[match[1]]
            host = match[0].rpartition(":")[0]
            listens = host == "0.0.0.0"  # noqa: S104 of a pod
            return f"{'127.0.0.1' if listens else 'localhost'}:{self.ports[match[2]]}"

        return lambda text: pattern.sub(found, text)


class IndexedJob:
    """Does with pods as processes what the controller of Indexed Jobs does with pods.

    Attributes:
      running: the process of each index, while there is one.
      failures: of each index.
      said: what the containers of each index have printed.
    """

    def __init__(self, cluster, job):
        self._cluster, self._spec = cluster, job["spec"]
        indices = range(self._spec["completions"])
        assert self._spec["parallelism"] == self._spec["completions"]
        self.running, self.succeeded = {}, set()
        self.failures = dict.fromkeys(indices, 0)
        self.said = {index: cluster.folder / f"worker-{index}.log" for index in indices}
        self._ends = threading.Event()
        self._threads = futures.ThreadPoolExecutor(len(indices))
        self._kept = [self._threads.submit(self._keep, index) for index in indices]

    def check(self):
        """All that has ended has ended well."""
        for each in self._kept:
            if each.done():
                each.result()

    def wait(self):
        for each in self._kept:
            each.result(LIMIT)

    def kill(self, index):
        self.running[index].kill()

    def close(self):
        """Ends everything, whatever came before."""
        self._ends.set()
        for process in list(self.running.values()):
            process.kill()
        self._threads.shutdown()

    def _keep(self, index):
        pod = self._spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        (container,) = pod["containers"]
        with self.said[index].open("ab") as out:
            while self.failures[index] <= self._spec["backoffLimitPerIndex"]:
                told = {
                    "batch.kubernetes.io/job-completion-index": str(index),
                    "batch.kubernetes.io/job-index-failure-count": str(
                        self.failures[index]
                    ),
                }
                for each in [*pod.get("initContainers", ()), container]:
                    if self._ends.is_set():
                        return
                    process = self._cluster.start(pod, each, told, out)
                    self.running[index] = process
                    if code := process.wait():
                        break
                if not code:
                    self.succeeded.add(index)
                    return
                self.failures[index] += 1
        raise AssertionError(self.said[index].read_text())


def expanded(text, variables):
    """With ``$(NAME)`` as it is; what is not known stays."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def ended(process):
    """As a node ends a container: its code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(LIMIT)


# Of this machine's own environment.
_OURS = ("PATH", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
