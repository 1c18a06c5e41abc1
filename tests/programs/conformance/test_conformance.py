# SPDX-License-Identifier: Apache-2.0
"""One table for all data planes: what is programmed before a change, the change, and what has to be
programmed after it. Each row runs on BPF, on a fake IPVS and, on kernels that have it, on IPVS, in
each of WAYS. What is programmed is read back by the readers of `kbpf inspect`, without the plane's
memory.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

from kbpf.dataplane.base import Report
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.ipvs import ipvs_inspect as inspect
from kbpf.dataplane.ipvs import statefile
from kbpf.model import objects
from kbpf.model.address import format_addr, format_endpoint
from kbpf.model.desired import FrontendKind, ServicePortKey, ServiceState
from kbpf.model.inspection import FrontendEntry, Part, ServicePort
from kbpf.model.objects import Algorithm
from tests.support.faults.fake_ipvs import Node, fake_node, real_node
from tests.support.features import needs
from tests.support.plane import Site, desired, flush, service

__all__ = ["fake_node", "real_node"]

UDP, SCTP = objects.Protocol.UDP, objects.Protocol.SCTP
A, B, C = "10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"
A6, B6 = "[fd00::a]:8080", "[fd00::b]:8080"
NODES = "198.18.0.1 198.18.0.2 fd00:18::1"
VIP, PORT = "10.96.0.1:80", "NodePort=0.0.0.0:30080"
LB, EXT = "LoadBalancer=192.0.2.1:80", "ExternalIP=192.0.2.2:80"
LOCAL = {"external_local": True}


class Row(NamedTuple):
    """`expected`: a line for each frontend, as show() prints it."""

    name: str
    before: list[ServiceState]
    after: list[ServiceState]
    expected: str


def web(to: str = f"{A} {B}", frontends: str = VIP, **more: Any) -> ServiceState:
    return service("web", frontends, to, **more)


ROWS = [
    Row("created", [], [web()], f"web {VIP}/TCP: {A} {B}"),
    Row("deleted", [web()], [], ""),
    Row("one of two is deleted", [web(), service("w2", "10.96.0.2:80", A)], [web()], f"web {VIP}/TCP: {A} {B}"),
    Row("a backend more", [web(A)], [web()], f"web {VIP}/TCP: {A} {B}"),
    Row("a backend less", [web()], [web(B)], f"web {VIP}/TCP: {B}"),
    Row("other backends", [web(A)], [web(f"{B} {C}")], f"web {VIP}/TCP: {B} {C}"),
    Row("no backend any more", [web()], [web("")], f"web {VIP}/TCP:"),
    Row("backends again", [web("")], [web()], f"web {VIP}/TCP: {A} {B}"),
    Row(
        "UDP and SCTP beside TCP",
        [web(), service("u", VIP, A, UDP)],
        [web(), service("u", VIP, B, UDP), service("s", VIP, A, SCTP)],
        f"s {VIP}/SCTP: {A}\nu {VIP}/UDP: {B}\nweb {VIP}/TCP: {A} {B}",
    ),
    Row(
        "IPv6 beside IPv4",
        [web()],
        [web(), service("web6", "[fd00:96::1]:80 NodePort=[::]:30080", f"{A6} {B6}")],
        f"web {VIP}/TCP: {A} {B}\nweb6 NodePort=[::]:30080/TCP: {A6} {B6}\nweb6 [fd00:96::1]:80/TCP: {A6} {B6}",
    ),
    Row(
        "all kinds of frontends",
        [web()],
        [web(frontends=f"{VIP} {PORT} {LB} {EXT}")],
        "\n".join(f"web {at}/TCP: {A} {B}" for at in (EXT, LB, PORT, VIP)),
    ),
    Row(
        "fewer kinds of frontends",
        [web(frontends=f"{VIP} {PORT} {LB} {EXT}")],
        [web(frontends=f"{VIP} {EXT}")],
        f"web {EXT}/TCP: {A} {B}\nweb {VIP}/TCP: {A} {B}",
    ),
    Row("another port", [web()], [web(frontends="10.96.0.1:81")], f"web 10.96.0.1:81/TCP: {A} {B}"),
    Row("another Service takes the address", [web(A)], [service("new", VIP, B)], f"new {VIP}/TCP: {B}"),
    Row(
        "two Services exchange addresses",
        [web(A), service("w2", "10.96.0.2:80", B)],
        [web(A, "10.96.0.2:80"), service("w2", VIP, B)],
        f"w2 {VIP}/TCP: {B}\nweb 10.96.0.2:80/TCP: {A}",
    ),
    Row(
        "external Local",
        [web(frontends=f"{VIP} {PORT} {LB}")],
        [web(frontends=f"{VIP} {PORT} {LB}", local=A, **LOCAL)],
        f"web {LB}/TCP local: {A}\nweb {PORT}/TCP local: {A}\nweb {VIP}/TCP: {A} {B}",
    ),
    Row(
        "external Local, none here",
        [],
        [web(frontends=f"{VIP} {LB}", **LOCAL)],
        f"web {LB}/TCP local:\nweb {VIP}/TCP: {A} {B}",
    ),
    Row(
        "external Cluster again",
        [web(frontends=f"{VIP} {PORT}", local=A, **LOCAL)],
        [web(frontends=f"{VIP} {PORT}")],
        f"web {PORT}/TCP: {A} {B}\nweb {VIP}/TCP: {A} {B}",
    ),
    Row(
        "internal Local",
        [web(frontends=f"{VIP} {EXT}")],
        [web(frontends=f"{VIP} {EXT}", local=B, internal_local=True)],
        f"web {EXT}/TCP: {A} {B}\nweb {VIP}/TCP local: {B}",
    ),
    Row("weights", [web()], [web(cluster_weights=(3, 1))], f"web {VIP}/TCP: {A}*3 {B}"),
    Row("no weights any more", [web(cluster_weights=(3, 1))], [web()], f"web {VIP}/TCP: {A} {B}"),
    Row("affinity", [web()], [web(affinity_timeout=100)], f"web {VIP}/TCP affinity=100: {A} {B}"),
    Row("no affinity any more", [web(affinity_timeout=100)], [web(A)], f"web {VIP}/TCP: {A}"),
    Row(
        "source ranges",
        [web(frontends=f"{VIP} {LB}")],
        [web(frontends=f"{VIP} {LB}", ranges="203.0.113.0/24")],
        f"web {LB}/TCP restricted: {A} {B}\nweb {VIP}/TCP: {A} {B}",
    ),
    Row(
        "no source ranges any more",
        [web(frontends=f"{VIP} {LB}", ranges="203.0.113.0/24")],
        [web(frontends=f"{VIP} {LB}")],
        f"web {LB}/TCP: {A} {B}\nweb {VIP}/TCP: {A} {B}",
    ),
    Row("Maglev", [web(A)], [web(A, algorithm=Algorithm.MAGLEV)], f"web {VIP}/TCP MAGLEV: {A}"),
]


def show(ports: Iterable[ServicePort]) -> list[str]:
    """The frontends with the backends that a client outside reaches, sorted."""
    return sorted(_show(port, frontend) for port in ports for frontend in port.frontends)


def _show(port: ServicePort, frontend: FrontendEntry) -> str:
    assert port.key is not None
    is_cluster_ip = frontend.kind is FrontendKind.CLUSTER_IP
    at = frontend.at
    kind = "" if is_cluster_ip else f"{frontend.kind}="
    is_local = port.internal_local if is_cluster_ip else port.external_local
    counts = Counter(
        format_endpoint(entry.backend.address, entry.backend.port)
        for entry in (frontend.local if is_local else frontend.cluster).slots.values()
        if entry.backend is not None
    )
    if port.algorithm is Algorithm.MAGLEV:  # its table has many slots for each backend
        counts = Counter(set(counts))
    words = [
        f"{port.key.name} {kind}{format_endpoint(at.address, at.port)}/{at.protocol.name}",
        *(["local"] if is_local else []),
        *([f"affinity={port.affinity_timeout}"] if port.affinity_timeout else []),
        *(["restricted"] if frontend.restricted else []),
        *([port.algorithm.name] if port.algorithm is not Algorithm.RANDOM else []),
    ]
    backends = (f"{at}*{n}" if n > 1 else at for at, n in sorted(counts.items()))
    return " ".join([f"{' '.join(words)}:", *backends])


# ---- the data planes -----------------------------------------------------------------------------


class Bench(Protocol):
    """A data plane under test. start() is also a restart."""

    def start(self) -> object: ...

    def apply(self, states: Sequence[ServiceState], touched: Sequence[ServicePortKey] | None) -> Report: ...

    def show(self) -> list[str]: ...


class BpfBench:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._plane: BpfPlane | None = None

    def start(self) -> None:
        self._plane = self._site.open()

    def apply(self, states: Sequence[ServiceState], touched: Sequence[ServicePortKey] | None) -> Report:
        assert self._plane is not None
        return self._plane.apply(desired(*states, nodes=NODES), touched)

    def show(self) -> list[str]:
        assert self._plane is not None
        flush(self._plane)
        assert self._site.dump()["strays"] == {}
        return show(snapshot.read(self._site.pins, Part.SERVICES | Part.NAMES).services)


class IpvsBench:
    def __init__(self, node: Node) -> None:
        self._node = node

    def start(self) -> None:
        self._node.start()

    def apply(self, states: Sequence[ServiceState], touched: Sequence[ServicePortKey] | None) -> Report:
        return self._node.apply(*states, nodes=NODES, touched=touched)

    def show(self) -> list[str]:
        self._node.tick()  # removes what was drained
        self._node.plane.write_status(b"")
        folder: Path = self._node.config.ipvs_folder
        read = inspect._read_servers
        servers = self._node.do(read)
        ports = statefile.read_services(folder)
        at = {(v.protocol, format_addr(v.address), v.port) for v in servers if not v.fwmark}
        for port in ports:  # on each address of the node that has this family
            state = port.state
            for frontend in state.frontends:
                hosts = (
                    [one for one in NODES.split() if (":" in one) == (state.key.family == 6)]
                    if frontend.kind is FrontendKind.NODE_PORT
                    else [format_addr(frontend.at.address)]
                )
                assert at >= {(frontend.at.protocol, host, frontend.at.port) for host in hosts}
        return show(inspect.build_inspection(folder, ports, servers).services)


@pytest.fixture(params=["bpf", "fake-ipvs", pytest.param("ipvs", marks=needs("ipvs"))])
def bench(request: pytest.FixtureRequest) -> Bench:
    if request.param == "bpf":
        return BpfBench(request.getfixturevalue("site"))
    name = "fake_node" if request.param == "fake-ipvs" else "real_node"
    return IpvsBench(request.getfixturevalue(name))


# ---- the ways ------------------------------------------------------------------------------------


def at_once(bench: Bench, row: Row) -> None:
    bench.apply(row.before, None)
    bench.apply(row.after, None)


def backwards(bench: Bench, row: Row) -> None:
    bench.apply(row.before[::-1], None)
    bench.apply(row.after[::-1], None)


def by_events(bench: Bench, row: Row) -> None:
    """Service ports change one by one; those that are removed first."""
    states: dict[ServicePortKey, ServiceState] = {}
    bench.apply([], None)
    for goal in (row.before, row.after):
        changed = {state.key: state for state in goal if states.get(state.key) != state}
        for key in states.keys() - {state.key for state in goal}:
            del states[key]
            bench.apply([*states.values()], [key])
        # Two Services cannot have one address: a Service that takes one waits for its release.
        moved = {at.at for state in changed.values() for at in state.frontends}
        for key in [k for k in changed if k in states and len(changed) > 1]:
            if moved & {frontend.at for frontend in states[key].frontends}:
                del states[key]
                bench.apply([*states.values()], [key])
        for key, state in changed.items():
            states[key] = state
            bench.apply([*states.values()], [key])


def twice(bench: Bench, row: Row) -> None:
    for states in (row.before, row.before, row.after):
        bench.apply(states, None)
    assert bench.apply(row.after, None).writes == {}


def restarted(bench: Bench, row: Row) -> None:
    bench.apply(row.before, None)
    bench.start()
    bench.apply(row.after, None)
    bench.start()
    assert bench.apply(row.after, None).writes == {}


def back_and_forth(bench: Bench, row: Row) -> None:
    for states in (row.after, row.before, row.after):
        bench.apply(states, None)


WAYS = (at_once, backwards, by_events, twice, restarted, back_and_forth)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_change_is_programmed_in_every_way(bench: Bench, row: Row):
    way: Callable[[Bench, Row], None]
    for way in WAYS:
        bench.start()
        bench.apply([], None)
        way(bench, row)
        assert bench.show() == sorted(row.expected.splitlines()), way.__name__
