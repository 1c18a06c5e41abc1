# SPDX-License-Identifier: Apache-2.0
"""Status, connections and devices, built from constructed snapshots: states that a kernel cannot be
made to show.
"""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.inspect.attached import NO_PATTERNS, build_devices
from kbpf.dataplane.bpf.inspect.connections import ORIGINAL, REPLY, SNAT_REPLY, FlowTable, TrackedConnection
from kbpf.dataplane.bpf.inspect.snapshot import read_packet_path
from kbpf.dataplane.bpf.maps.flow_entries import IDENTITY
from kbpf.dataplane.bpf.maps.layout import (
    FLOW_HEAD,
    NODE,
    FlowPath,
    NodeFlag,
    TcpState,
)
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.tc import Attachment, AttachMethod
from kbpf.kernel.net.devices import Device
from kbpf.model.address import parse_addr
from kbpf.model.inspection import ConnectionQuery, DeviceEntry, Fill, NodeEntry, ServicePort
from kbpf.model.reasons import Reason
from kbpf.model.status import DeviceFailure, PacketStatus
from kbpf.views import programs, sources, status
from kbpf.views.packet_path import availability, connections, devices, nat
from tests.support.faults.fake_maps import FakeMap, target
from tests.support.table import each_cells, each_named_pair, each_pair
from tests.values.views.snapshots import AGENT, ATTACHED, MISSING, TCP, UDP, key, snapshot

FAILED = PacketStatus(True, failed=(DeviceFailure("eth0", "no clsact"),), failed_count=1)


@each_pair(
    "given, says",
    """\
healthy: → ok, runs
its process does not exist: dead →
silent for 10 s: heartbeat=4990 →
silent for 9 s: heartbeat=4991 → ok, runs
not synced yet: synced= → runs
a hook is missing: unhooked → runs
a Service port is refused: refused=1 → runs
a change was not written: error=no → runs
a device failed: failed → runs
problems are not refusals: problem_count=3 → ok, runs
no agent has ever run: never dead →
""",
)
def test_status_ok_and_running(given, says):
    """The agent's status, process and hooks → what the view says."""
    words = given.partition(":")[2].split()
    fields = {name: type(getattr(AGENT, name))(value) for name, value in (w.split("=") for w in words if "=" in w)}
    agent = replace(AGENT, packets=FAILED if "failed" in words else None, **fields)
    seen = status.build_view(
        snapshot(
            status=None if "never" in words else agent,
            agent_alive="dead" not in words,
            hooks=(MISSING[0], *ATTACHED[1:]) if "unhooked" in words else ATTACHED,
            packet_programs=True,
        )
    )
    assert ", ".join(["ok"] * seen.ok + ["runs"] * seen.running) == says
    assert set(seen.counters) == {reason.name.lower() for reason in Reason}
    assert seen.hooks_attached + len(seen.hooks_missing) == seen.hooks == len(HOOKS)


COUNTING = {"sock_ops", "trace_reset", "trace_retransmit", "trace_error"}


def test_missing_counting_hook_is_ok():
    """As on a kernel without that hook, or with `--accounting off`."""
    without = tuple(gone if gone.only_counts else hook for gone, hook in zip(MISSING, ATTACHED, strict=True))
    seen = status.build_view(snapshot(status=AGENT, agent_alive=True, hooks=without))
    assert seen.ok
    others = len(HOOKS) - len(COUNTING)
    assert (seen.hooks_attached, seen.hooks, seen.hooks_missing) == (others, others, ())
    off = [row for row in programs.build_rows(snapshot(hooks=without)) if row.state == "off"]
    assert {row.hook for row in off} == COUNTING


# ---- the packet path ---------------------------------------------------------------------------

NOW = 1000.0
NANO = 1_000_000_000


def track(
    client: str = "198.51.100.7:2000",
    to: str = "10.244.0.1:8080",
    snat: str = "",
    idle: float = 10.0,
    state: int = TcpState.ESTABLISHED,
    left: float = 50.0,
    parts: int = 0,
    protocol: int = TCP,
    way: int = FlowPath.STACK,
    device: int = 0,
    port: int = 0,
) -> TrackedConnection:
    """A connection to Service 1, `idle` seconds ago, with `left` seconds to live."""
    host, _, snat_port = (snat or "[::]:0").rpartition(":")
    address, number = target(client)[:16], target(client)[16:18]
    raw = FLOW_HEAD.pack(
        int((NOW - idle) * NANO),
        address + number + bytes([protocol, 0]),
        target("192.0.2.1:80"),
        target(to, protocol),
        parse_addr(host.strip("[]")),
        int(snat_port).to_bytes(2, "big"),
        port.to_bytes(2, "big") if port else number,
        1,
        5,
        state,
        0,
        way,
        0,
        device,
    )
    whole = ORIGINAL | REPLY | (SNAT_REPLY if snat else 0)
    return TrackedConnection(raw, int((NOW + left) * NANO), parts or whole)


