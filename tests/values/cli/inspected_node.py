# SPDX-License-Identifier: Apache-2.0
"""The node of test_inspect.py: its pinned maps, programs, devices and routes."""

import dataclasses
import struct

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.maps import flow_entries, layout
from kbpf.dataplane.bpf.maps.layout import (
    U32,
    U32_PAIR,
    ClientKind,
    ConfigFlag,
    DeviceFlag,
    EndpointCondition,
    FlowDirection,
    FlowPath,
    NodeFlag,
    Role,
    ServiceFlag,
    ServiceValue,
    TcpState,
)
from kbpf.dataplane.bpf.maps.status_entries import pack_entry
from kbpf.model.address import Addr, format_addr, parse_addr
from kbpf.model.desired import ServicePortKey
from kbpf.model.inspection import HookEntry, HostDevice, Route
from kbpf.model.objects import Cidr, Protocol
from kbpf.model.reasons import Reason
from kbpf.model.status import encode
from kbpf.views.trace_page import NodeFacts, Step
from tests.support.faults.fake_maps import Entries, names, slots, target
from tests.support.table import table
from tests.values.views.snapshots import agent, stats

TCP, UDP = Protocol.TCP, Protocol.UDP
NOW, BOOT, NS = 100_000.0, 200_000.0, 1_000_000_000
HOST_NETNS = 4026531840


def frontends(text: str) -> Entries:
    """Lines ``PROTOCOL FRONTEND SERVICE FLAGS TIMEOUT``, then set and size for both policies, and the table."""
    found = {}
    for protocol, to, service, flags, *numbers in map(str.split, text.splitlines()):
        key, bits = target(to, Protocol[protocol]), sum(ServiceFlag[name] for name in flags.split("|") if name != "-")
        found[key] = ServiceValue(int(service), bits, *map(int, numbers)).pack(key)
    return found


def flow(
    ends: str,
    *,
    state: int = TcpState.ESTABLISHED,
    idle: float = 10.0,
    protocol: int = TCP,
    directions: str = "ors",
    service: int = 1,
    path: int = FlowPath.STACK,
    device: int = 0,
) -> Entries:
    """The entries of a connection: original, reply, and SNAT reply if there is SNAT. `ends`: the client, the
    frontend, the backend, and the SNAT address.
    """
    client, frontend, backend, *snat = (target(text, protocol) for text in ends.split())
    (source,) = snat or [bytes(20)]
    times = int((NOW - idle) * NS)
    head = (times, client, frontend, backend, source[:16], source[16:18], client[16:18], service, 5, state, 0, path)

    def entry(direction: int) -> bytes:
        return layout.FLOW.pack(*head, direction, device, bytes(32), 0, 0, bytes(48))

    keys = {"o": (FlowDirection.ORIGINAL, client, frontend), "r": (FlowDirection.REPLY, client, backend)}
    if snat:
        keys["s"] = (FlowDirection.SNAT_REPLY, source, backend)
    return {
        flow_entries.flow_key(one, other): entry(direction)
        for letter, (direction, one, other) in keys.items()
        if letter in directions
    }


def affinity(client: bytes, kind: int, service: int, backend: int, age: float, cgroup: int = 0) -> Entries:
    key = layout.AFFINITY_KEY.pack(client, service, kind)
    return {key: layout.AFFINITY.pack(int((NOW - age) * NS), backend, cgroup)}


def endpoints(text: str) -> Entries:
    """Names of endpoints: lines ``PROTOCOL SERVICE ENDPOINT POD NODE ZONE CONDITIONS``, r(eady), s(erving),
    t(erminating); `-`: none.
    """
    found = {}
    for protocol, service, at, pod, *where, letters in map(str.split, text.splitlines()):
        node, zone = (word.removeprefix("-") for word in where)
        conditions = sum(condition for condition in EndpointCondition if condition.name[0].lower() in letters)
        key = layout.ENDPOINT_KEY.pack(int(service), target(at, Protocol[protocol]))
        found[key] = layout.pack_endpoint_name(pod.replace("ESC", "\x1b"), node, zone, conditions)
    return found


