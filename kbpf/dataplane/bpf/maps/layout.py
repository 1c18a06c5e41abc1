# SPDX-License-Identifier: Apache-2.0
"""The binary layout of map keys and values. kbpf/bpf/types.h is authoritative.

A test compiles types.h and compares sizes, offsets and enums with this module. Numbers are in host
byte order except ports, which are in network order as the socket hooks provide them.
"""

import hashlib
from array import array
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from operator import mul
from struct import Struct
from typing import Any, Final, NamedTuple

from kbpf.kernel.bpf import uapi
from kbpf.model.address import ANY, Addr, family_of
from kbpf.model.config import MapSizes
from kbpf.model.desired import FrontendKind, ServicePortKey
from kbpf.model.metrics import LATENCY_BOUNDS, Latency, PortName, ServiceLatencies
from kbpf.model.objects import ELLIPSIS, Cidr, Protocol, protocol_name
from kbpf.model.reasons import Reason
from kbpf.model.status import MAX_STATUS_BYTES


class ServiceFlag(IntFlag):
    """enum service_flags."""

    INTERNAL_LOCAL = 1 << 0
    EXTERNAL_LOCAL = 1 << 1
    ANY_ENDPOINTS = 1 << 2
    RESTRICTED = 1 << 3
    MAGLEV = 1 << 4
    CLUSTER_IP = 1 << 8
    NODE_PORT = 1 << 9
    EXTERNAL_IP = 1 << 10
    LOAD_BALANCER = 1 << 11


KIND_FLAGS: Final = {
    FrontendKind.CLUSTER_IP: ServiceFlag.CLUSTER_IP,
    FrontendKind.NODE_PORT: ServiceFlag.NODE_PORT,
    FrontendKind.EXTERNAL_IP: ServiceFlag.EXTERNAL_IP,
    FrontendKind.LOAD_BALANCER: ServiceFlag.LOAD_BALANCER,
}


class NodeFlag(IntFlag):
    """enum node_flags."""

    MASQUERADE_ALL = 1 << 0
    DETECTS_LOCAL = 1 << 1
    LOCAL_NETWORKS = 1 << 2
    DIRECT = 1 << 3
    PASSIVE = 1 << 4
    COEXISTING = 1 << 5
    NETFILTER = 1 << 6


class DeviceFlag(IntFlag):
    """enum device_flags."""

    LOCAL = 1 << 0
    PEER = 1 << 1
    TUNNEL = 1 << 2
    NBMA = 1 << 3
    IPIP = 1 << 4
    PODS = 1 << 5
    STRICT = 1 << 6
    SPANS = 1 << 7
    NO_EGRESS = 1 << 8


class Role(IntEnum):
    """enum role: what a device connects to."""

    HOST = 1
    POD = 2


class TcpState(IntEnum):
    """enum tcp_state: connection states, used for all protocols."""

    NEW = 0
    ESTABLISHED = 1
    CLOSING = 2
    CLOSED = 3
    ANSWERED = 4
    UNPROVEN = 5


TCP_IDLE_TIMEOUT_S: Final = {
    TcpState.NEW: 120,
    TcpState.ESTABLISHED: 24 * 3600,
    TcpState.CLOSING: 3600,
    TcpState.CLOSED: 120,
    TcpState.ANSWERED: 60,
    TcpState.UNPROVEN: 24 * 3600,
}
"""Idle timeout of a tracked TCP connection, in seconds: timeout_of() in flow.h."""

UNESTABLISHED_IDLE_TIMEOUT_S: Final = 30
"""The same for other protocols until the connection is established."""

STREAM_IDLE_TIMEOUT_S: Final = {Protocol.UDP: 120, Protocol.SCTP: 210}
"""The same for other protocols afterwards."""


def idle_timeout_s(protocol: int, state: int) -> int:
    """Idle timeout of a tracked connection, in seconds. An unknown state is treated like CLOSED, as
    in the C.
    """
    if protocol == Protocol.TCP:
        is_known = state in TcpState.__members__.values()
        return TCP_IDLE_TIMEOUT_S[TcpState(state) if is_known else TcpState.CLOSED]
    if state != TcpState.ESTABLISHED:
        return UNESTABLISHED_IDLE_TIMEOUT_S
    return STREAM_IDLE_TIMEOUT_S[Protocol.SCTP if protocol == Protocol.SCTP else Protocol.UDP]


