# SPDX-License-Identifier: Apache-2.0
"""Kernel settings of the own process."""

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError

PR_SET_PDEATHSIG: Final = 1
PROC_PID_INIT_INO: Final = 0xEFFFFFFC
"""Inode of the initial PID namespace, the same on every Linux."""


def is_in_initial_pid_namespace() -> bool:
    """Whether we are in the initial PID namespace, so that /proc shows all processes of the
    machine.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino == PROC_PID_INIT_INO
    except OSError:
        return False


def set_parent_death_signal(parent: int) -> None:
    """The kernel kills this process when its parent exits; this survives execve(2).

    `parent` is the parent's process id: if the parent has already exited, this process kills
    itself.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_nofile_limit() -> None:
    """Raises the limit of open files to the hard limit, as Go programs do: each Service's health
    check needs two. Failures are ignored.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_oom_score_adj(value: int) -> None:
    """Sets the priority for the OOM killer: -1000 never, 1000 first."""
    path = Path("/proc/self/oom_score_adj")
    try:
        if path.read_text().strip() != str(value):
            path.write_text(str(value))
    except OSError as error:
        raise KernelError(
            f"cannot set oom_score_adj to {value}", str(path),
            "a value below the current one needs CAP_SYS_RESOURCE", error.errno or 0,
        ) from error  # fmt: skip


def is_alive(pid: int) -> bool:
    """Whether this process runs. A zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # the command, in parentheses, may itself contain spaces and parentheses: proc(5)
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
