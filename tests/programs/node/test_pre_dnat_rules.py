# SPDX-License-Identifier: Apache-2.0
"""Firewall rules that kbpf warns of: rules that refuse NodePorts and VIPs before kube-proxy's DNAT,
which our traffic does not pass. Real rulesets of nft and iptables-nft, in a network namespace.

"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.dataplane import firewalls
from kbpf.kernel.netfilter import pre_dnat_rules
from kbpf.kernel.system import netns
from tests.programs.node.rows_pre_dnat_rules import IPTABLES, LEGACY, RAW, ROWS, Row
from tests.support.lab.lab import run


@pytest.fixture
def where() -> Iterator[str]:
    name = f"kber{os.getpid()}"
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")
    yield name
    run("ip", "netns", "del", name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_nft_chains_are_named(where: str, row: Row) -> None:
    run("ip", "netns", "exec", where, "nft", "-f", "-", stdin=row.rules.replace("; }", ";\n}\n"))
    found = netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_chains)
    assert found == row.named
    lines = netns.run_in(Path("/run/netns") / where, firewalls.early_drop_warnings)
    assert len(lines) == bool(row.named)
    assert all(name in line for name in row.named for line in lines)


@pytest.mark.parametrize(("rule", "named"), IPTABLES, ids=[rule for rule, _ in IPTABLES])
def test_iptables_nft_chains_are_named(where: str, rule: str, named: tuple[str, ...]) -> None:
    command = ["ip", "netns", "exec", where, "iptables-nft", *rule.split()]
    subprocess.run(command, check=True, capture_output=True)
    assert netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_chains) == named


@pytest.mark.parametrize(("rule", "named"), LEGACY, ids=[rule for rule, _ in LEGACY])
def test_iptables_legacy_chains_are_named(where: str, rule: str, named: tuple[str, ...]) -> None:
    run("ip", "netns", "exec", where, "iptables-legacy", *rule.split())
    place = Path("/run/netns") / where
    assert netns.run_in(place, pre_dnat_rules.find_legacy_chains) == (named, ())
    lines = netns.run_in(place, firewalls.early_drop_warnings)
    assert len(lines) == bool(named)
    assert all(name in line for name in named for line in lines)


JUMPS = [("--dport 30080", (f"{RAW} PREROUTING",)), ("--dport 22", ())]


@pytest.mark.parametrize(("ports", "named"), JUMPS)
def test_iptables_legacy_rules_in_a_user_chain_are_found(
    where: str, ports: str, named: tuple[str, ...]
) -> None:
    for words in ("-N d", "-A d -j DROP", f"-A PREROUTING -p tcp {ports} -j d"):
        run("ip", "netns", "exec", where, "iptables-legacy", "-t", "raw", *words.split())
    found = netns.run_in(Path("/run/netns") / where, pre_dnat_rules.find_legacy_chains)
    assert found.chains == named


def test_unreadable_iptables_legacy_tables_are_reported(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in our image, which has no iptables-legacy. A table that exists is reported, because its
    rules cannot be known.
    """
    run("ip", "netns", "exec", where, "iptables-legacy", "-t", "raw", "-S")
    run("ip", "netns", "exec", where, "ip6tables-legacy", "-t", "mangle", "-S")
    monkeypatch.setenv("PATH", str(tmp_path))
    place = Path("/run/netns") / where
    unread = ("ip raw (iptables-legacy)", "ip6 mangle (iptables-legacy)")
    assert netns.run_in(place, pre_dnat_rules.find_legacy_chains) == ((), unread)
    (line,) = netns.run_in(place, firewalls.early_drop_warnings)
    assert line.startswith(f"{', '.join(unread)} cannot be read from here; ")


def test_no_warning_without_rules(where: str) -> None:
    assert netns.run_in(Path("/run/netns") / where, firewalls.early_drop_warnings) == ()
