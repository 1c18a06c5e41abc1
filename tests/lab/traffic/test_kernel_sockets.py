# SPDX-License-Identifier: Apache-2.0
"""Sockets that the kernel itself connects to a Service: a real NFS mount of a ClusterIP, whose
server moves to a Pod of another node. The servers export the same folder, as Pods of a storage
system do.

The kernel connects from its own threads, which are in the root cgroup; so the agent's hooks are
there, and the test runs in guests (tests/kernels).
"""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbpf.kernel.bpf.kernel_members import keeps_addresses
from tests.support.cluster.cluster import HOST_PORT, UNROUTED
from tests.support.cluster.kube_objects import port, service, slice_port
from tests.support.features import IPPROTO_MPTCP, needs, tunnel_modules
from tests.support.lab.field import NODES4, Field, there
from tests.support.lab.lab import Place, cgroup2, inside, ip, run, until
from tests.support.lab.podnet import gate
from tests.support.runtime import pods

pytestmark = needs("nfs")
NFS, WEB, HOSTED = "10.96.0.50", "10.96.0.51", "10.96.0.52"
SMB, SMB_HOSTED = "10.96.0.53", "10.96.0.54"
NFS_PORT, SMB_PORT = 2049, 445
SERVER = Path(pods.__file__).with_name("nfs_server.py")
OPTIONS = f"vers=4.1,sec=sys,addr={NFS},clientaddr=0.0.0.0,soft,timeo=30,retrans=1"
"""A server that does not answer for some seconds is an error instead of a wait without end."""
TUNNEL_ENDS = ("10.244.1.99", "10.244.2.99")
"""The nodes' addresses on tunl0, as Calico has them, from the networks of their pods."""


class OneAgent(Field):
    """Only node-1 has an agent, whose hooks in the root cgroup see both nodes. `is_tunnelled`:
    packets between pods of different nodes travel by tunl0, as with Calico and IPIP.
    """

    def __init__(self, *arguments: str, is_tunnelled: bool) -> None:
        super().__init__(*arguments, name="ks", pods=(1, 1), agents=1)
        self._is_tunnelled = is_tunnelled

    def prepare(self) -> None:
        if not self._is_tunnelled:
            return
        self.own.enter_context(tunnel_modules("ipip"))
        nodes = self.lab.nodes
        for node, other, own in zip(nodes, reversed(nodes), TUNNEL_ENDS, strict=True):
            ip(
                f"""
                addr add {own}/32 dev tunl0
                link set tunl0 up
                route replace 10.244.{other.number}.0/24 via {other.ip} dev tunl0 onlink
                """,
                netns=node.netns,
            )


@pytest.fixture(scope="module", params=["routed", pytest.param("ipip", marks=needs("tunnels"))])
def field(request) -> Iterator[Field]:
    is_tunnelled = request.param == "ipip"
    with OneAgent("--cgroup", str(cgroup2()), is_tunnelled=is_tunnelled) as made:
        ip(*(f"route del unreachable {net}" for net in UNROUTED), netns=made.lab.nodes[0].netns)
        made.create(
            service("nfs", port(NFS_PORT), cluster_ip=NFS),
            service("web", port(80), cluster_ip=WEB),
            made.slice("web", "a1", slice_port(8080)),
            service("hosted", port(80), cluster_ip=HOSTED),
            made.slice("hosted", "a-net", slice_port(HOST_PORT)),
            service("smb", port(SMB_PORT), cluster_ip=SMB),
            made.slice("smb", "a1", slice_port(SMB_PORT)),
            service("smb-hosted", port(SMB_PORT), cluster_ip=SMB_HOSTED),
            made.slice("smb-hosted", "a-net", slice_port(SMB_PORT)),
        )
        made.settle()
        yield made


@pytest.fixture
def share(tmp_path) -> Iterator[Path]:
    """A file system that the kernel can export."""
    folder = tmp_path / "share"
    folder.mkdir()
    run("mount", "-t", "tmpfs", "share", str(folder))
    yield folder
    run("umount", "--lazy", str(folder))


