# SPDX-License-Identifier: Apache-2.0
"""Sysctls of the calling thread's network namespace, and the format of port lists in them.

In a container /proc/sys is read-only. Our pod mounts the node's /proc/sys/net a second time, at
HOST_ROOT. At both places the kernel shows the settings of the reader's own network namespace.
"""

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kbpf.errors import kernel_errors

ROOT: Final = Path("/proc/sys")
HOST_ROOT: Final = Path("/host/proc/sys")
LOCAL_PORT_RANGE: Final = "net.ipv4.ip_local_port_range"
"""The range for sockets that do not request a port; used for both families."""
RESERVED_PORTS: Final = "net.ipv4.ip_local_reserved_ports"
"""Ports excluded from that range. A socket that requests such a port by number still gets it."""

PortRange = tuple[int, int]
"""First and last port."""


def path_of(name: str, root: Path = ROOT, host_root: Path = HOST_ROOT) -> Path:
    """The file of a setting; the one below `host_root` if it exists."""
    relative_path = name.replace(".", "/")
    return host_root / relative_path if (host_root / relative_path).exists() else root / relative_path


def read(name: str) -> str:
    """Returns the value of a setting, stripped."""
    with kernel_errors(f"cannot read the setting {name}", str(ROOT), "mount /proc"):
        return path_of(name).read_text().strip()


def is_writable(name: str) -> bool:
    """Whether the mode of a setting's file allows its owner to write; it does not where the kernel
    makes the file read-only in this network namespace.
    """
    with kernel_errors(f"cannot read the mode of the setting {name}", str(ROOT)):
        return bool(path_of(name).stat().st_mode & stat.S_IWUSR)


def write(name: str, value: str) -> None:
    """Writes a setting. Raises KernelError with EROFS or EACCES in a container without write
    access.
    """
    with kernel_errors(f"cannot set {name}", str(ROOT), f"on the node: sysctl -w {name}={value}"):
        path_of(name).write_text(f"{value}\n")


# ---- ports ---------------------------------------------------------------------------------------


def parse_ports(text: str) -> frozenset[int]:
    """Parses a list of ports such as ``8080,61000-65535``."""
    ports: set[int] = set()
    for item in text.split(","):
        if item.strip():
            low, _, high = item.strip().partition("-")
            ports.update(range(int(low), int(high or low) + 1))
    return frozenset(ports)


def merge_ranges(ports: Iterable[int]) -> tuple[PortRange, ...]:
    """Merges ports into the fewest ranges, in ascending order."""
    merged: list[PortRange] = []
    for port in sorted(ports):
        if merged and merged[-1][1] == port - 1:
            merged[-1] = merged[-1][0], port
        else:
            merged.append((port, port))
    return tuple(merged)


def format_ports(ports: Iterable[int]) -> str:
    """Formats a list of ports as the kernel does."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in merge_ranges(ports))


def read_local_port_range() -> PortRange:
    """Reads the range of ports for sockets that do not request one."""
    low, high = read(LOCAL_PORT_RANGE).split()
    return int(low), int(high)
