"""What the agent keeps on a node beside its programs, in a network namespace of its own: ports that
sockets stay away from, and one rule in a FORWARD chain.
"""

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from kbpf.dataplane.bpf import host
from kbpf.dataplane.bpf.host import HOST_POLL_INTERVAL_S, HostIntegration
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.errors import KernelError
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import netns, sysctl
from kbpf.model.config import Config
from tests.support.lab.lab import inside
from tests.support.lab.lab import run as command

T = TypeVar("T")
USUAL = (32768, 60999)
CONFIG = Config(masquerade_ports=(61_000, 65_535))
WIDE = (1024, 65535)


class House:
    """A network namespace and a pin folder; an agent looks after both."""

    def __init__(self, where: str, folder: Path) -> None:
        self.where = where
        self.pins = Pins(folder)
        self.clock = itertools.count(0, HOST_POLL_INTERVAL_S)
        self.beside = HostIntegration(self.pins, CONFIG)

    def do(self, action: Callable[[], T]) -> T:
        return netns.run_in(Path("/run/netns") / self.where, action)

    def run(self, *words: str, stdin: str | None = None) -> str:
        return command(*inside(self.where, None, *words), stdin=stdin)

    def look(self, **changed: object) -> None:
        """One look of the agent; of a new one with other settings, if any are given."""
        if changed:
            self.beside = HostIntegration(self.pins, replace(CONFIG, **changed))
        now = float(next(self.clock))
        self.do(lambda: self.beside.poll(now))

    def set(self, local: tuple[int, int], reserved: str) -> None:
        self.do(lambda: sysctl.write(sysctl.LOCAL_PORT_RANGE, f"{local[0]} {local[1]}"))
        self.do(lambda: sysctl.write(sysctl.RESERVED_PORTS, reserved))

    @property
    def reserved(self) -> str:
        return self.do(lambda: sysctl.read(sysctl.RESERVED_PORTS))

    def remove(self) -> tuple[str, ...]:
        return self.do(lambda: host.remove(self.pins))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    where = f"kbbe{os.getpid()}"
    command("ip", "netns", "add", where)
    try:
        made = House(where, tmp_path)
        made.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        yield made
    finally:
        command("ip", "netns", "del", where)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kbpf")


# ---- ports ---------------------------------------------------------------------------------------


class Ports(NamedTuple):
    """What the node had, what it has with us, and after us."""

    name: str
    local: tuple[int, int]
    before: str
    during: str
    after: str


PORTS = [
    Ports("out of the way already", USUAL, "", "", ""),
    Ports("out of the way, with others", USUAL, "8080", "8080", "8080"),
    Ports("in the way", WIDE, "", "61000-65535", ""),
    Ports("by one port", (32768, 61000), "", "61000-65535", ""),
    Ports("others' ports stay", WIDE, "8080,9000-9010", "8080,9000-9010,61000-65535",
          "8080,9000-9010"),
    Ports("next to others'", WIDE, "60000-60999", "60000-65535", "60000-60999"),
    Ports("some of ours were others' before", WIDE, "62000-62999", "61000-65535", "62000-62999"),
    Ports("all of them were", WIDE, "61000-65535", "61000-65535", "61000-65535"),
    Ports("more than all", WIDE, "50000-65535", "50000-65535", "50000-65535"),
]  # fmt: skip


@pytest.mark.parametrize("row", PORTS, ids=lambda row: row.name)
def test_ports_are_reserved_and_given_back(house: House, row: Ports):
    house.set(row.local, row.before)
    house.look()
    assert house.reserved == row.during
    house.look(masquerade_bit=14)  # the next agent adopts it
    house.look()
    assert house.reserved == row.during
    gone = house.remove()
    assert house.reserved == row.after
    assert bool(gone) == (row.during != row.before)
    assert not (house.pins.root / host.NOTE_FOLDER).exists()


def test_no_socket_gets_one_of_them(house: House):
    """What the setting is for: of 64 ports that the kernel may choose from, 60 are ours."""
    house.set((61_000, 61_063), "")
    house.look(masquerade_ports=(61_004, 61_063))
    script = (
        "import socket\n"
        "made = [socket.create_server(('127.0.0.1', 0)) for _ in range(4)]\n"
        "print(*sorted(s.getsockname()[1] for s in made))\n"
        "try:\n socket.create_server(('127.0.0.1', 0))\n"
        "except OSError as e: print(e.errno)\n"
    )
    said = house.run(sys.executable, "-c", script).split()
    assert said == ["61000", "61001", "61002", "61003", "98"]


