# SPDX-License-Identifier: Apache-2.0
"""Views built from constructed snapshots, for states that a kernel cannot be made to show."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from kbpf.checks.connect import MAX_BACKENDS, select_targets
from kbpf.cli import pages
from kbpf.dataplane.bpf.hooks import HOOKS
from kbpf.dataplane.bpf.inspect.hooks import HookFacts
from kbpf.dataplane.bpf.inspect.snapshot import (
    AffinityEntry,
    DeviceEntry,
    MapFacts,
    NodeEntry,
    Snapshot,
)
from kbpf.dataplane.bpf.inspect.tracked_connections import (
    ORIGINAL,
    REPLY,
    SNAT_REPLY,
    Fill,
    TrackedConnection,
)
from kbpf.dataplane.bpf.maps.flow_entries import IDENTITY
from kbpf.dataplane.bpf.maps.layout import (
    FLOW,
    MAPS,
    ClientKind,
    DeviceFlag,
    FlowPath,
    NodeFlag,
    Reason,
    Role,
    ServiceFlag,
    ServiceValue,
    TcpState,
    pack_target,
)
from kbpf.dataplane.bpf.metrics import REMOVED_BACKENDS
from kbpf.errors import NotFoundError
from kbpf.kernel.bpf import uapi
from kbpf.kernel.bpf.objects import LinkInfo
from kbpf.kernel.bpf.tc import Attachment, AttachMethod, Direction
from kbpf.kernel.net.devices import Device
from kbpf.model.address import Addr, parse_addr
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.metrics import ALL_COUNTERS, CONNECTION_COUNTERS, ConnectionStats
from kbpf.model.objects import Cidr, Protocol
from kbpf.model.status import AgentStatus, DeviceFailure, PacketStatus, SourceView, ThreadView
from kbpf.views import affinity, maps, programs, service, services, sources, status
from kbpf.views.packet_path import availability, connections, devices, nat

PINS = Path("/pins")
TCP, UDP = Protocol.TCP, Protocol.UDP
CLUSTER_IP = int(ServiceFlag.CLUSTER_IP)


def at(address: str, port: int = 80, protocol: Protocol = TCP) -> FrontendAddress:
    return FrontendAddress(parse_addr(address), port, protocol)


def backend(index: int, protocol: Protocol = TCP) -> Backend:
    return Backend(parse_addr(f"10.244.0.{index}"), 8080, protocol)


def value(
    service_id: int, size: int = 1, flags: int = CLUSTER_IP, timeout: int = 0
) -> ServiceValue:
    return ServiceValue(service_id, flags, timeout, service_id if size else 0, size, 0, 0)


def key(name: str, namespace: str = "default", protocol: Protocol = TCP) -> ServicePortKey:
    return ServicePortKey(namespace, name, "http", protocol, 4)


def snapshot(**parts: Any) -> Snapshot:
    return Snapshot(PINS, **{"monotonic": 1000.0, "boottime": 5000.0, **parts})


# ---- services ----------------------------------------------------------------------------------


def test_frontend_without_a_name_is_shown_last():
    found = services.build_rows(
        snapshot(frontends={at("10.96.0.9"): value(9), at("10.96.0.1"): value(1)},
                 names={1: key("web")})
    )  # fmt: skip
    assert [(row.name, row.id) for row in found] == [("web", 1), ("", 9)]


@pytest.mark.parametrize(
    ("address", "families", "nowhere"),
    [
        ("0.0.0.0", {4, 6}, False),
        ("0.0.0.0", {6}, True),
        ("::", {4}, True),
        ("::", {6}, False),
        ("0.0.0.0", None, False),
        ("10.96.0.1", set(), False),
    ],
)
def test_node_port_without_an_address_of_its_family_is_not_served(
    address: str, families: set[int] | None, nowhere: bool
):
    is_cluster_ip = address == "10.96.0.1"
    flags = CLUSTER_IP if is_cluster_ip else int(ServiceFlag.NODE_PORT)
    held = snapshot(
        frontends={at(address, 30080): value(1, flags=flags)}, names={1: key("web")},
        node_ports=None if families is None else frozenset(families),
    )  # fmt: skip
    (row,) = services.build_rows(held)
    (frontend,) = row.frontends
    assert frontend.nowhere is nowhere
    texts = [column.text(row) for column in services.COLUMNS]
    assert any("not served" in text for text in texts) is nowhere
    notes = [column.text(frontend) for column in service.FRONTEND_COLUMNS]
    assert any("not served" in text for text in notes) is nowhere


def test_name_without_a_frontend_is_shown():
    (row,) = services.build_rows(snapshot(names={1: key("web")}))
    assert (row.name, row.frontends, row.backends_cluster) == ("web", (), 0)


def test_slot_without_a_backend_is_counted_as_missing():
    one = snapshot(
        frontends={at("10.96.0.1"): value(1, size=3)},
        names={1: key("web")},
        sets={1: {0: 5, 1: 6}},
        backends={5: backend(1)},
    )
    (detail,) = service.build_details(one, "web")
    assert [(p.id, p.address) for p in detail.cluster[0].backends] == [
        (5, "10.244.0.1"), (6, ""), (0, ""),
    ]  # fmt: skip
    assert detail.cluster[0].missing == 2


def test_backend_in_several_slots_is_one_row_with_its_share():
    """A weighted or Maglev set has more slots than backends."""
    held = snapshot(
        frontends={at("10.96.0.1"): value(1, size=4, flags=CLUSTER_IP | int(ServiceFlag.MAGLEV))},
        names={1: key("web")},
        sets={1: {0: 6, 1: 5, 2: 6, 3: 6}},
        backends={5: backend(1), 6: backend(2)},
    )
    (detail,) = service.build_details(held, "web")
    (one,) = detail.cluster
    assert (one.size, one.missing) == (4, 0)
    assert [(b.id, b.index, b.slots, b.share) for b in one.backends] == [
        (6, 0, 3, 0.75), (5, 1, 1, 0.25),
    ]  # fmt: skip
    assert (detail.service.algorithm, detail.service.backends_cluster) == ("maglev", 2)
    assert [[c.text(b) for c in service.BACKEND_COLUMNS] for b in one.backends] == [
        ["6", "10.244.0.2:8080", "3", "75.0%"], ["5", "10.244.0.1:8080", "1", "25.0%"],
    ]  # fmt: skip
    assert "cluster set 1: 2 backends in 4 slots" in pages.format_service([detail])
    assert "algorithm         maglev" in pages.format_service([detail])


def test_traffic_rows_of_a_service():
    """Only traffic of this Service. Connections without a backend come first, those to removed
    backends last.
    """
    good = ConnectionStats(
        opened=40, ended=39, bytes_in=2048, bytes_out=5 << 20, rtt_us=60_000, rtts=30
    )
    held = snapshot(
        frontends={at("10.96.0.1"): value(1), at("10.96.0.2"): value(2)},
        names={1: key("web"), 2: key("other")},
        sets={1: {0: 5}},
        backends={5: backend(1), 6: backend(2)},
        totals={
            (1, REMOVED_BACKENDS): ConnectionStats(opened=7),
            (1, 5): good,
            (2, 6): good,
            (1, 0): ConnectionStats(refused=3),
            (1, 9): ConnectionStats(opened=2, unanswered=1, broken=1, retransmits=4),
        },
        open={(1, 5): 1, (2, 6): 8, (1, 6): 2},
        counted=ALL_COUNTERS,
    )
    (detail,) = service.build_details(held, "web")
    assert [[c.text(t) for c in service.TRAFFIC_COLUMNS] for t in detail.traffic] == [
        ["none", "0", "0", "3", "0", "0", "0B", "0B", "0", "-"],
        ["10.244.0.1:8080", "1", "40", "0", "0", "0", "2.0KiB", "5.0MiB", "0", "2ms"],
        ["10.244.0.2:8080", "2", "0", "0", "0", "0", "0B", "0B", "0", "-"],
        ["id 9, gone", "0", "2", "0", "1", "1", "0B", "0B", "4", "-"],
        ["gone", "0", "7", "0", "0", "0", "0B", "0B", "0", "-"],
    ]
    assert "connections since counting began" in pages.format_service([detail])
    (without,) = service.build_details(snapshot(names={1: key("web")}), "web")
    assert "since counting began" not in pages.format_service([without])


class AccountingRow(NamedTuple):
    """A protocol and the counters enabled by --accounting: the cells after OPEN, the line below."""

    story: str
    protocol: Protocol
    counted: frozenset[str]
    cells: tuple[str, ...]
    line: str


ACCOUNTING_ROWS = [
    AccountingRow("all of TCP",
                  TCP, ALL_COUNTERS, ("4", "1", "0", "0", "9B", "0B", "0", "2ms"), ""),
    AccountingRow("all of UDP", UDP, ALL_COUNTERS, ("4", "1", "-", "-", "9B", "0B", "-", "-"), ""),
    AccountingRow("connections only", TCP, CONNECTION_COUNTERS, ("4", "1", *6 * "-"),
                  "UNANSWERED, BROKEN, IN, OUT, RETRANSMITS, ROUND-TRIP"),
    AccountingRow("no counters", TCP, frozenset(), tuple(8 * "-"),
                  "OPENED, REFUSED, UNANSWERED, BROKEN, IN, OUT, RETRANSMITS, ROUND-TRIP"),
]  # fmt: skip


@pytest.mark.parametrize("row", ACCOUNTING_ROWS, ids=lambda row: row.story)
def test_uncounted_values_are_null_not_zero(row: AccountingRow):
    """Even if the map holds numbers from an earlier --accounting."""
    held = snapshot(
        frontends={at("10.96.0.1", protocol=row.protocol): value(1)},
        names={1: key("web", protocol=row.protocol)},
        backends={5: backend(1)},
        totals={(1, 5): ConnectionStats(opened=4, refused=1, bytes_in=9, rtt_us=2000, rtts=1)},
        open={(1, 5): 3},
        counted=row.counted,
    )
    (detail,) = service.build_details(held, "web")
    (shown,) = detail.traffic
    cells = [c.text(shown) for c in service.TRAFFIC_COLUMNS]
    assert cells == ["10.244.0.1:8080", "3", *row.cells]
    plain = msgspec.to_builtins(shown)
    assert plain["open"] == 3
    nulls = {name for name, number in plain.items() if number is None}
    assert ("opened" in nulls) == (row.cells[0] == "-")
    assert ("broken" in nulls) == ("round_trips" in nulls) == (row.cells[3] == "-")
    line = f"    not counted: {row.line}; --accounting full"
    assert (line in pages.format_service([detail]).split("\n")) == bool(row.line)
    assert ("not counted" in pages.format_service([detail])) == bool(row.line)


NAMES = {1: key("web"), 2: key("web", "shop"), 3: key("dns", "kube-system")}


class NameQuery(NamedTuple):
    """A name and namespace, and the Services that are shown, or words of the error's hint."""

    name: str
    namespace: str
    found: tuple[str, ...]
    hint: str = ""


