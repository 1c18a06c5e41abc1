# SPDX-License-Identifier: Apache-2.0
"""`--write-config-to` with each kind of target: only a regular file is ever replaced."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.config import output

NOBODY = 65534
OLD, NEW = "old: text, and a longer one\n", "new: text\n"


class Target(NamedTuple):
    """`make` creates `folder/target`, `check` verifies the folder after the write.

    With `error`, the text of an errno, the write fails and the folder is unchanged.
    """

    name: str
    make: Callable[[Path], object]
    check: Callable[[Path], bool]
    error: str = ""


def file(path: Path, mode: int = 0o644) -> Path:
    path.write_text(OLD)
    path.chmod(mode)
    return path


def link(path: Path, to: str) -> None:
    path.symlink_to(to)


def reads(name: str, mode: int = 0o644) -> Callable[[Path], bool]:
    def check(folder: Path) -> bool:
        found = (folder / name).lstat()
        return (folder / name).read_text() == NEW and found.st_mode == stat.S_IFREG | mode

    return check


TARGETS = [
    Target("missing", lambda f: None, reads("target")),
    Target("a regular file", lambda f: file(f / "target"), reads("target")),
    Target("a regular file with another mode", lambda f: file(f / "target", 0o600), reads("target", 0o600)),
    Target(
        "a regular file of another owner",
        lambda f: os.chown(file(f / "target"), NOBODY, NOBODY),
        lambda f: reads("target")(f) and (f / "target").stat().st_uid == NOBODY,
    ),
    Target(
        "a symbolic link",
        lambda f: (file(f / "real"), link(f / "target", "real")),
        lambda f: reads("real")(f) and os.readlink(f / "target") == "real",
    ),
    Target(
        "a link to a link",
        lambda f: (file(f / "real"), link(f / "b", "real"), link(f / "target", "b")),
        lambda f: reads("real")(f) and os.readlink(f / "target") == "b" and os.readlink(f / "b") == "real",
    ),
    Target(
        "a link into another folder", lambda f: ((f / "sub").mkdir(), link(f / "target", "sub/real")), reads("sub/real")
    ),
    Target(
        "a dangling link",
        lambda f: link(f / "target", "real"),
        lambda f: reads("real")(f) and os.readlink(f / "target") == "real",
    ),
    Target(
        "a link into a missing folder",
        lambda f: link(f / "target", "no/where"),
        lambda f: os.readlink(f / "target") == "no/where",
        "No such file or directory",
    ),
    Target(
        "a link to itself",
        lambda f: link(f / "target", "target"),
        lambda f: (f / "target").is_symlink(),
        "Too many levels of symbolic links",
    ),
    Target(
        "a device",
        lambda f: os.mknod(f / "target", stat.S_IFCHR | 0o600, os.makedev(1, 3)),
        lambda f: stat.S_ISCHR((f / "target").lstat().st_mode),
    ),
    Target(
        "a link to a device",
        lambda f: link(f / "target", "/dev/null"),
        lambda f: os.readlink(f / "target") == "/dev/null" and stat.S_ISCHR(os.stat("/dev/null").st_mode),
    ),
    Target("a full device", lambda f: link(f / "target", "/dev/full"), lambda f: True, "No space left on device"),
    Target("a folder", lambda f: (f / "target").mkdir(), lambda f: (f / "target").is_dir(), "Is a directory"),
    Target("in a missing folder", lambda f: f.rmdir(), lambda f: not f.exists(), "No such file or directory"),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_write_to_a_target(tmp_path: Path, target: Target) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    target.make(folder)
    before = sorted(os.listdir(folder)) if folder.exists() else []
    if target.error:
        with pytest.raises(OSError, match=target.error):
            output.write(folder / "target", NEW)
        assert (sorted(os.listdir(folder)) if folder.exists() else []) == before
    else:
        output.write(folder / "target", NEW)
    assert target.check(folder)
    left = set(os.listdir(folder)) - set(before) if folder.exists() else set()
    assert left <= {"target", "real"}, "nothing else is left"


def test_fifo_is_written_to(tmp_path: Path) -> None:
    fifo, got = tmp_path / "target", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()))
    reader.start()
    output.write(fifo, NEW)
    reader.join()
    assert got == [NEW]
    assert stat.S_ISFIFO(fifo.lstat().st_mode)


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("on purpose")

    target = file(tmp_path / "target")
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="on purpose"):
        output.write(target, NEW)
    assert target.read_text() == OLD
    assert os.listdir(tmp_path) == ["target"]


def test_open_reader_sees_the_old_file(tmp_path: Path) -> None:
    target = file(tmp_path / "target")
    with target.open() as reader:
        output.write(target, NEW)
        assert (reader.read(), target.read_text()) == (OLD, NEW)


def test_mounted_file_is_written_in_place(tmp_path: Path) -> None:
    """A bind mount, such as a file of a volume in a container, cannot be replaced by rename()."""
    file(tmp_path / "real"), file(tmp_path / "target")
    code = (
        f"import sys; from pathlib import Path; from kbpf.config import output;output.write(Path(sys.argv[1]), {NEW!r})"
    )
    script = 'mount --make-rprivate / && mount --bind "$1/real" "$1/target" && "$2" -c "$3" "$4"'
    subprocess.run(
        ["unshare", "-m", "sh", "-ec", script, "sh", str(tmp_path), sys.executable, code, str(tmp_path / "target")],
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
def test_permissions_are_respected(name: str) -> None:
    folder_mode, file_mode, written = PERMISSIONS[name]
    folder = Path(f"/tmp/kbpf-test-output-{os.getpid()}")
    folder.mkdir()
    try:
        target = file(folder / "target", file_mode)
        folder.chmod(folder_mode)
        child = os.fork()
        if child == 0:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            try:
                output.write(target, NEW)
                os._exit(0)
            except PermissionError:
                os._exit(13)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert (code, target.read_text()) == ((0, NEW) if written else (13, OLD))
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
def test_write_to_standard_output(tmp_path: Path, link: str, name: str, line: str, text: str) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    file(tmp_path / "out")
    inode = (tmp_path / "out").stat().st_ino
    code = (
        f"import sys; from pathlib import Path; from kbpf.config import output;output.write(Path(sys.argv[1]), {NEW!r})"
    )
    subprocess.run(["sh", "-ec", line, "sh", sys.executable, "-P", "-c", code, link], check=True, cwd=tmp_path)
    assert (tmp_path / "out").read_text() == text
    assert (tmp_path / "out").stat().st_ino == inode
    assert Path("/dev/stdout").is_symlink()


def test_write_config_to_on_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kbpf", "run", "--source", str(tmp_path)]
    done = subprocess.run([*command, "--write-config-to", "/dev/stdout"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("apiVersion: kubeproxy.config.k8s.io/v1alpha1\n")
    done = subprocess.run([*command, "--write-config-to", str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"cannot write the configuration: Is a directory ({tmp_path})" in done.stderr
