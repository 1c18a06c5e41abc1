"""The compiled programs as a file: bytecode, and where each map is referenced.

The agent never imports BCC. It asks here for the artifact of a unit; the file's name says all
that it depends on, so an unchanged restart compiles nothing and a changed source never meets old
bytecode. A file that is damaged is as good as absent.
"""

import hashlib
import os
import platform
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from kbpf.dataplane.bpf import flatten

FORMAT: Final = 1
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


def file_name(unit: str, source: str, tools: str) -> str:
    """`unit-source-compiler.kbpf`."""
    return f"{unit}-{source}-{hashlib.sha256(tools.encode()).hexdigest()[:8]}.kbpf"


def store(artifact: Artifact, folder: Path) -> Path:
    """Writes the artifact beside its final name and renames it, so no reader sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    body = msgspec.msgpack.encode(artifact)
    path = folder / file_name(artifact.unit, artifact.source, artifact.compiler)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".kbpf-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(body).digest() + body)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)  # or a full disk would get fuller at every start
        raise
    return path


def read(path: Path) -> Artifact | None:
    """The artifact in this file; None if there is none, or it is damaged or of another format."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(raw[32:]).digest() != raw[:32]:
        return None
    try:
        artifact = msgspec.msgpack.decode(raw[32:], type=Artifact)
    except msgspec.DecodeError:
        return None
    return artifact if artifact.format == FORMAT else None


def find(unit: str, folder: Path, tools: str | None) -> Artifact | None:
    """The artifact for today's sources made by these tools. Without tools on this machine
    (`tools` None), one that was made ahead of time by any: `kbpf compile` in an image.
    """
    source = source_key(unit)
    if tools is not None:
        candidates = [folder / file_name(unit, source, tools)]
    else:
        candidates = sorted(folder.glob(f"{unit}-{source}-*.kbpf"))
    for path in candidates:
        artifact = read(path)
        if artifact is not None and artifact.source == source:
            return artifact
    return None