NAME_QUERIES = [
    NameQuery("web", "", ("default/web", "shop/web")),
    NameQuery("web", "shop", ("shop/web",)),
    NameQuery("shop/web", "", ("shop/web",)),
    NameQuery("dns", "default", (), "kube-system/dns"),
    NameQuery("wbe", "", (), "default/web or shop/web"),
    NameQuery("zzzzzz", "", (), "kbpf inspect services"),
]


@pytest.mark.parametrize("asked", NAME_QUERIES)
def test_service_is_found_by_name_and_namespace(asked: NameQuery):
    held = snapshot(names=NAMES)
    if asked.found:
        shown = service.build_details(held, asked.name, asked.namespace)
        assert tuple(d.service.full_name for d in shown) == asked.found
    else:
        with pytest.raises(NotFoundError) as caught:
            service.build_details(held, asked.name, asked.namespace)
        assert asked.hint in caught.value.hint


# ---- affinity ----------------------------------------------------------------------------------


def netns(cookie: int) -> Addr:
    return Addr(cookie.to_bytes(8, "little") + bytes(8))


class AffinityRow(NamedTuple):
    """An affinity entry, and its row: (client, kind, expires_seconds, expired)."""

    entry: AffinityEntry
    row: tuple[str, str, float | None, bool]


