# SPDX-License-Identifier: Apache-2.0
"""A Service that claims the address of a real API server is refused. If it is programmed anyway,
the agent still reaches the API server, even through hooks that were pinned before it started.
"""

import urllib.parse
from collections.abc import Iterable

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
    node,
    port,
    service,
    slice_port,
)
from tests.support.lab.lab import PATIENCE, Place, ip, until

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


def test_an_address_of_another_node_is_refused(cluster: Cluster):
    """Refused while such a Node exists. All Nodes are watched, since there are few."""
    elsewhere = node("elsewhere", INNOCENT)
    at = f"{INNOCENT}:{server(cluster)[1]}/TCP"

    def problems() -> list[str]:
        status = cluster.agent.status()
        assert status is not None
        words = f"{at} is not served: it is an address of another node"
        return [line for line in status["problems"] if words in line]

    with cluster.given(*hijacker(cluster, INNOCENT)):
        assert at in cluster.served()
        cluster.kube.create(elsewhere)
        try:
            until("the refusal is a problem", problems)
            assert at not in cluster.served()
        finally:
            cluster.kube.delete("Node", "elsewhere")
        until("no problem is reported", lambda: not problems())
        assert at in cluster.served()


def test_a_cluster_ip_on_a_device_is_left_to_the_node(cluster: Cluster):
    """Pods and the node reach what listens there, on any port, and the Service while nothing does:
    after the address appears, after the process ends, and once the address is gone. A node-local
    DNS cache is in tests/lab/neighbours.
    """
    address, home, where = "10.96.0.30", cluster["host-1"], cluster.lab.nodes[0].netns
    clients = (cluster["a3"], home)
    local = Place("local", where, cluster.lab.nodes[0].cgroup / "local")
    with cluster.given(*cluster.web(30, "a1")):
        assert {client.tcp(address, 80).get("name") for client in clients} == {"a1"}
        assert "error" in clients[0].tcp(address, 8089), "a port that no Service has"
        pod = clients[0].netns
        ip("route del unreachable 10.96.0.0/16", netns=pod)  # which shows missing translation
        ip("link add nodelocal type bridge", f"addr add {address}/32 dev nodelocal", netns=where)
        try:
            answers_from(clients, address, "a1")
            local.serve(80, 8089, udp=(80,), address=address)
            lines = [f"{address}:80/TCP of Service default/web-30"]
            until(  # written once all maps are
                "the status has it", lambda: (cluster.agent.status() or {})["left_to_node"] == lines
            )
            assert f"{address}:80/TCP" not in cluster.served()
            for client in clients:
                assert client.tcp(address, 80)["name"] == local.name
                assert client.udp(address, 80)["name"] == local.name
                assert client.tcp(address, 8089)["name"] == local.name
            local.close()
            answers_from(clients, address, "a1")
        finally:
            ip("link del nodelocal", netns=where)
            ip("route add unreachable 10.96.0.0/16", netns=pod)
        answers_from(clients, address, "a1")


def answers_from(clients: Iterable[Place], address: str, name: str) -> None:
    for client in clients:
        until(f"{name} answers", lambda at=client: at.tcp(address, 80).get("name") == name)


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
