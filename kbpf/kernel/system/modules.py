"""Kernel modules."""

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
    """The path of modprobe; None without one. Not from the working directory."""
    return shutil.which("modprobe", path=children.search_path())


def load(names: Iterable[str]) -> bool:
    """Loads those of them that are not built in; False where that cannot be tried. Whether they
    are there is for their users to find out. KernelError when modprobe does not end.
    """
    modprobe = find_modprobe()
    if modprobe is None:
        return False
    for name in names:
        _run(modprobe, "--quiet", "--", name)
    return True


def probe_module(name: str) -> Probe:
    """Whether a module is there, loaded or to be loaded; nothing is loaded by asking."""
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
    return Probe(True, "not loaded; it is when it is needed")


def _run(*command: str) -> int:
    """Its exit code."""
    try:
        return subprocess.run(
            command, cwd=children.WORKING_DIRECTORY, env=children.child_environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=MODPROBE_TIMEOUT_S, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"modprobe has not ended after {MODPROBE_TIMEOUT_S:.0f} s", command[-1],
            "see the kernel's log", errno.ETIMEDOUT,
        ) from error  # fmt: skip
