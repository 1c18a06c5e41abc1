"""The compiled programs as a file: bytecode, and where each map is referenced.

The agent never imports BCC. It asks here for the artifact of a unit; the file's name says all
that it depends on, so an unchanged restart compiles nothing and a changed source never meets old
bytecode. A file that is damaged is as good as absent, and so is one that another user can have
written: the hash in it keeps no secret, and its bytecode is loaded by root.
"""

import contextlib
import errno
import hashlib
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kbpf.dataplane.bpf.programs import flatten
from kbpf.errors import CompileError
from kbpf.kernel.system.private_folders import distrust_reason

log = logging.getLogger("kbpf.dataplane")

FORMAT: Final = 1
MAX_FILE_BYTES: Final = 16 * 1024 * 1024
"""An artifact that is larger is not read; those of today have less than one MiB."""
TRUST_HINT: Final = (
    "chown root and chmod go-w the folder and its files, or name another --cache-dir"
)
NOT_USED: Final = "are not used, they are compiled again"
CACHE_HINT: Final = "make room or the folder writable, or name another --cache-dir"
CFLAGS: Final = ("-Wall", "-Wno-unused-function", "-Wno-unused-variable")


class Reference(msgspec.Struct, frozen=True):
    """The instruction that loads a map's address."""

    insn: int
    map: str


class Bytecode(msgspec.Struct, frozen=True):
    """One program before it is loaded."""

    name: str
    insns: bytes
    references: tuple[Reference, ...]


class MapShape(msgspec.Struct, frozen=True):
    """What the C believes of a map; the loader compares it with layout.py."""

    name: str
    key_size: int
    value_size: int


class Artifact(msgspec.Struct, frozen=True):
    """A unit, compiled. `source` is the key of what went in, `compiler` names the tools."""

    format: int
    unit: str
    source: str
    compiler: str
    programs: tuple[Bytecode, ...]
    maps: tuple[MapShape, ...]


def source_key(unit: str) -> str:
    """A hash of everything that decides the bytecode, but for the compiler."""
    digest = hashlib.sha256(f"{FORMAT} {platform.machine()} {' '.join(CFLAGS)}\n".encode())
    digest.update(flatten.flatten(unit).encode())
    for name, text in flatten.headers().items():
        digest.update(f"\n{name}\n".encode() + text)
    return digest.hexdigest()[:16]


def file_name(unit: str, source: str, toolchain: str) -> str:
    """`unit-source-compiler.kbpf`."""
    return f"{unit}-{source}-{hashlib.sha256(toolchain.encode()).hexdigest()[:8]}.kbpf"


def store(artifact: Artifact, folder: Path) -> Path:
    """Writes the artifact beside its final name and renames it, so no reader sees half of it.
    CompileError for a folder that other users may change.
    """
    folder.mkdir(0o755, parents=True, exist_ok=True)
    if reason := distrust_reason(folder.stat()):
        raise CompileError(f"not kept: {reason}", str(folder), TRUST_HINT)
    body = msgspec.msgpack.encode(artifact)
    path = folder / file_name(artifact.unit, artifact.source, artifact.compiler)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".kbpf-")
    try:
        with os.fdopen(handle, "wb") as out:
            os.fchmod(out.fileno(), 0o644)
            out.write(hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)  # or a full disk would get fuller at every start
        raise
    return path


def try_store(artifact: Artifact, folder: Path) -> None:
    """Stores it; a folder where that cannot be done costs a compilation at each start, not the
    start. Of one that other users may change read() has told.
    """
    try:
        store(artifact, folder)
    except OSError as error:
        reason = error.strerror or str(error)
        _warn_once("cannot be kept, they are compiled at each start",
                   CompileError(reason, str(folder), CACHE_HINT))  # fmt: skip
    except CompileError:
        pass


def read(path: Path) -> Artifact | None:
    """The artifact in this file; None if there is none, or it is damaged, of another format, or
    not a trusted user's, in a folder of his: the log says so.
    """
    try:
        with _open_trusted_folder(path.parent) as folder:
            if (artifact := _decode(_read_trusted_file(folder, path.name))) is None:
                raise CompileError("the file is damaged", str(path))
            return artifact
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
            reason = os.strerror(error.errno or 0)
            _warn_once(NOT_USED, CompileError(reason, str(path), TRUST_HINT))
    except CompileError as error:
        _warn_once(NOT_USED, error)
    return None


_logged_warnings: set[str] = set()


def _warn_once(consequence: str, error: CompileError) -> None:
    """However many units there are, and however often they are looked for."""
    line = f"compiled programs {consequence}: {error}"
    if line not in _logged_warnings:
        _logged_warnings.add(line)
        log.warning("%s", line)


def find(unit: str, folder: Path, toolchain: str | None) -> Artifact | None:
    """The artifact for today's sources made by these tools. Without tools on this machine
    (`tools` None), one that was made ahead of time by any: `kbpf compile` in an image.
    """
    source = source_key(unit)
    if toolchain is not None:
        candidates = [folder / file_name(unit, source, toolchain)]
    else:
        candidates = sorted(folder.glob(f"{unit}-{source}-*.kbpf"))
    for path in candidates:
        artifact = read(path)
        if artifact is not None and artifact.source == source:
            return artifact
    return None


@contextlib.contextmanager
def _open_trusted_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder, which is a trusted user's: nobody can exchange it meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if reason := distrust_reason(os.fstat(fd)):
            raise CompileError(reason, str(path), TRUST_HINT)
        yield fd
    finally:
        os.close(fd)


def _read_trusted_file(folder: int, name: str) -> bytes:
    """O_NONBLOCK: opening a FIFO would wait for a writer."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CompileError("it is not a regular file", name, TRUST_HINT)
        if status.st_size > MAX_FILE_BYTES:
            raise CompileError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB", name, TRUST_HINT)
        if reason := distrust_reason(status):
            raise CompileError(reason, name, TRUST_HINT)
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_FILE_BYTES)
    finally:
        os.close(fd)


def _decode(raw: bytes) -> Artifact | None:
    if hashlib.sha256(raw[32:]).digest() != raw[:32]:
        return None
    try:
        artifact = msgspec.msgpack.decode(raw[32:], type=Artifact)
    except msgspec.DecodeError:
        return None
    return artifact if artifact.format == FORMAT else None
