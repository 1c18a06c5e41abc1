"""Programs of another architecture run on this machine: qemu's user emulation, told to the kernel
by binfmt_misc for as long as somebody needs it.

What an emulated program cannot do is call bpf(2): the emulator has not got it.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BINFMT = Path("/proc/sys/fs/binfmt_misc")
QEMU = Path("/usr/bin/qemu-aarch64-static")
NAME = "kbpf-tests-aarch64"
_MAGIC = (
    r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
)
"""An ELF executable for aarch64, little endian, and which bits of that count."""


@contextmanager
def aarch64() -> Iterator[None]:
    """Programs for aarch64 run, in every root: the kernel keeps the emulator open (F)."""
    mounted = not (BINFMT / "register").exists()
    if mounted:
        subprocess.run(["mount", "-t", "binfmt_misc", "none", str(BINFMT)], check=True)
    rule = BINFMT / NAME
    try:
        if not rule.exists():
            (BINFMT / "register").write_text(f":{NAME}:M::{_MAGIC}:{QEMU}:F")
        yield
    finally:
        if rule.exists():
            rule.write_text("-1")
        if mounted:
            subprocess.run(["umount", str(BINFMT)], check=True)
