"""The objects that are known now. Events go in, the names of touched Services come out.

Rules kept here:
- What an object says stays in force until it is upserted or deleted; a Rejected changes nothing.
- An upsert that says nothing new touches nothing.
- Slices are kept by the Service that they name, so they may come before it or outlive it.
- Of other Nodes only the addresses count; of all Pods, those on our node. What our Node said
  stays in force when it is deleted, as with kube-proxy: a node that serves has to be somewhere.
- The API server's own Service keeps its last endpoints when it is left with none: a server that
  ends takes itself out of the list, and nobody who finds it by this Service, we perhaps among them,
  would ever hear of the next one.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from kbpf.model.address import Addr
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import API_SERVER, EndpointSlice, Node, Pod, Service, ServiceName


@dataclass(slots=True)
class Touched:
    """What has to be computed again: these Services, or everything since our Node changed;
    and whether other Pods are exempt than before. `addresses`: those that a Pod behind a Service
    or another Node has now, or has no more.
    """

    services: set[ServiceName] = field(default_factory=set)
    everything: bool = False
    pods: bool = False
    addresses: set[Addr] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.everything or self.pods or bool(self.services or self.addresses)

    def add(self, other: "Touched") -> None:
        """This and that."""
        self.services |= other.services
        self.everything |= other.everything
        self.pods |= other.pods
        self.addresses |= other.addresses


class World:
    """Services, EndpointSlices, exempt Pods and Nodes, as last told. One thread only."""

    def __init__(self, node_name: str, bind_address: Addr | None = None) -> None:
        self._own = (bind_address,) if bind_address else ()
        self._node = Node(node_name, self._own)
        self._node_known = False
        self._services: dict[ServiceName, Service] = {}
        self._slices: dict[ObjectKey, EndpointSlice] = {}
        self._by_service: dict[ServiceName, dict[str, EndpointSlice]] = {}
        self._api_server: dict[ObjectKey, EndpointSlice] = {}  # its slices as they were said last
        self._pods: dict[ObjectKey, Pod] = {}
        self._pod_addresses: dict[Addr, int] = {}  # in how many slices
        self._other_nodes: dict[str, tuple[Addr, ...]] = {}
        self._node_addresses: dict[Addr, int] = {}  # of how many other Nodes
        self._rejected: dict[ObjectKey, str] = {}
        self._unusable: set[ObjectKey] = set()  # of these, all but Pods
        self._skipped: dict[ObjectKey, tuple[str, ...]] = {}
        self._synced: frozenset[Kind] = frozenset()

    @property
    def node(self) -> Node:
        """Our Node; with nothing but its name while it is not known."""
        return self._node

    @property
    def node_known(self) -> bool:
        """Whether our Node has ever been told."""
        return self._node_known

    @property
    def synced(self) -> frozenset[Kind]:
        """The kinds that have been listed completely at least once."""
        return self._synced

    @property
    def all_usable(self) -> bool:
        """Whether the newest version of every object can be used, but for Pods, which serve
        nothing.
        """
        return not self._unusable

    def problems_of(self, key: ObjectKey) -> tuple[str, ...]:
        """What was left out of this object, a line each: all of its newest version, or parts."""
        error = self._rejected.get(key)
        return (*(() if error is None else (error,)), *self._skipped.get(key, ()))

    @property
    def pods(self) -> Collection[Pod]:
        """The Pods of our node whose sockets are to be left alone."""
        return self._pods.values()

    def names(self) -> Collection[ServiceName]:
        """The Services that exist."""
        return self._services.keys()

    def service(self, name: ServiceName) -> Service | None:
        """The Service of this name."""
        return self._services.get(name)

    def service_of(self, event: Upsert | Delete) -> ServiceName | None:
        """The Service that an event is about."""
        if event.key.kind is Kind.SERVICE:
            return ServiceName(event.key.namespace, event.key.name)
        said = event.object if isinstance(event, Upsert) else None
        return said.service_name if isinstance(said, EndpointSlice) else None

    def size_of(self, name: ServiceName) -> int:
        """How much there is to compute for this Service: about its ports times its endpoints."""
        service = self._services.get(name)
        ports = len(service.ports) if service is not None else 1
        return ports * (
            1 + sum(len(piece.endpoints) for piece in self._by_service.get(name, {}).values())
        )

    def slices(self, name: ServiceName) -> tuple[EndpointSlice, ...]:
        """The slices that name this Service, sorted by their own name."""
        pieces = self._by_service.get(name, {})
        return tuple(pieces[each] for each in sorted(pieces))

    def has_pod(self, address: Addr) -> bool:
        """Whether a Pod behind any Service has this address."""
        return address in self._pod_addresses

    def has_node(self, address: Addr) -> bool:
        """Whether another Node has this address."""
        return address in self._node_addresses

    def apply(self, events: Iterable[Event]) -> Touched:
        """Take in what the sources say, in order; returns what it touches."""
        touched = Touched()
        for event in events:
            if isinstance(event, Synced):
                touched.pods |= event.kind is Kind.POD and Kind.POD not in self._synced
                self._synced |= {event.kind}
            elif event.key.kind is not Kind.NODE or event.key.name == self._node.name:
                self._apply(event, touched)
            elif not isinstance(event, Rejected):
                said = event.object if isinstance(event, Upsert) else None
                assert said is None or isinstance(said, Node)
                self._put_other_node(event.key.name, said.addresses if said else (), touched)
        return touched

    def _apply(self, event: Upsert | Delete | Rejected, touched: Touched) -> None:
        key = event.key
        if isinstance(event, Rejected):
            self._rejected[key] = event.error
            if key.kind is not Kind.POD:
                self._unusable.add(key)
            return
        self._rejected.pop(key, None)
        self._unusable.discard(key)
        said = event.object if isinstance(event, Upsert) else None
        skipped = () if said is None or isinstance(said, Pod) else said.skipped
        if skipped:
            self._skipped[key] = skipped
        else:
            self._skipped.pop(key, None)
        match key.kind:
            case Kind.SERVICE:
                assert said is None or isinstance(said, Service)
                self._put_service(ServiceName(key.namespace, key.name), said, touched)
            case Kind.SLICE:
                assert said is None or isinstance(said, EndpointSlice)
                if API_SERVER in (said.service_name if said else None, self._service_of(key)):
                    self._put_slice_of_api_server(key, said, touched)
                else:
                    self._put_slice(key, said, touched)
            case Kind.NODE:
                assert said is None or isinstance(said, Node)
                self._put_node(said or replace(self._node, leaving=True), touched)
            case Kind.POD:
                assert said is None or isinstance(said, Pod)
                self._put_pod(key, said, touched)
            case _:
                assert_never(key.kind)

    def _put_service(self, name: ServiceName, new: Service | None, touched: Touched) -> None:
        if new == self._services.get(name):
            return
        if new is None:
            del self._services[name]
        else:
            self._services[name] = new
        touched.services.add(name)

    def _service_of(self, key: ObjectKey) -> ServiceName | None:
        """The Service that the slice of this key named last."""
        if key in self._api_server:
            return API_SERVER
        known = self._slices.get(key)
        return known.service_name if known is not None else None

    def _put_slice_of_api_server(
        self, key: ObjectKey, new: EndpointSlice | None, touched: Touched
    ) -> None:
        """All of its slices become as they were said, once one of them has somebody who serves."""
        said = self._api_server
        said.pop(key, None)
        if new is not None and new.service_name == API_SERVER:
            said[key] = new
        elif new is not None:
            self._put_slice(key, new, touched)
        if any(end.ready for piece in said.values() for end in piece.endpoints):
            there = {k for k, piece in self._slices.items() if piece.service_name == API_SERVER}
            for each in there | said.keys():
                self._put_slice(each, said.get(each), touched)

    def _put_slice(self, key: ObjectKey, new: EndpointSlice | None, touched: Touched) -> None:
        old = self._slices.get(key)
        if new == old:
            return
        if old is not None:
            del self._slices[key]
            self._index(old.service_name, old, None)
            touched.services.add(old.service_name)
        if new is not None:
            self._slices[key] = new
            self._index(new.service_name, None, new)
            touched.services.add(new.service_name)
        self._count_pods(old, new, touched)

    def _count_pods(
        self, old: EndpointSlice | None, new: EndpointSlice | None, touched: Touched
    ) -> None:
        before = pod_addresses(old) if old is not None else set()
        after = pod_addresses(new) if new is not None else set()
        touched.addresses |= _count(self._pod_addresses, before, after)

    def _index(
        self, name: ServiceName, old: EndpointSlice | None, new: EndpointSlice | None
    ) -> None:
        pieces = self._by_service.setdefault(name, {})
        if old is not None:
            del pieces[old.name]
        if new is not None:
            pieces[new.name] = new
        if not pieces:
            del self._by_service[name]

    def _put_node(self, new: Node, touched: Touched) -> None:
        if self._own:
            others = (address for address in new.addresses if address not in self._own)
            new = replace(new, addresses=(*self._own, *others))
        old, self._node, self._node_known = self._node, new, True
        if _read_of(old) != _read_of(new):
            touched.everything = True

    def _put_other_node(self, name: str, new: tuple[Addr, ...], touched: Touched) -> None:
        old = self._other_nodes.pop(name, ())
        if new:
            self._other_nodes[name] = new
        touched.addresses |= _count(self._node_addresses, set(old), set(new))

    def _put_pod(self, key: ObjectKey, new: Pod | None, touched: Touched) -> None:
        if new is not None and new.node not in ("", self._node.name):
            new = None
        if new == self._pods.get(key):
            return
        touched.pods = True
        if new is None:
            del self._pods[key]
        else:
            self._pods[key] = new


def pod_addresses(piece: EndpointSlice) -> set[Addr]:
    """The addresses of those endpoints that are Pods."""
    if not piece.packed_pods:
        return set()
    pairs = zip(piece.endpoints, piece.pods, strict=True)
    return {end.address for end, pod in pairs if pod}


def _count(counts: dict[Addr, int], before: set[Addr], after: set[Addr]) -> set[Addr]:
    """Counts those of one object in the place of what it had before; which came or went."""
    changed = set()
    for address in after - before:
        counts[address] = counts.get(address, 0) + 1
        if counts[address] == 1:
            changed.add(address)
    for address in before - after:
        counts[address] -= 1
        if not counts[address]:
            del counts[address]
            changed.add(address)
    return changed


def _read_of(node: Node) -> tuple[object, ...]:
    """What policy reads of a Node."""
    return node.zone, node.addresses, node.pod_cidrs
