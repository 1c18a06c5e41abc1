# SPDX-License-Identifier: Apache-2.0
"""NodeLocal DNSCache at the ClusterIP of kube-dns: it answers the node's clients while it runs, and
when it ends, kube-dns answers within a second, also if it is killed and leaves its address and its
rules. Clients are a pod and the node, by UDP and TCP.
"""

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.checks import connect
from kbpf.dataplane.bpf.inspect.snapshot import read as read_snapshot
from tests.lab.neighbours import dns_queries
from tests.lab.neighbours.dns_cache import AT_CACHE, AT_SERVER, WHERE, NodeCache, start_server
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, port, service, slice_port
from tests.support.lab.lab import DIE_WITH_US, Place, inside, ip, until

DNS, UPSTREAM = "10.96.0.10", "10.96.0.11"
METRICS = 9153
ROUNDS = 3


def dns_service(name: str, address: str, server: str) -> list[Object]:
    """A Service as kubeadm's kube-dns, whose pod has the address `server`."""
    protocols = {"dns": "UDP", "dns-tcp": "TCP"}
    ports = [port(53, name=each, protocol=protocol) for each, protocol in protocols.items()]
    slices = [slice_port(53, each, protocol) for each, protocol in protocols.items()]
    ports.append(port(METRICS, target=8080, name="metrics"))
    slices.append(slice_port(8080, "metrics"))
    space = {"namespace": "kube-system"}
    return [
        service(name, *ports, cluster_ip=address, **space),
        endpoint_slice(name, endpoint(server, node="node-1"), ports=slices, **space),
    ]


class Answer(NamedTuple):
    """A line of dns_queries.py."""

    time: float
    protocol: str
    text: str


class Queries:
    """A client's queries to kube-dns, in a loop."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self._output = folder / f"queries.{place.name}"
        command = ("/usr/bin/python3", "-S", dns_queries.__file__, DNS, WHERE)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*DIE_WITH_US, *inside(place.netns, place.cgroup, *command)], stdout=output
            )

    def read(self, protocol: str) -> list[Answer]:
        rows = [line.split() for line in self._output.read_text().splitlines()[:-1]]
        answers = [Answer(float(at), *words) for at, *words in rows]
        return [answer for answer in answers if answer.protocol == protocol]

    def last(self, protocol: str, count: int = 3) -> set[str]:
        return {answer.text for answer in self.read(protocol)[-count:]}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module", params=["on", "off"])
def socket_lb(request: pytest.FixtureRequest) -> str:
    """Whether connections are translated at the socket or by the packet path."""
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(programs: None, socket_lb: str) -> Iterator[Cluster]:
    with Cluster(1, "nd", arguments=("--socket-lb", socket_lb)) as made:
        for place in (made["a3"], made["host-1"]):
            ip("route del unreachable 10.96.0.0/16", netns=place.netns)
        with made.given(*dns_service("kube-dns", DNS, made["a1"].ip),
                        *dns_service("kube-dns-upstream", UPSTREAM, made["a1"].ip)):  # fmt: skip
            yield made


@pytest.fixture
def server(cluster: Cluster) -> Iterator[None]:
    process = start_server(cluster["a1"], cluster.lab.folder)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cache(cluster: Cluster) -> Iterator[NodeCache]:
    made = NodeCache(cluster.lab.nodes[0], DNS, UPSTREAM)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def clients(cluster: Cluster, server: None, socket_lb: str) -> Iterator[list[Queries]]:
    """A pod and the node. Without the socket hooks the node's packets to an address of a device
    stay on the node, so kube-dns cannot answer them while a killed cache leaves its address.
    """
    names = ("a3", "host-1") if socket_lb == "on" else ("a3",)
    made = [Queries(cluster[name], cluster.lab.folder) for name in names]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def answered_by(clients: list[Queries], address: str) -> Callable[[], bool]:
    return lambda: all(
        client.last(protocol) == {address} for client in clients for protocol in ("udp", "tcp")
    )


def show(clients: list[Queries]) -> Callable[[], object]:
    return lambda: {
        (client.place.name, protocol): client.read(protocol)[-3:]
        for client in clients
        for protocol in ("udp", "tcp")
    }


def test_a_cache_serves_and_when_it_ends_the_service_does(
    cluster: Cluster, cache: NodeCache, clients: list[Queries]
) -> None:
    until("kube-dns answers", answered_by(clients, AT_SERVER), state=show(clients))
    seconds: dict[signal.Signals, list[float]] = {signal.SIGTERM: [], signal.SIGKILL: []}
    for number in ROUNDS * [signal.SIGTERM, signal.SIGKILL]:
        began = time.monotonic()
        cache.start()
        until("the cache answers", answered_by(clients, AT_CACHE), state=show(clients))
        assert failures(clients, began)[:3] == [], "kube-dns answered until the cache did"
        cache.add_rules()
        until("its rules exist", cache.has_rules)
        until("the status has it", lambda: len(left_to_node(cluster)) == 2)
        snapshot = read_snapshot(cluster.agent.pin_dir, connect.NEEDS)
        (row,) = connect.left_to_node_rows(snapshot)
        assert row.detail.count(f"{DNS}:53") == 2
        for client in clients:
            assert "error" not in client.place.tcp(DNS, METRICS), "where the cache does not listen"
        began = time.monotonic()
        cache.end(number)
        until("kube-dns answers again", answered_by(clients, AT_SERVER), state=show(clients))
        assert cache.has_address() == cache.has_rules() == (number == signal.SIGKILL)
        until("the status has it no more", lambda: not left_to_node(cluster))
        seconds[number].append(
            max(
                seconds_without(client.read(protocol), began)
                for client in clients
                for protocol in ("udp", "tcp")
            )
        )
    print({number.name: each for number, each in seconds.items()}, file=sys.stderr)
    assert {number for number in seconds if statistics.median(seconds[number]) > 1} == set()


def failures(clients: list[Queries], since: float) -> list[Answer]:
    return [
        answer
        for client in clients
        for protocol in ("udp", "tcp")
        for answer in client.read(protocol)
        if answer.time > since and answer.text not in (AT_CACHE, AT_SERVER)
    ]


def seconds_without(answers: list[Answer], began: float) -> float:
    """From `began` to the first answer of kube-dns after which there are no others."""
    recovered = None
    for answer in answers:
        if answer.time > began:
            recovered = None if answer.text != AT_SERVER else recovered or answer.time
    assert recovered is not None
    return recovered - began


def left_to_node(cluster: Cluster) -> list[str]:
    return list((cluster.agent.status() or {})["left_to_node"])
