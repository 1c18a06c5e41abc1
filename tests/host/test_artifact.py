# SPDX-License-Identifier: Apache-2.0
"""Artifacts: found by a key of all their inputs, and ignored if they are damaged."""

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from kbpf.dataplane.bpf.hooks import UNITS
from kbpf.dataplane.bpf.programs import artifact, compile
from kbpf.dataplane.bpf.programs.artifact import Artifact, Bytecode, MapShape, Reference
from kbpf.errors import CompileError
from tests.support.table import pairs, table

TOOLS = "bcc 1 llvm 14"
C = {
    "one.c": '#include "a.h"\n#include "b.h"\nint one;\n',
    "a.h": "#pragma once\nint a;\n",
    "b.h": '#include "a.h"\nint b;\n',
}


def made(unit: str = "sock", source: str = "", tools: str = TOOLS) -> Artifact:
    return Artifact(
        artifact.FORMAT,
        unit,
        source or artifact.source_key(unit),
        tools,
        (Bytecode("connect4", b"\xb7" + bytes(15), (Reference(1, "services"),)),),
        (MapShape("services", 20, 28),),
    )


@pytest.fixture
def sources(tmp_path) -> Path:
    folder = tmp_path / "bpf"
    (folder / "include" / "linux").mkdir(parents=True)
    (folder / "include" / "linux" / "types.h").write_text("typedef int x;\n")
    for name, text in C.items():
        (folder / name).write_text(text)
    return folder


# ---- the flattened source ----------------------------------------------------------------------


def test_each_header_is_included_once_with_line_directives(sources: Path):
    assert artifact.flatten("one", sources).splitlines() == [
        '#line 1 "kbpf/bpf/one.c"',
        '#line 1 "kbpf/bpf/a.h"',
        "",
        "int a;",
        '#line 2 "kbpf/bpf/one.c"',
        '#line 1 "kbpf/bpf/b.h"',
        '#line 2 "kbpf/bpf/b.h"',
        "int b;",
        '#line 3 "kbpf/bpf/one.c"',
        "int one;",
    ]


def test_a_missing_header_is_an_error_that_names_it(sources: Path):
    (sources / "b.h").unlink()
    with pytest.raises(CompileError, match=r"cannot read a BPF source \(.*b\.h\)") as error:
        artifact.flatten("one", sources)
    assert "\n" not in str(error.value)


# ---- the key -----------------------------------------------------------------------------------


@pytest.fixture
def keyed(sources: Path, monkeypatch) -> Callable[[], str]:
    """The key of the unit "one" in these sources."""
    real, headers = artifact.flatten, artifact.headers
    monkeypatch.setattr(artifact, "flatten", lambda unit: real(unit, sources))
    monkeypatch.setattr(artifact, "headers", lambda: headers(sources))
    return lambda: artifact.source_key("one")


CHANGES = pairs("""\
the unit → echo >>one.c
a header of a header → echo "int aa;" >a.h
a kernel header → echo >include/linux/types.h
a new kernel header → : >include/linux/new.h
an unrelated file → echo "another unit" >two.c
""")
"""What changes → a command in the folder of the sources."""
SETTINGS = {
    "the flags": (artifact, "CFLAGS", ("-O3",)),
    "the format": (artifact, "FORMAT", 99),
    "the machine": (artifact.platform, "machine", lambda: "m68k"),
}


@pytest.mark.parametrize(("what", "command"), CHANGES)
def test_each_source_and_no_other_file_changes_it(keyed: Callable[[], str], sources: Path, what: str, command: str):
    before = keyed()
    subprocess.run(["sh", "-ec", command], cwd=sources, check=True)
    assert (keyed() == before) is (what == "an unrelated file")


@pytest.mark.parametrize("what", SETTINGS)
def test_each_setting_of_the_compiler_changes_the_key(keyed: Callable[[], str], monkeypatch, what: str):
    before = keyed()
    monkeypatch.setattr(*SETTINGS[what])
    assert keyed() != before


def test_the_units_of_kbpf_have_distinct_keys():
    assert len({artifact.source_key(unit) for unit in UNITS}) == len(UNITS)


