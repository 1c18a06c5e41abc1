# SPDX-License-Identifier: Apache-2.0
"""How one part is collected: by a command in a separate process, from files, or by HTTP. Each is
limited in bytes and time, and a failure becomes a line of text.
"""

import contextlib
import http.client
import os
import selectors
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import describe_unexpected_error
from kbpf.kernel.system import children

CHUNK: Final = 1 << 16
MAX_ERROR_BYTES: Final = 4096
SYSTEM_FOLDERS: Final = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Also searched for programs: the PATH of an unprivileged user may not have them."""


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


def run_command(*command: str) -> Collector:
    """The output of a command. A part that ends with an error keeps what it has printed."""

    def collect(limit: Limit) -> Collected:
        environment = children.child_environment()
        path = f"{children.search_path(environment.get('PATH'))}:{SYSTEM_FOLDERS}"
        if shutil.which(command[0], path=path) is None:
            return Collected(b"", f"{command[0]} is not installed")
        return _run(command, environment | {"PATH": path, "COLUMNS": "250"}, limit)

    return collect


def run_kbpf(*arguments: str) -> Collector:
    """The output of a command of kbpf, in a separate process: whatever happens to it, the other
    parts are collected.
    """
    return run_command(*children.python_command("kbpf", *arguments))


def run_module(module: str, *arguments: str) -> Collector:
    return run_command(*children.python_command(module, *arguments))


def first_installed(*choices: tuple[str, ...], otherwise: Collector) -> Collector:
    """The output of the first of these programs that is installed; `otherwise` without any."""

    def collect(limit: Limit) -> Collected:
        path = f"{children.search_path()}:{SYSTEM_FOLDERS}"
        for command in choices:
            if shutil.which(command[0], path=path):
                return run_command(*command)(limit)
        return otherwise(limit)

    return collect


def _run(command: tuple[str, ...], environment: dict[str, str], limit: Limit) -> Collected:
    try:
        process = subprocess.Popen(
            command, cwd=children.WORKING_DIRECTORY, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
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
                return bytes(output), bytes(errors), "took too long, and was ended"
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


def read_files(*paths: Path) -> Collector:
    """The contents of files, each after its name if there are several. Those of /proc have no size,
    so all are read from the beginning.
    """

    def collect(limit: Limit) -> Collected:
        parts, missing, remaining = [], [], limit.max_bytes
        for path in paths:
            try:
                with path.open("rb") as file:
                    data = file.read(remaining + 1)
            except OSError as error:
                missing.append(f"{path}: {error.strerror}")
                continue
            if len(paths) > 1:
                data = f"==> {path} <==\n".encode() + data + b"\n"
            if len(data) > remaining:
                missing.append(f"{path}: cut off")
                data = whole_lines(data, remaining)
            remaining -= len(data)
            parts.append(data)
        return Collected(b"".join(parts), "; ".join(missing))

    return collect


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


def read_tree(root: Path, excluded: Callable[[str], bool], folders: Iterable[str]) -> Collector:
    """The files below these folders of `root`, a line each, as `sysctl -a` prints them."""

    def collect(limit: Limit) -> Collected:
        lines: list[bytes] = []
        size = 0
        for folder in folders:
            for parent, subfolders, names in os.walk(root / folder):
                subfolders.sort()
                for name in sorted(names):
                    path = Path(parent, name)
                    key = str(path.relative_to(root)).replace("/", ".")
                    if excluded(key):
                        continue
                    with contextlib.suppress(OSError):  # some can only be written
                        value = path.read_bytes()[:CHUNK].strip().replace(b"\n", b" ")
                        lines.append(key.encode() + b" = " + value + b"\n")
                        size += len(lines[-1])
                    if size > limit.max_bytes or limit.seconds <= 0:
                        return Collected(b"".join(lines[:-1]), "cut off")
        return Collected(b"".join(lines), "" if lines else f"{root}: nothing can be read")

    return collect


# ---- HTTP ----------------------------------------------------------------------------------------


def get(address: str, path: str) -> Collector:
    """The body of an answer of the agent. `address`: HOST:PORT; "": it does not listen."""

    def collect(limit: Limit) -> Collected:
        host, _, port = address.rpartition(":")
        if not port:
            return Collected(b"", "the agent does not listen there, by its configuration")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))
        connection = http.client.HTTPConnection(host, int(port), timeout=max(0.1, limit.seconds))
        data = bytearray()
        try:
            connection.connect()
            with _closed_at(connection.sock, limit):
                connection.request("GET", path)
                response = connection.getresponse()
                while chunk := response.read1(CHUNK):
                    data += chunk
                    if len(data) > limit.max_bytes:
                        return Collected(whole_lines(data, limit.max_bytes), "cut off")
        except (OSError, http.client.HTTPException) as error:
            if limit.seconds > 0:
                reason = getattr(error, "strerror", None) or repr(error)
                return Collected(b"", f"{address}: {reason}")
        finally:
            connection.close()
        if limit.seconds <= 0:
            return Collected(whole_lines(data, len(data)), "took too long")
        status = response.status
        return Collected(bytes(data), "" if status == 200 else f"{status} {response.reason}")

    return collect


@contextlib.contextmanager
def _closed_at(sock: socket.socket, limit: Limit) -> Iterator[None]:
    """Closes the connection at the deadline. A socket's own timeout starts again with each byte,
    and while the agent is down any process may listen at its address.
    """

    def end() -> None:
        with contextlib.suppress(OSError):  # the server has closed it
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(limit.seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def safely(collector: Collector, limit: Limit) -> Collected:
    """Runs a collector; its bugs are errors of this part."""
    try:
        return collector(limit)
    except OSError as error:
        return Collected(b"", describe_unexpected_error(error))
    except Exception as error:
        return Collected(b"", f"internal error: {error!r}")