def tracking(*found: TrackedConnection) -> FlowTable:
    held = {one.raw[IDENTITY]: one for one in found}
    return FlowTable(held, {1: ServicePort(1, key("web"))}, "/pins", NOW - 1, NOW, {})


SNATTED = "198.18.0.1:61000"
PARTS = {"original": ORIGINAL, "reply": REPLY, "snat": SNAT_REPLY}


@each_named_pair(
    "entry, fields",
    """\
the original entry is lost: parts=reply → lost=('flow',)
the reply entry is lost: parts=original → lost=('reply',)
the SNAT entry is lost: snat parts=original|reply → lost=('source',)
all but the SNAT entry are lost: snat parts=snat → lost=('flow','reply')
a new connection may not have its other entry yet: parts=reply idle=0.5 → lost=()
another source port at the backend: port=7 → seen_as=198.51.100.7:7
just before it expires: left=0.001 → expired=False
just after it expired: left=-0.001 → expired=True
an unknown path, from another version: way=9 → path=9
an unknown state, from another version: state=9 → state=9
from the node, through a device that is gone: device=1073741824 → device=#1073741824
SCTP: protocol=132 → protocol=SCTP
a last use in the future: idle=-5 → idle_seconds=0.0
""",
)
def test_connection_row(entry, fields):
    """What is special about an entry, as arguments of track() → some fields of its row.
    tests/golden/inspect/connections.txt has the usual ones.
    """
    given: dict[str, Any] = {}
    for word in entry.split():
        name, _, value = word.partition("=")
        match name:
            case "snat":
                given[name] = SNATTED
            case "parts":
                given[name] = sum(PARTS[part] for part in value.split("|"))
            case _:
                given[name] = json.loads(value)
    (row,) = tracking(track(**given)).find(ConnectionQuery(expired=True)).rows
    for field in fields.split():
        name, _, value = field.partition("=")
        assert str(getattr(row, name)).replace(" ", "") == value
    assert row.service == "default/web:http"
    for column in connections.COLUMNS:
        assert isinstance(column.text(row), str)


def test_connections_are_sorted_by_service_then_client():
    clients = ["10.0.0.2:9", "10.0.0.10:1", "9.255.255.255:5", "10.0.0.2:1000"]
    rows = tracking(*map(track, clients)).find(ConnectionQuery()).rows
    assert [r.client for r in rows] == ["9.255.255.255:5", "10.0.0.2:9", "10.0.0.2:1000", "10.0.0.10:1"]


@pytest.mark.parametrize(("used", "alarm"), [(79, False), (80, True), (100, True)])
def test_snat_port_alarm_is_at_80_percent(used, alarm):
    entries = [track(f"10.0.0.1:{i}", snat=f"198.18.0.1:{61_000 + i}") for i in range(used)]
    held = tracking(*entries, track("10.0.0.2:1"), track("10.0.0.3:1", snat="198.18.0.1:5", left=-1))
    node = NodeEntry((parse_addr("198.18.0.1"),), 61_000, 61_099)
    (row,) = nat.build_view(snapshot(node=node), held.usage()).usage
    assert (row.used, row.ports, row.percent, row.alarm) == (used, 100, float(used), alarm)
    assert len(held) == len(list(held.sources())) == used


def test_snat_port_usage_is_per_backend_and_protocol_most_used_first():
    held = tracking(
        track("10.0.0.1:1", "10.244.0.9:80", "198.18.0.1:1"),
        track("10.0.0.1:2", "10.244.0.1:80", "198.18.0.1:1"),
        track("10.0.0.1:3", "10.244.0.1:80", "198.18.0.1:2", state=TcpState.CLOSED),
        track("10.0.0.1:4", "10.244.0.1:80", "198.18.0.1:1", protocol=UDP),
    )
    view = nat.build_view(snapshot(), held.usage())
    assert [(u.backend, u.protocol, u.used, u.closed, u.alarm) for u in view.usage] == [
        ("10.244.0.1:80", "TCP", 2, 1, False),
        ("10.244.0.1:80", "UDP", 1, 0, False),
        ("10.244.0.9:80", "TCP", 1, 0, False),
    ]


PACKETS = {
    "on": PacketStatus(True),
    "off": PacketStatus(False),
    "no-clsact": PacketStatus(True, "no clsact"),
    "unknown": None,
}


@each_named_pair(
    "given, expected",
    """\
attached: on pinned → on
disabled: off → off --packet-path false
failed to load: no-clsact → failed no clsact
failed to attach: no-clsact pinned → failed no clsact
not attached yet: on → off not attached yet
no status, but programs: unknown pinned → on
no status and no programs: unknown → off no packet programs
disabled, but programs are pinned until the next start: off pinned → on
""",
)
def test_packet_path_state(given, expected):
    """The agent's PacketStatus, whether programs are pinned → the view's state and words of the reason."""
    name, *pinned = given.split()
    state, _, why = expected.partition(" ")
    said = replace(AGENT, packets=PACKETS[name])
    held = snapshot(status=said, agent_alive=True, hooks=ATTACHED, packet_programs=bool(pinned), fill=Fill(1, 1, 1, 9))
    seen = availability.build_view(held)
    assert seen.state == state
    assert why in seen.reason
    assert bool(seen.reason) == (state != "on") == bool(availability.unavailable_notice(held))
    assert status.build_view(held).ok == (state != "failed")


