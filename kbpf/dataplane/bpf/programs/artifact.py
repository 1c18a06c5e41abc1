# SPDX-License-Identifier: Apache-2.0
"""Stores compiled programs in files: bytecode, and where it references each map.

The agent never imports BCC; it gets artifacts from here. The file name contains a hash of
everything the bytecode depends on, so an unchanged restart compiles nothing, and changed sources
never use old bytecode. A corrupt file is treated as missing. So is one that another user can write:
root loads the bytecode, and the hash is not a signature.

What is hashed, and compiled, is one text of a unit and its headers (flatten()), since BCC rewrites
map accesses only in the main file. `#line` directives make compiler messages refer to the original
file and line.
"""

import contextlib
import errno
import hashlib
import logging
import os
import platform
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kbpf.errors import CompileError
from kbpf.kernel.system.private_folders import distrust_reason

log = logging.getLogger("kbpf.dataplane")

FORMAT: Final = 1
MAX_FILE_BYTES: Final = 16 * 1024 * 1024
"""A larger file is not read; current artifacts are below one MiB."""
TRUST_HINT: Final = "chown root and chmod go-w the folder and its files, or choose another --cache-dir"
NOT_USED: Final = "are ignored and compiled again"
CACHE_HINT: Final = "free space or make the folder writable, or choose another --cache-dir"
CFLAGS: Final = ("-Wall", "-Wno-unused-function", "-Wno-unused-variable")


class Reference(msgspec.Struct, frozen=True):
    """The instruction that loads the address of a map."""

    insn: int
    map: str


class Bytecode(msgspec.Struct, frozen=True):
    """One program before it is loaded."""

    name: str
    insns: bytes
    references: tuple[Reference, ...]


class MapShape(msgspec.Struct, frozen=True):
    """The sizes of a map according to the C; the loader compares them with layout.py."""

    name: str
    key_size: int
    value_size: int


class Artifact(msgspec.Struct, frozen=True):
    """A compiled unit. `source`: source_key() of its inputs; `compiler`: the tools."""

    format: int
    unit: str
    source: str
    compiler: str
    programs: tuple[Bytecode, ...]
    maps: tuple[MapShape, ...]


def source_key(unit: str) -> str:
    """A hash of everything that determines the bytecode, except the compiler."""
    digest = hashlib.sha256(f"{FORMAT} {platform.machine()} {' '.join(CFLAGS)}\n".encode())
    digest.update(flatten(unit).encode())
    for name, text in headers().items():
        digest.update(f"\n{name}\n".encode() + text)
    return digest.hexdigest()[:16]


def file_name(unit: str, source: str, toolchain: str) -> str:
    """`unit-source-compiler.kbpf`."""
    return f"{unit}-{source}-{hashlib.sha256(toolchain.encode()).hexdigest()[:8]}.kbpf"


def store(artifact: Artifact, folder: Path) -> Path:
    """Writes the artifact to a temporary file and renames it, so that no reader sees a partial
    file. Raises CompileError if other users may change the folder.
    """
    folder.mkdir(0o755, parents=True, exist_ok=True)
    if reason := distrust_reason(folder.stat()):
        raise CompileError(f"not stored: {reason}", str(folder), TRUST_HINT)
    body = msgspec.msgpack.encode(artifact)
    path = folder / file_name(artifact.unit, artifact.source, artifact.compiler)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".kbpf-")
    try:
        with os.fdopen(handle, "wb") as out:
            os.fchmod(out.fileno(), 0o644)
            out.write(hashlib.sha256(body).digest() + body)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)  # otherwise each start would fill the disk further
        raise
    return path


def try_store(artifact: Artifact, folder: Path) -> None:
    """Stores the artifact if possible. A failure costs a compilation at each start, but does not
    prevent the start. An untrusted folder was already logged by read().
    """
    try:
        store(artifact, folder)
    except OSError as error:
        reason = error.strerror or str(error)
        _warn_once("cannot be stored and are compiled at each start", CompileError(reason, str(folder), CACHE_HINT))
    except CompileError:
        pass


def read(path: Path) -> Artifact | None:
    """Reads an artifact. None if the file is missing, corrupt, of another format, or if it or its
    folder can be written by untrusted users; the reason is logged.
    """
    try:
        with _open_trusted_folder(path.parent) as folder:
            if (artifact := _decode(_read_trusted_file(folder, path.name))) is None:
                raise CompileError("the file is corrupt", str(path))
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
    """Logs each line once, for any number of units and lookups."""
    line = f"compiled programs {consequence}: {error}"
    if line not in _logged_warnings:
        _logged_warnings.add(line)
        log.warning("%s", line)


def find(unit: str, folder: Path, toolchain: str | None) -> Artifact | None:
    """Finds the artifact for the current sources, compiled by these tools. If the machine has no
    tools (`toolchain` None), finds one compiled elsewhere: `kbpf compile` in an image.
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
    """A descriptor of the folder, so that it cannot be replaced between check and use."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if reason := distrust_reason(os.fstat(fd)):
            raise CompileError(reason, str(path), TRUST_HINT)
        yield fd
    finally:
        os.close(fd)


def _read_trusted_file(folder: int, name: str) -> bytes:
    # Without O_NONBLOCK, opening a FIFO would block.
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


# ---- the text that is compiled -------------------------------------------------------------------

SOURCES: Final = Path(__file__).parents[3] / "bpf"
"""The C sources of the data plane, and the header tree (`include/`) for BCC."""

_INCLUDE = re.compile(r'#include "([^"]+)"')


def flatten(unit: str, folder: Path = SOURCES) -> str:
    """The text of `unit`.c with each of our headers included once."""
    return "\n".join(_lines(f"{unit}.c", folder, set())) + "\n"


def _lines(name: str, folder: Path, included: set[str]) -> list[str]:
    try:
        text = (folder / name).read_text()
    except OSError as error:
        raise CompileError(
            "cannot read a BPF source", str(folder / name), f"reinstall kbpf ({error.strerror})"
        ) from error
    lines = [f'#line 1 "kbpf/bpf/{name}"']
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line == "#pragma once" else line)
            continue
        if include[1] not in included:
            included.add(include[1])
            lines += _lines(include[1], folder, included)
        lines.append(f'#line {number + 1} "kbpf/bpf/{name}"')
    return lines


def headers(folder: Path = SOURCES) -> dict[str, bytes]:
    """The header tree by relative path: one of the inputs of an artifact."""
    root = folder / "include"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.h"))}
