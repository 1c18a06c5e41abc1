# SPDX-License-Identifier: Apache-2.0
"""What the agent has programmed: adopted from the maps, then updated with each change, so that the
cost of a change depends on the change and not on the size of the cluster.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.ids import IdAllocator, IsIdUsed
from kbpf.dataplane.bpf.maps.layout import U32, U32_PAIR, pack_ports
from kbpf.dataplane.bpf.state import adopt, commit, endpoint_names
from kbpf.dataplane.bpf.state.commit import AddressChange, GraceQueue, TableBuilder, pack_endpoint
from kbpf.dataplane.bpf.state.contents import NODE_PORTS_ID, Contents
from kbpf.dataplane.bpf.state.plan import ProgrammedPort, Retired, Writes
from kbpf.dataplane.bpf.state.quotas import NamespaceBudgets
from kbpf.model.address import Addr
from kbpf.model.desired import FrontendKind, ServicePortKey
from kbpf.model.objects import Cidr
from kbpf.model.ref_counts import RefCounts

T = TypeVar("T", bound=Hashable)
Changes = Mapping[ServicePortKey, ProgrammedPort | None]
"""Service ports as they will be programmed; None if they are removed."""


def cluster_ips_of(programmed: ProgrammedPort) -> Iterator[Addr]:
    """The ClusterIP of each ClusterIP frontend, unless a device of the node has it: then its other
    ports are the node's, so they are not refused.
    """
    return (
        frontend.at.address
        for frontend in programmed.frontends
        if frontend.kind is FrontendKind.CLUSTER_IP and not frontend.on_device
    )


def ports_of(programmed: ProgrammedPort) -> Iterator[int]:
    """The port of each frontend."""
    return (f.at.port for f in programmed.frontends)


class SharedValues(Generic[T]):
    """Counts the frontends of each value, and remembers which values the map holds."""

    def __init__(
        self,
        values: Callable[[ProgrammedPort], Iterable[T]],
        programmed_ports: Iterable[ProgrammedPort],
        written: Iterable[T],
    ) -> None:
        self._values = values
        self._counts = RefCounts(self._list(programmed_ports))
        self.written_values = set(written)

    def update(
        self, before: Iterable[ProgrammedPort], after: Iterable[ProgrammedPort], compare_all: bool
    ) -> tuple[set[T], set[T]]:
        """Returns the added and removed values when the Service ports `before` become those
        `after`. `compare_all`: the map may differ from `written_values`, so compare all values.
        """
        changed = self._counts.add(self._list(after)) | self._counts.remove(self._list(before))
        candidates = self._counts.keys() | self.written_values if compare_all else changed
        used = candidates & self._counts.keys()
        return used - self.written_values, (candidates & self.written_values) - used

    def record_written(self, new: set[T], removed: set[T]) -> None:
        """Records that these values were written to the map and removed from it."""
        self.written_values |= new
        self.written_values -= removed

    def _list(self, programmed_ports: Iterable[ProgrammedPort]) -> list[T]:
        return [value for programmed in programmed_ports for value in self._values(programmed)]


class SharedChange(NamedTuple):
    """The values that an apply() adds and removes in maps that Service ports share."""

    nodes: AddressChange
    cluster_ips: tuple[set[Addr], set[Addr]]
    ports: tuple[set[int], set[int]]

    def count_entries(self) -> dict[str, int]:
        """The number of new entries in maps that grow."""
        return {"node_addresses": len(self.nodes[0]), "cluster_ips": len(self.cluster_ips[0])}


class ProgrammedState:
    """What of the maps' contents the agent has programmed, and what it changes next; it writes
    nothing. `is_first_apply`: no apply() has written since the contents were adopted. `unclaimed`:
    what was adopted, until an authoritative apply() retires the part of it that no Service port has
    claimed.
    """

    def __init__(self, contents: Contents, is_id_used: IsIdUsed = lambda _, __: False) -> None:
        adopted = adopt.adopt(contents)
        self.ids = IdAllocator(adopt.usable_ids(contents.next_ids), is_id_used)
        self.ids.skip_past(adopted.highest_service, adopted.highest_backend, adopted.highest_set)
        self.budgets = NamespaceBudgets()
        for backend, backend_id in adopted.backends.items():
            self.ids.backends.adopt(backend, backend_id)
        for key, programmed in adopted.programmed.items():
            for set_ in programmed.sets:
                self.ids.backends.acquire(set_.backends)
                if set_.table:
                    self.ids.tables.adopt(set_.table)
            self.budgets.replace(key.namespace, None, programmed)
        self.programmed = adopted.programmed
        self._node_addresses = set(contents.node_addresses)
        ports = adopted.programmed.values()
        self._cluster_ips = SharedValues(cluster_ips_of, ports, contents.cluster_ips)
        self._frontend_ports = SharedValues(ports_of, ports, contents.ports)
        self.unclaimed: adopt.Adopted | None = adopted
        self.is_first_apply = True

    @property
    def unused_names(self) -> dict[ServicePortKey, int] | None:
        """Ids of Service ports that the first apply() may use again."""
        return self.unclaimed.unused_names if self.unclaimed and self.is_first_apply else None

    def claim(self, writes: Writes, node_port_ranges: Iterable[Cidr], authoritative: bool) -> None:
        """Completes the writes of the first apply() with what it takes over or removes."""
        assert self.unclaimed is not None
        frontends = self.unclaimed.unclaimed_frontends
        ranges = set(self.unclaimed.unclaimed_ranges)
        desired_ranges = dict.fromkeys([*writes.new_ranges, *((NODE_PORTS_ID, cidr) for cidr in node_port_ranges)])
        writes.new_ranges = [range_ for range_ in desired_ranges if range_ not in ranges]
        writes.old_ranges += sorted(ranges - desired_ranges.keys())
        if authoritative:
            writes.removed |= frontends - writes.flips.keys()
        # these are overwritten, and `fill` counts them already
        writes.new_frontends -= len(frontends & writes.flips.keys())

    def compute_shared(self, changes: Changes, node_addresses: set[Addr], authoritative: bool) -> SharedChange:
        """Changes of the maps of shared values, when the Service ports change like this."""
        return SharedChange(
            (node_addresses - self._node_addresses, self._node_addresses - node_addresses),
            self._compute_changed(self._cluster_ips, changes, authoritative),
            self._compute_changed(self._frontend_ports, changes, authoritative),
        )

    def _compute_changed(self, values: SharedValues[T], changes: Changes, authoritative: bool) -> tuple[set[T], set[T]]:
        new, removed = values.update(
            (self.programmed[key] for key in changes if key in self.programmed),
            (programmed for programmed in changes.values() if programmed is not None),
            compare_all=self.unclaimed is not None,
        )
        return new, removed if authoritative else set()

    def record(self, changes: Changes) -> None:
        """Records that these Service ports were written."""
        for key, port in changes.items():
            if port is None:
                self.programmed.pop(key, None)
            else:
                self.programmed[key] = port

    def retire_unclaimed(self, retired: Retired) -> adopt.Adopted:
        """Retires what no Service port has claimed, except frontends; returns all of it."""
        unclaimed, self.unclaimed = self.unclaimed, None
        assert unclaimed is not None
        retired.names += sorted({*unclaimed.unclaimed_names, *unclaimed.unused_names.values()})
        retired.slot_keys += unclaimed.unclaimed_slots
        retired.member_keys += unclaimed.unclaimed_members
        retired.backend_ids += self.ids.backends.remove_unreferenced() + unclaimed.unclaimed_backends
        return unclaimed


class MapState(ProgrammedState):
    """The state of the agent's maps, and what writes it."""

    def __init__(self, agent_maps: AgentMaps, contents: Contents, cut_udp: Callable[[Retired], None]) -> None:
        """`cut_udp`: see GraceQueue."""
        self._agent_maps = agent_maps
        super().__init__(contents, self._is_id_used)
        # Names of endpoints have a writer of their own, which remembers what the map holds.
        named = agent_maps.fill[endpoint_names.MAP_NAME]
        agent_maps.fill = Counter({**contents.counts, endpoint_names.MAP_NAME: named})
        self.builder = TableBuilder(agent_maps, self.ids)
        # What was about to be retired needs no queue: it is unclaimed now.
        self.grace_queue = GraceQueue(agent_maps, self.ids, cut_udp)

    def _is_id_used(self, kind: int, id_: int) -> bool:
        """Whether a map holds this id. Implements ids.IsIdUsed."""
        name = ("service_names", "backends", "backend_slots")[kind]
        key = U32_PAIR.pack(id_, 0) if name == "backend_slots" else U32.pack(id_)
        return self._agent_maps.maps[name].lookup(key) is not None

    def write_adopted_ports(self) -> None:
        """Sets the bits of all ports found in `services`. An agent of an earlier version kept no
        such bits, and programs attached from now on find a frontend only if the bit of its port is
        set.
        """
        assert self.unclaimed is not None
        used = {address.port for address in self.unclaimed.unclaimed_frontends}
        used.update(port for programmed in self.programmed.values() for port in ports_of(programmed))
        self._write_ports(new=used - self._frontend_ports.written_values)

    def write(self, writes: Writes, shared: SharedChange) -> None:
        """Programs look up a frontend only if its port is in `frontend_ports`, so the ports in it
        must be a superset of those in `services` at any time.
        """
        self._write_ports(new=shared.ports[0])
        commit.write(self._agent_maps, self.ids, writes, shared.nodes, shared.cluster_ips)
        self._write_ports(removed=shared.ports[1])
        self._cluster_ips.record_written(*shared.cluster_ips)
        self._node_addresses |= set(shared.nodes[0])
        self._node_addresses -= set(shared.nodes[1])

    def _write_ports(self, new: Collection[int] = (), removed: Collection[int] = ()) -> None:
        self._frontend_ports.record_written(set(new), set(removed))
        entries = pack_ports(self._frontend_ports.written_values, (*new, *removed))
        self._agent_maps.put("frontend_ports", entries, new=0)

    def delete_unclaimed(self, retired: Retired, delete_frontends: bool) -> None:
        """Retires what no Service port has claimed, and deletes corrupt frontends.
        `delete_frontends`: unclaimed frontends as well, which claim() has not removed.
        """
        unclaimed = self.retire_unclaimed(retired)
        if delete_frontends:
            # They may be ours by now.
            ours = {f.at for programmed in self.programmed.values() for f in programmed.frontends}
            self._agent_maps.delete("services", map(pack_endpoint, unclaimed.unclaimed_frontends - ours))
        self._agent_maps.delete("services", unclaimed.corrupt_frontends)
