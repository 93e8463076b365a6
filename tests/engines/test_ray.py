"""The example whose center and workers are actors of Ray."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess

import pytest
from helpers.commands import ROOT, python
from helpers.waiting import wait_until

# A cluster of Ray starts within seconds, on a busy machine within a minute.
LIMIT = 240
# No usage statistics and no metrics.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}


def actors(kind):
    """Return the ids of the processes of this kind's actors."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(f"ray::{kind}".encode()):
                found.append(int(path.parent.name))
    return found


def has_snapshot(journal):
    return any(path.suffix != ".tmp" for path in journal.glob("snapshot-*"))


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
def test_killed_center_of_the_example_continues_from_its_journal(tmp_path):
    pytest.importorskip("ray")
    options = ["--folder", tmp_path, "--steps", "1000"]
    command, environment = python(ROOT / "examples/on_ray.py", *options)
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(  # noqa: S603 our own program
        command,
        env=environment | QUIET,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            address, journal = tmp_path / "address", tmp_path / "journal"
            # Until then a worker may have to start anew.
            # A center that was never on disk would be another one after its restart.
            wait_until(lambda: has_snapshot(journal), LIMIT)
            before = address.read_text()
            (center,) = actors("Center")
            os.kill(center, signal.SIGKILL)
            wait_until(lambda: address.read_text() not in ("", before), LIMIT)
            output, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert re.search(r"^400 exchanges; the center is {'w':", output, re.M), output
