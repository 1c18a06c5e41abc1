# SPDX-License-Identifier: Apache-2.0
"""Rows and verdicts of `kbpf check`."""

from pathlib import Path

from kbpf.checks import neighbours, packet_path
from kbpf.checks.row import Check, CheckRow, sum_up
from kbpf.cli import check
from kbpf.cli.check import compute_verdict
from kbpf.dataplane.bpf.maps.layout import NodeFlag
from kbpf.dataplane.bpf.programs import foreign
from kbpf.dataplane.bpf.programs.hook_probe import Point, ProbeOutcome
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.tc import Runner
from kbpf.kernel.net.devices import Device
from kbpf.kernel.netfilter.forward_rules import BaseChain
from kbpf.kernel.probe_result import Probe
from tests.support.table import each_line, each_named_pair, each_pair

# ---- check -------------------------------------------------------------------------------------


def check_row(result: str, needed: bool = True) -> CheckRow:
    return CheckRow(Check.BPFFS, result, "", needed=needed)


FILES = {
    "range": "sys/net/ipv4/ip_local_port_range",
    "reserved": "sys/net/ipv4/ip_local_reserved_ports",
    "v4": "sys/net/ipv4/ip_forward",
    "v6": "sys/net/ipv6/conf/all/forwarding",
    "all": "sys/net/ipv4/conf/all/rp_filter",
    "eth0": "sys/net/ipv4/conf/eth0/rp_filter",
    "protocols": "net/protocols",
}


@each_named_pair(
    "node, expected",
    """\
disjoint ranges: range=32768 60999; reserved= → masquerade ports yes: 61000 to 65535
ranges that overlap in one port: range=32768 61000; reserved= → \
masquerade ports no: may use 61000 to 61000 too; ip_local_reserved_ports
ranges that overlap completely: range=1024 65535; reserved= → masquerade ports no: 61000 to 65535; 61000-65535
reserved: range=1024 65535; reserved=8080,61000-65535 → masquerade ports yes: reserved
reserved in pieces: range=1024 65535; reserved=62000-65535,60000-61999 → masquerade ports yes: reserved
except one port: range=1024 65535; reserved=61000-62000,62002-65535 → masquerade ports no: too; 61000-65535
reserved where the ranges overlap: range=1024 61001; reserved=61000,61001 → masquerade ports yes:
reserved where they overlap, at the end: range=62000 65535; reserved=62000-65535 → masquerade ports yes: reserved
not readable: → masquerade ports unknown: ip_local_port_range
enabled: v4=1; v6=0 → forwarding yes: IPv4
disabled: v4=0 → IPv4 forwarding no: ip_forward = 0; sysctl -w net.ipv4.ip_forward=1
enabled for both: v4=1; v6=2 → forwarding yes: IPv4, IPv6
disabled: v6=0 → IPv6 forwarding no: ; sysctl -w net.ipv6.conf.all.forwarding=1
no IPv6: → IPv6 forwarding unknown: no IPv6
loose: all=0; eth0=2 → rp_filter yes: not strict
strict: all=0; eth0=1 → rp_filter yes: strict (1) on eth0:
strict by conf/all: all=1; eth0=0 → rp_filter yes: strict (1) on eth0:
the maximum of both is used: all=2; eth0=1 → rp_filter yes: not strict
a vanished device: all=1 → rp_filter yes: not strict
SCTP: protocols=protocol size/SCTPv6 1/TCP 2 → SCTP sockets yes:
no SCTP: protocols=protocol size/TCP 2 → SCTP sockets no: not loaded
""",
)
def test_check_row_of_a_node(node, expected, tmp_path, monkeypatch):
    """The texts of FILES below /proc, `/` between lines → the row's name and result: its detail; its advice."""
    devices = (Device(1, "lo", loopback=True), Device(2, "eth0"), Device(3, "c0", "bridge"))
    monkeypatch.setattr(packet_path, "list_devices", lambda: devices)
    told = packet_path.PacketSettings(NodeFlag(0), 61_000, 65_535, 1 << 14)
    monkeypatch.setattr(packet_path, "read_settings", lambda _: told)
    for text in filter(None, node.split("; ")):
        name, _, value = text.partition("=")
        path = tmp_path / FILES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value.replace("/", "\n") + "\n")
    title, _, cells = expected.partition(": ")
    name, _, result = title.rstrip(":").rpartition(" ")
    detail, _, advice = cells.partition("; ")
    (row,) = [r for r in packet_path.check_packet_path(Path("/nowhere"), tmp_path) if r.name == name]
    assert row.result == result
    assert detail in row.detail
    assert advice in row.advice
    assert bool(row.advice) == bool(advice)
    assert not row.needed


