# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` in mode ipvs: the views of mode bpf, built from constructed values."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kbpf.dataplane import inspect as dataplane
from kbpf.dataplane.inspect import Locations
from kbpf.dataplane.ipvs import inspect as ipvs
from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.plan import VirtualService, fwmark_service
from kbpf.dataplane.ipvs.statefile import StateFile
from kbpf.errors import NotFoundError
from kbpf.kernel.net.ipvs import IpvsConnection, RealServerKey, RealServerStatus, parse_connections
from kbpf.model.address import parse_addr
from kbpf.model.desired import FrontendAddress, ServiceState
from kbpf.model.inspection import Connection, ConnectionQuery, Inspection
from kbpf.model.objects import Algorithm, Protocol
from kbpf.model.status import AgentStatus, ModeChoice, encode
from kbpf.views import backends, service, services, status
from tests.support.plane import service as state

HERE = Path("/state")
TCP, UDP = Protocol.TCP, Protocol.UDP
A, B, C = "10.244.1.2:8080", "10.244.1.3:8080", "10.244.2.2:8080"
NODE = "198.18.0.1"


def end(text: str) -> RealServerKey:
    host, _, port = text.rpartition(":")
    return RealServerKey(parse_addr(host), int(port))


def virtual(text: str, protocol: Protocol = TCP) -> VirtualService:
    host, _, port = text.rpartition(":")
    return VirtualService(protocol, parse_addr(host), int(port))


def loads(text: str) -> list[RealServerStatus]:
    """``10.0.0.1:80 10.0.0.2:80*3``: real servers with their weights."""
    words = (word.partition("*") for word in text.split())
    return [RealServerStatus(end(at), int(weight or 1), 0, 0) for at, _, weight in words]


STATES = (
    state("web", "10.96.0.1:80 NodePort=0.0.0.0:30080", f"{A} {B}"),
    state("local", "10.96.0.2:80 LoadBalancer=192.0.2.2:80 NodePort=0.0.0.0:30081", f"{A} {C}",
          external_local=True, local=A, ranges="10.0.0.0/8"),
    state("sticky", "10.96.0.3:53", A, protocol=UDP, affinity_timeout=100,
          algorithm=Algorithm.MAGLEV),
    state("none", "10.96.0.4:80", ""),
)  # fmt: skip
HELD: ipvs.ServersByService = {
    virtual("10.96.0.1:80"): loads(f"{A}*3 {B}"),
    virtual(f"{NODE}:30080"): loads(f"{A}*3 {B}"),
    virtual("10.96.0.2:80"): loads(f"{A} {C}"),
    virtual("192.0.2.2:80"): loads(A),
    virtual(f"{NODE}:30081"): loads(A),
    fwmark_service(4, 0x6B620001): loads(f"{A} {C}"),
    virtual("10.96.0.3:53", UDP): loads(f"{A} {B}*0"),  # drained
    virtual("10.96.0.4:80"): [],
    virtual("203.0.113.1:80"): loads("10.0.0.1:80"),  # not created by kbpf
}


@pytest.fixture
def held() -> Inspection:
    return ipvs.build_inspection(HERE, STATES, HELD)


def test_services_view(held: Inspection):
    found = {
        row.name: (
            [f"{f.text} {f.kind}" for f in row.frontends],
            row.internal_policy, row.external_policy, row.algorithm, row.affinity_seconds,
            row.backends_cluster, row.backends_local,
        )
        for row in services.build_rows(held)
    }  # fmt: skip
    assert found == {
        "web": (["10.96.0.1:80 ClusterIP", "*:30080 NodePort"], "Cluster", "Cluster", "random", 0,
                2, None),
        "local": (["10.96.0.2:80 ClusterIP", "192.0.2.2:80 LoadBalancer", "*:30081 NodePort"],
                  "Cluster", "Local", "random", 0, 2, 1),
        "sticky": (["10.96.0.3:53 ClusterIP"], "Cluster", "Cluster", "maglev", 100, 1, None),
        "none": (["10.96.0.4:80 ClusterIP"], "Cluster", "Cluster", "random", 0, 0, None),
    }  # fmt: skip
    restricted = [
        f.text for row in services.build_rows(held) for f in row.frontends if f.restricted
    ]
    assert restricted == ["192.0.2.2:80"]


