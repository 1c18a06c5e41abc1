# SPDX-License-Identifier: Apache-2.0
"""The agent's own connections are translated at ClusterIPs only, not at other Service addresses."""

import errno
import socket
import sys

import pytest

from kbpf.dataplane.bpf.exemptions import AgentSockets
from kbpf.dataplane.bpf.maps.layout import AGENT_SOCKETS
from kbpf.source.api.transport import SO_COOKIE
from tests.support.lab.lab import Place
from tests.support.plane import LOCAL, Site, desired, service, within

WORLD = desired(
    service(
        "web",
        "10.96.0.1:80 ExternalIP=192.0.2.1:80 LoadBalancer=192.0.2.2:80 NodePort=0.0.0.0:30080",
        f"{LOCAL[0]}:80",
    ),
    nodes="192.0.2.3",
)


def connect_result(site: Site, client: Place, to: str, claims: bool) -> str:
    """Where a TCP socket connects to, or the errno. `claims`: it is registered as the
    agent's own.
    """

    def dial() -> str:
        host, port = to.split(":")
        with (
            site.pinned("agent_sockets") as held,
            socket.create_server((LOCAL[0], 80)),
            socket.socket() as sock,
        ):
            sockets = AgentSockets()
            sockets.open(held)
            raw = sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8)
            if claims:
                sockets.claim(int.from_bytes(raw, sys.byteorder))
            code = sock.connect_ex((host, int(port)))
            return errno.errorcode[code] if code else str(sock.getsockname()[0])

    return within(client, dial)


@pytest.mark.parametrize(
    ("kind", "to", "own"),
    [
        ("ClusterIP", "10.96.0.1:80", LOCAL[0]),
        ("ExternalIP", "192.0.2.1:80", "ENETUNREACH"),
        ("LoadBalancer", "192.0.2.2:80", "ENETUNREACH"),
        ("NodePort", "192.0.2.3:30080", "ENETUNREACH"),
    ],
)
def test_agent_socket_is_translated_at_cluster_ips_only(site: Site, client: Place, kind: str, to: str, own: str):
    site.open().apply(WORLD, None)
    with site.pinned("services") as held:
        assert len(dict(held.items())) == 4
    assert connect_result(site, client, to, claims=False) == LOCAL[0]
    assert connect_result(site, client, to, claims=True) == own


def test_pinned_hooks_exempt_sockets_of_a_restarted_agent(site: Site, client: Place):
    """The old hooks stay attached until the first apply, which needs the API server."""
    site.open().apply(WORLD, None)
    site.open()
    assert connect_result(site, client, "192.0.2.1:80", claims=False) == LOCAL[0]
    assert connect_result(site, client, "192.0.2.1:80", claims=True) == "ENETUNREACH"


def test_oldest_claims_and_claims_of_an_earlier_agent_are_deleted(site: Site):
    plane = site.open()
    for cookie in range(1, AGENT_SOCKETS + 11):
        plane.shared.claim_socket(cookie)
    left = {int.from_bytes(key, sys.byteorder) for key in site.entries("agent_sockets")}
    assert left == set(range(11, AGENT_SOCKETS + 11))
    site.open()
    assert not site.entries("agent_sockets")


def test_claim_before_open_does_nothing(site: Site):
    site.plane().shared.claim_socket(1)
