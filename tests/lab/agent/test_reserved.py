# SPDX-License-Identifier: Apache-2.0
"""A Service that claims the address of a real API server is refused. If it is programmed anyway,
the agent still reaches the API server, even through hooks that were pinned before it started.
"""

import urllib.parse

import pytest

from kbpf.dataplane.bpf.maps.layout import ServiceValue, Target, schema_hash
from kbpf.kernel.bpf.objects import Map
from kbpf.model.address import parse_addr
from kbpf.model.objects import Protocol
from tests.support.cluster.cluster import POD_PORTS, Cluster
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    port,
    service,
    slice_port,
)
from tests.support.lab.lab import PATIENCE, until

INNOCENT = "198.51.100.9"
"""An ExternalIP that is allowed; the hijacked address gets the same backends."""


def server(cluster: Cluster) -> tuple[str, int]:
    """Address and port of the API server, as the agent dials it."""
    url = urllib.parse.urlsplit(cluster.api.url)
    assert url.hostname
    assert url.port
    return url.hostname, url.port


def hijacker(cluster: Cluster, external_ip: str) -> tuple[Object, Object]:
    number = server(cluster)[1]
    made = service("thief", port(number, target=POD_PORTS[0]), external_ips=[external_ip])
    return made, endpoint_slice("thief", endpoint(cluster["a1"].ip), ports=[slice_port(POD_PORTS[0])])


def test_a_claim_of_the_api_servers_address_is_refused_and_reported(cluster: Cluster):
    host, number = server(cluster)
    words = f"{host}:{number}/TCP is not served: it is an address of the API server"

    def problems() -> list[str]:
        status = cluster.agent.status()
        assert status is not None
        return [line for line in status["problems"] if words in line]

    with cluster.given(*hijacker(cluster, host)):
        assert f"{host}:{number}/TCP" not in cluster.served()
        until("the refusal is a problem", problems)
        assert f"Service default/thief: {words}; see" in "\n".join(cluster.agent.lines())

        def told() -> list[Object]:
            found = cluster.kube.list("Event")["items"]
            mine = [each for each in found if each["regarding"]["name"] == "thief"]
            return [each for each in mine if each["reason"] == "AddressRefused"]

        assert {event["note"] for event in until("an Event is stored", told)} == {words}
    until("no problem is reported", lambda: not problems())


def answers(cluster: Cluster, seconds: float) -> str:
    """The backend that answers a process of the node at the API server's address, "" if none."""
    host, number = server(cluster)
    found = cluster["host-1"].tcp(host, number, timeout=seconds)
    return str(found.get("name", ""))


@pytest.mark.parametrize("hooks", ["on", "off"])
def test_the_agent_reaches_a_hijacked_api_server(cluster: Cluster, hooks: str):
    """`off`: the hooks do not translate the node's sockets; then tc_egress would."""
    agent, (host, number) = cluster.agent, server(cluster)
    arguments = ("--kubeconfig", str(cluster.kubeconfig()), "--socket-lb", hooks)
    agent.kill()
    agent.start(extra=arguments)
    made = hijacker(cluster, INNOCENT)
    cluster.create(*made)
    cluster.settle()
    agent.kill()
    with Map.open(agent.pin_dir / f"maps-{schema_hash()}" / "services") as services:
        behind = services.lookup(Target(parse_addr(INNOCENT), number, Protocol.TCP).pack())
        assert behind is not None
        key = Target(parse_addr(host), number, Protocol.TCP).pack()
        services.update(key, ServiceValue.unpack(behind).pack(key))
    assert answers(cluster, PATIENCE) == "a1", "other processes are hijacked"
    cluster.delete(*made)
    agent.start(extra=arguments)
    assert f"{host}:{number}/TCP" not in cluster.served(), "the agent has received the deletion"
    assert answers(cluster, 5.0) == ""
    agent.kill()
    cluster.start(agent)
