"""Doing something in a network namespace of its own and, if asked, in another cgroup: by a child
process, because a process moves between cgroups as a whole.
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
    """What `action` gives (anything that JSON can say), run in an empty network namespace; not
    `apart`: in our own.

    The namespace and the child are gone afterwards. A KbpfError there is one here, by its text.
    """
    read_fd, write_fd = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        os.close(read_fd)
        _run_child(action, cgroup, write_fd, new_netns)
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
        os._exit(code)  # none of the parent's exit handlers and buffers
