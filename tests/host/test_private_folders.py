# SPDX-License-Identifier: Apache-2.0
"""Which folders are trusted, and the lock of a folder. The attacker is uid 65534."""

import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbpf.errors import KernelError
from kbpf.kernel.system.private_folders import lock_folder, require_private

NOBODY = 65534
HOLD = (
    "import fcntl, os, sys, time\n"
    "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
    "fcntl.flock(fd, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()"
)


def as_nobody(*command: str) -> list[str]:
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]


# ---- the lock ------------------------------------------------------------------------------------


def test_a_second_lock_of_a_folder_is_an_error(tmp_path):
    held = lock_folder(tmp_path, 0.0, "stop it first")
    with pytest.raises(KernelError) as error:
        lock_folder(tmp_path, 0.0, "stop it first")
    said = f"another agent is at work here ({tmp_path}): EAGAIN; stop it first"
    assert str(error.value) == said
    os.close(held)
    os.close(lock_folder(tmp_path, 0.0, ""))


def test_the_lock_waits_for_an_agent_that_exits(tmp_path):
    going = threading.Timer(0.2, os.close, (lock_folder(tmp_path, 0.0, ""),))
    going.start()
    os.close(lock_folder(tmp_path, 60.0, ""))
    going.join()


@pytest.fixture
def hold() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that hold a lock on the folder itself, as agents of earlier versions do,
    whatever the folder's mode is.
    """
    started = []

    def start(folder: Path, *before: str) -> subprocess.Popen[str]:
        python = [*before, "/usr/bin/python3", "-c", HOLD, str(folder)]
        process = subprocess.Popen(python, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_lock_excludes_agents_of_other_versions(tmp_path, hold):
    folder = tmp_path / "pins"
    folder.mkdir(mode=0o755)
    older = hold(folder)
    with pytest.raises(KernelError, match="another agent is at work here"):
        lock_folder(folder, 0.0, "")
    older.communicate("")
    held = lock_folder(folder, 60.0, "")
    older = subprocess.Popen(
        [sys.executable, "-c", HOLD.replace("LOCK_EX", "LOCK_EX | fcntl.LOCK_NB"), str(folder)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "BlockingIOError" in older.communicate()[1], "the newer agent keeps the older one out"
    os.close(held)


@pytest.fixture
def shared(tmp_path_factory) -> Iterator[Path]:
    """A folder that all users can access, like /sys/fs/bpf and /run: owned by root and sticky."""
    folder = Path(f"/tmp/kbpf-test-{os.getpid()}-{tmp_path_factory.getbasetemp().name}")
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_other_users_cannot_take_the_lock(shared: Path):
    os.close(lock_folder(make(shared / "pins", 0o755), 0.0, ""))
    assert stat.S_IMODE((shared / "pins").stat().st_mode) == 0o700
    done = subprocess.run(
        as_nobody("/usr/bin/python3", "-c", HOLD, str(shared / "pins")),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        cwd="/",
    )
    assert "PermissionError" in done.stderr


def test_another_users_process_that_holds_the_lock_is_named(shared: Path, hold):
    """Earlier versions left the folder accessible to all users."""
    folder = make(shared / "pins", 0o755)
    attacker = hold(folder, *as_nobody())
    with pytest.raises(KernelError) as error:
        lock_folder(folder, 0.0, "stop it first")
    named = rf"process {attacker.pid} \(python3[.\d]*\) of uid 65534 holds the lock \({folder}\)"
    assert re.fullmatch(f"{named}: EAGAIN; it is not an agent: stop this process", str(error.value))
    attacker.kill()
    os.close(lock_folder(folder, 60.0, ""))


# ---- trust ---------------------------------------------------------------------------------------


def make(folder: Path, mode: int = 0o755, owner: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    os.chown(folder, owner, owner)
    return folder


LINK = 'rmdir pins; mkdir b; ln -s "$PWD/b" pins'
CASES = {
    "private": (":", ""),
    "0755, of an earlier version": ("chmod 755 pins", ""),
    "in a sticky folder that all may write to": ("chmod 1777 .", ""),
    "another user's": ("chown 65534 pins", "pins: uid 65534 owns it"),
    "the group may write": ("chmod 770 pins", "pins: others may write to it (mode 0770)"),
    "all may write": ("chmod 777 pins", "pins: others may write to it (mode 0777)"),
    "all may write, sticky": ("chmod 1777 pins", "pins: others may write to it (mode 1777)"),
    "in another user's folder": ("chown 65534 .", "a: uid 65534 owns it"),
    "in another user's sticky folder": ("chown 65534 .; chmod 1777 .", "a: uid 65534 owns it"),
    "in a folder that all may write to, not sticky": ("chmod 777 .", "a: others may write to it (mode 0777)"),
    "root's link to another user's folder": (f"{LINK}; chown 65534 b", "b: uid 65534 owns it"),
    "another user's link to root's folder": (f"{LINK}; chown -h 65534 pins", "pins: uid 65534 owns it"),
    "root's link to root's folder": (LINK, ""),
}
"""Commands that change the folder `pins` in `a`, and the complaint; without one it is trusted."""


@pytest.mark.parametrize("name", CASES)
def test_which_folders_are_trusted(shared: Path, name: str):
    commands, complaint = CASES[name]
    folder = make(shared / "a")
    pins = make(folder / "pins", 0o700)
    subprocess.run(["sh", "-ec", commands], cwd=folder, check=True)
    if not complaint:
        require_private(pins)
        os.close(lock_folder(pins, 0.0, ""))
        assert stat.S_IMODE(pins.stat().st_mode) == 0o700
        return
    before = pins.stat()
    for refuse in (require_private, lambda folder: lock_folder(folder, 0.0, "")):
        with pytest.raises(KernelError) as error:
            refuse(pins)
        name, _, reason = complaint.partition(": ")
        where = next(path for path in (*pins.parents, pins, pins.resolve()) if path.name == name)
        assert str(error.value) == (
            f"cannot trust the folder: {reason} ({where}); remove it and start again, or choose another folder"
        )
    assert pins.stat() == before, "the folder is not changed"


def test_a_folder_of_the_current_user_is_trusted(shared: Path):
    """The user that kbpf runs as is trusted, too."""
    make(shared / "pins", 0o700, NOBODY)
    child = os.fork()
    if child == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            os.close(lock_folder(shared / "pins", 0.0, ""))
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
