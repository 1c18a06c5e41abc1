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


def run(action: Callable[[], Any], cgroup: Path | None = None, apart: bool = True) -> Any:
    """What `action` gives (anything that JSON can say), run in an empty network namespace; not
    `apart`: in our own.

    The namespace and the child are gone afterwards. A KbpfError there is one here, by its text.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(action, cgroup, writing, apart)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(text) if text else {"error": "the child process died"}
    if "error" in answer:
        raise KernelError(answer["error"])
    return answer["result"]


def _child(action: Callable[[], Any], cgroup: Path | None, writing: int, apart: bool) -> None:
    code = 1
    try:
        if cgroup is not None:
            cgroups.join(cgroup)
        if apart:
            netns.leave()
        answer = {"result": action()}
        code = 0
    except KbpfError as error:
        answer = {"error": str(error)}
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        answer = {"error": f"{type(error).__name__}: {error}"}
    try:
        os.write(writing, json.dumps(answer).encode())
    finally:
        os._exit(code)  # none of the parent's exit handlers and buffers