@pytest.mark.parametrize("port", [80, 30080])
def test_node_port_next_to_an_exact_frontend_at_the_node_address(tmp_path: Path, port: int):
    """The exact frontend takes precedence at its address and port. The NodePort's weights are then
    read from another address of the node.
    """
    states = (*STATES, state("far", f"10.96.0.5:{port} ExternalIP={NODE}:{port}", C))
    other = {virtual("198.18.0.9:30080"): loads(f"{A}*3 {B}")} if port == 30080 else {}
    found = ipvs.build_inspection(
        tmp_path, states, HELD | {virtual(f"{NODE}:{port}"): loads(C)} | other
    )
    at = FrontendAddress(parse_addr("0.0.0.0"), 30080, TCP)
    (frontend,) = [f for port in found.services for f in port.frontends if f.at == at]
    assert [str(entry.backend) for entry in frontend.cluster.slots.values()] == [A, A, A, B]


def test_service_view(held: Inspection):
    (found,) = service.build_details(held, "default/web")
    (one,) = found.cluster
    assert [(f"{b.address}:{b.port}", b.slots, b.share) for b in one.backends] == [
        (A, 3, 0.75), (B, 1, 0.25)]  # fmt: skip
    (found,) = service.build_details(held, "local")
    assert [len(one.backends) for one in (*found.cluster, *found.local)] == [2, 1]
    with pytest.raises(NotFoundError):
        service.build_details(held, "default/other")


def test_backends_view(held: Inspection):
    assert [(row.text, row.protocol, row.services) for row in backends.build_rows(held)] == [
        (A, "TCP", ("default/local", "default/web")),
        (A, "UDP", ("default/sticky",)),
        (B, "TCP", ("default/web",)),
        (C, "TCP", ("default/local",)),
    ]


def test_backends_missing_in_the_kernel_are_not_shown():
    (row,) = services.build_rows(ipvs.build_inspection(HERE, STATES[:1], {}))
    assert (row.name, row.backends_cluster) == ("web", 0)


# ---- connections ---------------------------------------------------------------------------------

PROC = """\
Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP C61200FE 9C40 C6120001 7580 0AF40102 1F90 ESTABLISHED     899
TCP C61200FE 0000 0A600001 0050 0AF40102 1F90 NONE             97
UDP 0AF40103 9C41 0A600003 0035 0AF40102 1F90 UDP             299
TCP fd00:0198:0018:0000:0000:0000:0000:00fe 9C42 fd00:0096:0000:0000:0000:0000:0000:0001 0050 \
fd00:0010:0244:0001:0000:0000:0000:0002 1F90 TIME_WAIT   3
TCP C61200FE 9C43 CB007101 0050 0A000001 0050 SYN_RECV         59
IP  C61200FE 0000 00000000 0000 0AF40102 1F90 NONE             97
"""
FOUND = tuple(parse_connections(PROC))


def test_connections_of_the_kernel_are_parsed():
    assert (
        IpvsConnection(TCP, (parse_addr("198.18.0.254"), 40000), (parse_addr(NODE), 30080),
                   end(A), "ESTABLISHED", 899),
        IpvsConnection(UDP, (parse_addr("10.244.1.3"), 40001), (parse_addr("10.96.0.3"), 53),
                   end(A), "UDP", 299),
        IpvsConnection(TCP, (parse_addr("fd00:198:18::fe"), 40002), (parse_addr("fd00:96::1"), 80),
                   (parse_addr("fd00:10:244:1::2"), 8080), "TIME_WAIT", 3),
        IpvsConnection(TCP, (parse_addr("198.18.0.254"), 40003), (parse_addr("203.0.113.1"), 80),
                   (parse_addr("10.0.0.1"), 80), "SYN_RECV", 59),
    ) == FOUND  # fmt: skip


def find(
    held: Inspection, monkeypatch: pytest.MonkeyPatch, query: ConnectionQuery
) -> list[Connection]:
    monkeypatch.setattr(ipvs, "list_connections", lambda: FOUND)
    assert held.connections is not None
    return list(held.connections.find(query).rows)


