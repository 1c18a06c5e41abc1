# SPDX-License-Identifier: Apache-2.0
"""Creates named network namespaces, and devices, addresses and routes in the calling thread's
namespace. Wraps pyroute2 and its errors.

Importing pyroute2 costs 20 MB and a quarter of a second, so only the demo and `kbpf check
--attached` import this module, when they need it. The agent uses netlink.py.
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
from kbpf.kernel.net.uapi import IFA_F_NODAD, RTN_LOCAL

LOCAL_ROUTE_TIMEOUT_S: Final = 10.0
NETNS_DIR: Final = Path("/run/netns")


@contextlib.contextmanager
def _kernel_errors(what: str, where: str) -> Iterator[None]:
    try:
        yield
    except (NetlinkError, OSError) as error:
        code = (error.code if isinstance(error, NetlinkError) else error.errno) or 0
        hint = "run as root" if code in (errno.EPERM, errno.EACCES) else ""
        raise KernelError(what, where, hint, code) from error


def namespace_path(name: str) -> Path:
    """The path of a named network namespace."""
    return NETNS_DIR / name


def create_namespace(name: str) -> Path:
    """Creates a network namespace that is kept alive by its name; its loopback device is down."""
    with _kernel_errors("cannot create the network namespace", name):
        netns.create(name)
    return namespace_path(name)


def remove_namespace(name: str) -> bool:
    """Removes the name; the namespace ends with its last process. Returns whether the name
    existed.
    """
    if not namespace_path(name).exists():
        return False
    with _kernel_errors("cannot remove the network namespace", name):
        netns.remove(name)
    return True


class Links:
    """Devices of this network namespace. Use it from the thread that created it."""

    def __init__(self) -> None:
        with _kernel_errors("cannot open a netlink socket", "rtnetlink"):
            self._route: Any = IPRoute()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._route.close()

    def _ifindex(self, name: str) -> int:
        indexes = self._route.link_lookup(ifname=name)
        if not indexes:
            raise KernelError("no such device", name)
        return int(indexes[0])

    def set_up(self, name: str) -> None:
        """Sets a device up."""
        with _kernel_errors("cannot set the device up", name):
            self._route.link("set", index=self._ifindex(name), state="up")

    def add_bridge(self, name: str) -> None:
        """Creates a bridge."""
        with _kernel_errors("cannot create the bridge", name):
            self._route.link("add", ifname=name, kind="bridge")

    def add_veth(self, name: str, peer: str, peer_namespace: Path, master: str = "") -> None:
        """Creates a veth pair: one end here and up, as a port of the bridge `master` if there is
        one; the other in another namespace.
        """
        with _kernel_errors("cannot create the veth pair", f"{name}, {peer}"), peer_namespace.open() as namespace_file:
            self._route.link(
                "add", ifname=name, kind="veth", peer={"ifname": peer, "net_ns_fd": namespace_file.fileno()}
            )
            if master:
                self._route.link("set", index=self._ifindex(name), master=self._ifindex(master))
        self.set_up(name)

    def add_address(self, name: str, address: str, prefix: int) -> None:
        """Adds an address to a device that is up. It is usable when this returns.

        Duplicate address detection is off for IPv6. Even so, the kernel adds the local route of an
        IPv6 address asynchronously, so this waits for it.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        flags = {"flags": IFA_F_NODAD} if family == socket.AF_INET6 else {}
        with _kernel_errors("cannot set the address", f"{name} {address}/{prefix}"):
            self._route.addr(
                "add", index=self._ifindex(name), address=address, prefixlen=prefix, family=family, **flags
            )
        if family == socket.AF_INET6:
            self._wait_local(name, address)

    def add_default_route(self, gateway: str) -> None:
        """Routes all IPv4 packets without another route through this gateway."""
        with _kernel_errors("cannot add the default route", gateway):
            self._route.route("add", dst="default", gateway=gateway)

    def _wait_local(self, name: str, address: str) -> None:
        deadline = time.monotonic() + LOCAL_ROUTE_TIMEOUT_S
        while not self._is_local(address):
            if time.monotonic() > deadline:
                raise KernelError("no packet arrives at the address", f"{name} {address}")
            time.sleep(0.001)

    def _is_local(self, address: str) -> bool:
        try:
            (route,) = self._route.route("get", dst=address, family=socket.AF_INET6)
        except NetlinkError:  # no route yet
            return False
        return bool(route["type"] == RTN_LOCAL)