# ---- the file ----------------------------------------------------------------------------------


def test_a_stored_artifact_is_found(tmp_path):
    path = artifact.store(made(), tmp_path / "deep" / "cache")
    assert artifact.read(path) == made()
    assert artifact.find("sock", path.parent, TOOLS) == made()
    assert os.listdir(path.parent) == [path.name], "no temporary file is left"
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_artifact_is_replaced_atomically(tmp_path):
    """A reader sees the old file or the new one."""
    path = artifact.store(made(), tmp_path)
    with path.open("rb") as reader:
        assert artifact.store(made(), tmp_path) == path
        assert reader.read() == path.read_bytes()
        assert os.fstat(reader.fileno()).st_ino != path.stat().st_ino


class Stored(NamedTuple):
    """An artifact made with tools from sources (default: these); whether it is found with the compiler TOOLS, and
    without any.
    """

    name: str
    tools: str
    source: str
    is_found: bool
    without_compiler: bool


STORED = table(
    Stored,
    """
of this compiler    | bcc 1 llvm 14 |                  | yes | yes
of another compiler | bcc 1 llvm 19 |                  | no  | yes
of other sources    | bcc 1 llvm 14 | 0123456789abcdef | no  | no
""",
)


@pytest.mark.parametrize("row", STORED, ids=lambda row: row.name)
def test_which_artifacts_are_found(tmp_path, row: Stored):
    for tools, is_found in ((TOOLS, row.is_found), (None, row.without_compiler)):
        assert artifact.find("sock", tmp_path, tools) is None
        stored = made(source=row.source, tools=row.tools)
        path = artifact.store(stored, tmp_path)
        assert artifact.find("sock", tmp_path, tools) == (stored if is_found else None)
        path.unlink()


def test_a_file_with_a_wrong_name_is_ignored(tmp_path):
    """The file itself records what it was made from."""
    stale = artifact.store(made(source="0123456789abcdef"), tmp_path)
    stale.rename(tmp_path / artifact.file_name("sock", artifact.source_key("sock"), TOOLS))
    assert artifact.find("sock", tmp_path, TOOLS) is None
    assert artifact.find("sock", tmp_path, None) is None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": lambda raw: raw[:-1],
    "cut in the checksum": lambda raw: raw[:20],
    "longer": lambda raw: raw + b"\0",
    "a bit in the bytecode": lambda raw: raw[:60] + bytes([raw[60] ^ 1]) + raw[61:],
    "a bit in the checksum": lambda raw: bytes([raw[0] ^ 1]) + raw[1:],
    "text": lambda _: b"<html>" * 100,
    "another format": lambda _: signed(msgspec.structs.replace(made(), format=99)),
    "not an artifact": lambda _: signed({"format": artifact.FORMAT}),
}


def signed(thing: object) -> bytes:
    body = msgspec.msgpack.encode(thing)
    return hashlib.sha256(body).digest() + body


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_logged(tmp_path, caplog, damage: str):
    path = artifact.store(made(), tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert artifact.read(path) is None
    assert artifact.find("sock", tmp_path, TOOLS) is None
    assert artifact.find("sock", tmp_path, None) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"compiled programs are ignored and compiled again: the file is corrupt ({path})"
    ]


FULL = 'mount -t tmpfs -o size=4k,mode=755 none "$PWD"; head -c 4096 /dev/zero >"$PWD/x"'
UNKEPT = {
    "a full disk": (FULL, "", "No space left on device"),
    "a read-only disk": ('mount -t tmpfs -o ro,mode=755 none "$PWD"', "", "Read-only file system"),
    "a file": ("touch file", "file", "File exists"),
    "below a file": ("touch file", "file/cache", "Not a directory"),
}
"""Commands in an empty folder, the cache in it, and what is logged."""


