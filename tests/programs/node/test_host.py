# SPDX-License-Identifier: Apache-2.0
"""Settings of the node that the agent maintains: local ports that sockets must not use, and one
rule in a FORWARD chain. Each test has its own network namespace.
"""

import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.host import HOST_POLL_INTERVAL_S, HostIntegration
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.layout import DEVICE, U32, DeviceFlag, Role
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.packet_path import nat_table
from kbpf.errors import KernelError
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import sysctl
from kbpf.model.config import Config
from kbpf.model.objects import Protocol
from tests.support.features import needs
from tests.support.lab.lab import run
from tests.support.lab.namespace import Namespace
from tests.support.plane import Site, desired, service
from tests.support.table import each_cells

USUAL = "32768 60999"
CONFIG = Config(masquerade_ports=(61_000, 65_535))
WIDE = "1024 65535"


class Bench(Namespace):
    """A network namespace and a pin folder, and an agent that maintains both."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.pins = Pins(folder)
        self.clock = itertools.count(0, HOST_POLL_INTERVAL_S)
        self.host_integration = HostIntegration(self.pins, CONFIG)

    def poll(self, **changed: object) -> None:
        """Polls once; with `changed`, first starts another agent with these settings."""
        if changed:
            self.host_integration = HostIntegration(self.pins, replace(CONFIG, **changed))
        now = float(next(self.clock))
        self.do(lambda: self.host_integration.poll(now))

    def poll_30_s(self) -> None:
        for _ in range(int(30 / HOST_POLL_INTERVAL_S)):
            self.poll()

    def set(self, local: str, reserved: str) -> None:
        self.do(lambda: sysctl.write(sysctl.LOCAL_PORT_RANGE, local))
        self.do(lambda: sysctl.write(sysctl.RESERVED_PORTS, reserved))

    @property
    def reserved(self) -> str:
        return self.do(lambda: sysctl.read(sysctl.RESERVED_PORTS))

    @property
    def generation(self) -> int:
        """Of the nftables ruleset: each change makes a new one."""
        return self.do(forward_rules.read_generation)

    @property
    def chains(self) -> dict[str, forward_rules.BaseChain]:
        return {chain.family: chain for chain in self.do(forward_rules.list_forward_chains)}

    def remove(self) -> tuple[str, ...]:
        return self.do(lambda: host.remove(self.pins))


@pytest.fixture
def bench(namespace: Namespace, tmp_path) -> Bench:
    made = Bench(namespace.name, tmp_path)
    made.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
    return made


@pytest.fixture(autouse=True)
def logged(caplog) -> Callable[[str], list[str]]:
    """A function that returns the lines of the log with these words."""
    caplog.set_level(logging.INFO, "kbpf")
    return lambda words: [line for record in caplog.records if words in (line := record.getMessage())]


def test_rules_that_cannot_be_parsed_do_not_end_the_agent(bench: Bench, monkeypatch, logged):
    def parse() -> tuple[str, ...]:
        raise ValueError("odd")

    monkeypatch.setattr(host.node, "find_early_chains", parse)
    for _ in range(3):
        bench.poll_30_s()
    assert len(logged("cannot read the firewall rules of the node")) == 1


@needs("conntrack_nat")
@pytest.mark.parametrize(
    ("close", "reopen"),
    [("iptables -P FORWARD DROP", "iptables -P FORWARD ACCEPT"), ("nft -f -", "nft delete table inet shut")],
    ids=["iptables", "another table"],
)
def test_packets_are_marked_only_where_forward_may_refuse_them(bench: Bench, close: str, reopen: str):
    """With conntrack: two chains, which each forwarded packet would pass."""
    config = replace(CONFIG, forwarding="netfilter", masquerade_ports=(61_000, 62_000))
    bench.do(lambda: bench.host_integration.choose_forwarding(config))
    shut = "table inet shut { chain c { type filter hook forward priority 0; policy drop; }; }"
    for command_line, marks in (("true", False), (close, True), (reopen, False)):
        bench.run(command_line, stdin=shut)
        bench.poll()
        table = bench.run(f"nft list table inet {nat_table.TABLE}")
        assert ("chain nat" in table, table.count("hook forward")) == (True, 2 * marks)


NFT = "table inet t { chain c { type filter hook prerouting priority raw ; tcp dport 30080 drop ; } ; }"
LEGACY = "iptables-legacy -w -t raw {} PREROUTING -p tcp --dport 30080 -j DROP"
BYPASSED = {
    "nft": (f"nft add {NFT}", "nft delete table inet t"),
    "iptables-legacy": (LEGACY.format("-A"), LEGACY.format("-D")),
}


@pytest.mark.parametrize("tool", BYPASSED)
def test_bypassed_rules_are_found_within_30_s(bench: Bench, tool: str):
    """Rules before DNAT that are added while the agent runs, and removed again."""
    bench.poll()
    for command_line, count in zip(BYPASSED[tool], (1, 0), strict=True):
        bench.run(command_line)
        bench.poll_30_s()
        assert len(bench.host_integration.bypassed.chains) == count
        assert len(bench.host_integration.problems()) == count


def test_rules_are_read_again_when_the_own_table_serves_a_port(bench: Bench, site: Site):
    """A rule of long ago, for the port of a Service of today: of SCTP, which is in kbpf's own table
    although conntrack is used.
    """
    plane = site.open()
    config = replace(CONFIG, forwarding="netfilter", masquerade_ports=(61_000, 62_000))
    bench.host_integration = HostIntegration(Pins(site.pins), config)
    bench.do(lambda: bench.host_integration.choose_forwarding(config))
    bench.run(f"nft add {NFT}".replace("30080", "443"))
    for frontend, count in (("10.96.0.1:80", 0), ("LoadBalancer=192.0.2.1:443", 1)) * 2:
        plane.apply(desired(service("web", frontend, "10.1.0.1:80", Protocol.SCTP)), None)
        bench.poll_30_s()
        assert len(bench.host_integration.bypassed.chains) == count


OWN_TABLE = {
    "an uplink of its own": (Role.HOST, DeviceFlag(0), 0, False),
    "an uplink that is a port of a bridge": (Role.HOST, DeviceFlag(0), 7, True),
    "pods at a bridge": (Role.POD, DeviceFlag(0), 7, False),
    "a bridge that spans all nodes": (Role.POD, DeviceFlag.SPANS, 0, True),
}
"""A device, and whether kbpf's own table serves NodePorts there though conntrack could."""


