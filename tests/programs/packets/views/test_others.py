# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect` of translated sources, source ranges, devices and the packet path's status."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kbpf.agent.agent import Agent
from kbpf.checks import packet_path
from kbpf.checks.row import CheckRow
from kbpf.cli import app
from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.bpf.maps.layout import TcpState
from kbpf.dataplane.bpf.packet_path.attach import DeviceAttachments
from kbpf.dataplane.bpf.packet_path.device_thread import DeviceReconciler, DeviceReconcilerStatus
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.dataplane.bpf.programs import compile
from kbpf.errors import CompileError, KernelError
from kbpf.kernel.bpf import tc
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import netns
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.status import MAX_FAILED_DEVICES, DeviceFailure, encode
from kbpf.views.packet_path import devices
from tests.programs.node.commands.world import agent_status
from tests.programs.packets.views.wire import (
    CLIENT,
    GUARDED,
    HIGH,
    KEPT,
    LOCAL,
    LOW,
    MASKED,
    NODE,
    POD,
    VIP,
    Run,
    Wire,
    age,
    end,
    key_between,
    world,
)
from tests.support.lab.lab import run as command
from tests.support.lab.lab import until
from tests.support.packets.packets import tcp, udp
from tests.support.packets.parse import parse
from tests.support.packets.test_run import TC_ACT_SHOT
from tests.support.plane import Site, sites

# ---- translated sources --------------------------------------------------------------------------


def test_nat_shows_sources_and_port_usage(wire: Wire, show, call: Run) -> None:
    for port in (61_100, 61_101, 61_102):
        wire.talk(4, MASKED, port, "S <SA A")
    wire.talk(4, MASKED, 61_103, "S <RA")
    wire.talk(4, MASKED, 61_100, "?")
    wire.talk(6, MASKED, 61_100, "?")
    wire.talk(4, LOCAL, 61_104, "S")
    seen = show("nat")
    assert (seen["first_port"], seen["last_port"], seen["ports"]) == (LOW, HIGH, HIGH - LOW + 1)
    assert seen["addresses"] == [NODE[4], NODE[6]]
    used = [(u["backend"], u["protocol"], u["node_address"], u["used"], u["closed"]) for u in seen["usage"]]
    assert used == [
        (f"{POD[4]}:8080", "TCP", NODE[4], 4, 1),
        (f"{POD[4]}:8080", "UDP", NODE[4], 1, 0),
        (f"[{POD[6]}]:8080", "UDP", NODE[6], 1, 0),
    ]
    assert not any(u["alarm"] for u in seen["usage"])
    rows = [r for r in seen["items"] if r["protocol"] == "TCP"]
    assert [(r["source"], r["client"]) for r in rows] == [
        (f"{NODE[4]}:{port}", f"{CLIENT[4]}:{port}") for port in (61_100, 61_101, 61_102, 61_103)
    ]
    assert {r["service"] for r in rows} == {"default/masked-tcp4"}
    assert {r["backend"] for r in rows} == {f"{POD[4]}:8080"}
    code, out, err = call("nat")
    assert (code, err) == (0, "")
    assert f"{LOW} to {HIGH} (1000)" in out
    assert f"{NODE[4]}:61103" in out
    age(wire, 200)
    assert [u["used"] for u in show("nat")["usage"]] == [3], "expired flows hold no port"


def test_nat_counts_failures_to_find_a_port(wire: Wire, show, call: Run) -> None:
    """All ports of the range are taken by established connections to this backend."""
    wire.talk(4, MASKED, 61_000, "? <!")
    with wire.site.pinned("flows") as found:
        key = key_between(found, NODE[4], POD[4])
        raw = found.lookup(key)
        assert raw is not None
        for port in range(LOW, HIGH + 1):
            at = port.to_bytes(2, "big")
            changed = raw[:84] + at + at + raw[88:96] + bytes([TcpState.ESTABLISHED]) + raw[97:]
            place = 16 if key[:16] == bytes(parse_addr(NODE[4])) else 36
            found.update(key[:place] + at + key[place + 2 :], changed[:24] + at + changed[26:])
        full = show("nat")
        before = full["failures"]
        (usage,) = full["usage"]
        assert (usage["used"], usage["percent"], usage["alarm"]) == (1000, 100.0, True)
        assert "100.0% !" in call("nat")[1]
        sent = udp(end("198.51.100.99", 5), end(f"{VIP[4]}{MASKED}", 80), b"?")
        assert wire.verdict(sent) == TC_ACT_SHOT
    assert show("nat")["failures"] == before + 1


