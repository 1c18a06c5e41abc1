# SPDX-License-Identifier: Apache-2.0
"""`kbpf record`: the objects and events of a cluster as a file for `kbpf run --source`."""

import contextlib
import gzip
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from kbpf.cli.endpoints import Kubeconfig
from kbpf.cli.options import DEFAULT, PinDir
from kbpf.cli.origin import (
    Ends,
    NodeName,
    RunConfigFile,
    read_config,
    watch,
    with_own_node,
)
from kbpf.config import durations
from kbpf.errors import ConfigError, OutputError, SourceError
from kbpf.model.config import Config
from kbpf.source.base import wait_until_listed

if TYPE_CHECKING:
    from kbpf.source.recording.tap import Recorder

MAX_BYTES: Final = 256 << 20
CHECK_INTERVAL: Final = 0.2
STDOUT: Final = Path("-")

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A file that does not exist yet; compressed if its name ends in .gz. `-`: standard "
        "output.",
    ),
]
For = Annotated[
    str,
    typer.Option(
        "--for", metavar="DURATION",
        help="Also record the changes of this time: 30s, 5m. Ctrl-C ends it earlier.",
    ),
]  # fmt: skip
Mask = Annotated[
    bool,
    typer.Option(
        "--mask", help="Replace names and addresses. kbpf decides the same about the rest."
    ),
]
Source = Annotated[
    Path | None,
    typer.Option(
        "--source", metavar="DIR|FILE", readable=False,
        help="Record a folder of YAML or another recording, for example to mask it.",
    ),
]  # fmt: skip
MaxBytes = Annotated[
    int, typer.Option("--max-bytes", min=4096, metavar="N", help="Stop at N bytes, uncompressed.")
]


def record(
    file: File, seconds: For = "0s", mask: Mask = False, source: Source = None,
    max_bytes: MaxBytes = MAX_BYTES, kubeconfig: Kubeconfig = None, node: NodeName = "",
    config: RunConfigFile = None, pin_dir: PinDir = DEFAULT.pin_dir,
) -> None:  # fmt: skip
    """Record the objects that the agent of this node reads, reduced to the fields that it uses, and
    with --for their changes. `kbpf run --source FILE` replays them anywhere; `kbpf diff` and `kbpf
    simulate` read them. Connects to the API server itself: the agent need not run.
    """
    from kbpf.source.recording.format import RecordingWriter, make_header
    from kbpf.source.recording.tap import Recorder

    try:
        duration = durations.parse(seconds, "--for")
    except ConfigError as error:
        raise typer.BadParameter(f"{error.what}; {error.hint}", param_hint="--for") from None
    settings = with_own_node(read_config(config, kubeconfig), node, pin_dir)
    path = source or settings.source
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with output_errors(file), open_output(file) as output, _masked(output, mask) as target:
        if path is not None and path.is_file():
            count, is_full = _copy(path, target, max_bytes)
        else:
            header = make_header(settings.node_name, started_at)
            recorder = Recorder(RecordingWriter(target, header, max_bytes))
            with _interrupts() as stop:
                if path is not None:
                    _record_folder(path, recorder, duration, stop)
                else:
                    _record_server(settings, recorder, duration, stop)
            recorder.close()
            count, is_full = recorder.events, recorder.is_full
    print(f"kbpf: {count} events recorded", file=sys.stderr)
    if is_full:
        what = f"the recording is incomplete: it would exceed {max_bytes} bytes"
        raise OutputError(what, str(file), "raise --max-bytes")


def _record_server(
    config: Config, recorder: "Recorder", duration: float, stop: threading.Event
) -> None:
    from kbpf.source.recording.tap import Tap

    def make_ends() -> Ends:
        tap = Tap(recorder)
        return tap.emit, tap.decode_object

    def is_over() -> bool:
        recorder.flush()
        return stop.is_set() or recorder.is_full or recorder.error is not None

    with watch(config, make_ends) as sources:
        wait_until_listed(sources, is_over)
        deadline = time.monotonic() + duration
        while not is_over() and time.monotonic() < deadline:
            stop.wait(min(CHECK_INTERVAL, deadline - time.monotonic()))


def _record_folder(
    path: Path, recorder: "Recorder", duration: float, stop: threading.Event
) -> None:
    from kbpf.source.folder.folder import POLL_INTERVAL, FolderSource, check_folder
    from kbpf.source.recording.tap import Tap

    check_folder(path)
    tap = Tap(recorder)
    folder = FolderSource(path, tap.emit, convert_object=tap.convert_object)
    deadline = time.monotonic() + duration
    folder.poll()
    if error := folder.status().error:
        raise SourceError(error)
    while not stop.is_set() and not recorder.is_full and time.monotonic() < deadline:
        recorder.flush()
        stop.wait(POLL_INTERVAL)
        folder.poll()
    for problem in folder.status().problems:
        print(f"kbpf: {problem}", file=sys.stderr)


def _copy(path: Path, target: BinaryIO, max_bytes: int) -> tuple[int, bool]:
    """Copies a recording; returns the number of its events, and whether it was too large."""
    from kbpf.source.recording.format import RecordingReader, RecordingWriter, make_entry

    reader = RecordingReader(path)
    writer = RecordingWriter(target, reader.header, max_bytes)
    count = 0
    for change in reader.changes():
        if (entry := make_entry(change)) is not None:
            writer.write(entry)
            count += 1
    if reader.complete or writer.is_full:
        writer.close(reader.end)
    for problem in reader.problems:
        print(f"kbpf: {problem}", file=sys.stderr)
    return count, writer.is_full


# ---- the file ------------------------------------------------------------------------------------


@contextlib.contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Turns errors of writing into an OutputError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        reason = error.strerror or str(error)
        hint = "choose another name" if isinstance(error, FileExistsError) else ""
        raise OutputError(f"cannot write the file: {reason}", str(path), hint) from error


@contextlib.contextmanager
def open_output(path: Path, compress: bool = True, only_new: bool = False) -> Iterator[BinaryIO]:
    """A new file that only its owner can read, a device or pipe that exists, or standard output.
    Compressed if its name ends in .gz, unless `compress` is false. It is removed again if the block
    fails because there is nothing to write. `only_new`: for a name that the user has not chosen;
    in a folder such as /tmp, another user may have made a pipe of it. Raises OSError.
    """
    if path == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY
    is_new = only_new or not path.exists() or stat.S_ISREG(path.stat().st_mode)
    fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if is_new else os.O_APPEND), 0o600)
    with open(fd, "wb") as raw:
        try:
            if compress and path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as compressed:
                    yield compressed  # type: ignore[misc]
            else:
                yield raw
        except (SourceError, ConfigError):
            if is_new:
                path.unlink()
            raise


@contextlib.contextmanager
def _masked(output: BinaryIO, mask: bool) -> Iterator[BinaryIO]:
    """Where to write a recording that gets to `output`, masked or not. Masks sort like the names,
    so all names must be known before any is masked.
    """
    if not mask:
        yield output
        return
    from kbpf.source.recording.mask import mask_recording

    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=1, fileobj=buffer) as compressed:
        yield compressed  # type: ignore[misc]

    def read_lines() -> Iterator[bytes]:
        buffer.seek(0)
        with gzip.GzipFile(fileobj=buffer) as file:
            yield from file

    mask_recording(read_lines, output)


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Sets the event at SIGINT and SIGTERM, so that the recording gets its last line."""
    stop = threading.Event()

    def handle(number: int, _: FrameType | None) -> None:
        stop.set()

    before = [(number, signal.signal(number, handle)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
