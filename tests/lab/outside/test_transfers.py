# SPDX-License-Identifier: Apache-2.0
"""Long transfers through a NodePort: every byte must be correct, with every mixture of offloads."""

from collections.abc import Iterator
from itertools import product

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason
from tests.support.lab.field import BULK, BULK_SERVICES, FORWARDINGS, Field, at, forward, transfer
from tests.support.lab.lab import Agent, ip
from tests.support.lab.offloads import offload
from tests.support.packets.wire import Wire

MEGABYTES = 2 << 20
BACKENDS = {"local": (41, "a1"), "remote": (42, "b1"), "local, Local": (43, "a1")}
LOSSES = (Reason.NOT_REWRITTEN, Reason.NOT_TRACKED, Reason.NO_SNAT_PORT, Reason.INVALID)


@pytest.fixture(scope="module", params=FORWARDINGS)
def field(request) -> Iterator[Field]:
    with Field(*forward(request.param), name="tr", pods=(1, 1), agents=1) as made:
        for name in ("a1", "b1"):
            made[name].ask("serve_bulk", ports=[BULK])
        made.create(*made.all_of(BULK_SERVICES))
        made.settle()
        yield made


def lost(agent: Agent) -> dict[str, int]:
    """How many packets its programs have dropped, by reason."""
    return {reason.name: agent.reasons()[reason] for reason in LOSSES}


# ---- device offloads -----------------------------------------------------------------------------


def cables(field: Field) -> Iterator[tuple[str | None, str]]:
    """Both ends of every veth pair that packets of this lab cross: (namespace, device)."""
    yield field.lab.outside, field.lab.prefix
    yield field.lab.fabric, "outside"
    for node in field.lab.nodes:
        yield field.lab.fabric, f"n{node.number}"
        yield node.netns, "eth0"
        for number, pod in enumerate(node.pods, 1):
            yield node.netns, f"p{number}"
            yield pod.netns, "eth0"


OFFLOADS = {
    "GSO": {},
    "GSO and GRO": {"gro": True},
    "no GSO": {"gso": False, "tso": False},
    "checksums by the kernel": {"tx": False},
    "neither, but GRO": {"gso": False, "tso": False, "tx": False, "gro": True},
}
"""Differences from a veth's default features."""
BY_ITSELF = {"tx": True, "sg": True, "tso": True, "gso": True, "gro": False}
DEVICES = [(1500, what) for what in OFFLOADS]
DEVICES += [(9000, "GSO"), (9000, "neither, but GRO")]


@pytest.fixture(scope="class")
def devices(request, field: Field) -> Iterator[None]:
    """Gives all veth pairs this MTU and these offloads. The scope is narrower than the field's, so
    that one field is used for all of them.
    """
    mtu, what = request.param
    try:
        for where, device in cables(field):
            ip(f"link set {device} mtu {mtu}", netns=where)
            for feature, on in OFFLOADS[what].items():
                offload(where, device, feature, on)
        yield
    finally:
        for where, device in cables(field):
            ip(f"link set {device} mtu 1500", netns=where)
            for feature in OFFLOADS[what].keys() | ({"sg"} if "tx" in OFFLOADS[what] else set()):
                offload(where, device, feature, BY_ITSELF[feature])


@pytest.mark.parametrize("devices", DEVICES, indirect=True, ids=lambda param: f"{param[0]} {param[1]}")
@pytest.mark.usefixtures("devices")
def test_megabytes_arrive_intact_both_ways(field: Field):
    """Of a client outside, and of a pod without hooks, which may be the backend itself."""
    before = lost(field.agent)
    for number, v6 in product((41, 42), (False, True)):
        transfer(field["outside"], at("NodePort", number, v6), MEGABYTES)
        transfer(field["a1!"], at("ClusterIP", number, v6), MEGABYTES)
    assert lost(field.agent) == before


@pytest.mark.parametrize(("backend", "v6"), [("local", False), ("remote", True), ("local, Local", False)])
def test_large_packets_are_not_segmented(field: Field, backend: str, v6: bool):
    """GSO packets must not be segmented on the way: that would cost several times as much."""
    number, name = BACKENDS[backend]
    with (
        Wire(field[name].netns, "eth0", tap=True) as there,
        Wire(field.lab.outside, field.lab.prefix, tap=True) as here,
    ):
        transfer(field["outside"], at("NodePort", number, v6), 4 << 20)
        for tap, to in ((there, field[name]), (here, field["outside"])):
            own = to.ip6 if v6 else to.ip
            tap.expect(lambda p, own=own: p.ip.destination == own and len(p.payload) > 4 * p.gso > 0)
