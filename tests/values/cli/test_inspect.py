# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` as text, on fakes of the pinned maps, the kernel's devices and IPVS: the files of
tests/golden/inspect.
"""

import dataclasses
import errno
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from kbpf.checks import connection
from kbpf.checks.connection import Result
from kbpf.cli import app, trace
from kbpf.cli.schema import build_schema, list_kinds
from kbpf.dataplane.bpf import map_metrics as metrics
from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps import flow_entries, layout, pinning
from kbpf.dataplane.bpf.maps.layout import (
    MAPS,
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
    schema_hash,
)
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.maps.status_entries import pack_entry
from kbpf.dataplane.ipvs import ipvs_inspect as ipvs
from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.statefile import StateFile
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts, pods
from kbpf.kernel.system.mounts import Cgroup
from kbpf.model.address import Addr, format_addr, parse_addr
from kbpf.model.desired import ServicePortKey
from kbpf.model.inspection import HookEntry, HostDevice, Route
from kbpf.model.metrics import ConnectionStats
from kbpf.model.objects import Cidr, Protocol
from kbpf.model.reasons import Reason
from kbpf.model.status import AgentStatus, DeviceFailure, ModeChoice, PacketStatus, SourceView, ThreadView, encode
from kbpf.views.trace_row import NodeFacts, Step
from tests.support.faults.fake_maps import Entries, FakeMap, names, slots, target
from tests.support.golden import Golden
from tests.support.json_schema import validate
from tests.support.table import table
from tests.values.views.ipvs_node import CONNECTIONS, HELD, PORTS

TCP, UDP = Protocol.TCP, Protocol.UDP
NOW, BOOT, NS = 100_000.0, 200_000.0, 1_000_000_000
HOST_NETNS = 4026531840


def frontends(*rows: tuple[str, ServiceValue, int]) -> Entries:
    return {key: value.pack(key) for to, value, protocol in rows if (key := target(to, protocol))}


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


def endpoint(service: int, text: str, protocol: int = TCP) -> Entries:
    """The name of an endpoint: its address, Pod, node, zone, and conditions, r(eady), s(erving), t(erminating); `-`:
    none.
    """
    at, pod, *where, letters = text.split()
    node, zone = (word.removeprefix("-") for word in where)
    conditions = sum(condition for condition in EndpointCondition if condition.name[0].lower() in letters)
    key = layout.ENDPOINT_KEY.pack(service, target(at, protocol))
    return {key: layout.pack_endpoint_name(pod, node, zone, conditions)}


def device(role: int, flags: int) -> bytes:
    return layout.DEVICE.pack(role, 14, flags, bytes(6), bytes(16), bytes(16), 0)


CLUSTER, NODE_PORT = ServiceFlag.CLUSTER_IP, ServiceFlag.NODE_PORT
VIP = ServiceFlag.LOAD_BALANCER | ServiceFlag.RESTRICTED
LOCAL = ServiceFlag.EXTERNAL_LOCAL | ServiceFlag.MAGLEV
STATUS = AgentStatus(
    version="9.9",
    pid=42,
    mode="bpf",
    node="node-1",
    started=BOOT - 3700,
    heartbeat=BOOT - 1,
    synced=True,
    services=3,
    service_ports=4,
    applied=5,
    last_apply_ms=1.5,
    event_to_map_p50_ms=2.0,
    event_to_map_p99_ms=3.0,
    refused=1,
    problem_count=3,
    problems=("Service a/b: no good", "another"),
    disabled_features=("Pods are not watched",),
    left_to_node=("10.96.0.10:53/UDP of Service kube-system/kube-dns",),
    sources=(SourceView("services", "watching", True, "7", ""), SourceView("pods", "failed", False, "", "forbidden")),
    threads=(ThreadView("http", True, 0.1), ThreadView("devices", False, 90.0, 2, "stuck")),
    packets=PacketStatus(True, excluded=("ex*",), failed=(DeviceFailure("up1", "no clsact"),), failed_count=2),
    choice=ModeChoice("auto", "bpf"),
)

CGROUPS = {"pod": 101, "service": 102, "nameless": 103, "gone": 104}
UIDS = {"pod": "0a1b2c3d-0000-4000-8000-000000000001", "nameless": "0a1b2c3d-0000-4000-8000-000000000002"}
CGROUP_PATHS = {
    101: f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
    f"{UIDS['pod'].replace('-', '_')}.slice/cri-containerd-1.scope",
    102: "/system.slice/cron.service",
    103: f"/kubepods/besteffort/pod{UIDS['nameless']}/c1",
}


def failure(times: str, ends: str, service: int, reason: Reason) -> Entries:
    """A failure: how many seconds ago the last and the first were, how many; the client's cgroup and address, the
    frontend, the backend (`-`: none).
    """
    last, first, count = map(int, times.split())
    cgroup, *targets = ends.split()
    packed = (target(text) if text != "-" else bytes(20) for text in targets)
    event = layout.EVENT.pack(int((NOW - last) * NS), CGROUPS.get(cgroup, 0), *packed, service, 0, reason)
    return {layout.CLIENT_SLOT.pack(bytes(16), last): layout.FAILURE.pack(int((NOW - first) * NS), count, event)}


CONTENTS: dict[str, Entries] = {
    "services": frontends(
        ("10.96.0.1:80", ServiceValue(1, CLUSTER, 0, 1, 3, 0, 0), TCP),
        ("0.0.0.0:30080", ServiceValue(1, NODE_PORT, 0, 1, 3, 0, 0), TCP),
        ("192.0.2.9:80", ServiceValue(1, ServiceFlag.EXTERNAL_IP, 0, 1, 3, 0, 0), TCP),
        ("10.96.0.2:443", ServiceValue(2, CLUSTER | LOCAL, 600, 2, 3, 3, 1, 9), TCP),
        ("192.0.2.5:443", ServiceValue(2, VIP | LOCAL, 600, 2, 3, 3, 1, 9), TCP),
        ("[fd00:96::1]:53", ServiceValue(3, CLUSTER, 0, 4, 2, 0, 0), UDP),
        ("[::]:30053", ServiceValue(3, NODE_PORT, 0, 5, 1, 0, 0), UDP),
        ("10.96.0.9:80", ServiceValue(8, 0, 0, 0, 0, 0, 0), TCP),
    ),
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
    "endpoint_names": {
        **endpoint(1, "10.244.0.5:8080 web-7f9c-x2v8k node-1 zone-a rs"),
        **endpoint(1, "10.244.0.6:8080 web-7f9c-7qzkd node-2 zone-b st"),
        **endpoint(1, "10.244.0.9:8080 web-7f9c-new1 node-1 zone-a -"),
        **endpoint(2, "10.244.0.6:8080 web-7f9c-7qzkd node-2 zone-b rst"),
        **endpoint(2, "10.244.0.10:8080 web-7f9c-w1w1w node-2 zone-b rs"),
        **endpoint(3, "[fd00:10::7]:53 coredns-6d4b\x1b[31m - - rs", UDP),
        **endpoint(9, "10.244.0.77:1 stale - - -"),
    },
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
    "counts": {
        U32_PAIR.pack(1, 5): layout.COUNTS.pack(
            *ConnectionStats(opened=40, refused=1, ended=39, bytes_in=2048, bytes_out=5 << 20, rtt_us=60_000, rtts=30)
        ),
        U32_PAIR.pack(1, 0): layout.COUNTS.pack(*ConnectionStats(no_endpoint=3, not_allowed=2)),
        U32_PAIR.pack(1, 0xFFFF_FFFF): layout.COUNTS.pack(*ConnectionStats(opened=7)),
        U32_PAIR.pack(1, 98): layout.COUNTS.pack(*ConnectionStats(opened=2, unanswered=1, reset=1, retransmits=4)),
        U32_PAIR.pack(3, 7): layout.COUNTS.pack(*ConnectionStats(opened=9)),
    },
    "latencies": {
        U32.pack(1): layout.LATENCIES.pack(
            *(layout.LATENCY.pack(struct.pack("=24Q", 0, 90, 8, 2, *20 * [0]), 100_000_000) for _ in range(2))
        )
    },
    "failures": {
        **failure("2 90 14", "pod 10.244.0.9:40000 10.96.0.1:80 10.244.0.5:8080", 1, Reason.BACKEND_REFUSED),
        **failure("41 41 1", "service - 10.96.0.2:443 -", 2, Reason.NO_LOCAL_ENDPOINTS),
        **failure("300 900 3", "nameless - 10.96.0.1:81 -", 0, Reason.UNKNOWN_PORT),
        **failure("400 400 1", "gone [fd00:10::9]:5 [fd00:96::1]:53 [fd00:10::7]:53", 3, Reason.BACKEND_UNANSWERED),
        **failure("600 700 2", "- 198.51.100.7:2000 192.0.2.9:80 10.244.0.6:8080", 1, Reason.BACKEND_RESET),
        **failure("650 650 1", "- 198.51.100.7:2001 192.0.2.5:443 -", 2, Reason.NOT_ALLOWED),
    },
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
DEVICES = (
    HostDevice("lo", 1, "loopback", "skipped", "loopback", "", ""),
    HostDevice("eth0", 2, "hardware", "host", "hardware", "tc_ingress (tcx)", "8 (tcx)"),
    HostDevice("cali0", 3, "veth", "pod", "veth into another namespace", "tc_ingress (tcx)", ""),
    HostDevice("ex0", 4, "hardware", "skipped", "excluded by the operator", "", ""),
    HostDevice("up1", 5, "hardware", "host", "hardware", "", ""),
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


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with an agent of mode bpf, in the current folder."""
    monkeypatch.chdir(tmp_path)
    pins = Pins(Path("pins"))
    pins.maps.mkdir(parents=True)
    (pins.root / "programs-tc-x").mkdir()
    for name in MAPS:
        (pins.maps / name).touch()
    monkeypatch.setattr(
        snapshot.pinning, "open_map", lambda path, spec: FakeMap(spec.name, CONTENTS.get(spec.name, {}))
    )
    clock = SimpleNamespace(
        monotonic=lambda: NOW, monotonic_ns=lambda: int(NOW * NS), clock_gettime=lambda _: BOOT, CLOCK_BOOTTIME=0
    )
    for module in (snapshot, ipvs, metrics):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(snapshot.hooks, "read", lambda _: FACTS)
    cgroups = {i: Cgroup(Path(f"/sys/fs/cgroup{path}"), path) for i, path in CGROUP_PATHS.items()}
    monkeypatch.setattr(mounts, "find_cgroups", lambda ids, mask=0: cgroups)
    monkeypatch.setattr(pods, "list_pod_names", lambda: {UIDS["pod"]: "shop/cart-5d6f"})
    monkeypatch.setattr(pods, "find_cgroup_ids", lambda uid: frozenset((CGROUPS["pod"], 77)))
    monkeypatch.setattr(pods, "find_process", lambda uid: pods.PodProcess(7, Path("/pod")))
    monkeypatch.setattr(trace, "_read_netns", lambda _: (99, (parse_addr("10.244.0.9"),)))
    monkeypatch.setattr(trace, "read_facts", lambda *_: FACTS_OF_NODE)
    for module in (snapshot, ipvs):
        monkeypatch.setattr(module, "is_alive", lambda *_: True)
    monkeypatch.setattr(snapshot.devices, "read", lambda *_: DEVICES)
    monkeypatch.setattr(ipvs, "_read_servers", lambda: HELD)
    monkeypatch.setattr(ipvs, "list_connections", lambda: CONNECTIONS)
    return tmp_path


