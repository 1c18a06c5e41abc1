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
from kbpf.model.address import parse_addr
from kbpf.model.desired import FrontendAddress
from kbpf.model.status import encode
from kbpf.views import services, status
from tests.support.plane import service as state
from tests.values.views.ipvs_node import (
    FWMARK,
    HELD,
    NODE,
    PORTS,
    STATES,
    TCP,
    A,
    B,
    C,
    loads,
    virtual,
)
from tests.values.views.snapshots import AGENT

HERE = Path("/state")


@pytest.mark.parametrize("port", [80, 30080])
def test_node_port_next_to_an_exact_frontend_at_the_node_address(tmp_path, port):
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


# ---- state files of the agent --------------------------------------------------------------------


def bare(port: ProgrammedPort) -> ProgrammedPort:
    state = replace(port.state, cluster=(), local=(), serving=(), source_ranges=(), lost=(), on_node=(), slices=())
    return replace(port, state=state)


def test_services_of_the_state_file_are_read(tmp_path):
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


def test_names_of_endpoints_are_in_a_file(tmp_path, monkeypatch):
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


def test_unchanged_state_file_is_not_written_again(tmp_path):
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


def test_agent_of_mode_ipvs_is_found_by_its_status_file(tmp_path):
    (tmp_path / statefile.STATUS_FILE).write_bytes(encode(replace(AGENT, mode="ipvs")))
    where = Locations(tmp_path / "no-pins", tmp_path)
    assert dataplane.is_ipvs(where)
    with pytest.raises(NotFoundError, match="is in mode ipvs"):
        dataplane.read(where, status.NEEDS, bpf_only=True)