@pytest.mark.parametrize("kind", OWN_TABLE)
def test_ports_that_the_own_table_serves_although_conntrack_is_used(site: Site, kind: str):
    role, flags, bridge, every = OWN_TABLE[kind]
    made = (
        service("web", "10.96.0.1:80 NodePort=0.0.0.0:30080", "10.1.0.1:80"),
        service("sctp", "NodePort=0.0.0.0:30082", "10.1.0.1:80", Protocol.SCTP),
    )
    site.start(desired(*made))
    site.clear("devices")
    site.put("devices", U32.pack(1), DEVICE.pack(role, 14, flags, bytes(6), bytes(16), bytes(16), bridge))
    assert host.read_external_ports(Pins(site.pins)) == {30080, 30082}
    in_own_table = host.read_external_ports(Pins(site.pins), in_conntrack=True)
    assert in_own_table == ({30080, 30082} if every else {30082})


# ---- ports ---------------------------------------------------------------------------------------


@each_cells(
    "local, before, during, after",
    """
outside the local range            | 32768 60999
outside, with other reserved ports | 32768 60999 | 8080           | 8080                       | 8080
inside the local range             | 1024 65535  |                | 61000-65535
one port inside                    | 32768 61000 |                | 61000-65535
ports reserved by others stay      | 1024 65535  | 8080,9000-9010 | 8080,9000-9010,61000-65535 | 8080,9000-9010
adjacent to ports of others        | 1024 65535  | 60000-60999    | 60000-65535                | 60000-60999
some reserved by others            | 1024 65535  | 62000-62999    | 61000-65535                | 62000-62999
all reserved by others             | 1024 65535  | 61000-65535    | 61000-65535                | 61000-65535
more than all reserved             | 1024 65535  | 50000-65535    | 50000-65535                | 50000-65535
""",
)
def test_masquerade_ports_are_reserved_and_released(bench: Bench, local, before, during, after):
    """The local port range, and the reserved ports before, with and after the agent."""
    bench.set(local, before)
    bench.poll()
    assert bench.reserved == during
    bench.poll(masquerade_bit=14)  # the next agent adopts it
    bench.poll()
    assert bench.reserved == during
    gone = bench.remove()
    assert bench.reserved == after
    assert bool(gone) == (during != before)
    assert not (bench.pins.root / pinning.HOST_FOLDER).exists()


