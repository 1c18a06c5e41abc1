# SPDX-License-Identifier: Apache-2.0
"""The lab without namespaces: its places as addresses, the state that their nodes' agents would
program, and a model of which backend answers a dial.

The rows of tests/rows are written once and proven three times: the lab dials them, tests/programs
sends them as packets to programs that serve `programmed()`, and tests/values compares them with
`answer()`, which evaluates the same state.
"""

import functools
from collections.abc import Callable
from enum import StrEnum
from ipaddress import ip_address
from typing import NamedTuple

from kbpf.model.address import ANY4, ANY6, Addr, family_of, format_addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import (
    Backend,
    BackendSet,
    DesiredState,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServiceState,
)
from kbpf.model.events import Kind, Upsert
from kbpf.model.objects import Protocol
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.endpoints import select_endpoints
from kbpf.policy.store import ObjectStore
from kbpf.source.decode import decode
from tests.rows import outside, policy, services
from tests.support.cluster.kube_objects import Object, node
from tests.support.lab import field
from tests.support.lab.dial import CLOSED, DROPPED, REFUSED, UNSERVED, Dial
from tests.support.lab.placed import Placed
from tests.support.plane import split

# ---- places --------------------------------------------------------------------------------------


class Spot(NamedTuple):
    """A place: its name and addresses."""

    name: str
    ip: str
    ip6: str


class Home(NamedTuple):
    """A node; `addresses` are all addresses of its devices."""

    number: int
    ip: str
    ip6: str
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its Node object."""
        return f"node-{self.number}"


def _home(number: int) -> Home:
    gates = (f"10.244.{number}.1", f"fd00:10:244:{number}::1")
    own = (f"198.18.0.{number}", f"fd00:198:18::{number}")
    return Home(number, *own, (*own, *gates, "198.51.100.74"))


class Paper(Placed):
    """Two nodes with three pods each, as in Cluster and Field, and the outside client, whose home
    is the node that its router sends packets for Services to.
    """

    def __init__(self) -> None:
        self.homes = {number: _home(number) for number in (1, 2)}
        self.places: dict[str, Spot] = {}
        self.home: dict[str, Home] = {}
        for letter, (number, home) in zip("ab", self.homes.items(), strict=True):
            for i in (1, 2, 3):
                pod = (f"10.244.{number}.{i + 1}", f"fd00:10:244:{number}::{i + 1}")
                self._put(home, f"{letter}{i}", *pod)
            for name in (f"host-{number}", f"{letter}-net"):
                self._put(home, name, home.ip, home.ip6)
        self._put(self.homes[1], "outside", field.OUT4, field.OUT6)
        self._names = {ip: each.name for each in self.places.values() for ip in each[1:]}

    def _put(self, home: Home, name: str, *addresses: str) -> None:
        self.places[name], self.home[name] = Spot(name, *addresses), home

    def name_of(self, address: Addr | str) -> str:
        """The place with this address; for a node's address its host-network pod."""
        return self._names[address if isinstance(address, str) else format_addr(address)]

    def is_host(self, name: str) -> bool:
        """Whether this place is in its node's network namespace."""
        return self.places[name].ip == self.home[name].ip


PAPER = Paper()

# ---- the programmed state ------------------------------------------------------------------------


class Table(NamedTuple):
    """Objects and the rows about them. `packets`: whether the lab's nodes have the packet path
    on.
    """

    name: str
    objects: Callable[[Placed], list[Object]]
    rows: tuple[Dial, ...]
    packets: bool


TABLES = (
    Table("services", services.objects, services.ROWS, False),
    Table("policy", policy.objects, policy.ROWS, False),
    Table("outside", outside.objects, outside.ROWS, True),
)


class OnNode(NamedTuple):
    """The objects that an agent has received, and the desired state computed from them."""

    world: ObjectStore
    state: DesiredState


@functools.cache
def programmed(table: Table, number: int) -> OnNode:
    """The table's objects on this node, decoded and computed by the agent's own source and
    policy.
    """
    home = PAPER.homes[number]
    nodes = (node(n.name, n.ip, n.ip6, zone=f"zone-{n.number}") for n in PAPER.homes.values())
    items = [decode.convert_object(Kind(o["kind"]), o) for o in (*table.objects(PAPER), *nodes)]
    assert [item.error for item in items if item.error] == []
    world, desired = ObjectStore(home.name), DesiredStateBuilder()
    touched = world.apply(Upsert(item.key, item.object) for item in items if item.object)
    desired.update(world, touched, tuple(map(parse_addr, home.addresses)), Config())
    return OnNode(world, desired.state)


# ---- the answer to a dial ------------------------------------------------------------------------


class Verdict(StrEnum):
    TRANSLATE = "translate"
    REFUSE = "refuse"
    DROP = "drop"
    PASS = "pass"


class Hop(NamedTuple):
    """A place where a dial is decided: by the client's socket on this node, or by its packets, with
    the sender `source`. `outside`: the client is not of this node; `host`: it is the node itself.
    """

    number: int
    source: Addr | None = None
    outside: bool = False
    host: bool = False

    def __str__(self) -> str:
        how = f"packets of {format_addr(self.source)}" if self.source else "a socket"
        return f"node-{self.number}, {how}{' from outside' if self.outside else ''}"


