"""What a process asks of the kernel for itself."""

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
"""PROC_PID_INIT_INO: the same number on every Linux."""


def is_in_initial_pid_namespace() -> bool:
    """Whether all processes of the machine are in our PID namespace, and so in /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == PROC_PID_INIT_INO
    except OSError:
        return False


def set_parent_death_signal(parent: int) -> None:
    """From now on, and through execve(2), this process is killed when its parent ends, however it
    ends. `parent` is its id: if it has gone already, so does this process now.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_nofile_limit() -> None:
    """As many open files as this process may allow itself, as Go's programs do: each Service's
    health check takes two. What cannot be raised stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_oom_score_adj(value: int) -> None:
    """How soon the kernel ends this process for want of memory: -1000 never, 1000 first."""
    path = Path("/proc/self/oom_score_adj")
    try:
        if path.read_text().strip() != str(value):
            path.write_text(str(value))
    except OSError as error:
        raise KernelError(
            f"cannot set oom_score_adj to {value}", str(path),
            "going below what it was needs CAP_SYS_RESOURCE", error.errno or 0,
        ) from error  # fmt: skip
