# SPDX-License-Identifier: Apache-2.0
"""Stores the current objects: events go in, the names of changed Services come out.

Rules:
- An object stays in force until it is upserted or deleted; a Rejected event changes nothing.
- An upsert without a change has no effect.
- Slices are stored by the Service that they name, so they may arrive before it and outlive it.
- Of other Nodes only the addresses matter, and of Pods only those on our node. Our Node stays in
  force when it is deleted, as in kube-proxy: a node that still serves needs its address and zone.
- The API server's own Service keeps its last ready endpoints. A server that shuts down removes
  itself from the list. With an empty list, clients of this Service, perhaps including us, could
  reach no server, and so would never learn of the next one.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from kbpf.model.address import Addr
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import API_SERVER, EndpointSlice, Node, Pod, Service, ServiceName
from kbpf.model.ref_counts import RefCounts


@dataclass(slots=True)
class ChangeSet:
    """What has to be computed again.

    `services`: these Services; `all_services`: all of them, because our Node changed. `pods`: the
    set of exempt Pods changed. `addresses`: addresses that became or ceased to be those of another
    Node or of a Pod behind a Service, or ClusterIPs.
    """

    services: set[ServiceName] = field(default_factory=set)
    all_services: bool = False
    pods: bool = False
    addresses: set[Addr] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.all_services or self.pods or bool(self.services or self.addresses)

    def update(self, changes: "ChangeSet") -> None:
        """Merges `changes` into this set."""
        self.services |= changes.services
        self.all_services |= changes.all_services
        self.pods |= changes.pods
        self.addresses |= changes.addresses


class ObjectStore:
    """The current Services, EndpointSlices, exempt Pods and Nodes. Use it from one thread only."""

    def __init__(self, node_name: str, bind_address: Addr | None = None) -> None:
        self._bind_addresses = (bind_address,) if bind_address else ()
        self.node = Node(node_name, self._bind_addresses)  # has only its name until the object is known
        self.node_known = False  # whether an object for our Node has been received
        self._services: dict[ServiceName, Service] = {}
        self._cluster_ips = RefCounts[Addr]()  # of Services
        self._slices: dict[ObjectKey, EndpointSlice] = {}
        self._by_service: dict[ServiceName, dict[str, EndpointSlice]] = {}
        self._api_server_slices: dict[ObjectKey, EndpointSlice] = {}  # their latest versions
        self._pods: dict[ObjectKey, Pod] = {}
        self._pod_addresses = RefCounts[Addr]()  # of EndpointSlices
        self._other_nodes: dict[str, tuple[Addr, ...]] = {}
        self._node_addresses = RefCounts[Addr]()  # of other Nodes
        self._rejected: dict[ObjectKey, str] = {}
        self._unusable_keys: set[ObjectKey] = set()  # the keys of _rejected, without Pods
        self._skipped: dict[ObjectKey, tuple[str, ...]] = {}
        self.synced: frozenset[Kind] = frozenset()

    @property
    def all_usable(self) -> bool:
        """Whether the latest version of every object is valid. Pods are ignored, because they
        serve nothing.
        """
        return not self._unusable_keys

    def problems_of(self, key: ObjectKey) -> tuple[str, ...]:
        """Returns a line for each problem of this object: its latest version was rejected, or a
        part of it was ignored.
        """
        error = self._rejected.get(key)
        return (*(() if error is None else (error,)), *self._skipped.get(key, ()))

    @property
    def pods(self) -> Collection[Pod]:
        """The exempt Pods of our node."""
        return self._pods.values()

    def service_names(self) -> Collection[ServiceName]:
        return self._services.keys()

    def service(self, name: ServiceName) -> Service | None:
        return self._services.get(name)

    def service_of(self, event: Upsert | Delete) -> ServiceName | None:
        """The Service that an event changes."""
        if event.key.kind is Kind.SERVICE:
            return ServiceName(event.key.namespace, event.key.name)
        obj = event.object if isinstance(event, Upsert) else None
        return obj.service_name if isinstance(obj, EndpointSlice) else None

    def estimate_cost(self, name: ServiceName) -> int:
        """Estimates the work to compute this Service: about its ports times its endpoints."""
        service = self._services.get(name)
        ports = len(service.ports) if service is not None else 1
        return ports * (1 + sum(len(slice_.endpoints) for slice_ in self._by_service.get(name, {}).values()))

    def slices(self, name: ServiceName) -> tuple[EndpointSlice, ...]:
        """The slices that name this Service, sorted by their own name."""
        slices_by_name = self._by_service.get(name, {})
        return tuple(slices_by_name[slice_name] for slice_name in sorted(slices_by_name))

    def has_pod(self, address: Addr) -> bool:
        """Whether a Pod behind any Service has this address."""
        return address in self._pod_addresses

    def has_cluster_ip(self, address: Addr) -> bool:
        """Whether this is the ClusterIP of any Service."""
        return address in self._cluster_ips

    @property
    def other_node_addresses(self) -> Collection[Addr]:
        """The addresses of other Nodes: a live view."""
        return self._node_addresses.keys()

    def has_node(self, address: Addr) -> bool:
        """Whether another Node has this address."""
        return address in self._node_addresses

    def apply(self, events: Iterable[Event]) -> ChangeSet:
        """Applies events in order; returns what they changed."""
        touched = ChangeSet()
        for event in events:
            if isinstance(event, Synced):
                touched.pods |= event.kind is Kind.POD and Kind.POD not in self.synced
                self.synced |= {event.kind}
            elif event.key.kind is not Kind.NODE or event.key.name == self.node.name:
                self._apply_event(event, touched)
            elif not isinstance(event, Rejected):
                node = event.object if isinstance(event, Upsert) else None
                assert node is None or isinstance(node, Node)
                self._put_other_node(event.key.name, node.addresses if node else (), touched)
        return touched

    def _apply_event(self, event: Upsert | Delete | Rejected, touched: ChangeSet) -> None:
        key = event.key
        if isinstance(event, Rejected):
            self._rejected[key] = event.error
            if key.kind is not Kind.POD:
                self._unusable_keys.add(key)
            return
        self._rejected.pop(key, None)
        self._unusable_keys.discard(key)
        obj = event.object if isinstance(event, Upsert) else None
        skipped = () if obj is None or isinstance(obj, Pod) else obj.skipped
        if skipped:
            self._skipped[key] = skipped
        else:
            self._skipped.pop(key, None)
        match key.kind:
            case Kind.SERVICE:
                assert obj is None or isinstance(obj, Service)
                self._put_service(ServiceName(key.namespace, key.name), obj, touched)
            case Kind.SLICE:
                assert obj is None or isinstance(obj, EndpointSlice)
                if API_SERVER in (obj.service_name if obj else None, self._slice_service(key)):
                    self._put_api_server_slice(key, obj, touched)
                else:
                    self._put_slice(key, obj, touched)
            case Kind.NODE:
                assert obj is None or isinstance(obj, Node)
                self._put_node(obj or replace(self.node, being_deleted=True), touched)
            case Kind.POD:
                assert obj is None or isinstance(obj, Pod)
                self._put_pod(key, obj, touched)
            case _:
                assert_never(key.kind)

    def _put_service(self, name: ServiceName, new: Service | None, touched: ChangeSet) -> None:
        old = self._services.get(name)
        if new == old:
            return
        touched.addresses |= self._cluster_ips.replace(
            set(old.cluster_ips if old else ()), set(new.cluster_ips if new else ())
        )
        if new is None:
            del self._services[name]
        else:
            self._services[name] = new
        touched.services.add(name)

    def _slice_service(self, key: ObjectKey) -> ServiceName | None:
        """The Service that the current version of this slice names."""
        if key in self._api_server_slices:
            return API_SERVER
        slice_ = self._slices.get(key)
        return slice_.service_name if slice_ is not None else None

    def _put_api_server_slice(self, key: ObjectKey, new: EndpointSlice | None, touched: ChangeSet) -> None:
        """Publishes the latest version of all slices once one of them has a ready endpoint."""
        slices = self._api_server_slices
        slices.pop(key, None)
        if new is not None and new.service_name == API_SERVER:
            slices[key] = new
        elif new is not None:
            self._put_slice(key, new, touched)
        # Without a ready endpoint the stored slices stay as they are.
        if any(endpoint.ready for slice_ in slices.values() for endpoint in slice_.endpoints):
            stored_keys = {k for k, slice_ in self._slices.items() if slice_.service_name == API_SERVER}
            for slice_key in stored_keys | slices.keys():
                self._put_slice(slice_key, slices.get(slice_key), touched)

    def _put_slice(self, key: ObjectKey, new: EndpointSlice | None, touched: ChangeSet) -> None:
        old = self._slices.get(key)
        if new == old:
            return
        if old is not None:
            del self._slices[key]
            self._index_slice(old.service_name, old, None)
            touched.services.add(old.service_name)
        if new is not None:
            self._slices[key] = new
            self._index_slice(new.service_name, None, new)
            touched.services.add(new.service_name)
        self._count_pods(old, new, touched)

    def _count_pods(self, old: EndpointSlice | None, new: EndpointSlice | None, touched: ChangeSet) -> None:
        before = pod_addresses(old) if old is not None else set()
        after = pod_addresses(new) if new is not None else set()
        touched.addresses |= self._pod_addresses.replace(before, after)

    def _index_slice(self, name: ServiceName, old: EndpointSlice | None, new: EndpointSlice | None) -> None:
        slices_by_name = self._by_service.setdefault(name, {})
        if old is not None:
            del slices_by_name[old.name]
        if new is not None:
            slices_by_name[new.name] = new
        if not slices_by_name:
            del self._by_service[name]

    def _put_node(self, new: Node, touched: ChangeSet) -> None:
        if self._bind_addresses:
            other_addresses = (address for address in new.addresses if address not in self._bind_addresses)
            new = replace(new, addresses=(*self._bind_addresses, *other_addresses))
        old, self.node, self.node_known = self.node, new, True
        if _policy_fields(old) != _policy_fields(new):
            touched.all_services = True

    def _put_other_node(self, name: str, new: tuple[Addr, ...], touched: ChangeSet) -> None:
        old = self._other_nodes.pop(name, ())
        if new:
            self._other_nodes[name] = new
        touched.addresses |= self._node_addresses.replace(set(old), set(new))

    def _put_pod(self, key: ObjectKey, new: Pod | None, touched: ChangeSet) -> None:
        if new is not None and new.node not in ("", self.node.name):
            new = None
        if new == self._pods.get(key):
            return
        touched.pods = True
        if new is None:
            del self._pods[key]
        else:
            self._pods[key] = new


def pod_addresses(slice_: EndpointSlice) -> set[Addr]:
    """The addresses of the endpoints that are Pods."""
    if not slice_.packed_pods:
        return set()
    pairs = zip(slice_.endpoints, slice_.pods, strict=True)
    return {endpoint.address for endpoint, pod in pairs if pod}


def _policy_fields(node: Node) -> tuple[object, ...]:
    """The fields of a Node that policy uses."""
    return node.zone, node.addresses, node.pod_cidrs