def device(role: int, flags: int) -> bytes:
    return layout.DEVICE.pack(role, 14, flags, bytes(6), bytes(16), bytes(16), 0)


STATUS = agent("""
version: '9.9'
node: node-1
started: 196300.0
heartbeat: 199999.0
applied: 5
event_to_map_p50_ms: 2.0
event_to_map_p99_ms: 3.0
refused: 1
problems: ['Service a/b: no good', another]
problem_count: 3
disabled_features: [Pods are not watched]
left_to_node: [10.96.0.10:53/UDP of Service kube-system/kube-dns]
sources:
- {name: services, state: watching, synced: true, resource_version: '7', error: ''}
- {name: pods, state: failed, synced: false, resource_version: '', error: forbidden}
threads:
- {name: http, alive: true, idle_seconds: 0.1}
- {name: devices, alive: false, idle_seconds: 90.0, restarts: 2, problem: stuck}
packets: {enabled: true, excluded: [ex*], failed: [{device: up1, detail: no clsact}], failed_count: 2}
choice: {requested: auto, mode: bpf}
""")

CGROUPS = {"pod": 101, "service": 102, "nameless": 103, "gone": 104}
UIDS = {"pod": "0a1b2c3d-0000-4000-8000-000000000001", "nameless": "0a1b2c3d-0000-4000-8000-000000000002"}
CGROUP_PATHS = {
    101: f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
    f"{UIDS['pod'].replace('-', '_')}.slice/cri-containerd-1.scope",
    102: "/system.slice/cron.service",
    103: f"/kubepods/besteffort/pod{UIDS['nameless']}/c1",
}


def counts(text: str) -> Entries:
    return {U32_PAIR.pack(*ids): layout.COUNTS.pack(*found) for ids, found in stats(text).items()}


def failures(text: str) -> Entries:
    """Lines: how many seconds ago the last and the first were, how many; the client's cgroup and address, the frontend,
    the backend (`-`: none); the Service and the reason.
    """
    found = {}
    for last, first, count, cgroup, *ends, service, reason in map(str.split, text.splitlines()):
        packed = (target(end) if end != "-" else bytes(20) for end in ends)
        times = int((NOW - int(last)) * NS), int((NOW - int(first)) * NS)
        event = layout.EVENT.pack(times[0], CGROUPS.get(cgroup, 0), *packed, int(service), 0, Reason[reason])
        found[layout.CLIENT_SLOT.pack(bytes(16), int(last))] = layout.FAILURE.pack(times[1], int(count), event)
    return found