PROBES = {
    "": Probe(True),
    "no library": Probe(None, "python3-nftables is missing"),
    "no nf_tables": Probe(None, "has no nf_tables"),
}
CHAINS = {"": (), "open": (BaseChain("ip", "filter", "FORWARD", False),)}
CHAINS["drops"] = (BaseChain("ip", "filter", "FORWARD", True),)


@each_line(
    "name, result, detail, advice, unmasqueraded, chain, others, legacy",
    """\
no chain | yes | no chain drops |  | yes
policy accept | yes | no chain drops |  | yes | open
policy drop | yes | drops by default: ip filter FORWARD |  | unknown | drops
another table that drops | no | not read inet fw forward, | with mark 0x4000 | no |  | inet fw forward
iptables-legacy | no | ip6 filter (iptables-legacy) | with mark 0x4000 | no | drops |  | ip6
no library | unknown | python3 | install python3-nftables | unknown
no nf_tables | unknown | no nf_tables |  | unknown
""",
)
def test_check_row_forward(name, result, detail, advice, unmasqueraded, chain, others, legacy, monkeypatch):
    """The expected row FORWARD: its result, words of its detail and of its advice. The result for packets that the
    agent's rule does not accept, as `kbpf trace` says it. The chain in iptables, chains of other tables that drop, and
    families with rules of iptables-legacy.
    """
    netfilter = packet_path.forward_rules
    monkeypatch.setattr(netfilter, "probe_nf_tables", lambda: PROBES.get(name, PROBES[""]))
    monkeypatch.setattr(netfilter, "list_forward_chains", lambda: CHAINS[chain])
    monkeypatch.setattr(netfilter, "list_other_drop_chains", lambda: (others,) * bool(others))
    monkeypatch.setattr(netfilter, "list_legacy_families", lambda: tuple(legacy.split()))
    (row,) = [r for r in packet_path.check_packet_path(Path("/nowhere")) if r.name == "FORWARD"]
    assert row.result == result
    assert detail in row.detail
    assert advice in row.advice
    assert bool(row.advice) == bool(advice)
    rules = packet_path.check_rules_of_others(Path("/nowhere"))
    assert (rules.masqueraded, rules.forwarded.result) == (row, unmasqueraded)


@each_pair(
    "result, says",
    """\
(yes) → the packet path can be used
(no) → the packet path cannot be used: hook y
(unknown) → the packet path cannot be used: hook y
no → mode bpf cannot be used: hook y
""",
)
def test_missing_packet_path_does_not_make_kbpf_unusable(result, says):
    """The row of a packet hook, in parentheses if not needed → words of the page."""
    rows = [check_row("yes"), CheckRow(Check.HOOK.of("y"), result.strip("()"), "", "", result.isalpha(), True)]
    made = compute_verdict(rows)
    assert (made.usable, made.packet_path) == (not result.isalpha(), result == "(yes)")
    assert says in check.format_page(made, rows)


@each_pair(
    "given, verdict",
    """\
yes → bpf True None
no → none False None
unknown → none False None
yes (no) → bpf True None
yes | yes → bpf True True
yes | yes no → bpf True False
yes | unknown → bpf True False
""",
)
def test_check_verdict(given, verdict):
    """Rows of `kbpf check`, in parentheses if not needed | of `--attached` → the mode, usable, attached."""
    rows, proof = (
        [check_row(word.strip("()"), needed=word.isalpha()) for word in part.split()]
        for part in given.partition("|")[::2]
    )
    made = compute_verdict(rows, proof or None)
    assert f"{made.mode} {made.usable} {made.attached}" == verdict


