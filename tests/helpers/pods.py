"""Runs the pods of manifests as local processes, with the same commands and variables.

A few lines replace the cluster: the center's names and ports become local ports,
volumes become folders, mount paths are replaced by those of the folders, and
environment variables are expanded as on a node.
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
LIMIT = 240  # s, generous for a busy machine

# Stands in for the kubectl that `launch` calls: copies files, and makes a folder of a
# Secret.
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
    """The objects of a run, on this machine instead of a cluster.

    Args:
      folder: folder for volumes and secrets.
      objects: the objects of all manifests.
      workdir: the image's working directory, which has the programs.
      ports: ports that pods listen at; each is mapped to a fixed local port.
    """

    def __init__(self, folder, objects, workdir, ports=()):
        self.folder, self.objects, self.workdir = folder, objects, workdir
        here = map(str, in_a_row(len(ports)))
        self.ports = dict(zip(map(str, ports), here, strict=True))
        self._scratches = 0

    def object(self, kind, name):
        """Return the object of this kind and name."""
        found = [o for o in self.objects if o["kind"] == kind]
        return next(o for o in found if o["metadata"]["name"] == name)

    def variables(self, pod, container, annotations):
        """Return the environment of a container."""
        made = {}
        for each in container.get("envFrom", ()):
            made |= self.object("ConfigMap", each["configMapRef"]["name"])["data"]
        for each in container.get("env", ()):
            if "value" in each:
                made[each["name"]] = expanded(each["value"], made)
            else:
                path = each["valueFrom"]["fieldRef"]["fieldPath"]
                key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]
                made[each["name"]] = annotations.get(key, "")
        return made

    def mounts(self, pod, container, variables):
        """Return the local path of each mount path of a container."""
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
        """Start a container as a process."""
        variables = self.variables(pod, container, dict(annotations))
        mounts = self.mounts(pod, container, variables)
        here = self._here(mounts)
        variables = {name: here(value) for name, value in variables.items()}
        command = [here(word) for word in container["command"]]
        program = {"python": sys.executable, "sh": "/bin/sh"}[command[0]]
        own = {name: os.environ[name] for name in _OURS if name in os.environ}
        own["PATH"] = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(self.workdir)])}
        return subprocess.Popen(  # noqa: S603 what a manifest says
            [program, *command[1:]],
            env=own | path | variables,
            cwd=self.workdir,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
        )

    def _here(self, mounts):
        """Return a function that replaces paths and ports in a text by local ones."""
        ports = "|".join(self.ports)
        paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        paths = paths or "(?!)"  # matches nothing
        pattern = re.compile(rf"(?<![\w/])({paths})(?![\w.-])|[\w.-]+:({ports})\b")

        def found(match):
            if match[1]:
                return mounts[match[1]]
            host = match[0].rpartition(":")[0]
            listens = host == "0.0.0.0"  # noqa: S104 of a pod
            return f"{'127.0.0.1' if listens else 'localhost'}:{self.ports[match[2]]}"

        return lambda text: pattern.sub(found, text)


class IndexedJob:
    """A controller of Indexed Jobs whose pods are processes.

    Attributes:
      running: the current process of each index.
      failures: the number of failures of each index.
      output_files: the file with the output of each index.
    """

    def __init__(self, cluster, job):
        self._cluster, self._spec = cluster, job["spec"]
        indices = range(self._spec["completions"])
        assert self._spec["parallelism"] == self._spec["completions"]
        self.running, self.succeeded = {}, set()
        self.failures = dict.fromkeys(indices, 0)
        self.output_files = {
            index: cluster.folder / f"worker-{index}.log" for index in indices
        }
        self._ends = threading.Event()
        self._threads = futures.ThreadPoolExecutor(len(indices))
        self._kept = [self._threads.submit(self._keep, index) for index in indices]

    def check(self):
        """Raise the error of an index that failed for good."""
        for each in self._kept:
            if each.done():
                each.result()

    def wait(self):
        for each in self._kept:
            each.result(LIMIT)

    def kill(self, index):
        self.running[index].kill()

    def close(self):
        """End all processes and threads."""
        self._ends.set()
        for process in list(self.running.values()):
            process.kill()
        self._threads.shutdown()

    def _keep(self, index):
        pod = self._spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        (container,) = pod["containers"]
        with self.output_files[index].open("ab") as out:
            while self.failures[index] <= self._spec["backoffLimitPerIndex"]:
                variables = {
                    "batch.kubernetes.io/job-completion-index": str(index),
                    "batch.kubernetes.io/job-index-failure-count": str(
                        self.failures[index]
                    ),
                }
                for each in [*pod.get("initContainers", ()), container]:
                    if self._ends.is_set():
                        return
                    process = self._cluster.start(pod, each, variables, out)
                    self.running[index] = process
                    if code := process.wait():
                        break
                if not code:
                    self.succeeded.add(index)
                    return
                self.failures[index] += 1
        raise AssertionError(self.output_files[index].read_text())


def expanded(text, variables):
    """Replace ``$(NAME)`` by the variable's value; keep unknown names."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def ended(process):
    """End a process by SIGTERM, as a node ends a container; return its exit code."""
    process.send_signal(signal.SIGTERM)
    return process.wait(LIMIT)


# Variables that processes get from this machine's environment.
_OURS = ("PATH", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