class FinFlag(IntFlag):
    """enum fins: which sides have closed."""

    CLIENT = 1 << 0
    BACKEND = 1 << 1
    BACKEND_FIRST = 1 << 2
    COUNTED = 1 << 3
    UNANSWERED = 1 << 4
    DIRECT = 1 << 5
    RESERVED = 1 << 6
    REPLACED = 1 << 7


class FlowPath(IntEnum):
    """enum flow_path: how the packets of a flow leave this node."""

    STACK = 0
    DIRECT = 1


class FlowDirection(IntEnum):
    """enum flow_direction: which entry of a flow this is."""

    ORIGINAL = 0
    REPLY = 1
    SNAT_REPLY = 2


class EndpointCondition(IntFlag):
    """enum endpoint_conditions."""

    READY = 1 << 0
    SERVING = 1 << 1
    TERMINATING = 1 << 2
    NODE_ADDRESS = 1 << 3


class ConfigFlag(IntFlag):
    """enum config_flags."""

    SET_RETVAL = 1 << 0
    LOCALHOST_NODE_PORTS = 1 << 1
    HOST_ONLY = 1 << 2
    EXEMPTIONS = 1 << 3
    SOCKET_LB_OFF = 1 << 4
    COEXISTING = 1 << 5
    ACCOUNTING = 1 << 6
    COUNT_CONNECTION_ENDS = 1 << 7
    PACKET_PATH = 1 << 8
    KERNEL_SOCKETS = 1 << 9
    TRACING = 1 << 10


class ClientKind(IntEnum):
    """enum client_kind."""

    ADDRESS = 0
    NETNS = 1


class RefusalLimit(IntEnum):
    """enum refusal_bucket: index into the map `refusal_limits`."""

    ICMP = 0
    RESET = 1
    PEER4 = 2
    PEER6 = 3
    PEER_RESET = 4


class Target(NamedTuple):
    """struct target: an address (16 bytes), a port (host order here) and a protocol."""

    address: Addr
    port: int
    protocol: int

    def pack(self) -> bytes:
        """20 bytes. Works for any object with these three attributes."""
        return pack_target(self.address, self.port, self.protocol)

    @classmethod
    def unpack(cls, raw: bytes) -> "Target":
        """From 20 bytes."""
        return cls(Addr(raw[:16]), int.from_bytes(raw[16:18], "big"), raw[18])


SetNumbers = tuple[int, int, int]
"""Id, size and table of a set, as a frontend has them."""


class ServiceValue(NamedTuple):
    """struct service."""

    id: int
    flags: int
    affinity_timeout: int
    cluster_set: int
    cluster_size: int
    local_set: int
    local_size: int
    cluster_table: int = 0
    local_table: int = 0

    @property
    def sets(self) -> tuple[SetNumbers, SetNumbers]:
        """The cluster and the local set."""
        return (
            (self.cluster_set, self.cluster_size, self.cluster_table),
            (self.local_set, self.local_size, self.local_table),
        )

    def pack(self, key: bytes) -> bytes:
        """40 bytes: the value of this key (struct target), with its check word."""
        # the result of check_of_service() in lib/check.h, unrolled: ((w0 * F + w1) * F + ...) * F
        u32_words = (*TARGET_WORDS.unpack(key), *self)
        return SERVICE.pack(*self, sum(map(mul, u32_words, CHECK_FACTORS)) & 0xFFFFFFFF)

    @classmethod
    def unpack(cls, raw: bytes) -> "ServiceValue":
        """From 40 bytes."""
        return cls(*SERVICE.unpack(raw)[:-1])


class Meta(NamedTuple):
    """struct meta: the next ids to allocate."""

    next_service: int
    next_backend: int
    next_set: int