HOST = 17
NETNS, ADDRESS = int(ClientKind.NETNS), int(ClientKind.ADDRESS)
AFFINITY_ROWS = [
    AffinityRow(AffinityEntry(netns(HOST), NETNS, 1, 5, 990.0), ("host", "netns", 20.0, False)),
    AffinityRow(AffinityEntry(netns(18), NETNS, 1, 5, 990.0), ("18", "netns", 20.0, False)),
    AffinityRow(AffinityEntry(parse_addr("192.0.2.7"), ADDRESS, 1, 5, 990.0),
                ("192.0.2.7", "address", 20.0, False)),
    AffinityRow(AffinityEntry(netns(18), NETNS, 1, 5, 900.0), ("18", "netns", -70.0, True)),
    AffinityRow(AffinityEntry(netns(18), NETNS, 2, 5, 990.0), ("18", "netns", None, True)),
]  # fmt: skip


@pytest.mark.parametrize("kept", AFFINITY_ROWS)
def test_affinity_rows(kept: AffinityRow):
    held = snapshot(
        frontends={at("10.96.0.1"): value(1, timeout=30)},
        names={1: key("web")},
        backends={5: backend(1)},
        host_netns=HOST,
        affinity=(kept.entry,),
    )
    (row,) = affinity.build_rows(held)
    assert (row.client, row.kind, row.expires_seconds, row.expired) == kept.row
    assert row.backend == "10.244.0.1:8080"


