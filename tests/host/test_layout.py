# SPDX-License-Identifier: Apache-2.0
"""The layouts of Python and C are equal: sizes, offsets, and all named numbers.

The C side comes from the compiler. BCC compiles a scratch program with kbpf/bpf/types.h and a map
for each struct, and returns these as ctypes; numbers are compared by _Static_assert. It runs in a
child process, which needs root.
"""

import json
import re
import shutil
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kbpf.config import kinds
from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.hooks import UNITS
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.programs.artifact import SOURCES, flatten
from kbpf.kernel.bpf import uapi
from kbpf.model.address import ANY4
from kbpf.model.config import MapSizes
from kbpf.model.metrics import LATENCY_EXPONENT, ConnectionStats
from kbpf.model.objects import Protocol
from tests.support.lab.lab import run

TYPES = (SOURCES / "types.h").read_text()

CHILD = """
import ctypes, json, os, sys
os.environ["BCC_KERNEL_SOURCE"] = sys.argv[1]
from bcc import BPF
names = sys.argv[2].split(",")
module = BPF(text=sys.stdin.read(), cflags=["-Wno-everything"])
def fields(kind):
    return {name: [getattr(kind, name).offset, getattr(kind, name).size]
            for name, *_ in kind._fields_}
found = {}
for name in names:
    leaf = module["t_" + name].Leaf
    found[name] = {"size": ctypes.sizeof(leaf), "fields": fields(leaf)}
json.dump(found, sys.stdout)
"""


class Layout(NamedTuple):
    c: str
    python: struct.Struct
    fields: list[str]


LAYOUTS = """\
target            TARGET            address port protocol
service           SERVICE           id flags affinity_timeout cluster_set cluster_size local_set local_size \
                                    cluster_table local_table check
slot              U32_PAIR          set index
member            U32_PAIR          set backend
affinity_key      AFFINITY_KEY      client service kind
affinity          AFFINITY          last_used backend owner
peer              PEER              socket frontend backend service backend_id
udp_flow          UDP_FLOW          chosen_at last_sent last_received frontend backend service backend_id
udp_flows         UDP_FLOWS         socket flow
cut_key           CUT_KEY           service backend
service_name      SERVICE_NAME      namespace name port protocol family
endpoint_key      ENDPOINT_KEY      service endpoint
endpoint_name     ENDPOINT_NAME     text conditions
config            CONFIG            host_netns flags affinity_share
source_key        SOURCE_KEY        bits service client
flow_key          FLOW_KEY          first second
unconfirmed_key   UNCONFIRMED_KEY   key time
ports             PORT_PAIR         source destination
flow              FLOW              last_used client frontend backend snat snat_port client_port service backend_id \
                                    state fins path direction host_device seen arrival syn out
tcp_side          TCP_SIDE          next ack edge window limit room scale fin syn_scale syn_at
sctp_tags         U32_PAIR          tag next
next_hop          NEXT_HOP          found_at check address ifindex own_mac next_mac max_length resolved family \
                                    uncounted
flow_generations  FLOW_GENERATIONS  current oldest
port_slot         PORT_SLOT         lockers unconfirmed
refusal_limit     REFUSAL_LIMIT     spent interval burst
network_key       NETWORK_KEY       bits address
device_network    SOURCE_KEY        bits ifindex address
device            DEVICE            role l2 flags mac snat4 snat6 bridge
cached_device     CACHED_DEVICE     ifindex device
node              NODE              snat4 snat6 flags port_low port_high mark connections
client_slot       CLIENT_SLOT       owner number
doubts            DOUBTS            until
first_fragment    FRAGMENT          id hash ports protocol
count_key         U32_PAIR          service backend
latency           LATENCY           count sum
latencies         LATENCIES         connect round_trip
event             EVENT             time cgroup client frontend backend service backend_id reason
failure           FAILURE           first count last
monitor           MONITOR           spent interval burst left_out reasons
meta              META              next_service next_backend next_set
"""
"""A struct of the C code, Python's Struct for it, and its fields in order; "pad" is not packed."""
STRUCTS = [
    *(Layout(c, getattr(layout, name), fields) for c, name, *fields in map(str.split, LAYOUTS.splitlines())),
    Layout("counts", layout.COUNTS, list(ConnectionStats._fields)),
]