CONTENTS: dict[str, Entries] = {
    "services": frontends("""\
TCP 10.96.0.1:80 1 CLUSTER_IP 0 1 3 0 0
TCP 0.0.0.0:30080 1 NODE_PORT 0 1 3 0 0
TCP 192.0.2.9:80 1 EXTERNAL_IP 0 1 3 0 0
TCP 10.96.0.2:443 2 CLUSTER_IP|EXTERNAL_LOCAL|MAGLEV 600 2 3 3 1 9
TCP 192.0.2.5:443 2 LOAD_BALANCER|RESTRICTED|EXTERNAL_LOCAL|MAGLEV 600 2 3 3 1 9
UDP [fd00:96::1]:53 3 CLUSTER_IP 0 4 2 0 0
UDP [::]:30053 3 NODE_PORT 0 5 1 0 0
TCP 10.96.0.9:80 8 - 0 0 0 0 0
"""),
    "service_names": names(
        {
            1: ServicePortKey("default", "web", "http", TCP, 4),
            2: ServicePortKey("default", "local", "", TCP, 4),
            3: ServicePortKey("kube-system", "dns", "dns", UDP, 6),
            4: ServicePortKey("default", "idle", "http", TCP, 4),
        }
    ),
    "backend_slots": slots({1: [5, 6, 5], 2: [5, 6], 9: [1, 0, 1], 3: [6], 4: [7, 99], 5: [7]}),
    "backends": {
        U32.pack(5): target("10.244.0.5:8080"),
        U32.pack(6): target("10.244.0.6:8080"),
        U32.pack(7): target("[fd00:10::7]:53", UDP),
        U32.pack(8): target("10.244.0.8:8080"),
    },
    "endpoint_names": endpoints("""\
TCP 1 10.244.0.5:8080 web-7f9c-x2v8k node-1 zone-a rs
TCP 1 10.244.0.6:8080 web-7f9c-7qzkd node-2 zone-b st
TCP 1 10.244.0.9:8080 web-7f9c-new1 node-1 zone-a -
TCP 2 10.244.0.6:8080 web-7f9c-7qzkd node-2 zone-b rst
TCP 2 10.244.0.10:8080 web-7f9c-w1w1w node-2 zone-b rs
UDP 3 [fd00:10::7]:53 coredns-6d4bESC[31m - - rs
TCP 9 10.244.0.77:1 stale - - -
"""),
    "node_addresses": {parse_addr("198.18.0.1"): bytes(4)},
    "affinity": {
        **affinity(parse_addr("198.51.100.7"), ClientKind.ADDRESS, 2, 5, 60.0),
        **affinity(HOST_NETNS.to_bytes(8, "little") + bytes(8), ClientKind.NETNS, 2, 6, 700.0),
        **affinity((18).to_bytes(8, "little") + bytes(8), ClientKind.NETNS, 2, 6, 599.0, CGROUPS["pod"]),
        **affinity((99).to_bytes(8, "little") + bytes(8), ClientKind.NETNS, 7, 77, 5.0),
    },
    "source_ranges": {
        layout.pack_source_range(2, Cidr(parse_addr("203.0.113.0"), 120)): bytes(4),
        layout.pack_source_range(2, Cidr(parse_addr("198.51.100.0"), 120)): bytes(4),
        layout.pack_source_range(7, Cidr(parse_addr("2001:db8::"), 32)): bytes(4),
    },
    "flows": {
        **flow("198.51.100.7:2000 192.0.2.9:80 10.244.0.5:8080 198.18.0.1:61000"),
        **flow(
            "198.51.100.8:2001 192.0.2.9:80 10.244.0.6:8080",
            directions="o",
            path=FlowPath.DIRECT,
            state=TcpState.CLOSED,
            idle=20,
        ),
        **flow("198.18.0.1:2002 192.0.2.5:443 10.244.0.6:8080", service=2, device=1, state=TcpState.NEW),
        **flow(
            "[2001:db8::7]:5 [fd00:96::1]:53 [fd00:10::7]:53 [fd00:198::1]:5",
            idle=25,
            protocol=UDP,
            service=3,
            state=TcpState.ANSWERED,
        ),
        **flow("198.51.100.9:9 192.0.2.9:80 10.244.0.5:8080 198.18.0.1:61001", idle=100_000),
        **flow("198.51.100.7:2000 192.0.2.9:80 10.244.0.6:8080 198.18.0.1:61002", directions="s", idle=200),
    },
    "devices": {U32.pack(2): device(Role.HOST, 0), U32.pack(3): device(Role.POD, DeviceFlag.LOCAL | DeviceFlag.PEER)},
    "node": {
        bytes(4): layout.NODE.pack(
            parse_addr("198.18.0.1"),
            bytes(16),
            NodeFlag.DETECTS_LOCAL | NodeFlag.LOCAL_NETWORKS,
            61_000,
            61_003,
            1 << 14,
            0,
        )
    },
    "local_networks": {layout.pack_network(Cidr(parse_addr("10.244.0.0"), 112)): bytes(4)},
    "exempt_cgroups": {bytes(8): bytes(4)},
    "config": {bytes(4): layout.CONFIG.pack(HOST_NETNS, ConfigFlag.COUNT_CONNECTION_ENDS | ConfigFlag.SET_RETVAL, 0)},
    "counts": counts("""\
1 5 opened=40 refused=1 ended=39 bytes_in=2048 bytes_out=5242880 rtt_us=60000 rtts=30
1 0 no_endpoint=3 not_allowed=2
1 4294967295 opened=7
1 98 opened=2 unanswered=1 reset=1 retransmits=4
3 7 opened=9
"""),
    "latencies": {
        U32.pack(1): layout.LATENCIES.pack(
            *(layout.LATENCY.pack(struct.pack("=24Q", 0, 90, 8, 2, *20 * [0]), 100_000_000) for _ in range(2))
        )
    },
    "failures": failures("""\
2 90 14 pod 10.244.0.9:40000 10.96.0.1:80 10.244.0.5:8080 1 BACKEND_REFUSED
41 41 1 service - 10.96.0.2:443 - 2 NO_LOCAL_ENDPOINTS
300 900 3 nameless - 10.96.0.1:81 - 0 UNKNOWN_PORT
400 400 1 gone [fd00:10::9]:5 [fd00:96::1]:53 [fd00:10::7]:53 3 BACKEND_UNANSWERED
600 700 2 - 198.51.100.7:2000 192.0.2.9:80 10.244.0.6:8080 1 BACKEND_RESET
650 650 1 - 198.51.100.7:2001 192.0.2.5:443 - 2 NOT_ALLOWED
"""),
    "reasons": {U32.pack(reason): (2 * reason).to_bytes(8, "little") * 2 for reason in Reason},
    "agent_status": {bytes(4): pack_entry(1, encode(STATUS))},
}


