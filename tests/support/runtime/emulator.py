# SPDX-License-Identifier: Apache-2.0
"""Runs programs of another architecture on this machine: qemu's user emulation, registered with
binfmt_misc while it is needed.

An emulated program cannot call bpf(2): the emulator does not implement it.
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
"""The header of a little-endian ELF executable for aarch64, and the mask of its relevant bits."""


@contextmanager
def aarch64() -> Iterator[None]:
    """Makes aarch64 programs run, in every root: the kernel keeps the emulator open (flag F)."""
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
