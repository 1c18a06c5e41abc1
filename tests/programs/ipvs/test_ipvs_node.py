# SPDX-License-Identifier: Apache-2.0
"""Mode ipvs and its node: settings, firewalls, `kbpf check`, objects of others with our names, and
what is removed. IPVS is a fake, as in test_ipvs_plane.py.
"""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from errno import ENOENT, EROFS
from unittest.mock import Mock

import pytest

from kbpf.checks import ipvs
from kbpf.checks.row import CheckRow
from kbpf.cli import app
from kbpf.dataplane.ipvs.ipvs_cleanup import PreviousIpvsPlane
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy
from kbpf.kernel.net.ipvs import ConnectionTimeouts, IpvsClient
from kbpf.kernel.netfilter import forward_rules, iptables_legacy
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import modules, sandbox, sysctl
from kbpf.model.config import IPVS_DEVICE, IpvsTimeoutSettings
from tests.programs.ipvs.test_ipvs_plane import VIP, WEB, listed, run_cleanup
from tests.support.faults.fake_ipvs import Node
from tests.support.table import each_line

# ---- settings ------------------------------------------------------------------------------------

TIMES = [
    (IpvsTimeoutSettings(), ConnectionTimeouts(900, 120, 300)),
    (IpvsTimeoutSettings(tcp=86_400), ConnectionTimeouts(86_400, 120, 300)),
    (IpvsTimeoutSettings(7200, 60, 10), ConnectionTimeouts(7200, 60, 10)),
]


@pytest.mark.parametrize(("asked", "there"), TIMES)
def test_connection_timeouts_are_set(fake_node: Node, asked: IpvsTimeoutSettings, there: ConnectionTimeouts):
    fake_node.start(replace(fake_node.config, ipvs_times=asked))
    assert fake_node.ipvs.times == there


VS = {"net.ipv4.vs.conntrack": "1", "net.ipv4.vs.expire_nodest_conn": "1", "net.ipv4.vs.expire_quiescent_template": "1"}
ARP = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}


@pytest.mark.parametrize(("strict", "wanted"), [(False, VS), (True, VS | ARP)])
def test_sysctls_are_set_where_they_differ(fake_node: Node, monkeypatch, strict: bool, wanted: dict[str, str]):
    """This kernel has no net.ipv4.vs. Settings that are already right are not written."""
    there = dict.fromkeys(VS | ARP, "0") | {"net.ipv4.vs.conntrack": "1"}
    written: dict[str, str] = {}
    monkeypatch.setattr(sysctl, "read", lambda name: there.get(name, "1"))
    monkeypatch.setattr(sysctl, "write", written.__setitem__)
    fake_node.start(replace(fake_node.config, strict_arp=strict))
    assert there | written == there | wanted
    assert "net.ipv4.vs.conntrack" not in written
    assert fake_node.plane.status().problems == ()


def test_read_only_sysctls_are_reported_once_and_do_not_stop_serving(fake_node: Node, monkeypatch):
    """In a container /proc/sys may be read-only."""

    def write(name: str, value: str) -> None:
        raise KernelError(f"cannot set {name} to {value}", "/proc/sys", errno=EROFS)

    monkeypatch.setattr(sysctl, "read", lambda _: "0")
    monkeypatch.setattr(sysctl, "write", write)
    fake_node.start()
    fake_node.apply(WEB)
    said = fake_node.plane.status().problems
    assert sum("net.ipv4.vs." in line for line in said) == len(VS)
    assert len(said) == len(set(said))
    assert VIP in fake_node.addresses()


# ---- warnings about firewalls --------------------------------------------------------------------

WALLS = {
    "none": ("table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }", ()),
    "INPUT": (
        "table inet fw { chain in { type filter hook input priority 0; policy drop; }; }",
        ("INPUT is closed by inet fw in",),
    ),
    "FORWARD": (
        "table inet fw { chain on { type filter hook forward priority 0; policy drop; }; }",
        ("FORWARD is closed by inet fw on, which is not touched; let packets with mark 0x4000 pass there",),
    ),
    "both": (
        "table inet fw { chain in { type filter hook input priority 0; drop; }; "
        "chain on { type filter hook forward priority 0; policy drop; }; }",
        ("FORWARD is closed by inet fw on", "INPUT is closed by inet fw in"),
    ),
}