# "=": host byte order, and no padding except where it is written (x), as in types.h.
TARGET: Final = Struct("=16s2sBx")
TARGET_WORDS: Final = Struct("=5I")
SERVICE: Final = Struct("=10I")
CHECK_FACTORS: Final = tuple(pow(0x9E3779B1, power, 1 << 32) for power in range(14, 0, -1))
"""The factor of each word of a key and value of `services` in the check word (lib/check.h)."""
U32: Final = Struct("=I")
U64: Final = Struct("=Q")
WORD_BITS: Final = 8 * U64.size
U32_PAIR: Final = Struct("=II")  # struct slot, struct member
AFFINITY_KEY: Final = Struct("=16sII")
AFFINITY: Final = Struct("=QII")
OWNER_NETWORK: Final = 0
OWNER_DEVICE: Final = 0x8000_0000
OWNER_ADDRESS: Final = 0xFFFF_FFFF
"""Kinds of owners of the entries of `affinity`; types.h explains them. Any other is a cgroup."""
AFFINITY_CGROUP_MASK: Final = 0xFFFF_FFFF
"""The bits of a cgroup's id that a struct affinity has."""
PEER: Final = Struct("=Q20s20sII")
UDP_FLOW: Final = Struct("=QQQ20s20sII")
FLOWS_PER_SOCKET: Final = 6
UDP_FLOWS: Final = Struct(f"=Q{FLOWS_PER_SOCKET * UDP_FLOW.size}s")
CUT_KEY: Final = Struct("=I20s")
SERVICE_NAME: Final = Struct("=64s64s64sBB2x")
ENDPOINT_KEY: Final = Struct("=I20s")
ENDPOINT_TEXT_SIZE: Final = 119
ENDPOINT_NAME: Final = Struct(f"={ENDPOINT_TEXT_SIZE}sB")
ALL_CONDITIONS: Final = sum(EndpointCondition)
SOURCE_KEY: Final = Struct("=II16s")
FLOW_KEY: Final = Struct("=20s20s")
UNCONFIRMED_KEY: Final = Struct("=40sQ")
NETWORK_KEY: Final = Struct("=I16s")
FLOW_HEAD: Final = Struct("=Q20s20s20s16s2s2sIIBBBBI")
"""The fields before the numbers of a struct flow: all that describes a connection."""
FLOW: Final = Struct(f"{FLOW_HEAD.format}32sII48s")
TCP_SIDE: Final = Struct("=IIIIIIBBBxI")
SCRATCH_SIZE: Final = 720
"""struct scratch (bpf/tc/scratch.h), which no other side reads."""
NEXT_HOP: Final = Struct("=II16sI6s6sHBBI")
DEVICE: Final = Struct("=III6s2x16s16sI")
CACHED_DEVICE: Final = Struct("=I56s")
FRONTEND_PORT_WORDS: Final = 1024
"""64-bit words in `frontend_ports`: one bit for each port."""
CACHED_DEVICES: Final = 1024
NODE: Final = Struct("=16s16sIHHII")
REFUSAL_LIMIT: Final = Struct("=QQQ")
FLOW_GENERATIONS: Final = Struct("=QQ")
FLOW_MARKS: Final = 4096
MAX_DEVICES: Final = 4096
PORT_SLOT: Final = Struct("=II")
PORT_SLOTS: Final = 1024
DOUBTFUL_PORTS: Final = 65_536
DOUBTS: Final = Struct("=64s")
CLIENT_SLOT: Final = Struct("=16sI")
FRAGMENTS_PER_CLIENT: Final = 128
FOREIGN_FLOWS_PER_CLIENT: Final = 2048
"""The maximum numbers of entries of one client in `fragments` and `foreign_flows`; see struct
client_slot.
"""
FRAGMENT: Final = Struct("=II4sI")
PORT_PAIR: Final = Struct("=2s2s")
CONFIG: Final = Struct("=QII")
META: Final = Struct("=III4x")
COUNTS: Final = Struct("=12Q")
LATENCY_BUCKETS: Final = len(LATENCY_BOUNDS) + 1
LATENCY: Final = Struct(f"={8 * LATENCY_BUCKETS}sQ")
LATENCIES: Final = Struct(f"={LATENCY.size}s{LATENCY.size}s")
EVENT: Final = Struct("=QQ20s20s20sIII")
UNCONFIRMED_FLOWS: Final = 16_384
"""Flows that rules of the host refuse can fill this many entries of conntrack's table, whose
smallest size is eight times as large. The first packet of a flow, or its answer, leaves before that
many new flows have begun.
"""
FAILURE: Final = Struct(f"=QQ{EVENT.size}s")
FAILURES_PER_CLIENT: Final = 16
PACKET_FAILURES_PER_CLIENT: Final = 64
PACKET_CLIENTS: Final = 16
"""`failures`: the maximum numbers of entries of one cgroup, and of one client by packets; and into
how many groups these clients are divided, each of which has that many.
"""
FLOW_HEADROOM: Final = 1.125
"""`flows` and `flow_queue` have room for this many times the configured connections: see enqueue()
in evict.h.
"""
MONITORS: Final = 4
"""How many commands may watch events at the same time."""
MONITOR: Final = Struct("=QQQQQ")
RING_ENTRIES: Final = 4096
"""The smallest size of a ring buffer, in bytes. This one only says what kind of map is added."""
AGENT_SOCKETS: Final = 256
"""The number of the agent's newest connections to the API server in `agent_sockets`."""
TAIL_CALL_MAP: Final = "tails"
"""Private to one version of the packet programs, and pinned with them."""
UNUSED_MAP_ENTRIES: Final = 64
"""Size of an unused map: the kernel does not allow 0."""
STATUS_SIZE: Final = MAX_STATUS_BYTES + 64
STATUS_ENTRIES: Final = 2
"""See status_entries.py."""