# ---- source ranges -------------------------------------------------------------------------------


def test_sources_shows_ranges_vips_and_dropped_packets(wire: Wire, show, call: Run) -> None:
    before = show("sources")["not_allowed"]
    guarded = end(f"{VIP[4]}{GUARDED}", 80)
    assert wire.verdict(tcp("198.51.101.1:5", guarded, flags="S")) == TC_ACT_SHOT
    assert wire.verdict(tcp(end(CLIENT[4], 5), guarded, flags="S")) != TC_ACT_SHOT
    seen = show("sources")
    assert seen["not_allowed"] == before + 1
    assert [(s["service"], s["ranges"], s["addresses"]) for s in seen["items"]] == [
        ("default/guarded-tcp4", ["198.51.100.0/24"], ["192.0.2.4:80/TCP"]),
        ("default/guarded-tcp6", ["2001:db8:9::/48"], ["[2001:db8::4]:80/TCP"]),
        ("default/guarded-udp4", ["198.51.100.0/24"], ["192.0.2.4:80/UDP"]),
        ("default/guarded-udp6", ["2001:db8:9::/48"], ["[2001:db8::4]:80/UDP"]),
        ("default/nobody-tcp4", [], ["192.0.2.5:80/TCP"]),
        ("default/nobody-tcp6", [], ["[2001:db8::5]:80/TCP"]),
        ("default/nobody-udp4", [], ["192.0.2.5:80/UDP"]),
        ("default/nobody-udp6", [], ["[2001:db8::5]:80/UDP"]),
    ]
    code, out, _ = call("sources")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert code == 0
    assert lines["default/nobody-tcp4"].split()[1:] == ["192.0.2.5:80/TCP", "none"]
    assert f"{before + 1} packets" in lines["dropped"]


def test_affinity_shows_client_addresses(wire: Wire, show, call: Run) -> None:
    for v in (4, 6):
        wire.talk(v, KEPT, 2000, "S <SA A+ <A")
    found = [(r["client"], r["kind"], r["service"], r["backend"]) for r in show("affinity")]
    assert found == [
        (CLIENT[4], "address", "default/kept-tcp4", f"{POD[4]}:8080"),
        (CLIENT[6], "address", "default/kept-tcp6", f"[{POD[6]}]:8080"),
    ]
    lines = call("affinity")[1].splitlines()
    assert [line.split()[0] for line in lines] == ["CLIENT", CLIENT[4], CLIENT[6]]


# ---- devices, status -----------------------------------------------------------------------------


def test_devices_show_role_and_programs(wire: Wire, show, call: Run) -> None:
    rows = {row["device"]: row for row in show("devices")}
    parts = {name: (row["role"], row["reason"]) for name, row in rows.items()}
    assert parts["lo"] == ("skipped", "loopback")
    by_netfilter = Path("/proc/sys/net/bridge").exists()  # then it is on, by default
    assert parts["port0"] == (
        ("port", "port of cni0, with br_netfilter") if by_netfilter else ("skipped", "port of cni0")
    )
    assert parts["cni0"] == ("pod", "bridge of pods, ports: 1")
    assert parts["out0"] == ("host", "veth")
    for name in ("cni0", "out0"):
        assert rows[name]["ingress"].startswith("tc_ingress (")
        assert rows[name]["egress"].startswith("tc_egress (")
        assert rows[name]["l2_header"] == 14
        assert rows[name]["problem"] == ""
    assert rows["cni0"]["flags"] == ["pods"]
    assert rows["out0"]["flags"] == []
    assert rows["port0"]["egress"] == rows["port0"]["problem"] == ""
    assert rows["port0"]["ingress"].startswith("tc_ingress (") == by_netfilter
    assert rows["port0"]["l2_header"] == (14 if by_netfilter else None)
    assert "bridge of pods" in call("devices")[1]


