# SPDX-License-Identifier: Apache-2.0
"""Finds the agent that attached programs belong to: its pin folder and its processes. Both may be
out of sight: in another mount or PID namespace.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.dataplane.bpf.maps.layout import TAIL_CALL_MAP
from kbpf.errors import KernelError, escape_unprintable
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.system import mounts

MAX_FOLDERS: Final = 2000
"""Folders that are searched in each bpffs. A CNI may have thousands."""
MAX_PROCESSES: Final = 2
MAX_SEARCH_S: Final = 2.0
"""Time for the search in /proc."""
MAX_DESCRIPTORS: Final = 10_000
"""Descriptors that are read of each process: those of an agent are far fewer."""
MAX_COMMAND_LENGTH: Final = 100


class Owner(NamedTuple):
    """The pin folder, None if it was not found, and processes that have the programs open."""

    folder: Path | None
    processes: tuple[str, ...]

    def __str__(self) -> str:
        folder = (f"--pin-dir {self.folder}",) if self.folder else ()
        return ", ".join((*folder, *self.processes))


def find_owner(program_ids: Collection[int]) -> Owner:
    folder = next((each for each in _list_pin_folders() if _pins_any(each, program_ids)), None)
    return Owner(folder, tuple(_find_processes(program_ids)))


def _list_pin_folders() -> Iterator[Path]:
    """The pin folders of kbpf in each bpffs that is mounted here."""
    for path in {mount.path for mount in mounts.list_mounts() if mount.fs_type == "bpf"}:
        for number, (folder, subfolders, _) in enumerate(os.walk(path)):
            if number >= MAX_FOLDERS:
                break
            if any(name.startswith("programs-") for name in subfolders):
                subfolders.clear()
                yield Path(folder)


def _pins_any(folder: Path, program_ids: Collection[int]) -> bool:
    for pin in folder.glob("*programs-*/*"):
        if pin.name == TAIL_CALL_MAP:
            continue
        with contextlib.suppress(KernelError), Program.open(pin) as program:
            if program.read_info().id in program_ids:
                return True
    return False


def _find_processes(program_ids: Collection[int]) -> Iterator[str]:
    """The first processes that have one of these programs open, with their command lines."""
    lines = {f"prog_id:\t{program_id}" for program_id in program_ids}
    count, deadline = 0, time.monotonic() + MAX_SEARCH_S
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or we lack the rights
            if lines & _read_program_lines(process):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").strip()
                text = escape_unprintable(command.decode(errors="replace"))
                yield f"process {process.name} ({text[:MAX_COMMAND_LENGTH]})"
                count += 1
        if count == MAX_PROCESSES or time.monotonic() > deadline:
            return


def _read_program_lines(process: Path) -> set[str]:
    """The lines in fdinfo of all BPF programs that this process has open."""
    lines: set[str] = set()
    for descriptor in os.listdir(process / "fd")[:MAX_DESCRIPTORS]:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(process / "fd" / descriptor) == "anon_inode:bpf-prog":
                lines |= set((process / "fdinfo" / descriptor).read_text().splitlines())
    return lines
