# SPDX-License-Identifier: Apache-2.0
"""Boots a kernel on this machine's own files, and runs one command inside.

virtme-ng shares the whole file system with the guest over 9p, read-only or with temporary overlays,
so it has the working tree and its .venv. What Python reads from is shared a second time, for the
guest to mount it with a cache (guest.sh): without it, importing pytest takes three minutes. The
guest can write one folder: its results. A guest has a time limit, and its console is always kept.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernels.debian import Kernel

ROOT = Path(__file__).parents[2]
VNG = "vng"
SILENT_SECONDS = 600.0
"""A guest that has not printed its version by then does not boot: unpacking a kernel takes seconds,
or minutes on a busy machine.
"""
KVM_SILENT_SECONDS, KVM_SECONDS = 15.0, 60.0
"""For the first boot with KVM, where it takes one second: some hosts offer a KVM that runs no stock
kernel.
"""
ALIVE = b"Linux version"
COMMAND = "command"
"""The file with the guest's command."""
DONE = "exit"
"""The guest's last file: the command's exit code. Without it the guest ended in another way."""
GUEST = Path(__file__).with_name("guest.sh")
SHARES = tuple(dict.fromkeys((ROOT, Path(sys.prefix).resolve(), Path(os.__file__).parent, Path("/usr/lib/python3"))))
MEMORY, CPUS = "2G", "2"
EMULATED = ("--disable-kvm", "--qemu-opts=-accel tcg,thread=single", "--append", "tsc=reliable no_timer_check")
"""Options that keep an emulated guest alive on a busy machine; without them one boot in fifty or so
died or hung. Its CPUs take turns, because when they run at the same time, one of them sometimes
executes the breakpoint of a code patch that the other has just finished (`Oops: int3`); taking
turns is no slower. The watchdog does not judge its clock, because its comparisons hang
(watchdog_check_skew()), and a late timer tick is no reason to give up (`IO-APIC + timer doesn't
work!`).
"""

_running: set["subprocess.Popen[bytes]"] = set()
_stopping = threading.Event()
"""Set by end_all(): a guest that another thread is starting at that moment ends, too."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a boot ended. `code` is the command's exit code; None if the guest did not get that far,
    and then `why` gives the reason. `log` is the console.
    """

    code: int | None
    why: str
    seconds: float
    log: Path

    def say(self) -> str:
        """How it ended, in one line."""
        how = self.why or ("done" if self.code == 0 else f"its command ended with {self.code}")
        return f"{how} after {self.seconds:.0f} s, see {self.log}"

    def tail(self, lines: int = 40) -> str:
        """The last lines of the console."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def boot(
    kernel: Kernel,
    command: list[str],
    results: Path,
    seconds: float,
    kvm: bool,
    parameters: str = "",
    silent: float = 0.0,
) -> Ending:
    """Boots, runs the command in the working tree as root, and waits for the power-off. The command
    finds a folder for its results in $RESULTS; afterwards they are in `results`. `parameters`:
    further words of the kernel's command line. `silent`: instead of SILENT_SECONDS.
    """
    results.mkdir(parents=True, exist_ok=True)
    log = results / "console.log"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kbpf-kernels-") as name, log.open("wb") as out:
        exchange = Path(name)
        shutil.copy(GUEST, exchange)
        (exchange / COMMAND).write_text(shlex.join(command))
        child = subprocess.Popen(
            _vng(kernel, exchange, kvm, parameters),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            start_new_session=True,
            cwd="/",  # the guest's, too: a share that is in use cannot be mounted again
        )
        _running.add(child)
        if _stopping.is_set():
            _end(child)
        try:
            why = _watch(child, log, silent or SILENT_SECONDS, seconds)
        finally:
            _running.discard(child)
            _end(child)
        for own in (GUEST.name, COMMAND):
            (exchange / own).unlink()
        shutil.copytree(exchange, results, dirs_exist_ok=True)
    took = time.monotonic() - started
    code = (results / DONE).read_text().strip() if (results / DONE).is_file() else ""
    if code.isdigit():
        return Ending(int(code), "", took, log)
    return Ending(None, why or "the guest ended early", took, log)


def _vng(kernel: Kernel, exchange: Path, kvm: bool, parameters: str) -> list[str]:
    """The command is passed on the kernel's command line, which has room for 2048 bytes."""
    inside = shlex.join(["sh", str(exchange / GUEST.name), str(exchange), str(ROOT)])
    return [
        VNG,
        "--verbose",
        "--run",
        str(kernel.image),
        "--user",
        "root",
        "--memory",
        MEMORY,
        "--cpus",
        CPUS,
        *([] if kvm else EMULATED),
        "--force-9p",
        *(["--append", parameters] if parameters else []),
        f"--rwdir={exchange}",
        *(f"--rodir={share}" for share in _outermost(SHARES)),
        "--exec",
        inside,
    ]


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """The folders that are inside no other of them."""
    return [one for one in folders if not any(other in one.parents for other in folders)]


def _watch(child: "subprocess.Popen[bytes]", log: Path, silent: float, seconds: float) -> str:
    """Waits for the end; returns "", or the reason why the guest has to be killed."""
    started = time.monotonic()
    heard = False
    while child.poll() is None:
        passed = time.monotonic() - started
        heard = heard or ALIVE in log.read_bytes()
        if not heard and passed > silent:
            return f"the kernel said nothing in {silent:.0f} s"
        if passed > seconds:
            return f"the guest hung: not done in {seconds:.0f} s"
        time.sleep(0.2)
    return ""


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kills vng and the emulator, which have a session of their own."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def end_all() -> None:
    """Kills every guest that another thread waits for; their boots end with "the guest ended
    early". None is started afterwards.
    """
    _stopping.set()
    for child in tuple(_running):
        _end(child)


def kvm_boots(kernel: Kernel, results: Path) -> bool:
    """Whether /dev/kvm exists and boots this kernel, by trying."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    ending = boot(kernel, ["true"], results, KVM_SECONDS, kvm=True, silent=KVM_SILENT_SECONDS)
    return ending.code == 0