def test_devices_show_clsact_without_tcx(wire: Wire, artifact_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCX the programs are attached to clsact qdiscs."""
    monkeypatch.setattr(tc, "probe_tcx", lambda: Probe(False, "EINVAL"))
    where = Path("/run/netns") / str(wire.site.node)
    with sites(artifact_cache) as make:
        site = make(node=wire.site.node)
        plane = site.open(packet_path=True, devices=("out0",), excluded_devices=("cni0",))
        netns.run_in(where, lambda: plane.apply(world(), None))
        until("all devices have their programs", lambda: plane.status().ready)

        def rows() -> dict[str, Any]:
            held = snapshot.read(site.pins, devices.NEEDS)
            return {row.device: row for row in devices.build_rows(held)}

        out0 = netns.run_in(where, rows)["out0"]
        assert (out0.ingress, out0.egress) == ("tc_ingress (clsact)", "tc_egress (clsact)")
        (row,) = [r for r in packet_path.check_packet_path(site.pins) if r.name == "TCX"]
        assert row.result == "no"
        assert "clsact qdiscs are used instead" in row.detail
        assert "CONFIG_NET_CLS_BPF" in row.advice
        netns.run_in(where, site.remove)


def test_devices_in_another_network_namespace_is_an_error(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.call(["inspect", "devices", "--pin-dir", str(wire.site.pins)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "another network namespace" in err
    assert "nsenter" in err


def test_status_shows_the_packet_path(wire: Wire, call: Run) -> None:
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(4, MASKED, 2001, "?")
    code, out, _ = call("status", "-o", "json")
    seen = json.loads(out)["packets"]
    assert code == 0
    assert (seen["state"], seen["reason"], seen["failed"]) == ("on", "", [])
    assert (seen["connections"], seen["entries"], seen["max_connections"]) == (2, 2, 4096)
    assert (seen["host_devices"], seen["pod_devices"], seen["alarm"]) == (2, 1, False)
    code, out, _ = call("status")
    assert code == 0
    assert "2 of at most 4096" in out
    age(wire, 31)
    _, out, _ = call("status", "-o", "json")
    assert [json.loads(out)["packets"][k] for k in ("connections", "entries")] == [1, 2]


BAD = {
    "a problem": {"problem": "the kernel refuses the program"},
    "a device": {"failed": [{"device": "up0", "detail": "no clsact"}], "failed_count": 3},
}


@pytest.mark.parametrize("bad", BAD)
def test_failed_packet_path_exits_with_1_and_the_reason(wire: Wire, call: Run, bad: str):
    healthy = msgspec.to_builtins(wire.plane.status().packets)
    said = msgspec.convert({**healthy, **BAD[bad]}, type(wire.plane.status().packets))
    wire.plane.write_status(encode(agent_status(packets=said)))
    code, out, _ = call("status")
    assert code == 1
    if bad == "a problem":
        assert "failed: the kernel refuses the program" in out
        assert "the packet path is failed: the kernel refuses" in call("connections")[2]
    else:
        assert "NOT on 3" in out
        assert "no clsact" in out
        assert "and 2 more devices" in out


@pytest.fixture
def plane_without_programs(site: Site, monkeypatch: pytest.MonkeyPatch) -> BpfPlane:
    """A plane whose packet programs cannot be compiled."""
    obtain = compile.find_or_compile

    def refuse(unit: str, cache: Path) -> Any:
        if unit == "tc":
            raise CompileError("no such header", "tc.c", "install it")
        return obtain(unit, cache)

    monkeypatch.setattr(compile, "find_or_compile", refuse)
    return site.open(packet_path=True, devices=("up*",), excluded_devices=("wg0",))


def test_compile_error_is_shown_in_the_status(
    site: Site, plane_without_programs: BpfPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the failure to the agent's status, and from there to the view."""
    plane_without_programs.apply(world(), None)
    agent = Agent(Config(pin_dir=site.pins, packet_path=True), plane_without_programs, lambda _: ())
    said = agent.status().packets
    assert said is not None
    assert (said.enabled, said.devices, said.excluded) == (True, ("up*",), ("wg0",))
    assert "no such header (tc.c); install it" in said.problem
    plane_without_programs.write_status(encode(agent_status(packets=said)))
    assert app.call(["inspect", "status", "--pin-dir", str(site.pins)]) == 1
    assert "failed: no such header (tc.c); install it" in capsys.readouterr().out


def test_failed_devices_are_in_the_status(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {f"d{i:02}": f"why {i}" for i in range(MAX_FAILED_DEVICES + 5)}
    monkeypatch.setattr(DeviceReconciler, "status", lambda _: DeviceReconcilerStatus(failed=failed))
    said = wire.plane.status().packets
    assert (said.enabled, said.problem, said.failed_count) == (True, "", MAX_FAILED_DEVICES + 5)
    assert said.failed[0] == DeviceFailure("d00", "why 0")
    assert len(said.failed) == MAX_FAILED_DEVICES


def test_device_problem_is_cleared_after_the_next_sync(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise KernelError("the kernel refused the rtnetlink request", "up0")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceAttachments, "sync", refuse)
        plane = site.open(packet_path=True, devices=("nothing",), excluded_devices=("*",))
        plane.apply(world(), None)
        assert plane.status().packets.problem == "the kernel refused the rtnetlink request (up0)"
    until("devices are synced again", lambda: plane.status().packets.problem == "")


def test_status_counts_created_connections_and_lost_entries(wire: Wire, show, call: Run) -> None:
    before = json.loads(call("status", "-o", "json")[1])["packets"]
    wire.talk(4, MASKED, 2000, "S <SA A+ <A")
    wire.talk(4, MASKED, 2001, "?")
    with wire.site.pinned("flows") as flows:
        assert flows.delete(key_between(flows, CLIENT[4], f"{VIP[4]}{MASKED}", 2000))
    (row,) = [r for r in show("connections") if r["protocol"] == "TCP"]
    assert row["lost"] == ["flow"]
    answer = tcp(end(POD[4], 8080), row["seen_as"], seq=70_001, ack=1011)
    assert parse(wire.pass_(answer), l2=False).destination == end(CLIENT[4], 2000)
    after = json.loads(call("status", "-o", "json")[1])["packets"]
    assert after["created"] - before["created"] == 2
    assert after["evicted"] == before["evicted"]
    assert after["entries_lost"] == after["created"] - 1
    out = call("status")[1]
    assert f"{after['created']} since the counters started" in out
    assert "connections that a packet started" in out


def test_check_reports_a_dropping_forward_chain_of_another_table(wire: Wire) -> None:
    """It is in a table that iptables and CNIs do not use, so kbpf does not change it."""

    def row() -> CheckRow:
        where = Path("/run/netns") / str(wire.site.node)
        found = netns.run_in(where, lambda: list(packet_path.check_packet_path(wire.site.pins)))
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


# ---- packet path off, or maps missing ------------------------------------------------------------


@pytest.mark.parametrize("view", ["connections", "nat", "sources"])
@pytest.mark.parametrize("has_status", [True, False], ids=["agent's status", "no status"])
def test_views_report_that_the_packet_path_is_off(
    site: Site, capsys: pytest.CaptureFixture[str], view: str, has_status: bool
) -> None:
    plane = site.open()
    plane.apply(world(), None)
    if has_status:
        plane.write_status(encode(agent_status(packets=plane.status().packets)))
    code = app.call(["inspect", view, "--pin-dir", str(site.pins)])
    out, err = capsys.readouterr()
    assert code == 0
    assert out
    assert err.startswith("kbpf: the packet path is off: ")
    assert ("--packet-path false" in err) == has_status


def test_status_is_ok_with_the_packet_path_switched_off(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    plane = site.open()
    plane.apply(world(), None)
    plane.write_status(encode(agent_status(packets=plane.status().packets)))
    assert app.call(["inspect", "status", "--pin-dir", str(site.pins)]) == 0
    assert "state   off: switched off" in capsys.readouterr().out


@pytest.mark.parametrize("view", ["connections", "nat", "maps", "status"])
def test_missing_map_is_named(site: Site, capsys: pytest.CaptureFixture[str], view: str) -> None:
    site.open().apply(world(), None)
    (site.maps / "flows").unlink()
    assert app.call(["inspect", view, "--pin-dir", str(site.pins)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the map flows is missing" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("view", ["services", "backends", "affinity", "sources", "devices"])
def test_missing_map_that_is_not_shown_is_no_error(site: Site, view: str) -> None:
    site.open().apply(world(), None)
    (site.maps / "flows").unlink()
    assert app.call(["inspect", view, "--pin-dir", str(site.pins)]) == 0