def test_it_is_put_right_when_somebody_changes_it(house: House, caplog: pytest.LogCaptureFixture):
    house.set(USUAL, "")
    house.look()
    assert house.reserved == ""
    house.set(WIDE, "")
    house.look()
    assert house.reserved == "61000-65535"
    house.set(WIDE, "7,62000")  # a file of sysctl.d, written anew: what it says is theirs
    house.look()
    assert house.reserved == "7,61000-65535"
    house.set(USUAL, "7,61000-65535")
    house.look()
    assert house.reserved == "7,62000", "nobody needs ours any more"
    assert sum("reserved" in line for line in told(caplog)) == 2


def test_what_somebody_writes_over_ours_is_theirs(house: House):
    house.set(WIDE, "")
    house.look()
    house.set(WIDE, "1")
    house.set(WIDE, "61000-65535")
    house.pins.root.joinpath(host.NOTE_FOLDER, "61000-65535").rmdir()
    house.look()
    house.remove()
    assert house.reserved == "61000-65535"


def test_another_range_takes_the_place_of_the_old_one(house: House):
    house.set(WIDE, "8080")
    house.look()
    house.look(masquerade_ports=(50_000, 50_099))
    assert house.reserved == "8080,50000-50099"
    house.remove()
    assert house.reserved == "8080"


