"""The lab on paper: its places as addresses, what their nodes' agents would program, and who then
answers a dial.

The rows of rows_*.py are written once. The lab dials them, tests/programs sends them as packets to
programs that serve `programmed()`, and tests/values asks `answer()`, a reading of the same value.
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
    """A place."""

    name: str
    ip: str
    ip6: str


class Home(NamedTuple):
    """A node; `addresses` are all that it has."""

    number: int
    ip: str
    ip6: str
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        """Kubernetes' name of it."""
        return f"node-{self.number}"


def _home(number: int) -> Home:
    gates = (f"10.244.{number}.1", f"fd00:10:244:{number}::1")
    own = (f"198.18.0.{number}", f"fd00:198:18::{number}")
    return Home(number, *own, (*own, *gates, "198.51.100.74"))


class Paper(Placed):
    """Two nodes with three pods each, as Cluster and Field have them, and the client outside, who
    is at home where its router sends what is for Services.
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
        """Who serves there; at a node's address it is the pod in its network."""
        return self._names[address if isinstance(address, str) else format_addr(address)]

    def is_host(self, name: str) -> bool:
        """Whether this place is in its node's own network."""
        return self.places[name].ip == self.home[name].ip


PAPER = Paper()

# ---- what is programmed --------------------------------------------------------------------------


class Table(NamedTuple):
    """Objects and the rows about them. `packets`: whether the lab's nodes serve those, too."""

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
    """What an agent knows, and what it makes of it."""

    world: ObjectStore
    state: DesiredState


@functools.cache
def programmed(table: Table, number: int) -> OnNode:
    """Those objects on this node, by way of the source and policy as the agent goes it."""
    home = PAPER.homes[number]
    nodes = (node(n.name, n.ip, n.ip6, zone=f"zone-{n.number}") for n in PAPER.homes.values())
    items = [decode.convert_object(Kind(o["kind"]), o) for o in (*table.objects(PAPER), *nodes)]
    assert [item.error for item in items if item.error] == []
    world, desired = ObjectStore(home.name), DesiredStateBuilder()
    touched = world.apply(Upsert(item.key, item.object) for item in items if item.object)
    desired.update(world, touched, tuple(map(parse_addr, home.addresses)), Config())
    return OnNode(world, desired.state)


# ---- who answers ---------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What becomes of a dial."""

    TRANSLATE = "translate"
    REFUSE = "refuse"
    DROP = "drop"
    PASS = "pass"


class Hop(NamedTuple):
    """Where a dial is decided: on this node by the client's socket, or by its packets, of which
    `source` is then the sender. `outside`: it is not of this node; `host`: it is the node itself.
    """

    number: int
    source: Addr | None = None
    outside: bool = False
    host: bool = False

    def __str__(self) -> str:
        how = f"packets of {format_addr(self.source)}" if self.source else "a socket"
        return f"node-{self.number}, {how}{' from outside' if self.outside else ''}"


class Answer(NamedTuple):
    """What a node decides, and why."""

    verdict: Verdict
    why: str
    backends: BackendSet = ()
    service: ServiceState | None = None

    def names(self, expected: frozenset[str]) -> frozenset[str]:
        """The places that it leads to, with the port where that is expected."""
        return frozenset(named(one, expected) for one in self.backends)


def named(backend: Backend, expected: frozenset[str]) -> str:
    """As a row's outcome says it."""
    name = PAPER.name_of(backend.address)
    return name if name in expected else f"{name}:{backend.port}"


def target(row: Dial) -> FrontendAddress:
    """What the row dials."""
    protocol = row.protocol.removesuffix("-connected").upper()
    return FrontendAddress(*split(row.to), Protocol[protocol])


def expected(row: Dial) -> tuple[Verdict, frozenset[str]]:
    """The outcome that the row states. Who dials its own loopback is answered by nobody else."""
    fails = {REFUSED: Verdict.REFUSE, DROPPED: Verdict.DROP, field.DROPPED: Verdict.DROP}
    own = bool(row.backend_sees) and ip_address(row.backend_sees).is_loopback
    if own or row.outcome in (UNSERVED, CLOSED):
        return Verdict.PASS, frozenset()
    if row.outcome in fails:
        return fails[row.outcome], frozenset()
    return Verdict.TRANSLATE, frozenset(row.outcome.split())


def hops(row: Dial, sockets: bool, packets: bool) -> list[Hop]:
    """Where the row is decided, in order: one that passes it leaves it to the next."""
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
    """Who answers the row by what is programmed."""
    found = Answer(Verdict.PASS, "nobody looks at it")
    for hop in hops(row, sockets=True, packets=table.packets):
        found = decide(programmed(table, hop.number).state, target(row), hop)
        if found.verdict is not Verdict.PASS:
            break
    return found


def decide(state: DesiredState, to: FrontendAddress, hop: Hop) -> Answer:
    """What a data plane with this state must do (docs/datapath.md)."""
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
    else:  # who is of this node takes the short circuit
        local = service.external_local and hop.outside
    backends = service.local if local else service.cluster
    why += ": the local set" if local else ": the cluster set"
    if backends:
        return Answer(Verdict.TRANSLATE, why, backends, service)
    drops = local and service.any_endpoints
    return Answer(Verdict.DROP if drops else Verdict.REFUSE, f"{why} is empty", (), service)


def _find(
    state: DesiredState, to: FrontendAddress, hop: Hop
) -> tuple[ServiceState, Frontend] | None:
    """Exactly this address; else a NodePort, if that is an address of the node."""
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
    """Only packets show who sends them."""
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
        assert service is not None
        port = next(p for p in service.ports if (p.name, p.protocol) == (key.port, key.protocol))
        chosen = select_endpoints(world.slices(key.service), port, service, world.node, key.family)
        for end in chosen.explain():
            who = PAPER.name_of(end.endpoint.address)
            lines.append(f"  {who} cluster={end.cluster} local={end.local}: {end.text}")
    return "\n".join(lines)