def pack_target(address: Addr | bytes, port: int, protocol: int) -> bytes:
    """Packs a struct target."""
    return TARGET.pack(address, port.to_bytes(2, "big"), protocol)


def node_port_target(frontend: bytes) -> bytes:
    """The key under which a NodePort is programmed: its address is the wildcard."""
    return ANY[family_of(frontend[:16])] + frontend[16:]


def pack_slots(set_id: int, size: int, start: int = 0) -> bytes:
    """The keys of a set in `backend_slots` from index `start` on (struct slot, back to back)."""
    count = size - start
    keys = array("I", bytes(8 * count))  # filled by columns: sets have up to thousands of slots
    keys[0::2] = array("I", [set_id]) * count
    keys[1::2] = array("I", range(start, size))
    return keys.tobytes()


def pack_source_range(service_id: int, cidr: Cidr) -> bytes:
    """struct source_key. The 32 bits of the service id count as part of the prefix."""
    return SOURCE_KEY.pack(32 + cidr.bits, service_id, cidr.address)


def pack_network(cidr: Cidr) -> bytes:
    """struct network_key."""
    return NETWORK_KEY.pack(cidr.bits, cidr.address)


def unpack_network(raw: bytes) -> Cidr:
    """From struct network_key."""
    bits, address = NETWORK_KEY.unpack(raw)
    return Cidr(Addr(address), bits)


def unpack_source_range(raw: bytes) -> tuple[int, Cidr]:
    """From struct source_key: service id and network."""
    bits, service_id, address = SOURCE_KEY.unpack(raw)
    return service_id, Cidr(Addr(address), bits - 32)


