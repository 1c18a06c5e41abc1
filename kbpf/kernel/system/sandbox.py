# SPDX-License-Identifier: Apache-2.0
"""Runs code in a new network namespace and optionally in another cgroup: in a child process,
because only whole processes move between cgroups.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.system import cgroups, netns
from kbpf.kernel.system.polling import wait_readable

CHUNK: Final = 1 << 16
FIRST_VICTIM: Final = "1000"
"""The oom_score_adj of a process that the kernel kills before all others."""


def run(
    action: Callable[[], Any],
    cgroup: Path | None = None,
    new_netns: bool = True,
    enter_netns: Path | None = None,
    seconds: float = 0.0,
) -> Any:
    """Runs `action` in a child process and returns its result, which must be JSON-serializable.

    The child runs in an empty network namespace, or in ours without `new_netns`, or in
    `enter_netns`; an empty namespace and the child are gone afterwards. A KbpfError in the child is
    raised here as KernelError with its text.

    `seconds`: then the child is killed, and KernelError is raised; 0: no limit. The cgroup may be
    that of a Pod: frozen, or with hardly any CPU time. If its memory is used up, the kernel kills
    the child and not a process of the Pod.
    """
    read_fd, write_fd = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        os.close(read_fd)
        _run_child(action, cgroup, write_fd, new_netns, enter_netns)
    # Read before waitpid(): a result that does not fit into the pipe would block the child.
    os.close(write_fd)
    try:
        text = _read_to_end(read_fd, seconds)
    finally:
        os.close(read_fd)
        if seconds:
            os.kill(child_pid, signal.SIGKILL)  # it has answered, or will not
        os.waitpid(child_pid, 0)
    reply = json.loads(text) if text else {"error": "the child process died"}
    if "error" in reply:
        raise KernelError(reply["error"])
    return reply["result"]


def _read_to_end(fd: int, seconds: float) -> bytes:
    chunks: list[bytes] = []
    deadline = time.monotonic() + seconds
    while True:
        if seconds and not wait_readable([fd], deadline - time.monotonic()):
            raise KernelError(
                f"the child process has not finished within {seconds:g} s",
                "",
                "its cgroup may be frozen, or have no CPU time",
            )
        if not (data := os.read(fd, CHUNK)):
            return b"".join(chunks)
        chunks.append(data)


def _run_child(
    action: Callable[[], Any], cgroup: Path | None, write_fd: int, new_netns: bool, enter_netns: Path | None
) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)
        if cgroup is not None:
            cgroups.join(cgroup)
        if enter_netns is not None:
            netns.enter(enter_netns)
        elif new_netns:
            netns.unshare()
        reply = {"result": action()}
        code = 0
    except KbpfError as error:
        reply = {"error": str(error)}
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        reply = {"error": f"{type(error).__name__}: {error}"}
    try:
        os.write(write_fd, json.dumps(reply).encode())
    finally:
        os._exit(code)  # skip the parent's exit handlers and buffers