@pytest.fixture
def ipvs_node(node: Path) -> Path:
    """The same node after a change to mode ipvs."""
    folder = node / "state" / "kbpf-ipvs0"
    folder.mkdir(parents=True)
    file = StateFile(folder)
    for port in PORTS:
        file.set_service(port.state.key, port.state, fwmark=port.fwmark)
    file.write(b"")
    choice = ModeChoice("auto", "ipvs", "no cgroup v2", "no cgroup v2 hierarchy is mounted")
    status = replace(STATUS, mode="ipvs", choice=choice, packets=None, refused=0)
    (folder / statefile.STATUS_FILE).write_bytes(encode(status))
    return node


def transcript(capsys: pytest.CaptureFixture[str], *commands: str, command_name: str = "inspect") -> str:
    """What a shell would show of these commands; of JSON each row in one line."""
    pages = []
    for line in commands:
        command, _, word = line.partition(" | grep ")
        code, out, err = run(capsys, command, command_name)
        if command.endswith("json"):
            value = json.loads(out)
            assert out == json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            yaml_code, yaml_out, yaml_err = run(capsys, f"{command[:-4]}yaml", command_name)
            assert (yaml_code, yaml.safe_load(yaml_out), yaml_err) == (code, value, err)
            assert validate(value, build_schema(list_kinds())) == []
            rows = [{k: v} for k, v in value.items() if k != "items"] + value.get("items", [])
            texts = [json.dumps(row, ensure_ascii=False) for row in rows]
            out = "".join(f"{text}\n" for text in texts if word in text)
        end = f"exit code {code}\n" if code else ""
        pages.append(f"$ kbpf {command_name} {line}\n{out}{err}{end}")
    return "\n".join(pages)


