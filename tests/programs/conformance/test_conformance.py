# SPDX-License-Identifier: Apache-2.0
"""One table for all data planes: what is programmed before a change, the change, and what has to be
programmed after it. Each row runs on BPF, on a fake IPVS and, on kernels that have it, on IPVS, in
each of WAYS. What is programmed is read back by the readers of `kbpf inspect`, without the plane's
memory.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.dataplane.base import Report
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.ipvs import ipvs_inspect as inspect
from kbpf.dataplane.ipvs import statefile
from kbpf.model.address import format_addr, format_endpoint
from kbpf.model.desired import FrontendKind, ServicePortKey, ServiceState
from kbpf.model.inspection import FrontendEntry, Part, ServicePort
from kbpf.model.objects import Algorithm
from tests.support.faults.fake_ipvs import Node, fake_node, real_node
from tests.support.features import needs
from tests.support.plane import Site, desired, flush, services
from tests.support.table import each_row, table

__all__ = ["fake_node", "real_node"]

A, B, C = "10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"
NODES = "198.18.0.1 198.18.0.2 fd00:18::1"
NAMES = {
    **{"A": A, "B": B, "C": C, "A6": "[fd00::a]:8080", "B6": "[fd00::b]:8080"},
    **{"VIP": "10.96.0.1:80", "PORT": "NodePort=0.0.0.0:30080"},
    **{"LB": "LoadBalancer=192.0.2.1:80", "EXT": "ExternalIP=192.0.2.2:80"},
}


class Row(NamedTuple):
    """Service ports before a change and after it, and each frontend then, as show() prints it."""

    name: str
    before: str
    after: str
    expected: str = ""


def service_ports(text: str) -> list[ServiceState]:
    return services(text, NAMES)


def frontends(text: str) -> list[str]:
    shown = re.sub(r"\w+", lambda word: NAMES.get(word[0], word[0]), text)
    return sorted(filter(None, shown.split(" / ")))


ROWS = table(
    Row,
    """
created |  | web VIP -> A B | web VIP/TCP: A B
deleted | web VIP -> A B |  |
one of two is deleted | web VIP -> A B; w2 10.96.0.2:80 -> A | web VIP -> A B | web VIP/TCP: A B
a backend more | web VIP -> A | web VIP -> A B | web VIP/TCP: A B
a backend less | web VIP -> A B | web VIP -> B | web VIP/TCP: B
other backends | web VIP -> A | web VIP -> B C | web VIP/TCP: B C
no backend any more | web VIP -> A B | web VIP | web VIP/TCP:
backends again | web VIP | web VIP -> A B | web VIP/TCP: A B
UDP and SCTP beside TCP | web VIP -> A B; u:UDP VIP -> A | \
    web VIP -> A B; u:UDP VIP -> B; s:SCTP VIP -> A | s VIP/SCTP: A / u VIP/UDP: B / web VIP/TCP: A B
IPv6 beside IPv4 | web VIP -> A B | web VIP -> A B; web6 [fd00:96::1]:80 NodePort=[::]:30080 -> A6 B6 | \
    web VIP/TCP: A B / web6 NodePort=[::]:30080/TCP: A6 B6 / web6 [fd00:96::1]:80/TCP: A6 B6
all kinds of frontends | web VIP -> A B | \
    web VIP PORT LB EXT -> A B | web EXT/TCP: A B / web LB/TCP: A B / web PORT/TCP: A B / web VIP/TCP: A B
fewer kinds of frontends | web VIP PORT LB EXT -> A B | web VIP EXT -> A B | web EXT/TCP: A B / web VIP/TCP: A B
another port | web VIP -> A B | web 10.96.0.1:81 -> A B | web 10.96.0.1:81/TCP: A B
another Service takes the address | web VIP -> A | new VIP -> B | new VIP/TCP: B
two Services exchange addresses | web VIP -> A; w2 10.96.0.2:80 -> B | \
    web 10.96.0.2:80 -> A; w2 VIP -> B | w2 VIP/TCP: B / web 10.96.0.2:80/TCP: A
external Local | web VIP PORT LB -> A B | \
    web VIP PORT LB -> A B local=A external=Local | web LB/TCP local: A / web PORT/TCP local: A / web VIP/TCP: A B
