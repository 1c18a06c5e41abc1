# SPDX-License-Identifier: Apache-2.0
"""A real systemd-resolved on the node, with the ClusterIP of kube-dns as the server of the link eth0, as networkd and
netplan give it. It restricts its sockets to that link, but a pod is reached by another one.

It runs without systemd, networkd and D-Bus, which it does not need to resolve: networkd's file about the link is
written here.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from tests.lab.neighbours.dns_cache import AT_SERVER, dns_service, start_server
from tests.lab.neighbours.dns_queries import ask
from tests.support.build import debian_files
from tests.support.lab.field import Field
from tests.support.lab.lab import DIE_WITH_US, PATIENCE, Place, inside, ip, until
from tests.support.plane import within

SERVERS = {"a1": "10.96.0.10", "b1": "10.96.0.11"}
"""The pod of a DNS server, on this node or another one → its Service."""
STUB = "127.0.0.53"
LINK = """\
ADMIN_STATE=configured
OPER_STATE=routable
DNS={server}
DNS_DEFAULT_ROUTE=yes
LLMNR=no
MDNS=no
"""
CONFIG = """\
[Resolve]
Cache=no
DNSSEC=no
FallbackDNS=
LLMNR=no
MulticastDNS=no
"""
START = """\
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/netif/links /run/systemd/resolved.conf.d /run/systemd/resolve
echo "$2" >/run/systemd/netif/links/$(ip -o link show eth0 | cut -d : -f 1)
echo "$3" >/run/systemd/resolved.conf.d/test.conf
[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf
cp "$1"/* /run
chown nobody /run/systemd/resolve
rights=+net_raw,+net_bind_service,+setpcap
exec setpriv --reuid=nobody --clear-groups --inh-caps=$rights --ambient-caps=$rights --pdeathsig=KILL \\
    env LD_LIBRARY_PATH=/run /run/systemd-resolved
"""
"""Runs in a separate mount namespace, so that the machine's files stay as they are. systemd-resolved also uses the
servers in /etc/resolv.conf, and as root it would look for the user systemd-resolve.
"""


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(Field(name="sr", pods=(1, 1)))
        ip("route del unreachable 10.96.0.0/16", netns=made["host-1"].netns)
        for pod, address in SERVERS.items():
            process = start_server(made[pod], made.lab.folder)
            stack.callback(process.wait)
            stack.callback(process.kill)
            made.create(*dns_service(f"dns-{pod}", address, made[pod].ip))
        made.settle()
        yield made


@contextlib.contextmanager
def resolved(place: Place, server: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs it with this server of eth0."""
    folder = debian_files.systemd_resolved()
    command = ("unshare", "--mount", "sh", "-c", START, "sh", str(folder), LINK.format(server=server), CONFIG)
    process = subprocess.Popen([*DIE_WITH_US, *inside(place.netns, place.cgroup, *command)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("pod", SERVERS)
def test_systemd_resolved_asks_a_service_by_its_link(field: Field, pod: str):
    host = field["host-1"]

    def answers(protocol: str) -> str:
        return within(host, partial(ask, protocol, STUB, 7, "where.example", PATIENCE))

    with resolved(field.lab.nodes[0].host_network_pod("resolved"), SERVERS[pod]) as process:
        until("it listens", lambda: process.poll() is not None or answers("udp") != "ConnectionRefusedError")
        for protocol in ("udp", "tcp"):
            assert answers(protocol) == AT_SERVER