def test_forwarding_says_why_auto_is_not_netfilter():
    said = replace(AGENT, packets=PacketStatus(True, forwarding="stack", fallback="no BTF"))
    held = snapshot(status=said, agent_alive=True, hooks=ATTACHED, packet_programs=True)
    (text, *_) = availability.format_parts(availability.build_view(held))
    assert "stack: no BTF" in text


IN, OUT = (Attachment(2, direction, AttachMethod.TCX, 7) for direction in Direction)
UPLINK, POD = Device(2, "eth0"), Device(2, "cali0", "veth", peer_netns=1)


@each_cells(
    "device, on, said, role, ingress, problem",
    """\
a pod's veth | pod | ingress egress | on | pod | tc_x (tcx)
no program at ingress | uplink | egress | on | host |  | missing
no programs | uplink |  | on | host |  | missing
excluded, but with a program | uplink | ingress | excluded | skipped | tc_x (tcx) | should have no program
not in the list of devices | uplink |  | not listed | skipped
""",
    device={"pod": POD, "uplink": UPLINK}.get,
    on=lambda cell: tuple({"ingress": IN, "egress": OUT}[name] for name in cell.split()),
    said={
        "on": PacketStatus(True),
        "excluded": PacketStatus(True, excluded=("eth*",)),
        "not listed": PacketStatus(True, devices=("up*",)),
    }.get,
)
def test_device_row(device, on, said, role, ingress, problem):
    """A device, its programs, the agent's PacketStatus; the row's role, ingress program and words of the problem. The
    usual ones are in tests/golden/inspect/devices.txt.
    """
    held = snapshot(
        status=replace(AGENT, packets=said),
        packet_programs=True,
        devices={2: DeviceEntry("host", 14, pods=False, peer=True)},
        host_devices=build_devices((device,), on, {7: "tc_x"}, said),
    )
    (row,) = devices.build_rows(held)
    assert (row.role, row.ingress, row.flags, row.l2_header) == (role, ingress, ("peer",), 14)
    assert problem in row.problem
    assert bool(row.problem) == bool(problem)
    assert row.reason


def test_device_without_programs_is_no_problem_if_the_packet_path_is_off():
    tunnel = DeviceEntry("host", 0, pods=False, peer=False, tunnel=True)
    for held, flags, l2_header in (({}, (), None), ({2: tunnel}, ("tunnel",), 0)):
        listed = build_devices((UPLINK,), (), {}, NO_PATTERNS)
        (row,) = devices.build_rows(snapshot(devices=held, host_devices=listed))
        assert (row.role, row.problem, row.flags, row.l2_header) == ("host", "", flags, l2_header)


@each_cells(
    "created, fill, lost, alarm",
    """\
none is lost | 10 | 10 10 10 100 | 0 | no
full, but 21 flows may be evicted | 250 | 100 100 79 100 | 150 | no
full | 250 | 100 90 80 100 | 150 | yes
the counters are younger than the flows | 5 | 10 10 10 100 | unknown | no
""",
    created=int,
    fill=lambda cell: Fill(*map(int, cell.split())),
    lost=lambda cell: int(cell) if cell.isdigit() else None,
    alarm=bool,
)
def test_lost_entries_and_alarm(created, fill, lost, alarm):
    held = snapshot(fill=fill, reasons={Reason.NEW_FLOW: created}, packet_programs=True)
    seen = availability.build_view(held)
    assert (seen.entries_lost, seen.alarm, seen.connections) == (lost, alarm, fill.open)


def test_every_reason_has_a_distinct_description():
    assert len({reason.words for reason in Reason} - {""}) == len(Reason)


PODS = [
    (NodeFlag(0), ""),
    (NodeFlag.LOCAL_NETWORKS, ""),
    (NodeFlag.DETECTS_LOCAL, "devices"),
    (NodeFlag.DETECTS_LOCAL | NodeFlag.LOCAL_NETWORKS, "networks"),
]


@pytest.mark.parametrize(("flags", "pods"), PODS)
def test_detection_of_local_pods(flags: NodeFlag, pods):
    node = NODE.pack(bytes(16), bytes(16), flags, 0, 0, 0, 0)
    maps: Any = {name: FakeMap(name, {}) for name in ("devices", "local_networks")}
    seen = sources.build_view(snapshot(**read_packet_path({**maps, "node": FakeMap("node", {bytes(4): node})})))
    assert seen.pods == pods
