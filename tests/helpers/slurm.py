"""A SLURM cluster for tests: one controller and two nodes on this machine."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile

import pytest

from helpers import ports
from helpers.waiting import wait_until

_NEEDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=20
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] \
CPUs=8 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def why_not():
    """Return why SLURM cannot run here, or "" if it can."""
    missing = [name for name in _NEEDS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} of slurm-wlm and munge are not installed"
    return "" if os.geteuid() == 0 else "only root can start slurmd"


class Cluster:
    """A running cluster; its folder is deleted with it.

    Attributes:
      environment: environment variables for its commands.
    """

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._started = []

    def __call__(self, *command):
        """Return the output of one of SLURM's commands."""
        done = subprocess.run(  # noqa: S603 a command of SLURM
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr, self.logs())
        return done.stdout.strip()

    @property
    def queue(self):
        """The states of jobs by their ids, such as ``3`` or ``4_1``."""
        output = self("squeue", "--noheader", "--array", "--format=%i %T")
        return dict(line.split() for line in output.splitlines())

    def processes(self):
        """Return the ids of the processes of this cluster: daemons, steps and tasks."""
        mine = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = []
        for each in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mine in (each / "environ").read_bytes().split(b"\0"):
                    found.append(int(each.name))
        return sorted(set(found) - {os.getpid()})

    def logs(self):
        """Return the ends of the logs of the daemons."""
        return "\n".join(
            f"{path.name}: {path.read_text()[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def start(self):
        """Start the daemons; return when both nodes accept jobs."""
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        text = _CONFIG.format(
            host=socket.gethostname(), folder=self.folder, ports=ports.in_a_row(3)
        )
        (self.folder / "slurm.conf").write_text(text)
        where = {
            "key-file": "key",
            "socket": "munge",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "seed",
        }
        files = [f"--{name}={self.folder / file}" for name, file in where.items()]
        self._start("munged", "--foreground", "--force", *files)
        wait_until((self.folder / "munge").exists)
        self._start("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-c", "-N", node)
        wait_until(self._is_up)

    def stop(self):
        """Stop the cluster and all its jobs."""
        with contextlib.suppress(AssertionError):
            self("scancel", "--user=root")
            wait_until(lambda: not self.queue, limit=25)
        for each in reversed(self._started):
            each.terminate()
        for each in reversed(self._started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(10)
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for each in self._started:
            each.wait()

    def _start(self, *command):
        with (self.folder / f"{command[0]}-{len(self._started)}.log").open("w") as log:
            self._started.append(
                subprocess.Popen(  # noqa: S603 a command of SLURM
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def _is_up(self):
        assert all(each.poll() is None for each in self._started), self.logs()
        result = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],  # noqa: S607 from PATH
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return result.stdout.split() == ["idle", "idle"]


@contextlib.contextmanager
def cluster():
    """Yield a cluster and stop it at the end; skip the test without SLURM."""
    if why := why_not():
        pytest.skip(f"no SLURM here: {why}")
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        made = Cluster(pathlib.Path(folder))
        try:
            made.start()
            yield made
        finally:
            made.stop()
        wait_until(lambda: not made.processes(), limit=10)