# ---- maps, programs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "entries", "fill", "alarm"),
    [
        ("services", uapi.BPF_MAP_TYPE_HASH, 79, 79.0, False),
        ("services", uapi.BPF_MAP_TYPE_HASH, 80, 80.0, True),
        ("affinity", uapi.BPF_MAP_TYPE_LRU_HASH, 100, 100.0, True),
        ("source_ranges", uapi.BPF_MAP_TYPE_LPM_TRIE, 80, 80.0, True),
        ("node", uapi.BPF_MAP_TYPE_ARRAY, None, None, False),
        ("flow_queue", uapi.BPF_MAP_TYPE_QUEUE, None, None, False),
        ("flows", uapi.BPF_MAP_TYPE_HASH, 100, 100.0, False),
    ],
)
def test_map_alarm_is_at_80_percent(
    name: str, kind: int, entries: int | None, fill: float | None, alarm: bool
):
    (row,) = maps.build_rows(snapshot(maps=(MapFacts(name, kind, entries, 100, None),)))
    assert (row.max_entries, row.fill_percent, row.alarm) == (100, fill, alarm)
    assert ("!" in next(c.text(row) for c in maps.COLUMNS if c.title == "FILL")) == alarm


def test_every_map_has_a_purpose():
    assert maps.PURPOSE.keys() == MAPS.keys()


def test_sources_and_threads_are_not_shown_as_running_while_the_agent_is_down():
    watches = (SourceView("services", "watching", True, "7", ""),)
    agent = replace(AGENT, sources=watches, threads=(ThreadView("http", True, 0.1),))
    up, down = ["watching", "yes", "running"], ["was watching", "-", "ended"]
    for alive, wanted in ((True, up), (False, down)):
        seen = status.build_view(snapshot(status=agent, agent_alive=alive, hooks=ATTACHED))
        source, thread = seen.sources[0], seen.threads[0]
        cells = [column.text(source) for column in status.SOURCE_COLUMNS[1:3]]
        assert [*cells, status.THREAD_COLUMNS[1].text(thread)] == wanted


def test_hooks_are_missing_detached_or_attached():
    gone, here = LinkInfo(1, 10, 0, 10), LinkInfo(2, 11, 77, 11)
    facts = (HookFacts(HOOKS[0]), HookFacts(HOOKS[1], gone), HookFacts(HOOKS[2], here))
    found = programs.build_rows(snapshot(hooks=facts))
    assert [row.state for row in found] == ["missing", "detached", "attached"]


# ---- status ------------------------------------------------------------------------------------

AGENT = AgentStatus("1", 42, "bpf", "n", 4000.0, 4999.0, True, 3, 4, 7, 1.5, 2.5, 9.5, (), (), 0)
ATTACHED = tuple(HookFacts(hook, LinkInfo(1, 2, 3, hook.attach_type)) for hook in HOOKS)


class StatusRow(NamedTuple):
    """The agent's status, process and hooks, and the view's (ok, running)."""

    name: str
    agent: AgentStatus | None
    alive: bool
    hooks: tuple[HookFacts, ...]
    says: tuple[bool, bool]


