# SPDX-License-Identifier: Apache-2.0
"""Constructed inspections: read from fakes of the maps, or given as values."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import yaml

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.inspect import services
from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, U32_PAIR, ServiceValue
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.inspection import HookEntry, Inspection, Part
from kbpf.model.metrics import ConnectionStats
from kbpf.model.objects import Protocol
from kbpf.model.status import AgentStatus
from tests.support.faults.fake_maps import Entries, FakeMap, slots
from tests.support.faults.fake_maps import names as pack_names

TCP, UDP = Protocol.TCP, Protocol.UDP
IdPair = tuple[int, int]


def key(name: str, namespace: str = "default", protocol: Protocol = TCP) -> ServicePortKey:
    return ServicePortKey(namespace, name, "http", protocol, 4)


def snapshot(
    *,
    frontends: Mapping[FrontendAddress, ServiceValue] = {},
    names: Mapping[int, ServicePortKey] = {},
    sets: Mapping[int, Mapping[int, int]] = {},
    backends: Mapping[int, Backend] = {},
    totals: Mapping[IdPair, ConnectionStats] = {},
    open: Mapping[IdPair, int] = {},
    endpoints: Entries | None = None,
    **more: Any,
) -> Inspection:
    """The first parameters are contents of maps, by id; the others are fields of Inspection."""

    def pack(at: Any) -> bytes:
        return layout.pack_target(at.address, at.port, at.protocol)

    peers = [pair for pair, count in open.items() for _ in range(count)]
    contents: dict[str, Entries] = {
        "services": {pack(at): value.pack(pack(at)) for at, value in frontends.items()},
        "service_names": pack_names(names),
        "backend_slots": slots(sets),
        "backends": {U32.pack(i): pack(backend) for i, backend in backends.items()},
        "counts": {U32_PAIR.pack(*ids): layout.COUNTS.pack(*row) for ids, row in totals.items()},
        "sock_peers": {U32.pack(i): layout.PEER.pack(0, bytes(20), bytes(20), *ids) for i, ids in enumerate(peers)},
        "endpoint_names": endpoints or {},
    }
    maps: Any = {name: FakeMap(name, contents.get(name, {})) for name in MAPS}
    values = services.read(maps, Part.SERVICES | Part.TRAFFIC | Part.ENDPOINTS) | {
        "monotonic": 1000.0,
        "boottime": 5000.0,
    }
    return Inspection("/pins", **(values | more))


def stats(text: str) -> dict[IdPair, ConnectionStats]:
    """Lines ``SERVICE BACKEND COUNTER=NUMBER ...``, by ids."""
    found = {}
    for service, backend, *words in map(str.split, text.splitlines()):
        counters = {name: int(number) for name, _, number in (word.partition("=") for word in words)}
        found[int(service), int(backend)] = ConnectionStats(**counters)
    return found


# ---- status ------------------------------------------------------------------------------------

HEALTHY = """
version: '1'
pid: 42
mode: bpf
node: n
started: 4000.0
heartbeat: 4999.0
synced: true
services: 3
service_ports: 4
applied: 7
last_apply_ms: 1.5
event_to_map_p50_ms: 2.5
event_to_map_p99_ms: 9.5
sources: []
problems: []
problem_count: 0
"""


def agent(text: str, base: AgentStatus | None = None) -> AgentStatus:
    """The status of a healthy agent, or this one, but with these fields, in YAML."""
    fields = msgspec.to_builtins(base) if base else yaml.safe_load(HEALTHY)
    return msgspec.convert(fields | yaml.safe_load(text or "{}"), AgentStatus)


AGENT = agent("")
MISSING = tuple(HookEntry(h.name, h.purpose, h.required, h.only_counts, h.tracepoint) for h in HOOKS)
ATTACHED = tuple(replace(hook, link=1, program=2, cgroup_id=3) for hook in MISSING)