SAME_NAME = """
CACHED_DEVICES FRONTEND_PORT_WORDS FRAGMENTS_PER_CLIENT FOREIGN_FLOWS_PER_CLIENT FAILURES_PER_CLIENT
PACKET_FAILURES_PER_CLIENT PACKET_CLIENTS OWNER_NETWORK OWNER_DEVICE OWNER_ADDRESS MONITORS FLOWS_PER_SOCKET
LATENCY_BUCKETS FLOW_MARKS PORT_SLOTS DOUBTFUL_PORTS
"""
DEFINED = {
    **{name: getattr(layout, name) for name in SAME_NAME.split()},
    "LATENCY_EXPONENT": LATENCY_EXPONENT,
    "IPPROTO_TCP": int(Protocol.TCP),
    "IPPROTO_UDP": int(Protocol.UDP),
}
"""Named numbers that are not in an enum."""
ENUMS = {
    "SERVICE_": layout.ServiceFlag,
    "ENDPOINT_": layout.EndpointCondition,
    "CONFIG_": layout.ConfigFlag,
    "CLIENT_": layout.ClientKind,
    "": layout.Reason,
    "STATE_": layout.TcpState,
    "FIN_": layout.FinFlag,
    "PATH_": layout.FlowPath,
    "DIRECTION_": layout.FlowDirection,
    "LIMIT_": layout.RefusalLimit,
    "ROLE_": layout.Role,
    "NODE_": layout.NodeFlag,
    "DEVICE_": layout.DeviceFlag,
}
"""The enums of Python, and how the names of their members begin in C."""
NAMES = {
    **{f"{prefix}{member.name}": int(member) for prefix, kind in ENUMS.items() for member in kind},
    **DEFINED,
    "REASONS": len(layout.Reason),
    "REFUSAL_LIMITS": len(layout.RefusalLimit),
    "sizeof(struct address)": len(ANY4),
}


def python_offsets(packed: struct.Struct) -> list[tuple[int, int]]:
    """Offset and size of each value that the Struct packs; pad bytes have none."""
    text = packed.format
    assert text[0] == "=", "native alignment must be off"
    found, offset = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", text[1:]):
        number = int(count or 1)
        sizes = [number] if code == "s" else [struct.calcsize(f"={code}")] * number
        for size in sizes:
            if code != "x":
                found.append((offset, size))
            offset += size
    assert offset == packed.size
    return found


def compiled(folder: Path) -> dict[str, dict[str, Any]]:
    """Sizes and fields of all structs. The program has a static assertion for each number."""
    shutil.copy(SOURCES / "types.h", folder)
    tables = "".join(f'BPF_TABLE("hash", u32, struct {row.c}, t_{row.c}, 1);\n' for row in STRUCTS)
    asserts = "".join(f'_Static_assert({name} == {value}, "{name}");\n' for name, value in NAMES.items())
    (folder / "scratch.c").write_text(f'#include "types.h"\n{tables}{asserts}')
    command = (sys.executable, "-c", CHILD, str(SOURCES), ",".join(row.c for row in STRUCTS))
    return json.loads(run(*command, stdin=flatten("scratch", folder)))


def differences(c: Mapping[str, dict[str, Any]]) -> list[str]:
    """The differences between the compiler's layouts and Python's."""
    found = []
    for row in STRUCTS:
        size, fields = c[row.c]["size"], c[row.c]["fields"]
        if size != row.python.size:
            found.append(f"struct {row.c}: {size} bytes, Python packs {row.python.size}")
        if unpacked := [f for f in fields if f not in row.fields and f != "pad"]:
            found.append(f"struct {row.c}: Python does not pack {unpacked}")
        for name, where in zip(row.fields, python_offsets(row.python), strict=True):
            if tuple(fields.get(name, ())) != where:
                found.append(f"{row.c}.{name}: {fields.get(name)}, Python packs {where}")
    return found


def test_layouts_and_numbers_of_python_and_c_are_equal(tmp_path):
    assert differences(compiled(tmp_path)) == []


def test_python_fields_have_the_names_of_the_c_fields():
    """Fields are packed by position, so two of the same size could be swapped unnoticed."""
    names = {row.c: tuple(row.fields) for row in STRUCTS}
    assert (*layout.ServiceValue._fields, "check") == names["service"]
    assert layout.Meta._fields == names["meta"]
    assert layout.Target._fields == names["target"]


def test_every_struct_and_enum_is_compared():
    defined = set(re.findall(r"^struct (\w+) \{", TYPES, re.M))
    assert defined - {"address"} == {row.c for row in STRUCTS}
    enums = re.findall(r"^enum (\w+) \{(.*?)^\};", TYPES, re.M | re.S)
    words = {
        word
        for name, body in enums
        if name not in ("verdict", "peer_flags")  # only C uses these
        for word in re.findall(r"^\t([A-Z0-9_]+) =", body, re.M)
    }
    assert words == {name for name in NAMES if name.isupper() and name not in DEFINED}


def test_map_types_and_flags_match_the_programs():
    """Names, types and flags; the loader compares sizes at every start."""
    text = "\n".join(map(flatten, UNITS))
    found = {}
    for arguments in re.findall(r"^BPF_(?:F_)?TABLE\(([^;]*?)\);", text, re.M | re.S):
        kind, _, _, name, _, *flags = (part.strip().strip('"') for part in arguments.split(","))
        found[name] = (kind, flags == ["BPF_F_NO_PREALLOC"])
    others = {"QUEUE": ("queue", False), "RINGBUF_OUTPUT": ("ringbuf", False), "SK_STORAGE": ("sk_storage", True)}
    for kind, name in re.findall(r"^BPF_(\w+)\((\w+),", text, re.M):
        found |= {name: others[kind]} if kind in others else {}
    numbers = {kind: getattr(uapi, f"BPF_MAP_TYPE_{kind.upper()}") for kind, _ in found.values() if kind != "prog"}
    assert found.pop("tails") == ("prog", False), "created with the programs, not with the maps"
    ours = {spec.name: (spec.map_type, spec.flags == 1) for spec in layout.MAPS.values()}
    # the programs never read these
    for name in ("service_names", "endpoint_names", "meta", "agent_status"):
        assert ours.pop(name)
    assert {name: (numbers[kind], is_lazy) for name, (kind, is_lazy) in found.items()} == ours