STATUS_ROWS = [
    StatusRow("healthy", AGENT, True, ATTACHED, (True, True)),
    StatusRow("its process does not exist", AGENT, False, ATTACHED, (False, False)),
    StatusRow("silent for 10 s", replace(AGENT, heartbeat=4990.0), True, ATTACHED, (False, False)),
    StatusRow("silent for 9 s", replace(AGENT, heartbeat=4991.0), True, ATTACHED, (True, True)),
    StatusRow("not synced yet", replace(AGENT, synced=False), True, ATTACHED, (False, True)),
    StatusRow("a hook is missing",
              AGENT, True, (HookFacts(HOOKS[0]), *ATTACHED[1:]), (False, True)),
    StatusRow("a Service port is refused",
              replace(AGENT, refused=1), True, ATTACHED, (False, True)),
    StatusRow("a change was not written",
              replace(AGENT, error="no"), True, ATTACHED, (False, True)),
    StatusRow("problems are not refusals", replace(AGENT, problem_count=3), True, ATTACHED,
              (True, True)),
    StatusRow("no agent has ever run", None, False, ATTACHED, (False, False)),
]  # fmt: skip


@pytest.mark.parametrize("doing", STATUS_ROWS, ids=lambda doing: doing.name)
def test_status_ok_and_running(doing: StatusRow):
    held = snapshot(status=doing.agent, agent_alive=doing.alive, hooks=doing.hooks)
    seen = status.build_view(held)
    assert (seen.ok, seen.running) == doing.says
    assert set(seen.counters) == {reason.name.lower() for reason in Reason}
    assert seen.hooks_attached + len(seen.hooks_missing) == seen.hooks == len(HOOKS)


def test_missing_counting_hook_is_ok():
    """As on a kernel without that hook, or with `--accounting off`."""
    without = tuple(HookFacts(f.hook) if f.hook.only_counts else f for f in ATTACHED)
    seen = status.build_view(snapshot(status=AGENT, agent_alive=True, hooks=without))
    assert seen.ok
    assert (seen.hooks_attached, seen.hooks, seen.hooks_missing) == (
        len(HOOKS) - 1, len(HOOKS) - 1, ())  # fmt: skip
    off = [row for row in programs.build_rows(snapshot(hooks=without)) if row.state == "off"]
    assert [row.hook for row in off] == ["sock_ops"]


# ---- the packet path ---------------------------------------------------------------------------

NOW = 1000.0
NANO = 1_000_000_000


def target(text: str, protocol: int = TCP) -> bytes:
    host, _, port = text.rpartition(":")
    return pack_target(parse_addr(host), int(port), protocol)


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
    raw = FLOW.pack(
        int((NOW - idle) * NANO), address + number + bytes([protocol, 0]), target("192.0.2.1:80"),
        target(to, protocol), parse_addr(host.strip("[]")), int(snat_port).to_bytes(2, "big"),
        port.to_bytes(2, "big") if port else number, 1, 5, state, 0, way, 0, device, 0, bytes(48),
    )  # fmt: skip
    whole = ORIGINAL | REPLY | (SNAT_REPLY if snat else 0)
    return TrackedConnection(raw, int((NOW + left) * NANO), parts or whole)


def tracking(*found: TrackedConnection, **more: Any) -> Snapshot:
    held = {one.raw[IDENTITY]: one for one in found}
    return snapshot(connections=held, names={1: key("web")}, began=NOW - 1, **more)


class ConnectionRow(NamedTuple):
    """An entry, and some fields of its row."""

    name: str
    entry: TrackedConnection
    fields: dict[str, Any]


