# SPDX-License-Identifier: Apache-2.0
"""Kernel settings of the own process."""

import contextlib
import ctypes
import math
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import kernel_errors

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
    hint = "a value below the current one needs CAP_SYS_RESOURCE"
    with kernel_errors(f"cannot set oom_score_adj to {value}", str(path), hint):
        if path.read_text().strip() != str(value):
            path.write_text(str(value))


STAT_STATE, STAT_START_TIME = 0, 19
"""Fields of /proc/PID/stat behind the command, which may itself contain spaces and parentheses:
proc(5). The time is in clock ticks of CLOCK_BOOTTIME.
"""


def is_alive(pid: int, started: float = math.inf) -> bool:
    """Whether this process runs. A zombie does not, nor one that began after `started`
    (CLOCK_BOOTTIME): another process has this id by now.
    """
    try:
        return _runs_since(Path(f"/proc/{pid}/stat").read_text(errors="replace"), started)
    except OSError:
        return False


def _runs_since(stat: str, started: float) -> bool:
    fields = stat.rpartition(")")[2].split()
    began = int(fields[STAT_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return fields[STAT_STATE] not in ("Z", "X") and began <= started


def call_libc(function: str, *arguments: object) -> int:
    """Calls a function of libc that returns a number. Raises OSError if that is negative."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class ProcessCommand(NamedTuple):
    """How a process was started: its arguments, its environment and its working directory."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    folder: Path


def read_command(pid: int, started: float) -> ProcessCommand | None:
    """None if there is no such process, or it may not be read; if it began after `started`, see
    is_alive(); or if it is in another network namespace.

    A process can have any arguments, and root uses these: after the end of an agent, a Pod may get
    its id. The folder in /proc stays that of one process, so all is read of the same one.
    """
    try:
        proc = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        is_here = os.path.samestat(os.stat("ns/net", dir_fd=proc), os.stat("/proc/self/ns/net"))
        if not is_here or not _runs_since(os.fsdecode(_read_file("stat", proc)), started):
            return None
        raw_arguments, raw_environ = _read_file("cmdline", proc), _read_file("environ", proc)
        folder = Path(os.readlink("cwd", dir_fd=proc))
    except OSError:
        return None
    finally:
        os.close(proc)
    arguments = tuple(map(os.fsdecode, raw_arguments.split(b"\0")[:-1]))
    pairs = (os.fsdecode(entry).partition("=") for entry in raw_environ.split(b"\0") if entry)
    return ProcessCommand(arguments, {name: value for name, _, value in pairs}, folder)


def _read_file(name: str, folder: int) -> bytes:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        return file.read()