@pytest.mark.parametrize(("table", "lines"), WALLS.values(), ids=WALLS)
def test_closed_firewall_chains_are_reported_when_they_change(
    fake_node: Node, caplog, table: str, lines: tuple[str, ...]
):
    """Each is logged once, until it is removed and added again; the status has the current ones, and `kbpf check`
    INPUT. Our own chains do not count as closed.
    """
    node, logged = fake_node, lambda: firewall_lines(caplog.messages)
    node.run(f"nft {table}")
    node.start()
    assert beginnings(logged(), lines)
    node.apply(WEB)
    for _ in range(2):
        node.run("nft add table inet somebody; delete table inet somebody")
        node.tick()
    assert beginnings(logged(), lines)
    assert beginnings(firewall_lines(node.plane.status().problems), lines)
    row = check_row(node, "INPUT")
    assert (row.result, row.needed, row.ipvs) == ("no" if "INPUT" in str(lines) else "yes", False, False)
    assert (bool(row.advice), row.detail == "closed: inet fw in") == (row.result == "no",) * 2
    name = table.split("{", maxsplit=1)[0].strip()
    node.run(f"nft delete {name}")
    node.tick()
    assert firewall_lines(node.plane.status().problems) == []
    node.run(f"nft {table}")
    node.tick()
    assert beginnings(logged(), lines * 2)


def firewall_lines(lines: Iterable[str]) -> list[str]:
    """The lines about firewalls."""
    return [line for line in lines if re.match("INPUT is|FORWARD is closed by|iptables-", line)]


def beginnings(lines: list[str], wanted: tuple[str, ...]) -> bool:
    """Whether the lines begin with these texts, one by one."""
    return len(lines) == len(wanted) and all(map(str.startswith, lines, wanted))


def test_iptables_legacy_filter_table_is_reported(fake_node: Node, tmp_path, monkeypatch):
    (tmp_path / "names").write_text("filter\n")
    monkeypatch.setitem(iptables_legacy.FAMILIES, "ip", (tmp_path / "names", ""))
    fake_node.start()
    forward, inputs = firewall_lines(fake_node.plane.status().problems)
    assert "for ip, which is not looked at; if its FORWARD drops" in forward
    assert "if its INPUT drops" in inputs


def test_ignored_settings_are_logged_once(fake_node: Node, caplog):
    caplog.set_level("INFO")
    fake_node.start(replace(fake_node.config, ignored_in_ipvs=("--forwarding", "--accounting")))
    fake_node.apply(WEB)
    fake_node.tick()
    line = "settings without effect in mode ipvs: --forwarding, --accounting (docs/ipvs.md)"
    assert [one for one in caplog.messages if "without effect" in one] == [line]


# ---- kbpf check ----------------------------------------------------------------------------------


def check_row(node: Node, name: str) -> CheckRow:
    """The row of this name; a scheduler that works is named in the detail of one row for all."""
    rows = node.do(lambda: list(ipvs.rows()))
    found = [one for one in rows if one.name == name]
    return (found or [one for one in rows if one.name == "IPVS schedulers"])[0]


@each_line(
    "row, result, detail, lacks, loaded",
    """
IPVS              | yes     |
IPVS scheduler rr | yes     | rr, wrr, mh, sh
dummy devices     | yes     | loaded
IPVS scheduler mh | no      | no module ip_vs_mh            | mh
IPVS              | no      | no modprobe is installed here | IPVS
IPVS scheduler rr | unknown | no modprobe to ask            | IPVS
IPVS scheduler rr | unknown | no modprobe to ask            | sandboxes
dummy devices     | unknown | no modprobe to ask            | sandboxes
IPVS scheduler rr | yes     | rr                            | sandboxes | ip_vs_rr
""",
    loaded=lambda cell: cell or "another",
)
def test_check_without_modprobe_tries_the_modules(
    fake_node: Node, tmp_path, monkeypatch, row, result, detail, lacks, loaded
):
    """A row of `kbpf check` on a node that `lacks` something, or has a module `loaded`. As in our own image, which has
    no modprobe: the kernel loads a module when it is used.
    """

    broken = Mock(side_effect=KernelError("cannot make a network namespace", errno=ENOENT))
    monkeypatch.setattr(modules, "find_modprobe", lambda: None)
    monkeypatch.setattr(modules, "SYS_MODULE", tmp_path)
    (tmp_path / loaded).mkdir()
    fake_node.ipvs.refuse = lambda c: ENOENT if c.settings and c.settings[0] == lacks else 0
    if lacks == "IPVS":
        monkeypatch.setattr(IpvsClient, "__init__", broken)
    if lacks == "sandboxes":
        monkeypatch.setattr(sandbox, "run", broken)
    shown = check_row(fake_node, row)
    assert (shown.result, detail in shown.detail) == (result, True)
    assert bool(shown.advice) is (result == "no")
    assert (fake_node.ipvs.held, fake_node.links()) == ({}, set()), "tried in a sandbox"


