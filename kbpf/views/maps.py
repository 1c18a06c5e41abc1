"""The maps: how full, how big, and what each is for."""

from typing import Final

import msgspec

from kbpf.dataplane.bpf.inspect.snapshot import COUNTABLE_TYPES, MapFacts, Part, Snapshot
from kbpf.kernel.bpf import uapi
from kbpf.views.columns import Column, format_number, format_size

NEEDS: Final = Part.MAPS

ALARM_PERCENT: Final = 80.0

TYPE_NAMES: Final = {
    uapi.BPF_MAP_TYPE_HASH: "hash",
    uapi.BPF_MAP_TYPE_ARRAY: "array",
    uapi.BPF_MAP_TYPE_PERCPU_ARRAY: "percpu_array",
    uapi.BPF_MAP_TYPE_LRU_HASH: "lru_hash",
    uapi.BPF_MAP_TYPE_QUEUE: "queue",
    uapi.BPF_MAP_TYPE_LPM_TRIE: "lpm_trie",
    uapi.BPF_MAP_TYPE_SK_STORAGE: "sk_storage",
}

PURPOSE: Final = {
    "services": "address that clients dial → Service port and its backend sets",
    "service_names": "Service port id → name; for people, programs never read it",
    "backend_slots": "place in a backend set → backend id",
    "backends": "backend id → address and port",
    "set_members": "who is in a set, for Services with session affinity",
    "affinity": "client and Service → backend it is kept at; full: the oldest goes",
    "affinity_shares": "client → how many entries of affinity it has, which has a limit",
    "zero_counts": "what a new entry of counts is a copy of",
    "counts": "Service and backend → what their connections came to",
    "sock_peers": "connected socket → frontend and backend; of each socket its own",
    "former_peers": "connected UDP socket → its peer before it connected again, which may fail",
    "udp_flows": "unconnected UDP socket → frontends and backends; of each socket its own",
    "udp_cuts": "Service and UDP backend → since when it serves no more",
    "node_addresses": "addresses of this node that serve NodePorts",
    "cluster_ips": "ClusterIPs, of which a port that no Service has is refused",
    "frontend_ports": "ports that some Service has: everything else passes after one look-up",
    "agent_sockets": "the agent's connections to the API server, for which only ClusterIPs count",
    "exempt_cgroups": "cgroups whose processes the socket hooks leave alone",
    "local_networks": "packet path: clients that count as pods of this node",
    "source_ranges": "who may dial a LoadBalancer VIP or a NodePort that is not for everybody",
    "flows": "packet path: both ends of a packet → how it is translated; full: see order",
    "flow_queue": "packet path: connections, the oldest first; full: one that is not needed goes",
    "flow_count": "packet path: how many connections are in that order",
    "fragments": "packet path: ports of datagrams that come in fragments",
    "port_slots": "packet path: which CPU decides about a port of the node, and fruitless searches",
    "refusal_limits": "packet path: how many ICMP errors and RSTs refuse, a second and at once",
    "refused_peers": "packet path: clients that got ICMP errors, and until when that counts",
    "new_flows_paused_until": "packet path: until when no flow begins, during a change of maps",
    "foreign_flows": "packet path: connections that another data plane got while it served",
    "devices": "packet path: devices, and on which side of the node they are",
    "device_cache": "packet path: remainder of an ifindex → one of those devices",
    "flow_scratch": "packet path: the connection that is being made, on each CPU",
    "node": "packet path: the node's own addresses and ports for translated sources",
    "config": "settings that the programs read",
    "reasons": "what the programs decided, counted",
    "meta": "ids to give out next",
    "agent_status": "the agent's own words",
}


class MapRow(msgspec.Struct, frozen=True):
    """A map. `entries` is None where nobody knows how many are used (arrays and queues have all of
    theirs from the beginning), and `fill_percent` where fullness means nothing.

    `bytes` is None where the kernel does not say. `alarm`: 80 % or more is used. An LRU map may
    well stay full; then what was used least recently is forgotten early. Not of `flows`, whose
    entries stay until their room is needed: `inspect status` has its alarm.
    """

    name: str
    type: str
    entries: int | None
    room: int
    fill_percent: float | None
    alarm: bool
    bytes: int | None
    purpose: str


def build_rows(snapshot: Snapshot) -> tuple[MapRow, ...]:
    """All maps, in the order in which a connection meets them."""
    return tuple(map(_build_row, snapshot.maps))


def _build_row(facts: MapFacts) -> MapRow:
    fill = None
    if facts.kind in COUNTABLE_TYPES and facts.entries is not None and facts.room:
        fill = round(100 * facts.entries / facts.room, 1)
    return MapRow(
        name=facts.name,
        type=TYPE_NAMES.get(facts.kind, str(facts.kind)),
        entries=facts.entries,
        room=facts.room,
        fill_percent=fill,
        alarm=fill is not None and fill >= ALARM_PERCENT and facts.name != "flows",
        bytes=facts.bytes,
        purpose=PURPOSE.get(facts.name, ""),
    )


def _format_fill(row: MapRow) -> str:
    if row.fill_percent is None:
        return "-"
    return f"{row.fill_percent:.1f}%" + (" !" if row.alarm else "  ")


COLUMNS: Final = (
    Column("NAME", lambda m: m.name),
    Column("TYPE", lambda m: m.type),
    Column("ENTRIES", lambda m: format_number(m.entries), right=True),
    Column("ROOM", lambda m: format_number(m.room), right=True),
    Column("FILL", _format_fill, right=True),
    Column("BYTES", lambda m: format_size(m.bytes), right=True),
    Column("FOR", lambda m: m.purpose),
)