def test_reserved_ports_follow_changes_by_others(bench: Bench, logged):
    bench.set(USUAL, "")
    bench.poll()
    assert bench.reserved == ""
    bench.set(WIDE, "")
    bench.poll()
    assert bench.reserved == "61000-65535"
    bench.set(WIDE, "7,62000")  # as `sysctl --system` does: what it writes belongs to others
    bench.poll()
    assert bench.reserved == "7,61000-65535"
    bench.set(USUAL, "7,61000-65535")
    bench.poll()
    assert bench.reserved == "7,62000", "ours are outside the local range again"
    assert len(logged("reserved")) == 2


def test_ports_that_others_reserved_over_ours_stay(bench: Bench):
    bench.set(WIDE, "")
    bench.poll()
    bench.set(WIDE, "1")
    bench.set(WIDE, "61000-65535")
    bench.pins.root.joinpath(pinning.HOST_FOLDER, "61000-65535").rmdir()
    bench.poll()
    bench.remove()
    assert bench.reserved == "61000-65535"


def test_changed_masquerade_ports_replace_the_old_range(bench: Bench):
    bench.set(WIDE, "8080")
    bench.poll()
    bench.poll(masquerade_ports=(50_000, 50_099))
    assert bench.reserved == "8080,50000-50099"
    bench.remove()
    assert bench.reserved == "8080"


def test_sysctl_that_cannot_be_written_is_logged_once(bench: Bench, logged, monkeypatch):
    bench.set(WIDE, "8080")

    def refuse(name: str, value: str) -> None:
        raise KernelError(f"cannot set {name}", "", f"sysctl -w {name}={value}", 30)

    monkeypatch.setattr(sysctl, "write", refuse)
    for _ in range(3):
        bench.poll()
    (said,) = logged("cannot set")
    assert "EROFS" in said
    assert "net.ipv4.ip_local_reserved_ports=8080,61000-65535" in said
    monkeypatch.undo()
    assert bench.remove() == (), "nothing was reserved by us"
    assert bench.reserved == "8080"


def test_read_only_proc_sys_error_names_the_sysctl(bench: Bench):
    script = (
        "from kbpf.kernel.system import sysctl\n"
        "try: sysctl.write(sysctl.RESERVED_PORTS, '1')\n"
        "except Exception as e: print(e)\n"
    )
    mounted = 'mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys; exec "$@"'
    said = bench.run("unshare -m sh -c", mounted, "sh", sys.executable, "-c", script)
    assert said.startswith("cannot set net.ipv4.ip_local_reserved_ports")
    assert "EROFS" in said
    assert "sysctl -w net.ipv4.ip_local_reserved_ports=1" in said


def test_disabled_ip_forward_is_logged_once(bench: Bench, logged):
    bench.run("sysctl -qw net.ipv4.ip_forward=0")
    for _ in range(2):
        bench.poll()
    assert logged("forwards nothing") == [
        "net.ipv4.ip_forward is 0, so this node forwards nothing to pods; set it to 1"
    ]
    assert bench.run("sysctl -n net.ipv4.ip_forward").strip() == "0", "the agent leaves it"


# ---- the rule ------------------------------------------------------------------------------------


def close(bench: Bench) -> None:
    for tool in ("iptables-nft", "ip6tables-nft"):
        bench.run(f"{tool} -P FORWARD DROP")


