# SPDX-License-Identifier: Apache-2.0
"""The maps: entries, capacity, memory and purpose of each."""

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
    "services": "frontend → Service port and its backend sets",
    "service_names": "Service port id → name; for display only, no program reads it",
    "backend_slots": "slot of a backend set → backend id",
    "backends": "backend id → address and port",
    "set_members": "members of a backend set, for Services with session affinity",
    "affinity": "client and Service → backend; full: the oldest entry is evicted",
    "affinity_shares": "client → number of its entries in affinity, which is limited",
    "zero_counts": "initial value of an entry of counts",
    "counts": "Service and backend → totals of their connections",
    "sock_peers": "connected socket → frontend and backend; stored with the socket",
    "former_peers": "UDP socket that connects again → its previous peer, in case that fails",
    "udp_flows": "unconnected UDP socket → frontends and backends; stored with the socket",
    "udp_cuts": "Service and UDP backend → when the backend stopped serving",
    "node_addresses": "addresses of this node that serve NodePorts",
    "cluster_ips": "ClusterIPs, where a port that no Service defines is refused",
    "frontend_ports": "ports of all frontends: everything else passes after one look-up",
    "agent_sockets": "the agent's connections to the API server: only ClusterIPs are translated",
    "exempt_cgroups": "cgroups whose processes the socket hooks leave alone",
    "local_networks": "packet path: networks of clients that count as pods of this node",
    "source_ranges": "Service and client networks that may use its LoadBalancer VIPs or NodePorts",
    "flows": "packet path: both ends of a packet → its translation; full: see flow_queue",
    "flow_queue": "packet path: connections, oldest first; full: evicts one, or drops the new one",
    "flow_count": "packet path: number of connections in flow_queue",
    "fragments": "packet path: ports of fragmented datagrams, for their later fragments",
    "port_slots": "packet path: locks for choosing SNAT ports, and the last search without result",
    "refusal_limits": "packet path: rate limits of ICMP errors and RSTs",
    "refused_peers": "packet path: address → its rate limit of ICMP errors",
    "new_flows_paused_until": "packet path: when new flows may begin again after a change of maps",
    "foreign_flows": "packet path: connections that another data plane serves",
    "devices": "packet path: ifindex → role (host or pod), link header and addresses",
    "device_cache": "packet path: ifindex modulo the size → an entry of devices",
    "flow_scratch": "packet path: the packet that each CPU handles, and its new connection",
    "node": "packet path: the node's addresses and ports for SNAT",
    "config": "settings that the programs read",
    "reasons": "counters of the programs' decisions, by reason",
    "meta": "the next free ids",
    "agent_status": "the agent's status and heartbeat",
}


class MapRow(msgspec.Struct, frozen=True):
    """A map, and how full it is.

    `entries` is None if the number of used entries is unknown (the entries of arrays and queues
    exist from the start), and `fill_percent` is None if it would be meaningless. `bytes` is None if
    the kernel does not report it.

    `alarm`: 80 % or more are used. An LRU map may stay full: it then evicts the least recently used
    entries early. `flows` never has this alarm, because its expired entries stay until their space
    is needed; `inspect status` has the alarm for it.
    """

    name: str
    type: str
    entries: int | None
    max_entries: int
    fill_percent: float | None
    alarm: bool
    bytes: int | None
    purpose: str


def build_rows(snapshot: Snapshot) -> tuple[MapRow, ...]:
    """All maps, in the order in which a connection uses them."""
    return tuple(map(_build_row, snapshot.maps))


def _build_row(facts: MapFacts) -> MapRow:
    fill = None
    if facts.kind in COUNTABLE_TYPES and facts.entries is not None and facts.max_entries:
        fill = round(100 * facts.entries / facts.max_entries, 1)
    return MapRow(
        name=facts.name,
        type=TYPE_NAMES.get(facts.kind, str(facts.kind)),
        entries=facts.entries,
        max_entries=facts.max_entries,
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
    Column("MAX-ENTRIES", lambda m: format_number(m.max_entries), right=True),
    Column("FILL", _format_fill, right=True),
    Column("BYTES", lambda m: format_size(m.bytes), right=True),
    Column("PURPOSE", lambda m: m.purpose),
)
