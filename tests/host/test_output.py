# SPDX-License-Identifier: Apache-2.0
"""`--write-config-to` with each kind of target: only a regular file is ever replaced."""

import contextlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.config import write
from tests.support.lab.lab import PATIENCE
from tests.support.runtime.command import kbpf
from tests.support.table import table

OLD, NEW = "old: text, and a longer one\n", "new: text\n"
WRITE = f"import sys, pathlib, kbpf.config.write as write; write.write_text(pathlib.Path(sys.argv[1]), {NEW!r})"


def file(path: Path, mode: int = 0o644) -> Path:
    path.write_text(OLD)
    path.chmod(mode)
    return path


class Target(NamedTuple):
    """`given`: commands that make the target in an empty folder; `then`: what is in the folder after the
    write. With `error`, the text of an errno, the write fails.
    """

    name: str
    given: str
    then: str
    error: str = ""


TARGETS = table(
    Target,
    """
missing | : | target -rw-r--r-- 0 new: text
a regular file | cp $OLD target | target -rw-r--r-- 0 new: text
a regular file with another mode | install -m 600 $OLD target | target -rw------- 0 new: text
a regular file of another owner | install -m 644 -o 65534 $OLD target | target -rw-r--r-- 65534 new: text
a symbolic link | cp $OLD real; ln -s real target | real -rw-r--r-- 0 new: text, target -> real
a link to a link | cp $OLD real; ln -s real b; ln -s b target | b -> real, real -rw-r--r-- 0 new: text, target -> b
a link into another folder | mkdir sub; ln -s sub/real target | \
    sub drwxr-xr-x, sub/real -rw-r--r-- 0 new: text, target -> sub/real
a dangling link | ln -s real target | real -rw-r--r-- 0 new: text, target -> real
a link into a missing folder | ln -s no/where target | target -> no/where | No such file or directory
a link to itself | ln -s target target | target -> target | Too many levels of symbolic links
a device | mknod -m 600 target c 1 3 | target crw-------
a link to a device | mknod -m 600 null c 1 3; ln -s null target | null crw-------, target -> null
a full device | mknod -m 600 target c 1 7 | target crw------- | No space left on device
a folder | mkdir target | target drwxr-xr-x | Is a directory
in a missing folder | rmdir "$PWD" |  | No such file or directory
""",
)


def listing(folder: Path) -> Iterator[str]:
    """Links with their target, the owner and text of regular files, and the type of others."""
    for path in sorted(folder.rglob("*")):
        found, name = path.lstat(), path.relative_to(folder)
        if path.is_symlink():
            yield f"{name} -> {os.readlink(path)}"
        elif path.is_file():
            yield f"{name} {stat.filemode(found.st_mode)} {found.st_uid} {path.read_text().strip()}"
        else:
            yield f"{name} {stat.filemode(found.st_mode)}"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_write_to_a_target(tmp_path, target: Target):
    folder, old = tmp_path / "folder", file(tmp_path / "old")
    folder.mkdir()
    subprocess.run(["sh", "-ec", target.given], cwd=folder, env={**os.environ, "OLD": old}, check=True)
    with pytest.raises(OSError, match=target.error) if target.error else contextlib.nullcontext():
        write.write_text(folder / "target", NEW)
    assert ", ".join(listing(folder)) == target.then


def test_fifo_is_written_to(tmp_path):
    fifo, got = tmp_path / "target", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()), daemon=True)
    reader.start()
    write.write_text(fifo, NEW)
    reader.join(PATIENCE)
    assert got == [NEW]
    assert stat.S_ISFIFO(fifo.lstat().st_mode)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("on purpose")

    target = file(tmp_path / "target")
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="on purpose"):
        write.write_text(target, NEW)
    assert target.read_text() == OLD
    assert os.listdir(tmp_path) == ["target"]


def test_open_reader_sees_the_old_file(tmp_path):
    target = file(tmp_path / "target")
    with target.open() as reader:
        write.write_text(target, NEW)
        assert (reader.read(), target.read_text()) == (OLD, NEW)


def test_mounted_file_is_written_in_place(tmp_path):
    """A bind mount, such as a file of a volume in a container, cannot be replaced by rename()."""
    file(tmp_path / "real"), file(tmp_path / "target")
    script = 'mount --make-rprivate / && mount --bind "$1/real" "$1/target" && "$2" -c "$3" "$4"'
    subprocess.run(
        ["unshare", "-m", "sh", "-ec", script, "sh", str(tmp_path), sys.executable, WRITE, str(tmp_path / "target")],
        check=True,
    )
    assert (tmp_path / "real").read_text() == NEW
    assert (tmp_path / "target").read_text() == OLD


PERMISSIONS = {
    "a read-only file in a writable folder": (0o777, 0o444, False),
    "a writable file in a read-only folder": (0o755, 0o666, True),
    "a read-only file in a read-only folder": (0o755, 0o644, False),
}
"""The modes of a folder and of a file in it, and whether an unprivileged user may write it."""


@pytest.mark.parametrize("name", PERMISSIONS)
def test_permissions_are_respected(name: str):
    folder_mode, file_mode, written = PERMISSIONS[name]
    folder = Path(f"/tmp/kbpf-test-output-{os.getpid()}")
    folder.mkdir()
    try:
        target = file(folder / "target", file_mode)
        folder.chmod(folder_mode)
        as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", WRITE]
        done = subprocess.run([*as_nobody, str(target)], capture_output=True, text=True, check=False)
        assert ("PermissionError" in done.stderr, target.read_text()) == (not written, NEW if written else OLD)
        assert os.listdir(folder) == ["target"]
    finally:
        subprocess.run(["rm", "-r", str(folder)], check=True)


REDIRECTED = [
    ("a pipe", '"$@" | cat >out', NEW),
    ("a file", '"$@" >out', NEW),
    ("appending to a file", '"$@" >>out', OLD + NEW),
]


@pytest.mark.parametrize("link", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1", "link"])
@pytest.mark.parametrize(("name", "line", "text"), REDIRECTED, ids=[r[0] for r in REDIRECTED])
def test_write_to_standard_output(tmp_path, link: str, name: str, line: str, text: str):
    (tmp_path / "link").symlink_to("/dev/stdout")
    file(tmp_path / "out")
    inode = (tmp_path / "out").stat().st_ino
    subprocess.run(["sh", "-ec", line, "sh", sys.executable, "-P", "-c", WRITE, link], check=True, cwd=tmp_path)
    assert (tmp_path / "out").read_text() == text
    assert (tmp_path / "out").stat().st_ino == inode
    assert Path("/dev/stdout").is_symlink()


def test_write_config_to_on_the_command_line(tmp_path):
    words = ("run", "--source", str(tmp_path), "--write-config-to")
    done = kbpf(*words, "/dev/stdout")
    assert (done.code, done.out.splitlines()[0]) == (0, "apiVersion: kubeproxy.config.k8s.io/v1alpha1")
    done = kbpf(*words, str(tmp_path))
    assert done.code == 1
    assert f"cannot write the configuration: Is a directory ({tmp_path})" in done.err
