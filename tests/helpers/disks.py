"""Small disks: file systems with few bytes or files, which only root can mount."""

import contextlib
import os
import subprocess

import pytest


@contextlib.contextmanager
def small_disks(folder):
    """Yield a function that mounts a file system in a folder, with options of tmpfs.

    Skips the test where nothing can be mounted.
    """
    mounted = []

    def mount(options):
        if os.getuid():
            pytest.skip("only root can mount a small disk")
        place = folder / f"disk-{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 our own
            pytest.skip("nothing can be mounted here")
        mounted.append(place)
        return place

    try:
        yield mount
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", place], check=True)  # noqa: S603, S607 our own