@pytest.mark.parametrize("case", UNKEPT)
def test_a_cache_that_cannot_be_written_is_logged_once(tmp_path, caplog, case: str):
    commands, name, reason = UNKEPT[case]
    folder = tmp_path / name
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path, check=True)
    artifact._logged_warnings.clear()
    try:
        for _ in range(2):
            artifact.try_store(made(), folder)
            assert artifact.find("sock", folder, TOOLS) is None
    finally:
        subprocess.run(["umount", tmp_path], check=False, stderr=subprocess.DEVNULL)
    assert [record.getMessage() for record in caplog.records] == [
        f"compiled programs cannot be stored and are compiled at each start: {reason} ({folder}); "
        "free space or make the folder writable, or choose another --cache-dir"
    ]


def test_a_failed_store_leaves_no_file(tmp_path, monkeypatch):
    """Otherwise each start would leave another file on a full disk."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        artifact.store(made(), tmp_path)
    assert os.listdir(tmp_path) == []


# ---- other users -------------------------------------------------------------------------------

NO_FILE = "it is not a regular file"
PLANTED = {
    "the folder is another's": ("chown 65534 .", "uid 65534 owns it"),
    "the group may write to the folder": ("chmod 775 .", "mode 0775"),
    "all may write to the folder": ("chmod 1777 .", "mode 1777"),
    "the file is another's": ("chown 65534 $FILE", "uid 65534 owns it"),
    "the group may write to the file": ("chmod 664 $FILE", "mode 0664"),
    "all may write to the file": ("chmod 646 $FILE", "mode 0646"),
    "a symbolic link": ("mv $FILE x; ln -s x $FILE", "Too many levels of symbolic links"),
    "a FIFO": ("rm $FILE; mkfifo $FILE", NO_FILE),
    "a folder": ("rm $FILE; mkdir $FILE", NO_FILE),
    "a device": ("rm $FILE; mknod -m 600 $FILE c 1 5", NO_FILE),
    "too large": (f"truncate -s {artifact.MAX_FILE_BYTES + 1} $FILE", "it is larger than 16 MiB"),
}
"""How another user tampers with the cache, and what is logged."""


def tamper(how: str, file: Path) -> None:
    subprocess.run(["sh", "-ec", PLANTED[how][0]], cwd=file.parent, env={**os.environ, "FILE": file.name}, check=True)


@pytest.mark.parametrize("how", PLANTED)
def test_a_cache_writable_by_other_users_is_not_read(tmp_path, caplog, how: str):
    path = artifact.store(made(), tmp_path / "cache")
    artifact._logged_warnings.clear()
    tamper(how, path)
    for _ in range(2):
        assert artifact.find("sock", path.parent, TOOLS) is None
        assert artifact.find("sock", path.parent, None) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert PLANTED[how][1] in record.getMessage()
    assert record.getMessage().endswith(artifact.TRUST_HINT)


@pytest.mark.parametrize("how", list(PLANTED)[:3])
def test_nothing_is_stored_in_a_folder_writable_by_others(tmp_path, how: str):
    """Another user could replace a file there by a link at any moment."""
    path = artifact.store(made(), tmp_path / "cache")
    tamper(how, path)
    path.unlink()
    with pytest.raises(CompileError, match="not stored: "):
        artifact.store(made(), path.parent)
    assert os.listdir(path.parent) == []


def test_a_stored_artifact_is_readable_with_any_umask(tmp_path):
    before = os.umask(0)
    try:
        for number in (0o077, 0):
            os.umask(number)
            assert artifact.read(artifact.store(made(), tmp_path / "cache")) == made()
    finally:
        os.umask(before)


def test_error_without_bcc_and_cache_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CompileError) as error:
        compile.find_or_compile("sock", tmp_path)
    assert str(error.value) == (
        "BCC is not installed and the cache has no compiled programs "
        f"(unit sock, cache {tmp_path}); "
        "install python3-bpfcc, or run `kbpf compile --cache-dir` on a machine with BCC"
    )


def test_compiler_that_hangs_is_killed(monkeypatch, tmp_path):
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "__init__.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compile, "COMPILE_TIMEOUT_S", 0.01)
    with pytest.raises(CompileError, match="did not finish"):
        compile.find_or_compile("sock", tmp_path)