OPEN = [
    "",
    "table inet filter { chain forward { type filter hook forward priority 0; policy drop; }; }",
    "table ip filter { chain INPUT { type filter hook input priority 0; policy drop; }; }",
    "table ip filter { chain FORWARD { type filter hook forward priority 0; policy accept; }; }",
    "table ip mine { chain FORWARD { type filter hook forward priority 0; policy drop; }; }",
    "table ip filter { chain FORWARD { drop; }; }",
]


@pytest.mark.parametrize("ruleset", OPEN)
def test_open_forward_chains_are_not_changed(bench: Bench, ruleset: str):
    bench.run("nft -f -", stdin=ruleset)
    before = bench.generation
    bench.poll()
    assert bench.generation == before


def test_poll_of_a_correct_rule_changes_nothing(bench: Bench, monkeypatch):
    """While the ruleset stays as it is, it is not even listed."""
    close(bench)
    bench.poll()
    before = bench.generation
    bench.poll()
    bench.poll(masquerade_bit=14)
    assert bench.generation == before
    monkeypatch.setattr(forward_rules, "list_forward_chains", lambda: pytest.fail("asked for the rules"))
    bench.poll()
    monkeypatch.undo()
    assert all(chain.has_masquerade_rule(0x4000) for chain in bench.chains.values())
    assert bench.run("iptables-nft -S FORWARD").splitlines()[1:] == [
        '-A FORWARD -m mark --mark 0x4000/0x4000 -m comment --comment "kbpf: masqueraded, mark 0x4000" -j ACCEPT'
    ]


def test_changed_mark_replaces_the_old_rule(bench: Bench):
    close(bench)
    bench.poll()
    bench.poll(masquerade_bit=31)
    for chain in bench.chains.values():
        assert [rule.comment for rule in chain.rules] == ["kbpf: masqueraded, mark 0x80000000"]
    assert set(bench.remove()) == {"rule in ip filter FORWARD", "rule in ip6 filter FORWARD"}
    assert all(chain.rules == () for chain in bench.chains.values())


def test_concurrently_changed_chain_is_an_error_and_the_next_poll_succeeds(bench: Bench):
    """The rule that ours was to be inserted before is removed between the listing and the
    change.
    """
    bench.run("iptables-nft -A FORWARD -j DROP")
    chain = bench.chains["ip"]
    bench.run("iptables-nft -F FORWARD")
    with pytest.raises(KernelError) as caught:
        bench.do(lambda: forward_rules.accept_marked(chain, 0x4000))
    assert caught.value.errno in host.TRANSIENT_ERRNOS
    bench.run("iptables-nft -A FORWARD -j DROP")
    bench.poll()
    assert bench.chains["ip"].has_masquerade_rule(0x4000)


def test_missing_python3_nftables_is_logged_once(bench: Bench, logged, monkeypatch):
    close(bench)
    monkeypatch.setitem(sys.modules, "nftables", None)
    for _ in range(3):
        bench.poll()
    assert len(logged("python3-nftables")) == 1
    assert forward_rules.probe_nf_tables().works is None
    assert bench.remove() == ()


def test_foreign_chain_that_drops_is_logged_once(bench: Bench, logged):
    bench.run("nft -f -", stdin=OPEN[1])
    for _ in range(2):
        bench.poll()
    (said,) = logged("inet filter forward")
    assert "let packets with mark 0x4000 pass there" in said


NO_DESCRIPTOR_LEFT = """
import contextlib, os, resource
from kbpf.errors import KernelError
from kbpf.kernel.netfilter import forward_rules

tables = {"list": {"tables": None}}
forward_rules.run_transaction(tables)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with contextlib.suppress(OSError):
    while True:
        os.dup(0)
print(forward_rules.probe_nf_tables().reason)
try:
    forward_rules.run_transaction(tables)
except KernelError as error:
    print(error)
"""


def test_libnftables_without_a_socket_raises_instead_of_exiting():
    """As where the kernel has no nfnetlink."""
    probed, raised = run(sys.executable, "-c", NO_DESCRIPTOR_LEFT).splitlines()
    assert probed == "this kernel has no nf_tables: EMFILE"
    assert "(nf_tables): EMFILE" in raised
