# SPDX-License-Identifier: Apache-2.0
"""How child processes are started, so that nothing in the caller's working directory is executed.

`python -m` puts the working directory first in sys.path, and an empty entry in PYTHONPATH or PATH
means the working directory too. When root runs kbpf in a folder of another user, that would
execute this user's `subprocess.py` or `modprobe`. So each child gets WORKING_DIRECTORY and
child_environment(); paths in its arguments must be absolute.
"""

import os
import selectors
import site
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import subprocess  # which the agent does without

WORKING_DIRECTORY: Final = "/"
PACKAGE_ROOT: Final = Path(__file__).resolve().parents[3]
"""The folder that contains the package kbpf."""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of kbpf with this interpreter. -P: without the working
    directory in sys.path.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment (or `inherited`) without PYTHON* and without relative entries in PATH.

    PYTHONPATH is the exception: its absolute entries stay, because kbpf itself may have been found
    through them. The folder of this package is added if Python would not search it (a checkout).
    """
    source = os.environ if inherited is None else inherited
    variables = {name: value for name, value in source.items() if not name.startswith("PYTHON")}
    if "PATH" in variables:
        variables["PATH"] = search_path(variables["PATH"])
    folders = _absolute_entries(source.get("PYTHONPATH", ""))
    root = str(PACKAGE_ROOT)
    installed = {str(Path(folder).resolve()) for folder in site.getsitepackages()}
    if root not in folders and root not in installed:
        folders.insert(0, root)
    if folders:
        variables["PYTHONPATH"] = os.pathsep.join(folders)
    return variables


def search_path(path: str | None = None) -> str:
    """PATH (or `path`) without relative entries (an empty one is the working directory); the
    system's default if nothing is left.
    """
    return os.pathsep.join(_absolute_entries(os.environ.get("PATH", "") if path is None else path)) or (os.defpath)


def read_bounded(
    child: "subprocess.Popen[Any]", max_bytes: int, on_poll: Callable[[], None] = lambda: None
) -> tuple[bytes, bytes]:
    """What a child writes to standard output and error, as far as these are pipes, until it ends.
    Raises ValueError if that is more than `max_bytes`. `on_poll` is called ten times a second.
    """
    streams = child.stdout, child.stderr
    outputs = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        for stream, output in zip(streams, outputs, strict=True):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, output)
        while selector.get_map():
            on_poll()
            for key, _ in selector.select(0.1):
                if not (data := os.read(key.fd, 1 << 16)):
                    selector.unregister(key.fileobj)
                key.data.extend(data)
            if sum(map(len, outputs)) > max_bytes:
                raise ValueError(f"more than {max_bytes >> 20} MiB")
    child.wait()
    return bytes(outputs[0]), bytes(outputs[1])


def _absolute_entries(path: str) -> list[str]:
    return [folder for folder in path.split(os.pathsep) if os.path.isabs(folder)]
