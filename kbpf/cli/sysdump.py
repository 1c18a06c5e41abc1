# SPDX-License-Identifier: Apache-2.0
"""`kbpf sysdump`: one archive with everything that a report about this node needs."""

import contextlib
import io
import os
import re
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import msgspec
import typer

from kbpf import __version__
from kbpf.cli import render
from kbpf.cli.dump.collect import whole_documents, whole_lines
from kbpf.cli.endpoints import Kubeconfig, NodeName, own_node_name
from kbpf.cli.options import DEFAULT, Output, OutputOption, PinDir, StateDir, parse_duration
from kbpf.cli.origin import RunConfigFile, read_config, with_own_node
from kbpf.errors import KbpfError, OutputError
from kbpf.kernel.system.process import is_alive
from kbpf.model.config import Config
from kbpf.views.page import Column, Kind, Page, format_size

if TYPE_CHECKING:
    from kbpf.cli.dump.parts import Part as DumpPart
    from kbpf.dataplane.reader import Locations
    from kbpf.model.status import AgentStatus

USUAL_KUBECONFIG: Final = Path("/var/lib/kube-proxy/kubeconfig.conf")
"""Where kubeadm's DaemonSet has it: also if the configuration cannot be read."""
MIN_PART_BYTES: Final = 1024
"""With less room no further part is collected."""
MAX_OBJECT_BYTES: Final = 64 << 20
"""A folder's file may be as large (bounded_yaml.MANIFESTS)."""
WORKERS: Final = 3
STDOUT: Final = Path("-")

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE]",
        help="The archive, a file that does not exist yet. `-`: standard output. Default: "
        "kbpf-sysdump-NODE-TIME.tar.gz in this folder.",
    ),
]
TimeLimit = Annotated[
    str, typer.Option("--time-limit", metavar="DURATION", help="Do not begin further parts after it.")
]
MaxBytes = Annotated[int, typer.Option("--max-bytes", min=1 << 20, metavar="N", help="Of all parts, uncompressed.")]
Logs = Annotated[
    list[Path] | None,
    typer.Option(
        "--log",
        metavar="FILE",
        readable=False,
        help="The agent's log, if it is neither in /var/log/pods nor in the journal.",
    ),
]


class IndexEntry(msgspec.Struct, frozen=True):
    """A part of the archive. `source`: where it comes from. `bytes`: its size; 0 if it is not in
    the archive. `error`: why it is missing or incomplete, "" if it is complete.
    """

    path: str
    source: str
    seconds: float
    bytes: int
    error: str


class IndexSummary(msgspec.Struct, frozen=True):
    """What the archive is. `version`: of kbpf. `node`: its name. `started_at`: RFC 3339.
    `seconds`: how long it took. `failed`: the number of parts that are missing or incomplete.
    """

    version: str
    node: str
    started_at: str
    seconds: float
    failed: int


KIND: Final = Kind("SysdumpPartList", IndexEntry, IndexSummary)
COLUMNS: Final = (
    Column("PART", "path"),
    Column("SIZE", lambda e: format_size(e.bytes or None), right=True),
    Column("SECONDS", lambda e: f"{e.seconds:.1f}", right=True),
    Column("PROBLEM", "error"),
    Column("SOURCE", "source", wide=True),
)


def sysdump(
    file: File = None,
    time_limit: TimeLimit = "2m",
    max_bytes: MaxBytes = 256 << 20,
    logs: Logs = None,
    output: OutputOption = Output.TABLE,
    kubeconfig: Kubeconfig = None,
    node: NodeName = "",
    config: RunConfigFile = None,
    pin_dir: PinDir = DEFAULT.pin_dir,
    state_dir: StateDir = DEFAULT.state_dir,
) -> None:
    """Collect what a report about this node needs in one archive: check, verify, all views, health
    and metrics, logs, the objects of the cluster, devices, routes, rules, sysctls and settings.
    Passwords, tokens and keys are removed; names and addresses are not. A part that fails is a line
    in its index. Works while the agent is down, and with fewer rights.
    """
    from kbpf.cli.dump.parts import Subject, list_parts
    from kbpf.cli.dump.redact import Redactor, find_secrets
    from kbpf.config.locations import read_locations
    from kbpf.dataplane.reader import Locations

    seconds = parse_duration(time_limit, "--time-limit")
    if file == STDOUT and sys.stdout.isatty():
        what = "a terminal cannot show an archive; redirect it to a file"
        raise typer.BadParameter(what, param_hint="FILE")
    if config is not None:  # the locations in the file are those of the agent
        values = read_locations(config).values
        pin_dir = values.get("pin_dir", pin_dir)
        state_dir = values.get("state_dir", state_dir)
    # Parts are processes with another working directory.
    pin_dir, state_dir = pin_dir.absolute(), state_dir.absolute()
    kubeconfig, config = (path and path.absolute() for path in (kubeconfig, config))
    status = _read_status(Locations.of_settings(pin_dir, state_dir))
    node = node or (status.node if status else "")
    settings, problem = _read_settings(config, kubeconfig, node, pin_dir)
    names = (("--kubeconfig", kubeconfig), ("--config", config))
    origin = [text for name, path in names if path for text in (name, str(path))]
    subject = Subject(
        settings,
        config,
        ("--pin-dir", str(pin_dir), "--state-dir", str(state_dir)),
        tuple(origin),
        min(MAX_OBJECT_BYTES, max_bytes // 2),
        status.pid if status and is_alive(status.pid, status.started) else None,
        tuple(logs or ()),
    )
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    name = re.sub(r"[^A-Za-z0-9.-]", "_", settings.node_name)
    folder = f"kbpf-sysdump-{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    path = file or Path(f"{folder}.tar.gz")
    kubeconfigs = [p for p in (kubeconfig, settings.kubeconfig, USUAL_KUBECONFIG) if p is not None]
    redactor = Redactor(find_secrets(kubeconfigs, [settings.master], os.environ))
    start = time.monotonic()
    with _open_output(path, only_new=file is None) as stream, tarfile.open(fileobj=stream, mode="w|gz") as tar:
        archive = Archive(tar, folder, max_bytes, redactor.redact)
        entries = [*_collect(list(list_parts(subject)), archive, start, seconds)]
        if problem:
            entries.append(IndexEntry("config", str(config or "environment"), 0.0, 0, problem))
        duration = round(time.monotonic() - start, 1)
        failed = sum(bool(entry.error) for entry in entries)
        summary = IndexSummary(__version__, settings.node_name, started_at, duration, failed)
        archive.add_index(summary, entries)
    note = f"{len(entries) - failed} of {len(entries)} parts are complete"
    if path == STDOUT:
        print(f"kbpf: {note}; index.json says why others are not", file=sys.stderr)
        return
    notes = (f"{note}: {path}", "look through it before you send it: it has names and addresses")
    render.show(Page(KIND, entries, COLUMNS, summary=summary, notes=notes), output)


@contextlib.contextmanager
def _open_output(path: Path, only_new: bool) -> Iterator[BinaryIO]:
    """A new file that only its owner can read, a device or pipe that exists, or standard output.
    `only_new`: for a name that the user has not chosen; in a folder such as /tmp, another user may
    have made a pipe of it. Raises OutputError.
    """
    try:
        if path == STDOUT:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        is_new = only_new or not path.exists() or stat.S_ISREG(path.stat().st_mode)
        flags = os.O_CREAT | os.O_EXCL if is_new else os.O_APPEND
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | flags, 0o600)
        with open(fd, "wb") as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "choose another name" if isinstance(error, FileExistsError) else ""
        raise OutputError(f"cannot write the file: {reason}", str(path), hint) from error