NFCT = [
    ("conntrack is missing", {"net.ipv4.vs.expire_nodest_conn": "0"}, "no"),
    ("all settings exist", VS, "yes"),
    ("IPVS is not loaded, or hidden", {}, "unknown"),
]


@pytest.mark.parametrize(("name", "settings", "result"), NFCT, ids=[row[0] for row in NFCT])
def test_ipvs_without_conntrack_refuses_to_start(
    fake_node: Node, monkeypatch, name: str, settings: dict[str, str], result: str
):
    """An agent must refuse to start there; a warning is not enough."""

    def read(setting: str) -> str:
        if setting.startswith("net.ipv4.vs.") and setting not in settings:
            raise KernelError(f"cannot read the setting {setting}", "/proc/sys", errno=ENOENT)
        return "1"

    monkeypatch.setattr(sysctl, "read", read)
    row = check_row(fake_node, "IPVS with conntrack")
    assert (row.result, row.ipvs, "CONFIG_IP_VS_NFCT" in row.advice) == (result, True, result == "no")
    if result == "no":
        with pytest.raises(KernelError, match=r"cannot masquerade.*CONFIG_IP_VS_NFCT.*mode bpf"):
            fake_node.start()
        assert (fake_node.links(), fake_node.tables()) == (set(), set())
    else:
        fake_node.start()


def test_check_reports_missing_python3_nftables(fake_node: Node, monkeypatch):
    monkeypatch.setattr(forward_rules, "probe_nf_tables", lambda: Probe(None, "python3-nftables is missing"))
    row = check_row(fake_node, "nf_tables")
    assert (row.result, row.advice.split(";")[0]) == ("no", "install python3-nftables")


BRIDGES = [
    ("", "", "yes", "no bridge on this node"),
    ("br0/bridge", "", "no", "br_netfilter is not loaded"),
    ("br0/bridge", "0", "no", "bridge-nf-call-iptables is 0"),
    ("br0/bridge", "1", "yes", "bridge-nf-call-iptables is 1"),
]


@pytest.mark.parametrize(("bridge", "calls", "result", "detail"), BRIDGES)
def test_check_reports_bridged_replies(
    fake_node: Node, tmp_path, monkeypatch, bridge: str, calls: str, result: str, detail: str
):
    setting = tmp_path / ipvs.BRIDGE_NF_CALL_IPTABLES.name
    (tmp_path / "net" / bridge).mkdir(parents=True)
    if calls:
        setting.write_text(f"{calls}\n")
    monkeypatch.setattr(ipvs, "SYS_CLASS_NET", tmp_path / "net")
    monkeypatch.setattr(ipvs, "BRIDGE_NF_CALL_IPTABLES", setting)
    row = check_row(fake_node, "bridged replies")
    assert (row.result, row.detail) == (result, detail)


# ---- foreign objects with our names --------------------------------------------------------------

TABLE = "inet kbpf"
DEVICES = {
    "of another kind": f"link add {IPVS_DEVICE} type veth peer name other",
    "with addresses": f"link add {IPVS_DEVICE} type bridge\naddr add 192.0.2.7/32 dev {IPVS_DEVICE}",
    "another agent's": f"link add {IPVS_DEVICE} type bridge\nlink set {IPVS_DEVICE} alias somebody",
}
CHAINS = "{ chain input { type filter hook input priority 0; tcp dport 23 drop; }; }"
TABLES = {
    "a chain of ours": f"table {TABLE} {CHAINS}",
    "a set of ours": f"table {TABLE} {{ set served4 {{ type ipv4_addr; }}; }}",
}


