# SPDX-License-Identifier: Apache-2.0
"""What `kbpf inspect` reads in mode ipvs. tests/golden/inspect/ipvs.txt has the views of it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kbpf.dataplane import reader as dataplane
from kbpf.dataplane.ipvs import ipvs_inspect as ipvs
from kbpf.dataplane.ipvs import statefile
from kbpf.dataplane.ipvs.statefile import ProgrammedPort, StateFile
from kbpf.dataplane.reader import Locations
from kbpf.errors import NotFoundError
from kbpf.kernel.net.ipvs import IpvsConnection
from kbpf.model.address import parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.inspection import Connection, ConnectionQuery, Inspection
from kbpf.model.objects import Protocol
from kbpf.model.status import encode
from kbpf.views import services, status
from tests.support.plane import service as state
from tests.values.views.ipvs_node import (
    CONNECTIONS,
    FWMARK,
    HELD,
    NODE,
    PORTS,
    STATES,
    TCP,
    A,
    B,
    C,
    end,
    loads,
    virtual,
)
from tests.values.views.snapshots import AGENT

HERE = Path("/state")


@pytest.fixture
def held() -> Inspection:
    return ipvs.build_inspection(HERE, PORTS, HELD)


@pytest.mark.parametrize("port", [80, 30080])
def test_node_port_next_to_an_exact_frontend_at_the_node_address(tmp_path: Path, port: int):
    """The exact frontend takes precedence at its address and port. The NodePort's weights are then
    read from another address of the node.
    """
    far = state("far", f"10.96.0.5:{port} ExternalIP={NODE}:{port}", C)
    other = {virtual("198.18.0.9:30080"): loads(f"{A}*3 {B}")} if port == 30080 else {}
    found = ipvs.build_inspection(
        tmp_path, (*PORTS, ProgrammedPort(far)), HELD | {virtual(f"{NODE}:{port}"): loads(C)} | other
    )
    at = FrontendAddress(parse_addr("0.0.0.0"), 30080, TCP)
    (frontend,) = [f for port in found.services for f in port.frontends if f.at == at]
    assert [str(entry.backend) for entry in frontend.cluster.slots.values()] == [A, A, A, B]


def test_backends_missing_in_the_kernel_are_not_shown():
    (row,) = services.build_rows(ipvs.build_inspection(HERE, PORTS[:1], {}))
    assert (row.name, row.backends_cluster) == ("web", 0)


OPEN_OF = {
    "web": f"{A} 3 of 10, {B} 0 of 4",  # of the ClusterIP and the NodePort; closed ones are not open
    "local": f"{A} 2 of 5, {C} 0 of 0",  # of the VIP, and of the short circuit
    "sticky": f"{A} 7 of 20, {B} 0 of 0",  # UDP
    "none": "",
}


@pytest.mark.parametrize("name", OPEN_OF)
def test_connections_are_those_of_all_virtual_services(held: Inspection, name: str):
    """Of each backend: the open ones, and all. Bytes: see ipvs_node.loads()."""
    (port,) = (p for p in held.services if p.key.name == name)
    assert ", ".join(f"{t.backend} {t.open} of {t.totals.opened}" for t in port.traffic) == OPEN_OF[name]
    for row in port.traffic:
        assert row.totals.bytes_in == 100 * row.totals.opened
        assert row.totals.bytes_out == 1_000 * row.totals.opened


# ---- connections ---------------------------------------------------------------------------------


PARSED = """\
TCP 198.18.0.254:40000 198.18.0.1:30080 10.244.1.2:8080 ESTABLISHED 899
UDP 10.244.1.3:40001 10.96.0.3:53 10.244.1.2:8080 UDP 299
TCP fd00:198:18::fe:40002 fd00:96::1:80 fd00:10:244:1::2:8080 TIME_WAIT 3
TCP 198.18.0.254:40003 203.0.113.1:80 10.0.0.1:80 SYN_RECV 59
""".splitlines()


def test_connections_of_the_kernel_are_parsed():
    """Not those that are templates of persistence."""
    for connection, line in zip(CONNECTIONS, PARSED, strict=True):
        protocol, *ends, state, seconds = line.split()
        at = [end(text) for text in ends]
        assert connection == IpvsConnection(Protocol[protocol], *at, state, int(seconds))


def find(held: Inspection, monkeypatch: pytest.MonkeyPatch, query: ConnectionQuery) -> list[Connection]:
    monkeypatch.setattr(ipvs, "list_connections", lambda: CONNECTIONS)
    assert held.connections is not None
    return list(held.connections.find(query).rows)


@pytest.mark.parametrize(
    ("wanted", "ports"),
    [
        (ConnectionQuery(service="web"), "40000"),
        (ConnectionQuery(service="default/sticky"), "40001"),
        (ConnectionQuery(client=parse_addr("198.18.0.254")), "40000 40003"),
        (ConnectionQuery(backend=parse_addr("10.244.1.2")), "40000 40001"),
        (ConnectionQuery(state="closed"), "40002"),
        (ConnectionQuery(service="web", state="closed"), ""),
    ],
)
def test_connections_are_filtered(
    held: Inspection, monkeypatch: pytest.MonkeyPatch, wanted: ConnectionQuery, ports: str
):
    found = find(held, monkeypatch, wanted)
    assert sorted(row.client.rpartition(":")[2] for row in found) == ports.split()


def test_connections_of_an_unknown_service_are_an_error(held: Inspection, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NotFoundError):
        find(held, monkeypatch, ConnectionQuery(service="other"))


# ---- state files of the agent --------------------------------------------------------------------


def bare(port: ProgrammedPort) -> ProgrammedPort:
    state = replace(port.state, cluster=(), local=(), serving=(), source_ranges=(), lost=(), on_node=(), slices=())
    return replace(port, state=state)


def test_services_of_the_state_file_are_read(tmp_path: Path):
    made = StateFile(tmp_path)
    for port in PORTS:
        made.set_service(port.state.key, port.state, fwmark=port.fwmark)
    made.write(b"{}")
    assert statefile.read_services(tmp_path) == tuple(map(bare, PORTS))
    made.set_service(STATES[0].key, None)
    made.set_service(STATES[1].key, replace(STATES[1], affinity_timeout=7), fwmark=FWMARK)
    made.write(b"{}")
    changed = ProgrammedPort(replace(STATES[1], affinity_timeout=7), FWMARK)
    assert statefile.read_services(tmp_path) == tuple(map(bare, (changed, *PORTS[2:])))
    statefile.remove_files(tmp_path)
    assert not list(tmp_path.iterdir())
    assert statefile.read_services(tmp_path) == ()


def test_names_of_endpoints_are_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not those of a Service port with very many: the file is written again after each change."""
    made, key = StateFile(tmp_path), STATES[0].key
    made.set_service(key, STATES[0])
    made.write(b"{}")
    names = statefile.read_endpoints(tmp_path)[key]
    assert [(str(entry.backend), entry.pod, entry.node, entry.state) for entry in names] == [
        (A, "default/web-0", "node-1", "ready"),
        (B, "default/web-1", "node-2", "terminating, serving"),
        (C, "default/web-2", "", "not ready"),
    ]
    (slice_,) = STATES[0].slices
    made.set_service(key, replace(STATES[0], slices=(replace(slice_, packed_pods=""),)))
    made.write(b"{}")
    assert {entry.pod for entry in statefile.read_endpoints(tmp_path)[key]} == {""}
    monkeypatch.setattr(statefile, "MAX_NAMED_ENDPOINTS", 2)
    made.set_service(key, STATES[0])
    made.write(b"{}")
    assert statefile.read_endpoints(tmp_path) == {key: ()}
    made.set_service(key, None)
    made.write(b"{}")
    assert statefile.read_endpoints(tmp_path) == {}


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


def test_agent_of_mode_ipvs_is_found_by_its_status_file(tmp_path: Path):
    (tmp_path / statefile.STATUS_FILE).write_bytes(encode(replace(AGENT, mode="ipvs")))
    where = Locations(tmp_path / "no-pins", tmp_path)
    assert dataplane.is_ipvs(where)
    with pytest.raises(NotFoundError, match="is in mode ipvs"):
        dataplane.read(where, status.NEEDS, bpf_only=True)
