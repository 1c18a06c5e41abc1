# SPDX-License-Identifier: Apache-2.0
"""Runs code in a new network namespace and optionally in another cgroup: in a child process,
because only whole processes move between cgroups.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kbpf.errors import KbpfError, KernelError
from kbpf.kernel.system import cgroups, netns


def run(action: Callable[[], Any], cgroup: Path | None = None, new_netns: bool = True) -> Any:
    """Runs `action` in a child process and returns its result, which must be JSON-serializable.

    The child runs in an empty network namespace, or in ours without `new_netns`; both the
    namespace and the child are gone afterwards. A KbpfError in the child is raised here as
    KernelError with its text.
    """
    read_fd, write_fd = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        os.close(read_fd)
        _run_child(action, cgroup, write_fd, new_netns)
    # Read before waitpid(): a result that does not fit into the pipe would block the child.
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        text = pipe.read()
    os.waitpid(child_pid, 0)
    reply = json.loads(text) if text else {"error": "the child process died"}
    if "error" in reply:
        raise KernelError(reply["error"])
    return reply["result"]


def _run_child(
    action: Callable[[], Any], cgroup: Path | None, write_fd: int, new_netns: bool
) -> None:
    code = 1
    try:
        if cgroup is not None:
            cgroups.join(cgroup)
        if new_netns:
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