def test_connections_view(held: Inspection, monkeypatch: pytest.MonkeyPatch):
    found = [
        (row.service, row.protocol, row.client, row.frontend, row.backend, row.state)
        for row in find(held, monkeypatch, ConnectionQuery())
    ]
    assert found == [
        ("-", "TCP", "198.18.0.254:40003", "203.0.113.1:80", "10.0.0.1:80", "new"),
        ("-", "TCP", "[fd00:198:18::fe]:40002", "[fd00:96::1]:80", "[fd00:10:244:1::2]:8080",
         "closed"),
        ("default/sticky", "UDP", "10.244.1.3:40001", "10.96.0.3:53", A, "established"),
        ("default/web", "TCP", "198.18.0.254:40000", f"{NODE}:30080", A, "established"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "ports"),
    [
        (ConnectionQuery(service="web"), {40000}),
        (ConnectionQuery(service="default/sticky"), {40001}),
        (ConnectionQuery(client=parse_addr("198.18.0.254")), {40000, 40003}),
        (ConnectionQuery(backend=parse_addr("10.244.1.2")), {40000, 40001}),
        (ConnectionQuery(state="closed"), {40002}),
        (ConnectionQuery(service="web", state="closed"), set()),
    ],
)
def test_connections_are_filtered(
    held: Inspection, monkeypatch: pytest.MonkeyPatch, wanted: ConnectionQuery, ports: set[int]
):
    found = find(held, monkeypatch, wanted)
    assert {int(row.client.rpartition(":")[2]) for row in found} == ports


def test_connections_of_an_unknown_service_are_an_error(
    held: Inspection, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(NotFoundError):
        find(held, monkeypatch, ConnectionQuery(service="other"))


# ---- state files of the agent --------------------------------------------------------------------


def bare(one: ServiceState) -> ServiceState:
    return replace(one, cluster=(), local=(), serving=(), source_ranges=(), lost=(), on_node=())


def test_services_of_the_state_file_are_read(tmp_path: Path):
    made = StateFile(tmp_path)
    for one in STATES:
        made.set_service(one.key, one)
    made.write(b"{}")
    assert statefile.read_services(tmp_path) == tuple(map(bare, STATES))
    made.set_service(STATES[0].key, None)
    made.set_service(STATES[1].key, replace(STATES[1], affinity_timeout=7))
    made.write(b"{}")
    assert statefile.read_services(tmp_path) == (replace(bare(STATES[1]), affinity_timeout=7),
                                    *map(bare, STATES[2:]))  # fmt: skip
    statefile.remove_files(tmp_path)
    assert not list(tmp_path.iterdir())
    assert statefile.read_services(tmp_path) == ()


def test_unchanged_state_file_is_not_written_again(tmp_path: Path):
    made = StateFile(tmp_path)
    made.set_service(STATES[0].key, STATES[0])
    made.write(b"{}")
    before = (tmp_path / statefile.SERVICES_FILE).stat().st_ino
    made.set_service(STATES[0].key, replace(STATES[0], cluster=()))  # endpoints are not written
    made.set_service(STATES[1].key, None)
    made.write(b"{}")
    assert (tmp_path / statefile.SERVICES_FILE).stat().st_ino == before


def test_missing_state_directory_is_an_error():
    with pytest.raises(NotFoundError, match="no agent in mode ipvs"):
        ipvs.read(HERE)
    assert not dataplane.is_ipvs(Locations(Path("/pins"), HERE))


AGENT_STATUS = AgentStatus(
    version="1", pid=1, mode="ipvs", node="node-1", started=1.0, heartbeat=5000.0, synced=True,
    services=4, service_ports=4, applied=1, last_apply_ms=1.0, event_to_map_p50_ms=0.0,
    event_to_map_p99_ms=0.0, sources=(), problems=(), problem_count=0,
    choice=ModeChoice("auto", "ipvs", "no cgroup v2", "no cgroup v2 hierarchy is mounted"),
)  # fmt: skip


def test_agent_of_mode_ipvs_is_found_by_its_status_file(tmp_path: Path):
    (tmp_path / statefile.STATUS_FILE).write_bytes(encode(AGENT_STATUS))
    where = Locations(tmp_path / "no-pins", tmp_path)
    assert dataplane.is_ipvs(where)
    with pytest.raises(NotFoundError, match="is in mode ipvs"):
        dataplane.read(where, status.NEEDS, bpf_only=True)


def test_status_of_mode_bpf_has_no_reason():
    said = replace(AGENT_STATUS, mode="bpf", choice=ModeChoice("auto", "bpf"))
    page = status.format_page(status.build_view(Inspection("/state", boottime=5001.0, status=said)))
    assert "bpf, requested: auto" in page
    assert "not bpf" not in page
    assert "packet path" in page
