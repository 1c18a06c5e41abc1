# SPDX-License-Identifier: Apache-2.0
"""Sockets of the kernel, recognized by sk_kern_sock: left to the packet path where the kernel would
take over the backend's address. tests/lab/traffic/test_kernel_sockets.py has a real mount.
"""

import errno
import os
import socket

import msgspec
import pytest

from kbpf.dataplane.bpf.maps.layout import ConfigFlag, Reason
from kbpf.kernel.bpf import kernel_members
from kbpf.kernel.bpf.kernel_members import find_member_bit, keeps_addresses
from kbpf.model.address import parse_addr
from tests.support.features import IPPROTO_MPTCP, needs
from tests.support.lab.lab import PATIENCE, Place
from tests.support.plane import LOCAL, Site, desired, service, within


def test_bit_is_found_on_kernels_without_the_corrections():
    assert find_member_bit("sock", "sk_kern_sock") > 0, "Debian's kernels and ours have BTF"
    assert find_member_bit("sock", "no_such_member") == 0
    assert find_member_bit("no_such_struct", "sk_kern_sock") == 0
    assert bool(kernel_members.find_bit()) is not keeps_addresses(os.uname().release)
    assert kernel_members.probe_kernel_sockets().works


@pytest.fixture
def without_corrections(monkeypatch) -> None:
    """Programs are loaded as on a kernel without the corrections."""
    bit = find_member_bit("sock", "sk_kern_sock")
    monkeypatch.setattr(kernel_members, "find_bit", lambda: bit)


WORLD = desired(service("web", "10.96.0.1:80", f"{LOCAL[0]}:80"))


def connect(client: Place, protocol: int = 0) -> str:
    """What connect() says. Nothing listens at the backend, and nothing routes the Service."""

    def dial() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as s:
            s.settimeout(PATIENCE)
            return errno.errorcode[s.connect_ex(("10.96.0.1", 80))]

    return within(client, dial)


@needs("mptcp")
@pytest.mark.usefixtures("without_corrections")
def test_kernel_socket_is_left_to_the_packet_path(site: Site, client: Place):
    """The TCP socket of an MPTCP socket is the kernel's. A process connects it, as for an SMB
    mount, so no cgroup identifies it.
    """
    plane = site.start(WORLD)
    translated, untouched = "ECONNREFUSED", "ENETUNREACH"
    assert connect(client, IPPROTO_MPTCP) == translated, "no packet path would serve it"
    plane._attachments.settings.set_flags(plane._attachments.settings.flags | ConfigFlag.KERNEL_SOCKETS)
    before = site.reasons()[Reason.LEFT_TO_PACKETS]
    assert connect(client, IPPROTO_MPTCP) == untouched
    assert site.reasons()[Reason.LEFT_TO_PACKETS] == before + 1
    assert connect(client) == translated
    # By packets, a socket does not reach a backend in the node's own network.
    plane.apply(msgspec.structs.replace(WORLD, node_addresses=(parse_addr(LOCAL[0]),)), None)
    assert connect(client, IPPROTO_MPTCP) == translated