def test_a_setting_that_cannot_be_written_is_told_once(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    house.set(WIDE, "8080")

    def refuse(name: str, value: str) -> None:
        raise KernelError(f"cannot set {name}", "", f"sysctl -w {name}={value}", 30)

    monkeypatch.setattr(sysctl, "write", refuse)
    for _ in range(3):
        house.look()
    said = [line for line in told(caplog) if "cannot set" in line]
    assert len(said) == 1
    assert "EROFS" in said[0]
    assert "net.ipv4.ip_local_reserved_ports=8080,61000-65535" in said[0]
    monkeypatch.undo()
    assert house.remove() == (), "nothing is ours"
    assert house.reserved == "8080"


def test_a_real_proc_that_is_read_only(house: House):
    script = (
        "from kbpf.kernel.system import sysctl\n"
        "try: sysctl.write(sysctl.RESERVED_PORTS, '1')\n"
        "except Exception as e: print(e)\n"
    )
    mounted = 'mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys; exec "$@"'
    said = house.run("unshare", "-m", "sh", "-c", mounted, "sh", sys.executable, "-c", script)
    assert said.startswith("cannot set net.ipv4.ip_local_reserved_ports")
    assert "EROFS" in said
    assert "sysctl -w net.ipv4.ip_local_reserved_ports=1" in said


def test_a_node_that_does_not_forward_is_told_of(house: House, caplog: pytest.LogCaptureFixture):
    house.run("sysctl", "-qw", "net.ipv4.ip_forward=0")
    for _ in range(2):
        house.look()
    assert [line for line in told(caplog) if "forwards nothing" in line] == [
        "net.ipv4.ip_forward is 0, so this node forwards nothing to pods; set it to 1"
    ]
    assert house.run("sysctl", "-n", "net.ipv4.ip_forward").strip() == "0", "it is not ours to set"


# ---- the rule ------------------------------------------------------------------------------------


def chains(house: House) -> dict[str, forward_rules.BaseChain]:
    return {chain.family: chain for chain in house.do(forward_rules.list_forward_chains)}


def close(house: House) -> None:
    house.run("iptables-nft", "-P", "FORWARD", "DROP")
    house.run("ip6tables-nft", "-P", "FORWARD", "DROP")


OPEN = [
    "",
    "table inet filter { chain forward { type filter hook forward priority 0; policy drop; }; }",
    "table ip filter { chain INPUT { type filter hook input priority 0; policy drop; }; }",
    "table ip filter { chain FORWARD { type filter hook forward priority 0; policy accept; }; }",
    "table ip mine { chain FORWARD { type filter hook forward priority 0; policy drop; }; }",
    "table ip filter { chain FORWARD { drop; }; }",
]


@pytest.mark.parametrize("ruleset", OPEN)
def test_nothing_is_written_where_nothing_is_closed(house: House, ruleset: str):
    house.run("nft", "-f", "-", stdin=ruleset)
    before = house.do(forward_rules.read_generation)
    house.look()
    assert house.do(forward_rules.read_generation) == before


def test_a_look_at_what_is_right_changes_nothing(house: House):
    close(house)
    house.look()
    before = house.do(forward_rules.read_generation)
    house.look()
    house.look(masquerade_bit=14)
    assert house.do(forward_rules.read_generation) == before
    assert all(chain.has_masquerade_rule(0x4000) for chain in chains(house).values())
    assert house.run("iptables-nft", "-S", "FORWARD").splitlines()[1:] == [
        '-A FORWARD -m mark --mark 0x4000/0x4000 -m comment --comment "kbpf: masqueraded, mark '
        '0x4000" -j ACCEPT'
    ]


def test_a_look_without_news_lists_no_chain(house: House, monkeypatch: pytest.MonkeyPatch):
    close(house)
    house.look()
    house.look()
    monkeypatch.setattr(
        forward_rules, "list_forward_chains", lambda: pytest.fail("asked for the rules")
    )
    house.look()


def test_another_mark_takes_the_place_of_the_old_one(house: House):
    close(house)
    house.look()
    house.look(masquerade_bit=31)
    for chain in chains(house).values():
        assert [rule.comment for rule in chain.rules] == ["kbpf: masqueraded, mark 0x80000000"]
    assert set(house.remove()) == {"rule in ip filter FORWARD", "rule in ip6 filter FORWARD"}
    assert all(chain.rules == () for chain in chains(house).values())


def test_a_chain_that_changed_meanwhile_is_an_error_and_the_next_look_is_right(house: House):
    """Somebody removes the rule before which ours was to stand."""
    house.run("iptables-nft", "-A", "FORWARD", "-j", "DROP")
    chain = chains(house)["ip"]
    house.run("iptables-nft", "-F", "FORWARD")
    with pytest.raises(KernelError) as caught:
        house.do(lambda: forward_rules.accept_marked(chain, 0x4000))
    assert caught.value.errno in host.TRANSIENT_ERRNOS
    house.run("iptables-nft", "-A", "FORWARD", "-j", "DROP")
    house.look()
    assert chains(house)["ip"].has_masquerade_rule(0x4000)


def test_a_step_that_fails_leaves_the_old_rule(house: House):
    """New and old change places in one transaction."""
    close(house)
    house.look()
    chain = chains(house)["ip"]
    wrong = replace(
        chain,
        rules=(*chain.rules, forward_rules.ChainRule(999, forward_rules.masquerade_comment(1))),
    )
    with pytest.raises(KernelError):
        house.do(lambda: forward_rules.accept_marked(wrong, 2))
    assert chains(house)["ip"] == chain


def test_without_the_library_it_is_told_once(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    close(house)
    monkeypatch.setitem(sys.modules, "nftables", None)
    for _ in range(3):
        house.look()
    assert len([line for line in told(caplog) if "python3-nftables" in line]) == 1
    assert forward_rules.probe_nf_tables().works is None
    assert house.remove() == ()


def test_a_chain_of_others_that_drops_is_told_of(house: House, caplog: pytest.LogCaptureFixture):
    house.run("nft", "-f", "-", stdin=OPEN[1])
    for _ in range(2):
        house.look()
    said = [line for line in told(caplog) if "inet filter forward" in line]
    assert len(said) == 1
    assert "let packets with mark 0x4000 pass there" in said[0]


def test_a_table_of_the_old_iptables_is_told_of(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    names = tmp_path / "names"
    names.write_text("nat\n")
    monkeypatch.setitem(forward_rules.LEGACY_TABLE_NAMES, "ip", names)
    house.look(masquerade_bit=14)
    assert not [line for line in told(caplog) if "legacy" in line]
    names.write_text("nat\nfilter\n")
    house.look(masquerade_bit=14)
    house.look()
    said = [line for line in told(caplog) if "legacy" in line]
    assert len(said) == 1
    assert "0x4000" in said[0]


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
try:
    forward_rules.run_transaction(tables)
except KernelError as error:
    print(error)
"""


def test_libnftables_does_not_end_the_process_when_no_descriptor_is_left():
    assert "(nf_tables): EMFILE" in command(sys.executable, "-c", NO_DESCRIPTOR_LEFT)