class Answer(NamedTuple):
    """A node's verdict and the reason for it."""

    verdict: Verdict
    why: str
    backends: BackendSet = ()
    service: ServiceState | None = None

    def names(self, expected: frozenset[str]) -> frozenset[str]:
        """The places of its backends, with their port unless the bare name is in `expected`."""
        return frozenset(named(one, expected) for one in self.backends)


def named(backend: Backend, expected: frozenset[str]) -> str:
    """A backend in the notation of a row's outcome."""
    name = PAPER.name_of(backend.address)
    return name if name in expected else f"{name}:{backend.port}"


def target(row: Dial) -> FrontendAddress:
    protocol = row.protocol.removesuffix("-connected").upper()
    return FrontendAddress(*split(row.to), Protocol[protocol])


def expected(row: Dial) -> tuple[Verdict, frozenset[str]]:
    """The outcome of the row. A client that dials its own loopback is passed: only it can
    answer.
    """
    fails = {REFUSED: Verdict.REFUSE, DROPPED: Verdict.DROP, field.DROPPED: Verdict.DROP}
    own = bool(row.backend_sees) and ip_address(row.backend_sees).is_loopback
    if own or row.outcome in (UNSERVED, CLOSED):
        return Verdict.PASS, frozenset()
    if row.outcome in fails:
        return fails[row.outcome], frozenset()
    return Verdict.TRANSLATE, frozenset(row.outcome.split())


def hops(row: Dial, sockets: bool, packets: bool) -> list[Hop]:
    """The places where the row is decided, in order; one that passes it leaves it to the next."""
    address = target(row).address
    client = row.client.removesuffix("!")
    place, home = PAPER.places[client], PAPER.home[client].number
    source = parse_addr(place.ip if family_of(address) == 4 else place.ip6)
    made = []
    if sockets and row.client not in ("outside", f"{client}!"):
        made.append(Hop(home, host=PAPER.is_host(client)))
    there = [n.number for n in PAPER.homes.values() if format_addr(address) in n[1:3]]
    if packets and client != "outside":
        made.append(Hop(home, source))
    if packets and (client == "outside" or there not in ([], [home])):
        made.append(Hop((there or [home])[0], source, outside=True))
    return made


def answer(table: Table, row: Dial) -> Answer:
    found = Answer(Verdict.PASS, "no program decides it")
    for hop in hops(row, sockets=True, packets=table.packets):
        found = decide(programmed(table, hop.number).state, target(row), hop)
        if found.verdict is not Verdict.PASS:
            break
    return found


def decide(state: DesiredState, to: FrontendAddress, hop: Hop) -> Answer:
    """What a data plane with this state must do (docs/design/sets.md)."""
    match = _find(state, to, hop)
    if match is None:
        if to.address in _cluster_ips(state):
            return Answer(Verdict.REFUSE, "a ClusterIP without this port")
        return Answer(Verdict.PASS, "no frontend")
    service, frontend = match
    why = f"{frontend.kind} {frontend.at} of {service.key}"
    if frontend.restricted and not _lets_in(service, hop):
        verdict = Verdict.DROP if hop.source else Verdict.PASS
        return Answer(verdict, f"{why}: source ranges", (), service)
    if frontend.kind is FrontendKind.CLUSTER_IP:
        local = service.internal_local
    else:  # clients of this node take the short circuit
        local = service.external_local and hop.outside
    backends = service.local if local else service.cluster
    why += ": the local set" if local else ": the cluster set"
    if backends:
        return Answer(Verdict.TRANSLATE, why, backends, service)
    drops = local and service.any_endpoints
    return Answer(Verdict.DROP if drops else Verdict.REFUSE, f"{why} is empty", (), service)


def _find(state: DesiredState, to: FrontendAddress, hop: Hop) -> tuple[ServiceState, Frontend] | None:
    """The frontend at exactly this address, else a NodePort if it is an address of the node."""
    every = {each.at: (one, each) for one in state.services.values() for each in one.frontends}
    if to in every:
        return every[to]
    own = to.address in state.node_addresses
    if own or (hop.host and ip_address(format_addr(to.address)).is_loopback):
        wildcard = ANY4 if family_of(to.address) == 4 else ANY6
        return every.get(to._replace(address=wildcard))
    return None


def _cluster_ips(state: DesiredState) -> set[Addr]:
    every = (each for one in state.services.values() for each in one.frontends)
    return {each.at.address for each in every if each.kind is FrontendKind.CLUSTER_IP}


def _lets_in(service: ServiceState, hop: Hop) -> bool:
    """Whether the source ranges admit the client; never at connect(), which has no source yet."""
    source = hop.source
    return source is not None and any(cidr.contains(source) for cidr in service.source_ranges)


def explain(table: Table, row: Dial) -> str:
    """Each hop's decision, with the reason for each endpoint of the Service."""
    lines = [str(row)]
    for hop in hops(row, sockets=True, packets=table.packets):
        world, state = programmed(table, hop.number)
        found = decide(state, target(row), hop)
        lines.append(f"{hop}: {found.verdict}, {found.why}")
        if found.service is None:
            continue
        key = found.service.key
        service = world.service(key.service)
        port = next(p for p in service.ports if (p.name, p.protocol) == (key.port, key.protocol))
        chosen = select_endpoints(world.slices(key.service), port, service, world.node, key.family)
        for end in chosen.explain():
            who = PAPER.name_of(end.endpoint.address)
            lines.append(f"  {who} cluster={end.cluster} local={end.local}: {end.text}")
    return "\n".join(lines)