def run(capsys: pytest.CaptureFixture[str], command: str, name: str = "inspect") -> tuple[int, str, str]:
    line = [name, *command.split(), "--pin-dir", "pins", "--state-dir", "state"]
    return app.call(line), *capsys.readouterr()


def commands(view: str, *more: str, wide: bool = True) -> tuple[str, ...]:
    return (view, *([f"{view} -o wide"] if wide else []), f"{view} -o json", *more)


VIEWS = {
    "services": commands("services", "services -n kube-system", "services -n none"),
    "service": (
        "service local -o wide",
        "service local -o json",
        "service web",
        "service dns -n kube-system",
        "service wbe",
        "service :30053 -o wide",
        "service 10.9.9.9",
        "service web-7f9c-new1",
        "service default/web-7f9c-x2v8",
        "service kube-system/dns -n default",
    ),
    "backends": commands(
        "backends",
        "backends web",
        "backends 10.244.0.6",
        "backends 10.96.0.2:443",
        "backends :30053",
        "backends default/web-7f9c-x2v8k",
        "backends wbe",
        "backends --no-headers",
        "backends --sort-by services",
        "backends --sort-by nothing",
    ),
    "affinity": commands("affinity"),
    "failures": commands(
        "failures",
        "failures --service web",
        "failures --service 192.0.2.9",
        "failures --pod shop/cart-5d6f",
        "failures --since 5m --limit 1",
        "failures --since soon",
        "failures --service wbe",
        "failures --pod shop/none",
        "failures --pod web-7f9c-7qzkd",
    ),
    "connections": commands(
        "connections",
        "connections --expired --limit 2",
        "connections --service web --state closed",
        "connections --client 198.18.0.1",
        "connections --backend fd00:10::7",
        "connections --service no",
    ),
    "nat": commands("nat", "nat --limit 1"),
    "sources": commands("sources"),
    "devices": commands("devices"),
    "maps": ("maps", "maps -o json | grep queue"),
    "programs": commands("programs", wide=False),
    "status": commands("status", wide=False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_view(view: str, node: Path, golden: Golden, capsys: pytest.CaptureFixture[str]):
    golden(f"inspect/{view}.txt", transcript(capsys, *VIEWS[view]))


FORMATS = """\
services -o name
services -A -o name
services -n kube-system -o name
devices -o name --limit 3
backends -o name
maps -o wide --limit 1
failures -o name
services -o xml
status -o name
connections -n kube-system
connections -n default --limit 1 --sort-by idle
connections -n none
affinity -n none
failures -n kube-system
sources -n default
backends -n kube-system -o name
nat -n kube-system
services -l app=web
service web -n none -A
services --limit 2 --sort-by name -A
""".splitlines()


def test_formats_and_selections(node: Path, golden: Golden, capsys: pytest.CaptureFixture[str]):
    golden("inspect/formats.txt", transcript(capsys, *FORMATS))


TRACES = """\
host default/web
host default/web:http
host default/local:443
shop/cart-5d6f 10.96.0.1:80
shop/cart-5d6f https://local.default
shop/cart-5d6f 10.96.0.1:81
outside 198.18.0.1:30080
outside 198.18.0.9:30080
198.51.100.7 192.0.2.5:443
203.0.113.9 192.0.2.5:443
outside kube-system/dns
host [fd00:96::1]:53/udp
host 10.1.2.3:80
outside default/web -o json
shop/none default/web
host default/none
host default/web:ftp
host 10.96.0.1
host http://web.default:81
host default/wbe
outside default/local:8443
""".splitlines()


def test_traces(node: Path, golden: Golden, capsys: pytest.CaptureFixture[str]):
    golden("trace.txt", transcript(capsys, *TRACES, command_name="trace"))


IPVS_COMMANDS = (
    "services -o wide",
    "services -o json",
    *commands("service web", "service local", wide=False),
    *commands("backends", wide=False),
    "connections -o wide",
    "connections -o json",
    "connections --client 198.18.0.254 --limit 1",
    *commands("status", wide=False),
    "maps",
)


def test_view_of_mode_ipvs(ipvs_node: Path, golden: Golden, capsys: pytest.CaptureFixture[str]):
    golden("inspect/ipvs.txt", transcript(capsys, *IPVS_COMMANDS))


def refuse(code: int) -> Callable[..., Any]:
    """An open_map() that fails like this."""

    def open_map(*_: object) -> Any:
        raise KernelError("cannot open the map", "pins", "run as root", code)

    return open_map


REAL_OPEN_MAP = pinning.open_map
OTHER_LAYOUT = SimpleNamespace(type=1, key_size=8, value_size=96, close=lambda: None)
RUNNING = "is `kbpf run` running on this node, and with this --pin-dir?"
UNREADABLE: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "nothing was ever pinned": (
        lambda pins, _: shutil.rmtree(pins),
        f"nothing is pinned: there is no such folder (pins); {RUNNING}",
    ),
    "no maps are pinned": (lambda pins, _: shutil.rmtree(Pins(pins).maps), f"no maps are pinned (pins); {RUNNING}"),
    "another version, older or newer": (
        lambda pins, _: Pins(pins).maps.rename(pins / "maps-0123456789ab"),
        "another version of kbpf has pinned its maps (pins); use the kbpf that runs as the agent, "
        "or restart the agent with this one",
    ),
    "the pin folder is a file": (
        lambda pins, _: (shutil.rmtree(pins), pins.write_text("")),
        "not a folder (pins); give the folder that `kbpf run` was given with --pin-dir",
    ),
    "a map was removed": (
        lambda _, patch: patch.setattr(snapshot.pinning, "open_map", refuse(errno.ENOENT)),
        "the map MAP is missing (pins/maps-SCHEMA); its pin was removed: the agent restores "
        "it within seconds, or when it starts",
    ),
    "no rights": (
        lambda _, patch: patch.setattr(snapshot.pinning, "open_map", refuse(errno.EPERM)),
        "cannot open the map (pins): EPERM; run as root",
    ),
    "a map of another layout": (
        lambda _, patch: (
            patch.setattr(snapshot.pinning, "open_map", REAL_OPEN_MAP),
            patch.setattr(Map, "open", lambda path: OTHER_LAYOUT),
        ),
        "the pinned map has an incompatible layout: type 1, key size 8, value size 96 "
        "(pins/maps-SCHEMA/MAP); run kbpf cleanup",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("command", ["service web", "backends", "connections", "failures"])
def test_what_cannot_be_read_is_one_clear_line(
    name: str, command: str, node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    break_it, line = UNREADABLE[name]
    break_it(node / "pins", monkeypatch)
    code, out, err = run(capsys, command)
    err = re.sub(r"(the map |SCHEMA/)\w+", r"\1MAP", err.replace(schema_hash(), "SCHEMA"))
    assert (code, out, err) == (1, "", f"kbpf: {line}\n")


def test_corrupt_entries_are_left_out(node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Those that no agent or program of this version can have written."""
    whole = [run(capsys, command) for command in CORRUPT]
    for name, entries in CORRUPT_ENTRIES.items():
        monkeypatch.setitem(CONTENTS, name, {**CONTENTS[name], **entries})
    assert [run(capsys, command) for command in CORRUPT] == whole


CORRUPT = ("service web", "backends", "failures", "failures --service web")
BAD = bytes([9] * 20)
CORRUPT_ENTRIES: dict[str, Entries] = {
    "services": {BAD: bytes(layout.SERVICE.size)},
    "backends": {U32.pack(9): BAD},
    "endpoint_names": {layout.ENDPOINT_KEY.pack(1, BAD): bytes(layout.ENDPOINT_NAME.size)},
    "failures": {
        bytes(20): layout.FAILURE.pack(0, 1, layout.EVENT.pack(0, 0, *3 * [target("10.0.0.1:1")], 1, 0, 1 << 20)),
        bytes(19) + b"x": layout.FAILURE.pack(0, 1, layout.EVENT.pack(0, 0, *3 * [BAD], 1, 0, 1)),
    },
}


UNASKED = table("""\
True outside 198.18.0.1:30080 →   confirmed: a packet, on a copy
False outside 198.18.0.1:30080 →   DIFFERS: a packet, on a copy
None outside 198.18.0.1:30080 →
True host [fd00:96::1]:53/udp →   confirmed: a packet, on a copy
True 198.51.100.7 192.0.2.5:443 →   confirmed: a packet, on a copy
True outside 192.0.2.5:443 →
True host default/web →
True outside 198.18.0.1:30080 --connect →
""")
"""Whether what its packet does is what is predicted (None: it cannot be tried), and a trace → the last line. Nothing
is tried where source ranges depend on the client's address, and where a socket hook decides.
"""


@pytest.mark.parametrize(("tried", "line"), UNASKED)
def test_a_packet_is_tried_without_being_asked(
    node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tried: str, line: str
) -> None:
    """A connect() is not: it may give the client a backend by session affinity."""
    word, _, trace_of = tried.partition(" ")
    matches = {"True": True, "False": False}.get(word)
    monkeypatch.setattr(connection, "try_packet", lambda *_, **__: Result(matches, "it"))
    monkeypatch.setattr(connection, "try_socket", lambda *_: pytest.fail("it connects"))
    code, out, _ = run(capsys, trace_of, "trace")
    shown = [text for text in out.splitlines() if "a packet, on a copy" in text]
    assert [text.partition(" of the programs")[0] for text in shown] == [line] * bool(line)
    assert code == ("--connect" in trace_of or matches is False)


IPVS_TRACES = """\
host default/web
outside default/web
host 127.0.0.1:30080
outside 198.18.0.1:30081
host 192.0.2.2:80
203.0.113.9 192.0.2.2:80
host 192.0.2.2:81
shop/cart-5d6f default/sticky
host default/none
host 10.1.2.3:80
host default/web --confirm
""".splitlines()


def test_traces_in_mode_ipvs(ipvs_node: Path, golden: Golden, capsys: pytest.CaptureFixture[str]):
    golden("trace-ipvs.txt", transcript(capsys, *IPVS_TRACES, command_name="trace"))


OLD = "0a1b2c3d-0000-4000-8000-000000000009"
RUNNING = frozenset((CGROUPS["pod"], 77))
OTHER_PODS: dict[str, tuple[str, str, frozenset[int], str]] = {
    "replaced, its logs are first": (OLD, "shop/cart-5d6f", frozenset(), "(10.244.0.9)"),
    "replaced, its logs are last": ("last", "shop/cart-5d6f", frozenset(), "(10.244.0.9)"),
    "terminating, without a process": (OLD, "shop/cart-5d6f", frozenset((7,)), "(10.244.0.9)"),
    "of another namespace": (OLD, "stage/cart-5d6f", RUNNING, "cart-5d6f may be shop/cart-5d6f or stage/cart-5d6f"),
}
"""The uid, name and cgroups of a second Pod with the name of the one that runs; what is printed."""


@pytest.mark.parametrize(("uid", "name", "cgroups", "text"), OTHER_PODS.values(), ids=OTHER_PODS)
def test_trace_takes_the_pod_that_runs(
    node: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uid: str,
    name: str,
    cgroups: frozenset[int],
    text: str,
):
    names = {OLD: name, UIDS["pod"]: "shop/cart-5d6f"} if uid == OLD else {UIDS["pod"]: "shop/cart-5d6f", uid: name}
    process = pods.PodProcess(7, Path("/pod"))
    monkeypatch.setattr(pods, "list_pod_names", lambda: names)
    monkeypatch.setattr(pods, "find_cgroup_ids", lambda of: cgroups if of == uid else RUNNING)
    monkeypatch.setattr(pods, "find_process", lambda of: None if of == uid else process)
    code, out, err = run(capsys, "cart-5d6f default/web", "trace")
    assert text in out + err
    assert code == (2 if "may be" in text else 0)


OPENED = {
    "services": "services service_names backend_slots backends node_addresses config",
    "affinity": "services service_names backend_slots backends node_addresses config affinity endpoint_names node",
    "connections": "flows service_names endpoint_names config node devices local_networks",
    "devices": "config node devices local_networks",
    "maps": " ".join(MAPS),
    "programs": "config exempt_cgroups",
    "status": "config exempt_cgroups flows node devices local_networks",
}
"""The maps of each view; all read those of the status, too."""


@pytest.mark.parametrize("view", OPENED)
def test_only_maps_that_are_shown_are_opened(
    view: str, node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    opened: list[str] = []
    open_map = snapshot.pinning.open_map

    def count(path: Path, spec: layout.MapSpec) -> Any:
        opened.append(spec.name)
        return open_map(path, spec)

    monkeypatch.setattr(snapshot.pinning, "open_map", count)
    run(capsys, view)
    of_status = {"agent_status", "reasons"}
    assert {*opened} | of_status == {*OPENED[view].split()} | of_status
    others = [name for name in opened if name not in of_status]
    assert len(others) == len(set(others))


@pytest.mark.parametrize("is_alive", [True, False])
@pytest.mark.parametrize("view", [*sorted(set(VIEWS) - {"service", "status"}), "service web", "trace"])
def test_a_view_says_how_old_it_is_if_the_agent_is_down(
    view: str, is_alive: bool, node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(snapshot, "is_alive", lambda *_: is_alive)
    command = ("host default/web", "trace") if view == "trace" else (view, "inspect")
    _, _, err = run(capsys, *command)
    assert ("the agent is down: this is what it had programmed 1s ago" in err) is not is_alive


def test_a_view_does_not_need_the_status(
    node: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An agent of another version may know more reasons, and have a map of another size."""
    expected = run(capsys, "services")
    open_map = snapshot.pinning.open_map
    monkeypatch.setattr(
        snapshot.pinning, "open_map", lambda path, spec: (refuse(0) if spec.name == "reasons" else open_map)(path, spec)
    )
    assert run(capsys, "services") == expected
    assert run(capsys, "status")[0] == 1
