"""Settings below /proc/sys of the network namespace of the calling thread, and sets of ports as
the kernel writes them there.

In a container /proc/sys cannot be written. Its pod gets the node's /proc/sys/net a second time, at
HOST_ROOT; whose settings are shown there depends on who looks, as at the first.
"""

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kbpf.errors import KernelError

ROOT: Final = Path("/proc/sys")
HOST_ROOT: Final = Path("/host/proc/sys")
LOCAL_PORT_RANGE: Final = "net.ipv4.ip_local_port_range"
"""Where the kernel takes ports for sockets that do not ask for one; of both families."""
RESERVED_PORTS: Final = "net.ipv4.ip_local_reserved_ports"
"""What it leaves out there. A socket that asks for such a port by its number gets it."""

PortRange = tuple[int, int]
"""Ports, both ends included."""


def path_of(name: str, root: Path = ROOT, host_root: Path = HOST_ROOT) -> Path:
    """The file of a setting; the one below `host` where there is one."""
    relative_path = name.replace(".", "/")
    return (
        host_root / relative_path if (host_root / relative_path).exists() else root / relative_path
    )


def read(name: str) -> str:
    """The value of a setting, without the line's end."""
    try:
        return path_of(name).read_text().strip()
    except OSError as error:
        raise KernelError(
            f"cannot read the setting {name}", str(ROOT), "mount /proc", error.errno or 0
        ) from error


def write(name: str, value: str) -> None:
    """Sets it; KernelError with EROFS or EACCES in a container that must not."""
    try:
        path_of(name).write_text(f"{value}\n")
    except OSError as error:
        raise KernelError(
            f"cannot set {name}", str(ROOT), f"on the node: sysctl -w {name}={value}",
            error.errno or errno.EIO,
        ) from error  # fmt: skip


# ---- ports ---------------------------------------------------------------------------------------


def parse_ports(text: str) -> frozenset[int]:
    """The ports of a list such as ``8080,61000-65535``."""
    ports: set[int] = set()
    for item in text.split(","):
        if item.strip():
            low, _, high = item.strip().partition("-")
            ports.update(range(int(low), int(high or low) + 1))
    return frozenset(ports)


def merge_ranges(ports: Iterable[int]) -> tuple[PortRange, ...]:
    """The fewest ranges that are these ports, in order."""
    merged: list[PortRange] = []
    for port in sorted(ports):
        if merged and merged[-1][1] == port - 1:
            merged[-1] = merged[-1][0], port
        else:
            merged.append((port, port))
    return tuple(merged)


def format_ports(ports: Iterable[int]) -> str:
    """The list as the kernel writes it."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in merge_ranges(ports))


def read_local_port_range() -> PortRange:
    """Where the kernel takes ports for sockets."""
    low, high = read(LOCAL_PORT_RANGE).split()
    return int(low), int(high)