def test_the_cookie_mask_matches_the_shift_in_c():
    text = (SOURCES / "sock.c").read_text()
    assert f"<< {udp.COOKIE_MASK.bit_length()}" in text
    assert udp.COOKIE_MASK.bit_count() == udp.COOKIE_MASK.bit_length()


# ---- packing and unpacking ---------------------------------------------------------------------


def test_the_largest_accepted_sizes_fit_a_map():
    most = MapSizes(*[kinds.MAX_ENTRIES] * 3, connections=kinds.MOST_CONNECTIONS)
    assert max(spec.max_entries(most) for spec in layout.MAPS.values()) <= kinds.MAX_ENTRIES


def test_maps_start_no_larger_than_their_maximum():
    sizes = MapSizes(frontends=10, slots=20, backends=30, affinity=60)
    for spec in layout.MAPS.values():
        some = spec.map_type != uapi.BPF_MAP_TYPE_SK_STORAGE  # one for each socket
        assert some <= spec.initial_entries(sizes) <= spec.max_entries(sizes)
        if spec.sized_by:
            assert spec.max_entries(sizes) == int(getattr(sizes, spec.sized_by) * spec.entries_per_object)
        if not spec.grows:
            assert spec.initial_entries(sizes) == spec.max_entries(sizes)


def test_the_schema_hash_changes_with_any_layout(monkeypatch):
    seen = {layout.schema_hash()}
    spec = layout.MAPS["services"]
    for changed in ({"key_size": 24}, {"value_size": 32}, {"map_type": 9}, {"version": 2}):
        monkeypatch.setitem(layout.MAPS, "services", replace(spec, **changed))
        seen.add(layout.schema_hash())
    assert len(seen) == 5
    monkeypatch.setitem(layout.MAPS, "services", replace(spec, entries=1))
    assert layout.schema_hash() in seen, "the number of entries does not matter"
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("spec", "former"),
    [(spec, former) for spec in layout.MAPS.values() for former in spec.former_layouts],
    ids=lambda one: f"{one.name}" if isinstance(one, layout.MapSpec) else f"v{one.version}",
)
def test_values_of_former_layouts_are_converted(spec: layout.MapSpec, former: layout.FormerLayout):
    assert len(former.convert(bytes(former.value_size))) == spec.value_size


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_a_flow_without_windows_keeps_its_fields(protocol: Protocol):
    """A TCP connection gets windows that all its segments fit, whatever their scale is."""
    (former,) = layout.MAPS["flows"].former_layouts
    before = struct.Struct("=Q20s20s20s16s2s2sIIBBBBI8s48s")
    client = bytes(18) + bytes([protocol, 0])
    fields = [1, client, b"f" * 20, b"b" * 20, b"s" * 16, b"cp", b"sp", 2, 3, 4, 5, 6, 7, 8]
    numbers = struct.pack("=II", 100, 2**32 - 5)
    converted = layout.FLOW.unpack(former.convert(before.pack(*fields, numbers, b"w" * 48)))
    assert former.value_size == before.size
    assert [*converted[:14], *converted[15:]] == [*fields, 0, 0, b"w" * 48]
    tcp = layout.TCP_SIDE.pack(100, 2**32 - 5, 2**30 - 5, 2**30, 100 + 2**30, 2**30, 14, 0, 0, 0)
    side = tcp if protocol is Protocol.TCP else numbers
    assert converted[14] == side.ljust(32, b"\0")


def test_socket_storage_values_fit_slab_sizes():
    """struct bpf_local_storage_elem has 72 bytes before the value, and slab sizes are fixed."""
    assert layout.PEER.size + 72 <= 192
    assert layout.UDP_FLOWS.size + 72 == 512


def test_the_map_of_reasons_is_replaced_when_a_reason_is_added():
    """An older map has no entry for it: programs could not count it."""
    assert layout.MAPS["reasons"].version == layout.MAPS["reasons"].entries == len(layout.Reason)


def test_reasons_of_dropped_packets_are_counted_as_drops():
    """Only reasons that are written as constants; the variable `reason` is not followed."""
    dropped: set[str] = set()
    for reason in re.findall(r"(?:finish\(TC_ACT_SHOT|drop_flow\([^,]*),([^;]*)\);", flatten("tc")):
        dropped |= set(re.findall(r"\b[A-Z][A-Z_]+\b", reason)) - {"EEXIST"}
    assert len(dropped) > 4
    verdicts = {reason: layout.Reason[reason].verdict for reason in dropped}
    assert verdicts == dict.fromkeys(dropped, "drop")