def _read_settings(config: Path | None, kubeconfig: Path | None, node: str, pin_dir: Path) -> tuple[Config, str]:
    """The agent's settings; the defaults and an error if they cannot be read."""
    try:
        return with_own_node(read_config(config, kubeconfig), node, pin_dir), ""
    except KbpfError as error:
        try:
            name = node or own_node_name(pin_dir)
        except KbpfError:
            name = "unknown"
        return Config(node_name=name, kubeconfig=kubeconfig), str(error)


def _read_status(locations: "Locations") -> "AgentStatus | None":
    from kbpf.dataplane import reader as inspect
    from kbpf.model.inspection import Part

    try:
        return inspect.read(locations, Part.STATUS).status
    except (KbpfError, OSError):
        return None


class Archive:
    """Adds files to a tar file, as it is written. `redact` gets each of them."""

    def __init__(self, tar: tarfile.TarFile, folder: str, max_bytes: int, redact: Callable[[bytes], bytes]) -> None:
        self._tar, self._folder, self._redact = tar, folder, redact
        self.remaining = max_bytes

    def add(self, path: str, data: bytes) -> tuple[int, str]:
        """Adds a file, if it is not empty. Returns its size, and why it was cut, "" if it was
        not.
        """
        redacted, error = self._redact(data), ""
        if len(redacted) > self.remaining:  # other parts have grown meanwhile
            redacted, error = whole_lines(redacted, self.remaining), "cut off: --max-bytes"
            redacted = whole_documents(redacted) if path.endswith(".yaml") else redacted
        if redacted:
            self._write(path, redacted)
        self.remaining -= len(redacted)
        return len(redacted), error

    def add_index(self, summary: IndexSummary, entries: Sequence[IndexEntry]) -> None:
        page = Page(KIND, entries, summary=summary)
        text = "".join(render.render_page(page, Output.JSON))
        self._write("index.json", self._redact(text.encode()))

    def _write(self, path: str, data: bytes) -> None:
        info = tarfile.TarInfo(f"{self._folder}/{path}")
        info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
        self._tar.addfile(info, io.BytesIO(data))


def _collect(parts: Sequence["DumpPart"], archive: Archive, start: float, time_limit: float) -> Iterator[IndexEntry]:
    """Collects several parts at a time, until `time_limit` seconds after `start`, and adds them in
    their order.
    """
    from kbpf.cli.dump.collect import Collected, Limit, safely

    deadline = start + time_limit

    def collect_one(part: "DumpPart") -> tuple[Collected, float]:
        part_start = time.monotonic()
        if part_start >= deadline:
            return Collected(b"", "not collected: --time-limit is over"), 0.0
        size = min(archive.remaining, part.max_bytes)
        if size < MIN_PART_BYTES:
            return Collected(b"", "not collected: --max-bytes is reached"), 0.0
        part_deadline = min(deadline, part_start + part.share * time_limit)
        collected = safely(part.collect, Limit(size, part_deadline))
        return collected, time.monotonic() - part_start

    with ThreadPoolExecutor(WORKERS) as pool:
        waiting: list[tuple[DumpPart, Future[tuple[Collected, float]]]] = []
        todo = iter(parts)
        while True:
            # Not all at once: what is collected and not yet written is in memory.
            while len(waiting) < WORKERS and (part := next(todo, None)) is not None:
                waiting.append((part, pool.submit(collect_one, part)))
            if not waiting:
                return
            part, future = waiting.pop(0)
            collected, duration = future.result()
            size, error = archive.add(part.path, collected.data)
            errors = "; ".join(filter(None, (collected.error, error)))
            yield IndexEntry(part.path, part.source, round(duration, 2), size, errors)