SNATTED = "198.18.0.1:61000"
CONNECTION_ROWS = [
    ConnectionRow("all entries exist", track(), {"lost": (), "seen_as": "198.51.100.7:2000"}),
    ConnectionRow("masqueraded", track(snat=SNATTED), {"seen_as": SNATTED, "masqueraded": True}),
    ConnectionRow("the original entry is lost", track(parts=REPLY), {"lost": ("flow",)}),
    ConnectionRow("the reply entry is lost", track(parts=ORIGINAL), {"lost": ("reply",)}),
    ConnectionRow(
        "the SNAT entry is lost", track(snat=SNATTED, parts=ORIGINAL | REPLY), {"lost": ("source",)}
    ),
    ConnectionRow(
        "all but the SNAT entry are lost",
        track(snat=SNATTED, parts=SNAT_REPLY),
        {"lost": ("flow", "reply")},
    ),
    ConnectionRow(
        "direct SNAT has no reply entry",
        track(snat=SNATTED, way=FlowPath.DIRECT_SNAT, parts=ORIGINAL | SNAT_REPLY),
        {"lost": ()},
    ),
    ConnectionRow(
        "direct SNAT, the SNAT entry is lost",
        track(snat=SNATTED, way=FlowPath.DIRECT_SNAT, parts=ORIGINAL),
        {"lost": ("source",)},
    ),
    ConnectionRow(
        "direct SNAT, the original entry is lost",
        track(snat=SNATTED, way=FlowPath.DIRECT_SNAT, parts=SNAT_REPLY),
        {"lost": ("flow",)},
    ),
    ConnectionRow(
        "a new connection may not have its other entry yet",
        track(parts=REPLY, idle=0.5),
        {"lost": ()},
    ),
    ConnectionRow(
        "another source port at the backend", track(port=7), {"seen_as": "198.51.100.7:7"}
    ),
    ConnectionRow("just before it expires", track(left=0.001), {"expired": False}),
    ConnectionRow("just after it expired", track(left=-0.001), {"expired": True}),
    ConnectionRow("from device to device", track(way=FlowPath.DIRECT), {"path": "direct"}),
    ConnectionRow("an unknown path, from another version", track(way=9), {"path": "9"}),
    ConnectionRow("an unknown state, from another version", track(state=9), {"state": "9"}),
    ConnectionRow("from the node, through loopback", track(device=1), {"device": "lo"}),
    ConnectionRow(
        "from the node, through a device that is gone",
        track(device=1 << 30),
        {"device": "#1073741824"},
    ),
    ConnectionRow("SCTP", track(protocol=Protocol.SCTP), {"protocol": "SCTP"}),
    ConnectionRow("a last use in the future", track(idle=-5), {"idle_seconds": 0.0}),
]


@pytest.mark.parametrize("shown", CONNECTION_ROWS, ids=lambda shown: shown.name)
def test_connection_row(shown: ConnectionRow):
    held = tracking(shown.entry)
    found = connections.select(held, connections.ConnectionQuery(expired=True)).connections
    (row,) = connections.build_rows(held, found)
    assert {name: getattr(row, name) for name in shown.fields} == shown.fields
    assert row.service == "default/web:http"
    for column in connections.COLUMNS:
        assert isinstance(column.text(row), str)


def test_connections_are_sorted_by_service_then_client():
    clients = ["10.0.0.2:9", "10.0.0.10:1", "9.255.255.255:5", "10.0.0.2:1000"]
    held = tracking(*map(track, clients))
    rows = connections.build_rows(held, connections.select(held).connections)
    assert [r.client for r in rows] == [
        "9.255.255.255:5", "10.0.0.2:9", "10.0.0.2:1000", "10.0.0.10:1",
    ]  # fmt: skip


@pytest.mark.parametrize(("used", "alarm"), [(79, False), (80, True), (100, True)])
def test_snat_port_alarm_is_at_80_percent(used: int, alarm: bool):
    entries = [track(f"10.0.0.1:{i}", snat=f"198.18.0.1:{61_000 + i}") for i in range(used)]
    held = tracking(
        *entries, track("10.0.0.2:1"), track("10.0.0.3:1", snat="198.18.0.1:5", left=-1),
        node=NodeEntry((parse_addr("198.18.0.1"),), NodeFlag(0), 61_000, 61_099),
    )  # fmt: skip
    found = nat.select_translated(held)
    (row,) = nat.build_view(held, found).usage
    assert (row.used, row.ports, row.percent, row.alarm) == (used, 100, float(used), alarm)
    assert len(list(nat.build_rows(held, found))) == used


def test_snat_port_usage_is_per_backend_and_protocol_most_used_first():
    held = tracking(
        track("10.0.0.1:1", "10.244.0.9:80", "198.18.0.1:1"),
        track("10.0.0.1:2", "10.244.0.1:80", "198.18.0.1:1"),
        track("10.0.0.1:3", "10.244.0.1:80", "198.18.0.1:2", state=TcpState.CLOSED),
        track("10.0.0.1:4", "10.244.0.1:80", "198.18.0.1:1", protocol=UDP),
    )
    found = nat.build_view(held, nat.select_translated(held))
    assert [(u.backend, u.protocol, u.used, u.closed, u.alarm) for u in found.usage] == [
        ("10.244.0.1:80", "TCP", 2, 1, False),
        ("10.244.0.1:80", "UDP", 1, 0, False),
        ("10.244.0.9:80", "TCP", 1, 0, False),
    ]