ROWS = {
    name: CheckRow(Check[check], result, "", needed="needed" in words, ipvs="ipvs" in words)
    for name, check, result, *words in map(
        str.split,
        """\
yes BPFFS yes needed
no BPFFS no needed
ipvs IPVS yes ipvs
no-ipvs IPVS no ipvs
dummy? DUMMY unknown ipvs
kbpf OTHER_KBPF no needed
balancer BALANCERS no needed
(kbpf) OTHER_KBPF no
kbpf? OTHER_KBPF unknown needed
""".splitlines(),
    )
}


@each_pair(
    "given, expected",
    """\
yes ipvs → bpf: mode ipvs can be used
yes no-ipvs → bpf: mode ipvs cannot be used: IPVS
no ipvs → ipvs: mode bpf cannot be used
no no-ipvs → none: mode ipvs cannot be used: IPVS
no no-ipvs dummy? → none: mode ipvs cannot be used: IPVS
no ipvs dummy? → ipvs: this machine, unless this is missing (not known): dummy devices
kbpf ipvs → none: mode bpf cannot be used: no other kbpf
balancer ipvs → none: no other load balancer
(kbpf) ipvs → bpf: mode bpf can be used
kbpf? ipvs → ipvs: mode bpf cannot be used
""",
)
def test_check_verdict_on_the_modes(given, expected):
    """ROWS → what `--mode auto` would choose (none where a neighbour makes mode bpf refuse), and words of the page."""
    rows, (mode, _, says) = [ROWS[word] for word in given.split()], expected.partition(": ")
    made = compute_verdict(rows)
    assert (made.mode, made.usable) == (mode, mode != "none")
    assert says in check.format_page(made, rows)


def test_rows_about_neighbours_are_unknown_without_the_right_to_see_them(monkeypatch):
    """An agent without CAP_SYS_ADMIN starts all the same."""
    monkeypatch.setattr(neighbours.syscalls, "may_open_by_id", lambda: False)
    rows = list(neighbours.refusal_rows(Path("/nowhere"), Path("/nowhere")))
    assert [(row.name, row.result, row.needed) for row in rows] == [
        ("no other load balancer", "unknown", False),
        ("no other kbpf", "unknown", False),
    ]
    assert all("CAP_SYS_ADMIN" in row.detail for row in rows)


def test_all_that_works_is_one_row_and_the_rest_a_row_each():
    """So that a good node has few rows, and a lacking feature has a name and advice."""
    hooks = {"connect4": "yes", "sendmsg4": "no", "trace": "yes", "release": "unknown"}
    given = {name: CheckRow(Check.HOOK.of(name), hooks[name], "", "", name.endswith("4")) for name in hooks}
    working, refused, unknown = sum_up(Check.HOOK, given)
    assert (working.name, working.result, working.needed) == ("hooks", "yes", True)
    assert working.detail == "connect4, trace"
    assert [refused, unknown] == [given["sendmsg4"], given["release"]]
    assert (refused.name, unknown.name) == ("hook sendmsg4", "hook release")
    assert list(sum_up(Check.HOOK, {"sendmsg4": refused})) == [refused]


def test_advice_where_no_program_is_before_ours():
    """Another order of the programs would not help."""
    device, ours, theirs = Device(1, "up0"), Runner(1, "tcx", True), Runner(2, "tcx", False)
    outcome = ProbeOutcome(Point(device, Direction.INGRESS, (ours, theirs)), False)
    assert neighbours.describe_outcome(outcome).endswith("before it: nothing")
    assert "TC_ACT_UNSPEC" not in neighbours.advise(outcome)
    assert "the row no other kbpf" in neighbours.advise(outcome)
    assert "ip -s link show up0" in neighbours.advise(outcome)
    behind = Point(device, Direction.INGRESS, (theirs, ours))
    for outcome in (ProbeOutcome(behind, False), ProbeOutcome(behind, False, theirs, 0)):
        assert "TC_ACT_UNSPEC" in neighbours.advise(outcome)


def test_many_devices_are_summarised_in_one_line():
    found = [foreign.ForeignProgram(7, "cil_from_contai", "ingress", f"lxc{n}") for n in range(40)]
    (line,) = foreign.format_lines(found)
    assert "cil_from_contai (id 7) at ingress of lxc0 and 39 more; " in line
