# SPDX-License-Identifier: Apache-2.0
"""Links.add_address() returns once packets to the address arrive, even while the kernel is busy."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator

from kbpf.kernel.net import links as module
from kbpf.kernel.net.links import Links
from kbpf.kernel.system import sandbox
from tests.support.lab import namespace as namespaces
from tests.support.lab.lab import DIE_WITH_US, PATIENCE

ADDRESSES = tuple(f"fd00:99::{number:x}" for number in range(1, 601))


@contextlib.contextmanager
def others_change_devices() -> Iterator[None]:
    """Other processes hold the lock of all network devices (RTNL) most of the time."""
    with namespaces.made() as namespace, contextlib.ExitStack() as stack:
        loop = f'while echo "$1" | ip -n {namespace.name} -b -; do :; done'
        for name in "ab":
            change = "\n".join(f"link add {name}{n} type dummy\nlink del {name}{n}" for n in range(50))
            command = [*DIE_WITH_US, "sh", "-c", loop, "", change]
            child = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            stack.callback(child.kill)
        yield


def first_unreached() -> str | None:
    """The first address that lost a datagram sent right after the address was added."""
    module.LOCAL_ROUTE_TIMEOUT_S = PATIENCE  # of this process only
    with Links() as links, socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as server:
        links.set_up("lo")
        server.bind(("::", 5353))
        server.settimeout(PATIENCE)
        return next((each for each in ADDRESSES if not is_reached(links, each, server)), None)


def is_reached(links: Links, address: str, server: socket.socket) -> bool:
    """Whether a datagram to the new address arrives. It is sent once only."""
    links.add_address("lo", address, 128)
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client:
            client.sendto(address.encode(), (address, 5353))
        return server.recv(64) == address.encode()
    except OSError:
        return False


def test_packets_arrive_as_soon_as_an_ipv6_address_is_added():
    with others_change_devices():
        assert sandbox.run(first_unreached) is None