class PathRow(NamedTuple):
    """The agent's PacketStatus, whether programs are pinned, and the view's state and reason."""

    name: str
    said: PacketStatus | None
    pinned: bool
    state: str
    why: str = ""


PATHS = [
    PathRow("attached", PacketStatus(True), True, "on"),
    PathRow("disabled", PacketStatus(False), False, "off", "--packet-path false"),
    PathRow("failed to load", PacketStatus(True, "no clsact"), False, "failed", "no clsact"),
    PathRow("failed to attach", PacketStatus(True, "no clsact"), True, "failed", "no clsact"),
    PathRow("not attached yet", PacketStatus(True), False, "off", "not attached yet"),
    PathRow("no status, but programs", None, True, "on"),
    PathRow("no status and no programs", None, False, "off", "no packet programs"),
    PathRow(
        "disabled, but programs are pinned until the next start", PacketStatus(False), True, "on"
    ),
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_packet_path_state(path: PathRow):
    said = replace(AGENT, packets=path.said)
    held = snapshot(
        status=said,
        agent_alive=True,
        hooks=ATTACHED,
        packet_programs=path.pinned,
        fill=Fill(1, 1, 1, 9),
    )
    seen = availability.build_view(held)
    assert seen.state == path.state
    assert path.why in seen.reason
    assert bool(seen.reason) == (path.state != "on") == bool(availability.unavailable_notice(held))
    assert status.build_view(held).ok == (path.state != "failed")


def test_failed_device_makes_the_status_not_ok():
    failed = PacketStatus(True, failed=(DeviceFailure("up0", "no"),), failed_count=1)
    held = snapshot(
        status=replace(AGENT, packets=failed), agent_alive=True, hooks=ATTACHED,
        packet_programs=True,
    )  # fmt: skip
    assert not status.build_view(held).ok


IN, OUT = (Attachment(2, direction, AttachMethod.TCX, 7) for direction in Direction)
UPLINK, POD = Device(2, "eth0"), Device(2, "cali0", "veth", peer_netns=1)
EXCLUDED = PacketStatus(True, excluded=("eth*",))


class DeviceRow(NamedTuple):
    """A device, its attached programs, the agent's PacketStatus, and the expected row.

    The row is (role, ingress program, words of the problem).
    """

    name: str
    device: Device
    on: tuple[Attachment, ...]
    said: PacketStatus
    row: tuple[str, str, str]


DEVICE_ROWS = [
    DeviceRow("an uplink", UPLINK, (IN, OUT), PacketStatus(True), ("host", "tc_x (tcx)", "")),
    DeviceRow("a pod's veth", POD, (IN, OUT), PacketStatus(True), ("pod", "tc_x (tcx)", "")),
    DeviceRow("no program at ingress", UPLINK, (OUT,), PacketStatus(True), ("host", "", "missing")),
    DeviceRow("no programs", UPLINK, (), PacketStatus(True), ("host", "", "missing")),
    DeviceRow("excluded", UPLINK, (), EXCLUDED, ("skipped", "", "")),
    DeviceRow("excluded, but with a program", UPLINK, (IN,), EXCLUDED,
              ("skipped", "tc_x (tcx)", "should have no program")),
    DeviceRow("not in the list of devices", UPLINK, (), PacketStatus(True, devices=("up*",)),
              ("skipped", "", "")),
    DeviceRow("failed to attach", UPLINK, (),
              PacketStatus(True, failed=(DeviceFailure("eth0", "no clsact"),), failed_count=1),
              ("host", "", "no clsact")),
]  # fmt: skip


@pytest.mark.parametrize("played", DEVICE_ROWS, ids=lambda played: played.name)
def test_device_row(played: DeviceRow):
    told = DeviceEntry(Role.HOST, 14, DeviceFlag.PEER, bytes(6))
    held = snapshot(
        status=replace(AGENT, packets=played.said), packet_programs=True, devices={2: told}
    )
    (row,) = devices.build_rows(held, devices.HostDevices((played.device,), played.on, {7: "tc_x"}))
    role, ingress, problem = played.row
    assert (row.role, row.ingress, row.flags, row.l2_header) == (role, ingress, ("peer",), 14)
    assert problem in row.problem
    assert bool(row.problem) == bool(problem)
    assert row.reason


def test_device_without_programs_is_no_problem_if_the_packet_path_is_off():
    (row,) = devices.build_rows(snapshot(), devices.HostDevices((UPLINK,), (), {}))
    assert (row.role, row.problem, row.l2_header) == ("host", "", None)


@pytest.mark.parametrize(
    ("created", "fill", "lost", "alarm"),
    [
        (10, Fill(10, 10, 10, 100), 0, False),
        (250, Fill(100, 100, 79, 100), 150, False),  # full, but 21 flows may be evicted
        (250, Fill(100, 90, 80, 100), 150, True),
        (5, Fill(10, 10, 10, 100), None, False),  # the counters are younger than the flows
    ],
)
def test_lost_entries_and_alarm(created: int, fill: Fill, lost: int | None, alarm: bool):
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
def test_detection_of_local_pods(flags: NodeFlag, pods: str):
    held = snapshot(
        node=NodeEntry(flags=flags),
        local_networks=(Cidr(parse_addr("10.244.0.0"), 112), Cidr(parse_addr("fd00::"), 64)),
        devices={
            2: DeviceEntry(Role.POD, 14, DeviceFlag.LOCAL | DeviceFlag.PEER, bytes(6)),
            3: DeviceEntry(Role.HOST, 14, DeviceFlag(0), bytes(6)),
        },
    )
    seen = sources.build_view(held)
    assert (seen.pods, seen.local_devices) == (pods, 1)
    assert seen.local_networks == ("10.244.0.0/16", "fd00::/64")


def test_inconsistent_source_ranges_are_shown():
    restricted = int(ServiceFlag.LOAD_BALANCER | ServiceFlag.RESTRICTED)
    held = snapshot(
        frontends={at("192.0.2.1"): value(1, flags=restricted), at("10.96.0.1"): value(1)},
        names={1: key("web")},
        ranges=((2, Cidr(parse_addr("0.0.0.0"), 96)),),
    )
    assert [(r.service, r.ranges, r.addresses) for r in sources.build_view(held).services] == [
        ("default/web:http", (), ("192.0.2.1:80/TCP",)),
        ("id 2, not named", ("0.0.0.0/0",), ()),
    ]


# ---- targets of check --attached ---------------------------------------------------------------


def many(count: int) -> dict[int, int]:
    return {i: i + 1 for i in range(count)}


def dialled(**frontends: ServiceValue) -> list[str]:
    held = snapshot(
        frontends={at(f"10.96.0.{name[1:]}"): one for name, one in frontends.items()},
        sets={i: many(i) for i in range(1, 10)} | {100: many(MAX_BACKENDS + 1)},
        backends={i: backend(i) for i in range(1, MAX_BACKENDS + 2)},
    )
    return [str(at) for at, _ in select_targets(held)]


def test_smallest_set_is_dialled():
    assert dialled(_1=value(3), _2=value(2), _3=value(4)) == ["10.96.0.2:80/TCP"]


def test_service_with_affinity_is_dialled_only_if_there_is_no_other():
    assert dialled(_1=value(1, timeout=5), _2=value(4)) == ["10.96.0.2:80/TCP"]
    assert dialled(_1=value(1, timeout=5)) == ["10.96.0.1:80/TCP"]


@pytest.mark.parametrize(
    "never",
    [
        value(1, size=0),
        value(100),
        value(1, flags=int(ServiceFlag.NODE_PORT)),
        value(1, flags=int(ServiceFlag.LOAD_BALANCER | ServiceFlag.RESTRICTED)),
        value(1, flags=int(ServiceFlag.CLUSTER_IP | ServiceFlag.INTERNAL_LOCAL)),
        value(11),  # its set does not exist
    ],
    ids=["no backends", "too many", "NodePort", "restricted", "no local backend", "set is gone"],
)
def test_never_dialled(never: ServiceValue):
    assert dialled(_1=never) == []
