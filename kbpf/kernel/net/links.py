"""Network namespaces with names, and devices, addresses and routes in the one that the calling
thread is in: through pyroute2, whose errors end here.

Importing this costs 20 MB and a quarter of a second, so only the demo and `kbpf check --attached`
do, when they need it. The agent uses netlink.py.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from pyroute2 import IPRoute, NetlinkError, netns

from kbpf.errors import KernelError

IFA_F_NODAD: Final = 0x02
RTN_LOCAL: Final = 2
PATIENCE_SECONDS: Final = 10.0
NAMED: Final = Path("/run/netns")


@contextlib.contextmanager
def _said(what: str, where: str = "") -> Iterator[None]:
    try:
        yield
    except (NetlinkError, OSError) as error:
        code = (error.code if isinstance(error, NetlinkError) else error.errno) or 0
        hint = "run as root" if code in (errno.EPERM, errno.EACCES) else ""
        raise KernelError(what, where, hint, code) from error


def namespace(name: str) -> Path:
    """Where a namespace with this name is."""
    return NAMED / name


def create_namespace(name: str) -> Path:
    """A new network namespace, kept by its name alone; loopback is down in it."""
    with _said("cannot make the network namespace", name):
        netns.create(name)
    return namespace(name)


def remove_namespace(name: str) -> bool:
    """Takes the name away: it ends with its last process. Whether it was there."""
    if not namespace(name).exists():
        return False
    with _said("cannot remove the network namespace", name):
        netns.remove(name)
    return True


class Links:
    """Devices of this network namespace. Use it in the thread that made it."""

    def __init__(self) -> None:
        with _said("cannot open a netlink socket", "rtnetlink"):
            self._route: Any = IPRoute()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._route.close()

    def _index(self, name: str) -> int:
        found = self._route.link_lookup(ifname=name)
        if not found:
            raise KernelError("no such device", name)
        return int(found[0])

    def up(self, name: str) -> None:
        """Switches a device on."""
        with _said("cannot switch on the device", name):
            self._route.link("set", index=self._index(name), state="up")

    def bridge(self, name: str) -> None:
        """A new bridge."""
        with _said("cannot make the bridge", name):
            self._route.link("add", ifname=name, kind="bridge")

    def veth(self, name: str, master: str, peer: str, peer_namespace: Path) -> None:
        """A new cable: one end here, below a bridge and up, the other in another namespace."""
        with _said("cannot make the veth pair", f"{name}, {peer}"), peer_namespace.open() as there:
            self._route.link(
                "add", ifname=name, kind="veth",
                peer={"ifname": peer, "net_ns_fd": there.fileno()},
            )  # fmt: skip
            self._route.link("set", index=self._index(name), master=self._index(master))
        self.up(name)

    def address(self, name: str, address: str, prefix: int) -> None:
        """Gives a device that is up an address, which may be used as soon as this returns.

        Nobody is asked whether another has it. Even so, a worker of the kernel makes the route by
        which packets to an IPv6 address arrive, and on a busy machine it comes later.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        flags = {"flags": IFA_F_NODAD} if family == socket.AF_INET6 else {}
        with _said("cannot set the address", f"{name} {address}/{prefix}"):
            self._route.addr(
                "add", index=self._index(name), address=address, prefixlen=prefix, family=family,
                **flags,
            )  # fmt: skip
        if family == socket.AF_INET6:
            self._wait_local(name, address)

    def _wait_local(self, name: str, address: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_local(address):
            if time.monotonic() > deadline:
                raise KernelError("no packet arrives at the address", f"{name} {address}")
            time.sleep(0.001)

    def _is_local(self, address: str) -> bool:
        try:
            (route,) = self._route.route("get", dst=address, family=socket.AF_INET6)
        except NetlinkError:  # there is no route at all yet
            return False
        return bool(route["type"] == RTN_LOCAL)
