"""One boot of a kernel over this machine's own files, and one command inside.

virtme-ng shows the guest the whole file system over 9p, read-only or with overlays that vanish:
the working tree and its .venv are simply there. What Python reads from is shared once more, for
the guest to mount it with a cache (guest.sh): importing pytest takes three minutes without. One
folder can be written by the guest: its results. A guest has a time limit, and its console is kept
whatever comes of it.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kernels.debian import Kernel

ROOT = Path(__file__).parents[2]
VNG = "vng"
SILENT_SECONDS = 180.0
"""A guest that has not said its version by then does not boot: to unpack a kernel takes seconds, or
a minute where others keep the machine busy."""
KVM_SILENT_SECONDS, KVM_SECONDS = 15.0, 60.0
"""The same with KVM, where it takes one: some hosts offer a KVM that runs no stock kernel."""
ALIVE = b"Linux version"
COMMAND = "command"
"""The guest's first file: what it is to do."""
DONE = "exit"
"""The guest's last file: the command's exit code. Without it the guest ended otherwise."""
GUEST = Path(__file__).with_name("guest.sh")
SHARES = tuple(
    dict.fromkeys(
        (ROOT, Path(sys.prefix).resolve(), Path(os.__file__).parent, Path("/usr/lib/python3"))
    )
)
MEMORY, CPUS = "2G", "2"
EMULATED = (
    "--disable-kvm", "--qemu-opts=-accel tcg,thread=single",
    "--append", "tsc=reliable no_timer_check",
)  # fmt: skip
"""What keeps an emulated guest alive on a busy machine: without it one boot in fifty or so died or
hung. Its CPUs take turns: where they run at once, one of them sometimes executes the breakpoint of
a code patch that the other has just ended (`Oops: int3`); taking turns is no slower. Its clock is
not judged by others (the watchdog's comparisons hang, watchdog_check_skew()), and a timer whose
ticks come late is no reason to give up (`IO-APIC + timer doesn't work!`).
"""

_running: set["subprocess.Popen[bytes]"] = set()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a boot ended. `code` is the command's, None when the guest did not get that far: then
    `why` says it, and `log` is where to look.
    """

    code: int | None
    why: str
    seconds: float
    log: Path

    def say(self) -> str:
        """How it ended, in a line."""
        how = self.why or ("done" if self.code == 0 else f"its command ended with {self.code}")
        return f"{how} after {self.seconds:.0f} s, see {self.log}"

    def tail(self, lines: int = 40) -> str:
        """The console's last lines."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def boot(kernel: Kernel, command: list[str], results: Path, seconds: float, kvm: bool) -> Ending:
    """Boots, runs the command in the working tree as root, and waits for the power-off. The
    command finds a folder for its results in $RESULTS; they are in `results` afterwards.
    """
    results.mkdir(parents=True, exist_ok=True)
    log = results / "console.log"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kbpf-kernels-") as name, log.open("wb") as out:
        exchange = Path(name)
        shutil.copy(GUEST, exchange)
        (exchange / COMMAND).write_text(shlex.join(command))
        child = subprocess.Popen(
            _vng(kernel, exchange, kvm),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            start_new_session=True,
            cwd="/",  # the guest's too: a share that is somebody's cannot be mounted anew
        )
        _running.add(child)
        try:
            silent = KVM_SILENT_SECONDS if kvm else SILENT_SECONDS
            why = _watch(child, log, silent, seconds)
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


def _vng(kernel: Kernel, exchange: Path, kvm: bool) -> list[str]:
    """What it executes is a part of the kernel's command line, which has room for 2048 bytes."""
    inside = shlex.join(["sh", str(exchange / GUEST.name), str(exchange), str(ROOT)])
    return [
        VNG, "--verbose", "--run", str(kernel.image), "--user", "root", "--memory", MEMORY,
        "--cpus", CPUS, *([] if kvm else EMULATED), "--force-9p",
        f"--rwdir={exchange}", *(f"--rodir={share}" for share in _outermost(SHARES)),
        "--exec", inside,
    ]  # fmt: skip


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Those that are in no other of them."""
    return [one for one in folders if not any(other in one.parents for other in folders)]


def _watch(child: "subprocess.Popen[bytes]", log: Path, silent: float, seconds: float) -> str:
    """Waits for the end, or for a reason to end it: "" or what is wrong."""
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
    """Ends vng and the emulator, which are a session of their own."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def end_all() -> None:
    """Ends every guest that another thread waits for: each of them is told that it ended early."""
    for child in tuple(_running):
        _end(child)


def kvm_boots(kernel: Kernel, results: Path) -> bool:
    """Whether /dev/kvm is there and boots this kernel: tried."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    return boot(kernel, ["true"], results, KVM_SECONDS, kvm=True).code == 0
