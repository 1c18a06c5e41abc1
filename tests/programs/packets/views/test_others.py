# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` of translated sources, affinity, devices and the packet path's status.

tests/values/cli/test_inspect.py compares the whole output, on fakes of the maps.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kbpf.checks import packet_path
from kbpf.checks.row import CheckRow
from kbpf.cli import app
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconciler, DeviceReconcilerStatus
from kbpf.model.status import MAX_FAILED_DEVICES, DeviceFailure, encode
from tests.programs.node.commands.world import agent_status
from tests.programs.packets.path.single_packets import CLIENT, NODE, POD
from tests.programs.packets.views.wire import HIGH, KEPT, LOW, MASKED, VIP, Run, Wire, age, key_between, world
from tests.support.lab.lab import run as command
from tests.support.plane import Site


def test_nat_and_affinity_show_what_packets_have_written(wire: Wire, show):
    for port in (61_100, 61_101):
        wire.talk(4, MASKED, port, "S <SA A")
    wire.talk(4, MASKED, 61_102, "S <RA")
    wire.talk(6, KEPT, 61_100, "?")
    seen = show("nat")
    assert (seen["first_port"], seen["last_port"], seen["ports"]) == (LOW, HIGH, HIGH - LOW + 1)
    assert seen["addresses"] == [NODE[4], NODE[6]]
    assert [(u["backend"], u["node_address"], u["used"], u["closed"]) for u in seen["usage"]] == [
        (f"{POD[4]}:8080", NODE[4], 3, 1),
        (f"[{POD[6]}]:8080", NODE[6], 1, 0),
    ]
    rows = {(r["source"], r["client"], r["service"]) for r in seen["items"] if r["protocol"] == "TCP"}
    service = "default/masked-tcp4"
    assert rows == {(f"{NODE[4]}:{port}", f"{CLIENT[4]}:{port}", service) for port in (61_100, 61_101, 61_102)}
    (kept,) = show("affinity")
    assert (kept["client"], kept["kind"], kept["service"]) == (CLIENT[6], "address", "default/kept-udp6")


def test_devices_show_role_and_programs(wire: Wire, show, call: Run):
    fields = ("role", "reason", "l2_header", "problem")
    rows = {row["device"]: row for row in show("devices")}
    parts = {
        name: [*map(row.get, fields), *(row[way].partition(" (")[0] for way in ("ingress", "egress"))]
        for name, row in rows.items()
    }
    assert parts["lo"][:2] == ["skipped", "loopback"]
    assert parts["cni0"] == ["pod", "bridge of pods, ports: 1", 14, "", "tc_ingress", "tc_egress"]
    assert parts["out0"] == ["host", "veth", 14, "", "tc_ingress", "tc_egress"]
    if Path("/proc/sys/net/bridge").exists():  # then br_netfilter is on, by default
        assert parts["port0"] == ["port", "port of cni0, with br_netfilter", 14, "", "tc_ingress", ""]
    else:
        assert parts["port0"] == ["skipped", "port of cni0", None, "", "", ""]
    assert (rows["cni0"]["flags"], rows["out0"]["flags"]) == (["pods"], [])
    assert "bridge of pods" in call("devices")[1]


def test_devices_in_another_network_namespace_is_an_error(wire: Wire, capsys: pytest.CaptureFixture[str]):
    assert app.call(["inspect", "devices", "--pin-dir", str(wire.site.pins)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "another network namespace" in err
    assert "nsenter" in err


def test_check_reports_a_dropping_forward_chain_of_another_table(wire: Wire):
    """It is in a table that iptables and CNIs do not use, so kbpf does not change it."""

    def row() -> CheckRow:
        found = wire.path.inside(lambda: list(packet_path.check_packet_path(wire.site.pins)))
        (one,) = [row for row in found if row.name == "FORWARD"]
        return one

    def nft(text: str) -> None:
        command("ip", "netns", "exec", str(wire.site.node), "nft", text)

    hook = "type filter hook forward priority 0"
    assert row().result == "yes"
    nft(f"table inet fw {{ chain in {{ {hook}; policy accept; }}; }}")
    try:
        assert row().result == "yes"
        nft(f"table inet fw {{ chain shut {{ {hook}; policy drop; }}; }}")
        assert row().result == "no"
        assert "inet fw shut" in row().detail
    finally:
        nft("delete table inet fw")


def packets_of_status(call: Run) -> Any:
    return json.loads(call("status", "-o", "json")[1])["packets"]


def test_status_counts_connections_entries_and_devices(wire: Wire, call: Run):
    before = packets_of_status(call)
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(4, MASKED, 2001, "?")
    seen = packets_of_status(call)
    assert (seen["state"], seen["reason"], seen["failed"]) == ("on", "", [])
    assert (seen["connections"], seen["entries"], seen["max_connections"]) == (2, 2, 4096)
    assert (seen["host_devices"], seen["pod_devices"], seen["alarm"]) == (2, 1, False)
    assert (seen["created"] - before["created"], seen["evicted"]) == (2, before["evicted"])
    age(wire, 31)
    assert packets_of_status(call)["connections"] == 1
    with wire.site.pinned("flows") as flows:
        assert flows.delete(key_between(flows, CLIENT[4], f"{VIP[4]}{MASKED}", 2000))
    seen = packets_of_status(call)
    assert seen["entries_lost"] == seen["created"] - 1


def test_problems_of_the_device_thread_are_in_the_status(wire: Wire, monkeypatch: pytest.MonkeyPatch):
    failed = {f"d{i:02}": f"why {i}" for i in range(MAX_FAILED_DEVICES + 5)}
    thread = DeviceReconcilerStatus(failed=failed, problem="no answer")
    monkeypatch.setattr(DeviceReconciler, "status", lambda _: thread)
    said = wire.plane.status().packets
    assert (said.enabled, said.problem, said.failed_count) == (True, "no answer", MAX_FAILED_DEVICES + 5)
    assert said.failed[0] == DeviceFailure("d00", "why 0")
    assert len(said.failed) == MAX_FAILED_DEVICES


@pytest.mark.parametrize("has_status", [True, False], ids=["agent's status", "no status"])
def test_views_report_that_the_packet_path_is_off(site: Site, capsys: pytest.CaptureFixture[str], has_status: bool):
    plane = site.open()
    plane.apply(world(), None)
    if has_status:
        plane.write_status(encode(agent_status(packets=plane.status().packets)))
    for view in ("connections", "nat", "sources"):
        assert app.call(["inspect", view, "--pin-dir", str(site.pins)]) == 0
        out, err = capsys.readouterr()
        assert out
        assert err.startswith("kbpf: the packet path is off: ")
        assert ("--packet-path false" in err) == has_status