def has_remains(node: Node) -> bool:
    """Whether the next agent of mode bpf finds state of mode ipvs."""
    found = PreviousIpvsPlane(node.config)
    try:
        return node.do(found.claim)
    finally:
        found.close()


@pytest.mark.parametrize("made", DEVICES.values(), ids=DEVICES)
def test_foreign_device_with_our_name_is_refused(fake_node: Node, made: str):
    fake_node.run("ip -batch -", stdin=made)
    before = fake_node.run(f"ip -d addr show dev {IPVS_DEVICE}")
    with pytest.raises(KernelError, match=rf"kbpf did not create.*{IPVS_DEVICE}"):
        fake_node.start()
    shutil.rmtree(fake_node.folder)
    assert not has_remains(fake_node)
    assert run_cleanup(fake_node) == []
    assert fake_node.run(f"ip -d addr show dev {IPVS_DEVICE}") == before


@pytest.mark.parametrize("made", TABLES.values(), ids=TABLES)
def test_foreign_table_with_our_name_is_refused(fake_node: Node, made: str):
    fake_node.run(f"nft {made}")
    before = listed(fake_node)
    with pytest.raises(KernelError, match=f"kbpf did not create.*{TABLE}"):
        fake_node.start()
    assert run_cleanup(fake_node) == [f"device {IPVS_DEVICE}"]
    assert listed(fake_node) == before


def test_foreign_table_replacing_ours_is_an_error(node: Node):
    node.apply(WEB)
    node.run(f"nft delete table {TABLE}; add {TABLES['a chain of ours']}")
    before = listed(node)
    with pytest.raises(KernelError, match="kbpf did not create"):
        node.tick()
    for _ in range(2):
        with pytest.raises(KernelError, match="kbpf did not create"):
            node.apply(WEB)
    assert listed(node) == before


def test_empty_device_and_table_are_taken_over(fake_node: Node):
    """We may have been killed before we added our alias or rules."""
    fake_node.run(f"ip link add {IPVS_DEVICE} type bridge")
    fake_node.run(f"nft add table {TABLE}")
    fake_node.start()
    assert f"alias {dummy.ALIAS}" in fake_node.run(f"ip link show {IPVS_DEVICE}")
    fake_node.start()


LEFT = {"all": "", "the table": f"ip link del {IPVS_DEVICE}", "the device": f"nft delete table {TABLE}"}


@pytest.mark.parametrize("gone", LEFT.values(), ids=LEFT)
def test_remains_are_found_and_removed_without_a_state_folder(node: Node, gone: str):
    """The folder may have been a container's, or lost at a reboot."""
    node.apply(WEB)
    node.plane.close()
    shutil.rmtree(node.folder)
    if gone:
        node.run(gone)
    assert has_remains(node)
    shutil.rmtree(node.folder)
    assert run_cleanup(node)
    assert (node.links(), node.tables()) == (set(), set())
    assert not node.ipvs.held
    assert not node.folder.exists()
    assert not has_remains(node)


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "forced"])
def test_cleanup_with_a_running_agent_removes_nothing(node: Node, tmp_path, capsys, force: tuple[str, ...]):
    """The agent would restore everything within seconds, with its lock in a deleted folder."""
    node.apply(WEB)
    before = listed(node), node.ipvs.shown(), node.addresses()
    words = ["cleanup", *force, "--pin-dir", str(tmp_path / "pins"), "--state-dir", str(node.folder)]
    assert node.do(lambda: app.call(words)) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "nothing was removed: an agent in mode ipvs is running" in err
    assert "--force does not help" in err
    assert (listed(node), node.ipvs.shown(), node.addresses()) == before


def test_state_folder_of_another_user_is_refused(fake_node: Node):
    """The folder may be anywhere (--state-dir); another user could create it first and hold its
    lock.
    """
    folder = fake_node.folder / IPVS_DEVICE
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    with pytest.raises(KernelError, match="cannot trust the folder: uid 65534 owns it") as error:
        fake_node.start()
    assert str(folder) in str(error.value)
    assert (fake_node.links(), fake_node.tables()) == (set(), set()), "nothing is created"
    folder.rmdir()
    fake_node.start()
    assert folder.stat().st_mode & 0o7777 == 0o700