class NfsPod:
    """An NFS server in a pod."""

    def __init__(self, field: Field, name: str, share: Path) -> None:
        clients = (*NODES4, *TUNNEL_ENDS, gate(1, v6=False), gate(2, v6=False))
        command = ("unshare", "--mount", sys.executable, "-S", str(SERVER), str(share), *clients)
        self._process = subprocess.Popen(
            inside(field[name].netns, None, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"serves\n"
        field.change(field.slice("nfs", name, slice_port(NFS_PORT)))

    def stop(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def mounted(host: Place, folder: Path) -> Iterator[Path]:
    """The ClusterIP's export, mounted by a process of this host."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (f"{NFS}:/", str(folder), "nfs4")

    def mount() -> None:
        if libc.mount(*map(os.fsencode, arguments), 0, OPTIONS.encode()):
            raise OSError(ctypes.get_errno(), f"mount {arguments} {OPTIONS}")

    there(host, mount)
    try:
        yield folder
    finally:
        run("umount", "--force", "--lazy", str(folder))


def peers(host: Place, number: int) -> set[str]:
    """The peers of this host's established connections to this port."""

    def read() -> str:
        return Path("/proc/thread-self/net/tcp").read_text()

    rows = [line.split() for line in there(host, read).splitlines()[1:]]
    ends = [row[2].split(":") for row in rows if row[3] == "01"]
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address, of in ends if int(of, 16) == number}


def works(folder: Path, text: str) -> bool:
    try:
        (folder / text).write_text(text)
        return (folder / text).read_text() == text
    except OSError:
        return False


def expected_peer(clusterip: str, pod: Place) -> str:
    """Kernels that keep the Service's address in the mount may connect to the backend."""
    return pod.ip if keeps_addresses(os.uname().release) else clusterip


def test_mount_of_a_cluster_ip_follows_its_pod(field: Field, share: Path, tmp_path):
    host = field["host-1"]
    first = NfsPod(field, "a1", share)
    with mounted(host, tmp_path / "mnt") as folder:
        assert works(folder, "at-first")
        assert peers(host, NFS_PORT) == {expected_peer(NFS, field["a1"])}, field.agent.tail()
        second = NfsPod(field, "b1", share)
        first.stop()
        until("the mount has followed to the other node", lambda: works(folder, "moved"))
        assert peers(host, NFS_PORT) == {expected_peer(NFS, field["b1"])}
        # The next Pod disappears without closing its connections; b1 stays without a network.
        third = NfsPod(field, "a1", share)
        ip("link set eth0 down", netns=field["b1"].netns)
        until("the mount has followed back", lambda: works(folder, "back"))
        assert peers(host, NFS_PORT) == {expected_peer(NFS, field["a1"])}
        mount = next(row for row in Path("/proc/mounts").read_text().splitlines() if NFS in row)
        assert f"addr={NFS}" in mount.split()[3].split(",")
        assert {file.name for file in share.iterdir()} >= {"at-first", "moved", "back"}
    for server in (second, third):
        server.stop()


def connect_mptcp(host: Place, address: str) -> set[str]:
    """The peers of an MPTCP socket's TCP socket, which is the kernel's."""

    def dial() -> set[str]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP) as client:
            client.settimeout(10)
            client.connect((address, 80))
            return {peer for number in (80, 8080, HOST_PORT) for peer in peers(host, number)}

    return there(host, dial)


def connect_smb(host: Place, address: str) -> set[str]:
    """The peers of a mount(2) that waits for the first answer of its server."""
    options = f"ip={address},unc=\\\\{address}\\share,username=kbpf,password=kbpf,vers=3.0"
    command = (
        "mount",
        "--internal-only",
        "-t",
        "cifs",
        "-o",
        options,
        f"//{address}/share",
        "/mnt",
    )
    with subprocess.Popen(inside(host.netns, None, *command)) as process:
        try:
            until("the kernel has connected", lambda: peers(host, SMB_PORT))
            return peers(host, SMB_PORT)
        finally:
            process.kill()
            until("the connection has ended", lambda: not peers(host, SMB_PORT))


CONNECTS = (
    pytest.param(connect_mptcp, WEB, HOSTED, id="mptcp", marks=needs("mptcp")),
    pytest.param(connect_smb, SMB, SMB_HOSTED, id="smb", marks=needs("smb")),
)


@pytest.fixture
def silent_servers(field: Field) -> Iterator[None]:
    """SMB servers that take connections and never answer: in the Pod, and in its node's network."""
    with contextlib.ExitStack() as stack:
        for place in (field["a1"], field["host-1"]):
            server = there(place, lambda: socket.create_server(("0.0.0.0", SMB_PORT)))
            stack.enter_context(server)
        yield


@pytest.mark.parametrize(("connect", "service_ip", "hosted_ip"), CONNECTS)
def test_kernel_socket_that_a_process_connects(
    field: Field,
    silent_servers: None,
    connect: Callable[[Place, str], set[str]],
    service_ip: str,
    hosted_ip: str,
):
    """The first connection of an SMB mount is made by the process that mounts, so its cgroup says
    nothing.
    """
    host = field["host-1"]
    assert connect(host, service_ip) == {expected_peer(service_ip, field["a1"])}
    # Packets would not reach a backend in the node's own network.
    assert connect(host, hosted_ip) == {NODES4[0]}
