# SPDX-License-Identifier: Apache-2.0
"""Kernel modules: loading them and checking that they exist."""

import errno
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import children

MODPROBE_TIMEOUT_S: Final = 60.0
SYS_MODULE: Final = Path("/sys/module")


def find_modprobe() -> str | None:
    """The path of modprobe, or None. The working directory is not searched."""
    return shutil.which("modprobe", path=children.search_path())


def load(names: Iterable[str]) -> bool:
    """Runs modprobe for each module; returns False if there is no modprobe.

    Whether a module was loaded is not checked; its user finds out. Raises KernelError if modprobe
    does not finish in time.
    """
    modprobe = find_modprobe()
    if modprobe is None:
        return False
    for name in names:
        _run(modprobe, "--quiet", "--", name)
    return True


def probe_module(name: str) -> Probe:
    """Whether a module is loaded or can be loaded; nothing is loaded."""
    if (SYS_MODULE / name).is_dir():
        return Probe(True)
    modprobe = find_modprobe()
    if modprobe is None:
        return Probe(None, "not loaded, and there is no modprobe to ask")
    try:
        if _run(modprobe, "--dry-run", "--quiet", "--", name):
            return Probe(False, f"no module {name}")
    except KernelError as error:
        return Probe(None, error.what)
    return Probe(True, "not loaded; it is loaded when needed")


def _run(*command: str) -> int:
    try:
        return subprocess.run(
            command,
            cwd=children.WORKING_DIRECTORY,
            env=children.child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MODPROBE_TIMEOUT_S,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"modprobe did not finish within {MODPROBE_TIMEOUT_S:.0f} s",
            command[-1],
            "see the kernel's log",
            errno.ETIMEDOUT,
        ) from error