external Local, none here |  | web VIP LB -> A B external=Local | web LB/TCP local: / web VIP/TCP: A B
external Cluster again | web VIP PORT -> A B local=A external=Local | \
    web VIP PORT -> A B | web PORT/TCP: A B / web VIP/TCP: A B
internal Local | web VIP EXT -> A B | \
    web VIP EXT -> A B local=B internal=Local | web EXT/TCP: A B / web VIP/TCP local: B
weights | web VIP -> A B | web VIP -> A B cluster_weights=3,1 | web VIP/TCP: A*3 B
no weights any more | web VIP -> A B cluster_weights=3,1 | web VIP -> A B | web VIP/TCP: A B
affinity | web VIP -> A B | web VIP -> A B affinity=100 | web VIP/TCP affinity=100: A B
no affinity any more | web VIP -> A B affinity=100 | web VIP -> A | web VIP/TCP: A
source ranges | web VIP LB -> A B | \
    web VIP LB -> A B ranges=203.0.113.0/24 | web LB/TCP restricted: A B / web VIP/TCP: A B
no source ranges any more | web VIP LB -> A B ranges=203.0.113.0/24 | \
    web VIP LB -> A B | web LB/TCP: A B / web VIP/TCP: A B
Maglev | web VIP -> A | web VIP -> A algorithm=MAGLEV | web VIP/TCP MAGLEV: A
Maglev with weights and affinity | web VIP -> A B algorithm=MAGLEV | \
    web VIP -> A B C algorithm=MAGLEV cluster_weights=1,3,2 affinity=60 | web VIP/TCP affinity=60 MAGLEV: A B C
two Services have the same backends | web VIP -> A B | web VIP -> A B C; twin 10.96.0.8:80 -> A B C affinity=5 | \
    twin 10.96.0.8:80/TCP affinity=5: A B C / web VIP/TCP: A B C
""",
)


def show(ports: Iterable[ServicePort]) -> list[str]:
    """The frontends with the backends that a client outside reaches, sorted."""
    return sorted(_show(port, frontend) for port in ports for frontend in port.frontends)


def _show(port: ServicePort, frontend: FrontendEntry) -> str:
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


class BpfBench:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._plane: BpfPlane | None = None

    def start(self) -> None:
        self._plane = self._site.open()

    def apply(self, states: Sequence[ServiceState], touched: Sequence[ServicePortKey] | None) -> Report:
        return self._plane.apply(desired(*states, nodes=NODES), touched)

    def show(self) -> list[str]:
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


Bench = BpfBench | IpvsBench
"""A data plane under test. start() is also a restart."""


@pytest.fixture(params=["bpf", "fake-ipvs", pytest.param("ipvs", marks=needs("ipvs"))])
def bench(request) -> Bench:
    if request.param == "bpf":
        return BpfBench(request.getfixturevalue("site"))
    name = "fake_node" if request.param == "fake-ipvs" else "real_node"
    return IpvsBench(request.getfixturevalue(name))


# ---- the ways ------------------------------------------------------------------------------------


def by_events(bench: Bench, row: Row) -> None:
    """Service ports change one by one; those that are removed first."""
    states: dict[ServicePortKey, ServiceState] = {}
    bench.apply([], None)
    for goal in (service_ports(row.before), service_ports(row.after)):
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
    for states in (service_ports(row.before), service_ports(row.before), service_ports(row.after)):
        bench.apply(states, None)
    assert bench.apply(service_ports(row.after), None).writes == {}


def restarted(bench: Bench, row: Row) -> None:
    bench.apply(service_ports(row.before), None)
    bench.start()
    bench.apply(service_ports(row.after), None)
    bench.start()
    assert bench.apply(service_ports(row.after), None).writes == {}


WAYS = (by_events, twice, restarted)


@each_row(ROWS)
def test_change_is_programmed_in_every_way(bench: Bench, row: Row):
    way: Callable[[Bench, Row], None]
    for way in WAYS:
        bench.start()
        bench.apply([], None)
        way(bench, row)
        assert bench.show() == frontends(row.expected), way.__name__


def test_rows_follow_each_other(bench: Bench):
    """Whatever was programmed before, by this agent or by the last one."""
    for number, row in enumerate(random.Random(1).sample(2 * ROWS, 2 * len(ROWS))):
        if number % 4 == 0:
            bench.start()
        bench.apply(service_ports(row.after), None)
        assert bench.show() == frontends(row.expected), row.name