def pack_ports(ports: Set[int], changed: Iterable[int]) -> list[tuple[bytes, bytes]]:
    """The entries of `frontend_ports` that contain the `changed` ports. `ports`: all ports to be
    set.
    """
    return [
        (
            U32.pack(word_index),
            U64.pack(sum(1 << bit for bit in range(WORD_BITS) if word_index * WORD_BITS + bit in ports)),
        )
        for word_index in sorted({port // WORD_BITS for port in changed})
    ]


def unpack_ports(entries: Iterable[tuple[bytes, bytes]]) -> Iterator[int]:
    """The ports whose bits are set in `frontend_ports`."""
    for key, value in entries:
        word = U64.unpack(value)[0]
        first = U32.unpack(key)[0] * WORD_BITS
        yield from (first + bit for bit in range(WORD_BITS) if word >> bit & 1)


def pack_service_name(key: ServicePortKey) -> bytes:
    """struct service_name."""
    return SERVICE_NAME.pack(key.namespace.encode(), key.name.encode(), key.port.encode(), key.protocol, key.family)


def unpack_service_name(raw: bytes) -> ServicePortKey:
    """Unpacks a struct service_name."""
    namespace, name, port, protocol, family = SERVICE_NAME.unpack(raw)
    return ServicePortKey(_decode_text(namespace), _decode_text(name), _decode_text(port), Protocol(protocol), family)


def unpack_port_name(raw: bytes) -> PortName:
    """From the same struct; an unknown protocol is a number."""
    *texts, protocol, _ = SERVICE_NAME.unpack(raw)
    namespace, name, port = map(_decode_text, texts)
    return namespace, name, port, protocol_name(protocol)


def pack_endpoint_key(service_id: int, address: Addr, port: int, protocol: int) -> bytes:
    """struct endpoint_key."""
    return ENDPOINT_KEY.pack(service_id, pack_target(address, port, protocol))


def unpack_endpoint_key(raw: bytes) -> tuple[int, Target]:
    """From struct endpoint_key: the Service port's id, and the endpoint."""
    service_id, target = ENDPOINT_KEY.unpack(raw)
    return service_id, Target.unpack(target)


def pack_endpoint_name(pod: str, node: str, zone: str, conditions: int) -> bytes:
    """struct endpoint_name."""
    text = f"{pod}\0{node}\0{zone}".encode(errors="replace")
    if len(text) > ENDPOINT_TEXT_SIZE or text.count(b"\0") != 2:
        text = _shorten_texts(pod, node, zone)
    return ENDPOINT_NAME.pack(text, conditions)


def unpack_endpoint_name(raw: bytes) -> tuple[str, str, str, EndpointCondition]:
    """From struct endpoint_name: Pod, node, zone and conditions."""
    text, conditions = ENDPOINT_NAME.unpack(raw)
    pod, node, zone, *_ = (*_decode_text(text).split("\0"), "", "", "")
    return pod, node, zone, EndpointCondition(conditions & ALL_CONDITIONS)


def _shorten_texts(*texts: str) -> bytes:
    """Joins texts that are too long, or that contain the separator. The room that a short text
    leaves is for the longer ones.
    """
    raw_texts = [text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace") for text in texts]
    parts, room = [b""] * len(texts), ENDPOINT_TEXT_SIZE - (len(texts) - 1)
    by_length = sorted(range(len(texts)), key=lambda index: len(raw_texts[index]))
    for number, index in enumerate(by_length):
        parts[index] = _cut_middle(raw_texts[index], room // (len(texts) - number))
        room -= len(parts[index])
    return b"\0".join(parts)


def _cut_middle(raw: bytes, size: int) -> bytes:
    """Shortens UTF-8 to this many bytes. The names of a Deployment's Pods differ at their ends."""
    if len(raw) <= size:
        return raw
    tail_size = (size - len(ELLIPSIS.encode())) // 2
    head = raw[: size - len(ELLIPSIS.encode()) - tail_size].decode(errors="ignore")
    return f"{head}{ELLIPSIS}{raw[-tail_size:].decode(errors='ignore')}".encode()


def unpack_latencies(raw: bytes) -> ServiceLatencies:
    """From struct latencies."""
    return ServiceLatencies(*map(_unpack_latency, LATENCIES.unpack(raw)))


def _unpack_latency(raw: bytes) -> Latency:
    counts, sum_ns = LATENCY.unpack(raw)
    return Latency(tuple(memoryview(counts).cast("Q")), sum_ns / 1e9)


def _decode_text(raw: bytes) -> str:
    """Decodes a padded text. Invalid UTF-8 in a map must not raise, so it is replaced."""
    return raw.rstrip(b"\0").decode(errors="replace")


_ANY_WINDOW: Final = 1 << 30
"""A window that every segment of a live connection fits."""


def _add_windows(raw: bytes) -> bytes:
    """A flow of the layout that had only the last numbers of each side of a TCP connection."""
    side = raw[104:112].ljust(TCP_SIDE.size, b"\0")
    if raw[26] == Protocol.TCP:
        next_, ack = Struct("=II").unpack(raw[104:112])
        ends = ((ack + _ANY_WINDOW) & 0xFFFFFFFF, (next_ + _ANY_WINDOW) & 0xFFFFFFFF)
        side = TCP_SIDE.pack(next_, ack, ends[0], _ANY_WINDOW, ends[1], _ANY_WINDOW, 14, 0, 0, 0)
    return raw[:104] + side + bytes(8) + raw[112:]


@dataclass(frozen=True, slots=True)
class FormerLayout:
    """A layout of a map in an earlier version of kbpf. `convert` turns one of its values into a
    current one; the keys are the same.
    """

    version: int
    value_size: int
    convert: Callable[[bytes], bytes]


ON_DEMAND_TYPES: Final = (uapi.BPF_MAP_TYPE_HASH, uapi.BPF_MAP_TYPE_LPM_TRIE, uapi.BPF_MAP_TYPE_SK_STORAGE)
"""Types whose maps get memory for an entry when it is written."""


@dataclass(frozen=True, slots=True)
class MapSpec:
    """A map as it is created in the kernel.

    - `purpose`: for `kbpf inspect maps`.
    - `entries`: the initial size.
    - `sized_by`: the field of MapSizes that limits the size; "" if the size is fixed to `entries`.
    - `grows`: the agent is its only writer, so it can be copied into a larger map.
    - `packet_path_only`: only the packet path uses it; without one it is minimal if `sized_by`,
      since no other map is resized.
    - `entries_per_object`: entries for each object that MapSizes counts.
    - `version`: to be raised when the meaning of the map changes but its sizes do not.
    - `former_layouts`: layouts of earlier versions. For a map written by programs, an upgrade from
      a layout that is not listed loses its contents (for `flows`: connections).
    - `inner`: the name of the map that this array of one map holds.
    - `preallocated`: a hash whose entries have their memory from the start.
    """

    name: str
    purpose: str
    map_type: int
    key_size: int
    value_size: int
    entries: int
    sized_by: str = ""
    grows: bool = False
    version: int = 1
    packet_path_only: bool = False
    entries_per_object: float = 1
    former_layouts: tuple[FormerLayout, ...] = ()
    inner: str = ""
    preallocated: bool = False

    @property
    def flags(self) -> int:
        """How it is created: with BPF_F_NO_PREALLOC, which tries and socket storage need."""
        is_filled_on_demand = self.map_type in ON_DEMAND_TYPES and not self.preallocated
        return uapi.BPF_F_NO_PREALLOC if is_filled_on_demand else 0

    @property
    def identity(self) -> tuple[str, int, int, int, int]:
        """What has to be equal for a map to be adopted."""
        return self.name, self.map_type, self.key_size, self.value_size, self.version

    @property
    def size_flag(self) -> str:
        """The flag that sets the limit; "" if there is none."""
        field = "backends" if self.sized_by == "slots" else self.sized_by
        return f"--max-{field}" if field not in ("", "counts") else ""

    @property
    def is_fixed_size(self) -> bool:
        """Whether programs write it, so that its size is always the configured one."""
        return bool(self.sized_by) and not self.grows

    def max_entries(self, sizes: MapSizes) -> int:
        """The maximum size of this map."""
        return int(getattr(sizes, self.sized_by) * self.entries_per_object) if self.sized_by else self.entries

    def initial_entries(self, sizes: MapSizes, packet_path: bool = True) -> int:
        """The initial size. A map written by programs is created at its maximum size."""
        max_entries = self.max_entries(sizes)
        if self.packet_path_only and self.sized_by and not packet_path:
            return min(UNUSED_MAP_ENTRIES, max_entries)
        return min(self.entries, max_entries) if self.grows else max_entries


def _growing_hash(name: str, purpose: str, key_size: int, value_size: int, entries: int, sized_by: str) -> MapSpec:
    return MapSpec(name, purpose, uapi.BPF_MAP_TYPE_HASH, key_size, value_size, entries, sized_by, grows=True)


def _lru_hash(name: str, purpose: str, key_size: int, value_size: int, entries: int = 0, **options: Any) -> MapSpec:
    return MapSpec(name, purpose, uapi.BPF_MAP_TYPE_LRU_HASH, key_size, value_size, entries, **options)


def _array(name: str, purpose: str, value_size: int, entries: int = 1, version: int = 1) -> MapSpec:
    return MapSpec(name, purpose, uapi.BPF_MAP_TYPE_ARRAY, 4, value_size, entries, version=version)


def _socket_storage(name: str, purpose: str, value_size: int) -> MapSpec:
    """Socket storage: one value per socket, whose key is the socket's descriptor."""
    return MapSpec(name, purpose, uapi.BPF_MAP_TYPE_SK_STORAGE, 4, value_size, 0)


MAPS: Final = {
    spec.name: spec
    for spec in (
        _growing_hash(
            "services", "frontend → Service port and its backend sets", TARGET.size, SERVICE.size, 16_384, "frontends"
        ),
        _growing_hash(
            "service_names",
            "Service port id → name; for display only, no program reads it",
            U32.size,
            SERVICE_NAME.size,
            16_384,
            "frontends",
        ),
        _growing_hash(
            "endpoint_names",
            "endpoint of a Service port → Pod, node, zone and state; for display only",
            ENDPOINT_KEY.size,
            ENDPOINT_NAME.size,
            16_384,
            "backends",
        ),
        _growing_hash("backend_slots", "slot of a backend set → backend id", U32_PAIR.size, U32.size, 65_536, "slots"),
        _growing_hash("backends", "backend id → address and port", U32.size, TARGET.size, 65_536, "backends"),
        _growing_hash(
            "set_members",
            "members of a backend set, for Services with session affinity",
            U32_PAIR.size,
            U32.size,
            16_384,
            "slots",
        ),
        _lru_hash(
            "affinity",
            "client and Service → backend; full: the oldest entry is evicted",
            AFFINITY_KEY.size,
            AFFINITY.size,
            sized_by="affinity",
        ),
        _lru_hash(
            "affinity_shares",
            "client → number of its entries in affinity, which is limited",
            16,
            U32.size,
            sized_by="affinity",
            version=2,
        ),
        _socket_storage("sock_peers", "connected socket → frontend and backend; stored with the socket", PEER.size),
        _socket_storage(
            "former_peers", "UDP socket that connects again → its previous peer, in case that fails", PEER.size
        ),
        _socket_storage(
            "udp_flows", "unconnected UDP socket → frontends and backends; stored with the socket", UDP_FLOWS.size
        ),
        MapSpec(
            "udp_cuts",
            "Service and UDP backend → when the backend stopped serving",
            uapi.BPF_MAP_TYPE_HASH,
            CUT_KEY.size,
            U64.size,
            65_536,
        ),
        MapSpec(
            "source_ranges",
            "Service and client networks that may use its LoadBalancer VIPs or NodePorts",
            uapi.BPF_MAP_TYPE_LPM_TRIE,
            SOURCE_KEY.size,
            4,
            65_536,
        ),
        MapSpec(
            "flows",
            "packet path: both ends of a packet → its translation; full: see flow_queue",
            uapi.BPF_MAP_TYPE_HASH,
            FLOW_KEY.size,
            FLOW.size,
            0,
            preallocated=True,
            sized_by="connections",
            packet_path_only=True,
            entries_per_object=3 * FLOW_HEADROOM,
            former_layouts=(FormerLayout(1, 160, _add_windows),),
        ),
        MapSpec(
            "flow_queue",
            "packet path: connections, oldest first; full: evicts one, or drops the new one",
            uapi.BPF_MAP_TYPE_QUEUE,
            0,
            FLOW_KEY.size,
            0,
            sized_by="connections",
            packet_path_only=True,
            entries_per_object=FLOW_HEADROOM,
        ),
        _array("flow_count", "packet path: number of connections in flow_queue", U64.size),
        MapSpec(
            "unconfirmed",
            "packet path: ends of a flow of conntrack's → the flow, until its first packet leaves",
            uapi.BPF_MAP_TYPE_HASH,
            FLOW_KEY.size,
            EVENT.size,
            2 * UNCONFIRMED_FLOWS,
            version=3,
            packet_path_only=True,
        ),
        MapSpec(
            "unconfirmed_queue",
            "packet path: the same, oldest first; full: the oldest one that was refused ends",
            uapi.BPF_MAP_TYPE_QUEUE,
            0,
            UNCONFIRMED_KEY.size,
            UNCONFIRMED_FLOWS,
            version=3,
            packet_path_only=True,
        ),
        _array(
            "flow_marks",
            "packet path: hash of a frontend or backend → whether a connection may have it",
            U64.size,
            FLOW_MARKS,
        ),
        _array("flow_generations", "packet path: which marks of flow_marks still count", FLOW_GENERATIONS.size),
        _array(
            "doubtful_ports",
            "packet path: hash of a backend and an SNAT port → until when the port is in doubt",
            DOUBTS.size,
            DOUBTFUL_PORTS,
        ),
        _array(
            "port_slots",
            "packet path: locks for choosing SNAT ports; number of keys in unconfirmed",
            PORT_SLOT.size,
            PORT_SLOTS,
            version=2,
        ),
        _lru_hash(
            "fragments",
            "packet path: ports of fragmented datagrams, for their later fragments",
            CLIENT_SLOT.size,
            FRAGMENT.size,
            8192,
            packet_path_only=True,
        ),
        _array(
            "refusal_limits", "packet path: rate limits of ICMP errors and RSTs", REFUSAL_LIMIT.size, len(RefusalLimit)
        ),
        _lru_hash(
            "refused_peers",
            "packet path: sender → one of its rate limits of refusals",
            16,
            U64.size,
            4096,
            packet_path_only=True,
        ),
        _lru_hash(
            "foreign_flows",
            "packet path: connections that another data plane serves",
            CLIENT_SLOT.size,
            U32.size,
            16_384,
            packet_path_only=True,
        ),
        _array(
            "new_flows_paused_until", "packet path: when new flows may begin again after a change of maps", U64.size
        ),
        MapSpec(
            "devices",
            "packet path: ifindex → role (host or pod), link header and addresses",
            uapi.BPF_MAP_TYPE_HASH,
            4,
            DEVICE.size,
            MAX_DEVICES,
        ),
        _array(
            "device_cache",
            "packet path: ifindex modulo the size → an entry of devices",
            CACHED_DEVICE.size,
            CACHED_DEVICES,
        ),
        MapSpec(
            "device_sources",
            "packet path: ifindex and network → the address for SNAT, if not the first; 0: all",
            uapi.BPF_MAP_TYPE_LPM_TRIE,
            SOURCE_KEY.size,
            16,
            MAX_DEVICES,
        ),
        MapSpec(
            "flow_scratch",
            "packet path: the packet that each CPU handles, and its new connection",
            uapi.BPF_MAP_TYPE_PERCPU_ARRAY,
            4,
            SCRATCH_SIZE,
            1,
        ),
        _array("node", "packet path: the node's addresses and ports for SNAT", NODE.size),
        MapSpec(
            "local_networks",
            "packet path: networks of clients that count as pods of this node",
            uapi.BPF_MAP_TYPE_LPM_TRIE,
            NETWORK_KEY.size,
            4,
            64,
        ),
        _growing_hash("node_addresses", "addresses of this node that serve NodePorts", 16, 4, 4096, "frontends"),
        _growing_hash(
            "cluster_ips", "ClusterIPs, where a port that no Service defines is refused", 16, 4, 16_384, "frontends"
        ),
        _array(
            "frontend_ports",
            "ports of all frontends: everything else passes after one look-up",
            U64.size,
            FRONTEND_PORT_WORDS,
        ),
        MapSpec(
            "exempt_cgroups",
            "cgroups whose processes the socket hooks leave alone",
            uapi.BPF_MAP_TYPE_HASH,
            U64.size,
            4,
            4096,
        ),
        MapSpec(
            "agent_sockets",
            "the agent's connections to the API server: only ClusterIPs are translated",
            uapi.BPF_MAP_TYPE_HASH,
            U64.size,
            4,
            AGENT_SOCKETS,
        ),
        _array("config", "settings that the programs read", CONFIG.size),
        MapSpec(
            "counts",
            "Service and backend → totals of their connections",
            uapi.BPF_MAP_TYPE_HASH,
            U32_PAIR.size,
            COUNTS.size,
            0,
            "counts",
        ),
        _array("zero_counts", "initial value of an entry of counts", COUNTS.size),
        MapSpec(
            "latencies",
            "Service → histograms of its connect and round-trip times",
            uapi.BPF_MAP_TYPE_HASH,
            U32.size,
            LATENCIES.size,
            16_384,
        ),
        _array("zero_latencies", "initial value of an entry of latencies", LATENCIES.size),
        _socket_storage("connect_times", "connecting socket → when it began; stored with the socket", U64.size),
        _lru_hash(
            "failures",
            "failed connections, by client and by what failed",
            CLIENT_SLOT.size,
            FAILURE.size,
            4096,
            version=2,
        ),
        _array("monitored_until", "until when commands watch events", U64.size, MONITORS + 1),
        _array(
            "monitors", "which events a command wants to see, and how many it was not shown", MONITOR.size, MONITORS
        ),
        MapSpec(
            "monitor_ring",
            "the kind of ring buffer that a command reads events from; empty",
            uapi.BPF_MAP_TYPE_RINGBUF,
            0,
            0,
            RING_ENTRIES,
        ),
        # Reasons are only appended, so their number is the version.
        MapSpec(
            "reasons",
            "counters of the programs' decisions, by reason",
            uapi.BPF_MAP_TYPE_PERCPU_ARRAY,
            4,
            8,
            len(Reason),
            version=len(Reason),
        ),
        _array("meta", "the next free ids", META.size),
        _array("agent_status", "the agent's status and heartbeat", STATUS_SIZE, STATUS_ENTRIES, version=2),
    )
}

OUTER_MAPS: Final = {
    f"{inner}_outer": MapSpec(f"{inner}_outer", f"holds {inner}", uapi.BPF_MAP_TYPE_ARRAY_OF_MAPS, 4, 4, 1, inner=inner)
    for inner in ("services", "backend_slots", "backends", "set_members", "node_addresses", "cluster_ips")
}
"""Arrays of one map, through which programs find the maps that grow: see bpf/maps.h."""

MONITOR_RINGS: Final = MapSpec(
    "monitor_rings",
    "holds the ring buffers of commands that watch events",
    uapi.BPF_MAP_TYPE_ARRAY_OF_MAPS,
    4,
    4,
    MONITORS,
    inner="monitor_ring",
)
"""A command puts its own ring buffer there: see bpf/monitor.h."""

ALL_MAPS: Final = ChainMap({MONITOR_RINGS.name: MONITOR_RINGS}, OUTER_MAPS, MAPS)
"""Those of MAPS come first, since an array of maps is created with a map of its kind."""

SELF_EVICTING_MAPS: Final = {"flows", *(n for n, s in MAPS.items() if s.map_type == uapi.BPF_MAP_TYPE_LRU_HASH)}
"""Maps that keep entries until their room is needed, so that being full is normal: LRU maps, where
the kernel evicts, and `flows`, a plain hash where the programs evict (evict_over_limit() in
evict.h).
"""


def schema_hash() -> str:
    """A short hash of the layout of all maps. Pins with another hash are not adopted."""
    text = repr(sorted(spec.identity for spec in ALL_MAPS.values()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
