# SPDX-License-Identifier: Apache-2.0
"""How one part is collected: by a command in a separate process or from files, limited in bytes and
time. A failure becomes a line of text.
"""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import describe_unexpected_error
from kbpf.kernel.system import children, sysctl

CHUNK: Final = 1 << 16
MAX_ERROR_BYTES: Final = 4096
SYSTEM_FOLDERS: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Also searched for programs: the PATH of an unprivileged user may not have them."""
SYSCTL_FOLDERS: Final = ("net", "kernel", "vm", "user")
SECRET_SYSCTLS: Final = ("stable_secret", "tcp_fastopen_key")


class Limit(NamedTuple):
    """What a part may take. `deadline` is time.monotonic()."""

    max_bytes: int
    deadline: float

    @property
    def seconds(self) -> float:
        return self.deadline - time.monotonic()


class Collected(NamedTuple):
    """What was collected. `error`: why it is missing or incomplete, "" if it is complete."""

    data: bytes
    error: str = ""


Collector = Callable[[Limit], Collected]


# ---- commands ------------------------------------------------------------------------------------


def run_command(command: Sequence[str], otherwise: Sequence[str] = ()) -> Collector:
    """The output of a command, or of `otherwise` if its program is not installed. One that ends
    with an error keeps what it has printed.
    """

    def collect(limit: Limit) -> Collected:
        environment = children.child_environment()
        path = f"{children.search_path(environment.get('PATH'))}:{SYSTEM_FOLDERS}"
        is_installed = shutil.which(command[0], path=path) is not None
        if not is_installed and not otherwise:
            return Collected(b"", f"{command[0]} is not installed")
        chosen = command if is_installed else otherwise
        return _run(chosen, environment | {"PATH": path, "COLUMNS": "250"}, limit)

    return collect


def _run(command: Sequence[str], environment: dict[str, str], limit: Limit) -> Collected:
    try:
        process = subprocess.Popen(
            command,
            cwd=children.WORKING_DIRECTORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return Collected(b"", f"cannot be started: {error.strerror}")
    with process:
        output, errors, problem = _read_streams(process, limit)
        if problem:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has started
    if problem:
        return Collected(output, problem)
    lines = errors.decode(errors="replace").strip().splitlines()
    # check and verify exit with 1 for what they find, which is complete.
    if process.returncode == 0 or (process.returncode == 1 and output and not lines):
        return Collected(output)
    reason = f": {lines[-1]}" if lines else ""
    return Collected(output, f"exit code {process.returncode}{reason}")


def _read_streams(process: "subprocess.Popen[bytes]", limit: Limit) -> tuple[bytes, bytes, str]:
    """Standard output and error until both end, and why they were not read to the end."""
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        while selector.get_map():
            if limit.seconds <= 0:
                problem = "took too long, and was ended"
                return whole_lines(output, len(output)), bytes(errors), problem
            for key, _ in selector.select(min(limit.seconds, 1.0)):
                data = os.read(key.fd, CHUNK)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
                del errors[:-MAX_ERROR_BYTES]
                if len(output) > limit.max_bytes:
                    problem = f"cut off: more than {limit.max_bytes} bytes"
                    return whole_lines(output, limit.max_bytes), bytes(errors), problem
    return bytes(output), bytes(errors), ""


def whole_lines(data: bytes | bytearray, size: int) -> bytes:
    """The first `size` bytes, without the line in which they end: half of a secret would not be
    recognized.
    """
    return bytes(data[: data.rfind(b"\n", 0, max(0, size)) + 1])


def whole_documents(data: bytes) -> bytes:
    """YAML without the document in which it ends: half of an object would be another one."""
    return data[: data.rfind(b"\n---\n") + 1]


# ---- files ---------------------------------------------------------------------------------------


def read_tail(path: Path) -> Collector:
    """The end of a log file, from the beginning of a line."""

    def collect(limit: Limit) -> Collected:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - limit.max_bytes))
                data = file.read(limit.max_bytes)
        except OSError as error:
            return Collected(b"", str(error.strerror))
        if size <= limit.max_bytes:
            return Collected(data)
        return Collected(data.partition(b"\n")[2], f"only the end of {size} bytes")

    return collect


def read_sysctls(root: Path = sysctl.ROOT) -> Collector:
    """The settings below SYSCTL_FOLDERS, a line each, as `sysctl -a` prints them."""

    def collect(limit: Limit) -> Collected:
        lines: list[bytes] = []
        size = 0
        for path in sorted(chain.from_iterable((root / f).rglob("*") for f in SYSCTL_FOLDERS)):
            if path.name.endswith(SECRET_SYSCTLS):
                continue
            with contextlib.suppress(OSError):  # a folder, or a file that can only be written
                value = path.read_bytes()[:CHUNK].strip().replace(b"\n", b" ")
                key = str(path.relative_to(root)).replace("/", ".")
                lines.append(key.encode() + b" = " + value + b"\n")
                size += len(lines[-1])
            if size > limit.max_bytes or limit.seconds <= 0:
                return Collected(b"".join(lines[:-1]), "cut off")
        return Collected(b"".join(lines), "" if lines else f"{root}: nothing can be read")

    return collect


def safely(collector: Collector, limit: Limit) -> Collected:
    """Runs a collector; its bugs are errors of this part."""
    try:
        return collector(limit)
    except OSError as error:
        return Collected(b"", describe_unexpected_error(error))
    except Exception as error:
        return Collected(b"", f"internal error: {error!r}")