def hook(i: int) -> HookEntry:
    entry = HookEntry(
        *(getattr(HOOKS[i], name) for name in ("name", "purpose", "required", "only_counts", "tracepoint"))
    )
    if i in (8, len(HOOKS) - 1):
        return entry
    return dataclasses.replace(
        entry,
        link=10 + i,
        program=20 + i,
        tag="" if i == 1 else "cafe",
        instructions=None if i == 1 else 100 + i,
        pinned=i != 3,
        cgroup_id=0 if i == 2 else 77,
        cgroup="" if i == 4 else "/sys/fs/cgroup",
    )


FACTS = [hook(i) for i in range(len(HOOKS))]
DEVICES = tuple(
    table(
        HostDevice,
        """\
lo | 1 | loopback | skipped | loopback |  |
eth0 | 2 | hardware | host | hardware | tc_ingress (tcx) | 8 (tcx)
cali0 | 3 | veth | pod | veth into another namespace | tc_ingress (tcx) |
ex0 | 4 | hardware | skipped | excluded by the operator |  |
up1 | 5 | hardware | host | hardware |  |
""",
    )
)


def find_route(to: Addr, source: Addr | None, came_in_by: int) -> Route:
    """Pods of this node behind cali0; a router at eth0, except for one pod network."""
    text = format_addr(to)
    if text == "10.244.0.6":
        return Route(error="no route, or IP forwarding is off")
    if text.startswith("10.244.0."):
        return Route(3, "cali0")
    return Route(2, "eth0", parse_addr("fd00::1" if ":" in text else "198.18.0.254"))


FACTS_OF_NODE = NodeFacts(
    find_route,
    find_route,
    [
        Step(
            "FORWARD",
            "masqueraded packets pass",
            "drops by default: ip filter FORWARD; the agent keeps a rule there for masqueraded packets",
        )
    ],
    [Step("FORWARD", "may drop it", "drops by default: ip filter FORWARD; passes where a rule there accepts it")],
    [
        Step(
            "before DNAT",
            "rules are bypassed",
            "bypassed by the packet path, so they protect no NodePort or VIP: inet host early",
        )
    ],
)
