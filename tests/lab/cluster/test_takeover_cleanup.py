# SPDX-License-Identifier: Apache-2.0
"""`kbpf cleanup --kube-proxy` after a real kube-proxy, in each of its modes: foreign rules stay
exactly as they were.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kbpf.kernel.system import netns, process
from kbpf.takeover import detect
from tests.support.build import go_build
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.lab.lab import Lab, Node, inside, on, until
from tests.support.runtime import docs

KINDS = {"nftables": "nft", "iptables": "nft", "iptables-legacy": "legacy"}
"""Mode of kube-proxy → which programs of iptables have its rules."""
OTHERS = """\
*nat
:CNI-HOSTPORT - [0:0]
:KUBE-MARK-DROP - [0:0]
-A PREROUTING -m comment --comment "jumps to KUBE-SERVICES" -j CNI-HOSTPORT
-A PREROUTING -p tcp -m tcp --dport 81 -j REDIRECT --to-ports 82
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-POD-FW-ERIFXISQEP7F7OF4 - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A FORWARD -j KUBE-POD-FW-ERIFXISQEP7F7OF4
%s
COMMIT
*mangle
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
"""
"""Rules of a CNI, of kubelet and of an operator. kubelet and kube-proxy both use KUBE-FIREWALL."""
GUARD = (
    "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 "
    '-m comment --comment "block incoming localnet connections" '
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
TABLES = """
table inet kube-proxy {
    chain KUBE-SERVICES {
        type filter hook input priority 0
    }
}
table ip kube-proxy-2 {
    chain services {
    }
}
"""
"""Foreign tables with names similar to kube-proxy's."""
UNSEEN = () if process.is_in_initial_pid_namespace() else ("--force",)
"""Needed if the tests run in a container, where a running kube-proxy might not be visible."""


class Ground:
    """A node with foreign rules, and an API server with Services of every kind."""

    def __init__(self, lab: Lab, api: ApiServer) -> None:
        self.home: Node = lab.nodes[0]
        self.config = api.kubeconfig(lab.folder / "kubeconfig")
        self.legacy = lab.folder / "legacy"
        self.legacy.mkdir()
        for v6 in ("", "6"):
            for verb in ("", "-save", "-restore"):
                (self.legacy / f"ip{v6}tables{verb}").symlink_to(f"/usr/sbin/ip{v6}tables-legacy{verb}")
        with api.kube() as kube:
            kube.create(node(self.home.name, self.home.ip, self.home.ip6))
            for obj in objects():
                kube.create(obj)
            ingress = [{"ip": "192.0.2.1"}, {"ip": "2001:db8::1"}]
            kube.patch("Service", "kept", {"status": {"loadBalancer": {"ingress": ingress}}}, sub="status")

    def run(self, *words: str, stdin: str | None = None) -> str:
        return on(self.home, *words, stdin=stdin)

    def cleanup(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Runs it with a pin folder that does not exist: no state of kbpf is needed."""
        words = ("cleanup", "--kube-proxy", "--pin-dir", "/sys/fs/bpf/none", *more)
        where = inside(self.home.netns, None, sys.executable, "-m", "kbpf", *words)
        return subprocess.run(where, capture_output=True, text=True, check=False)

    def rules(self, kind: str) -> str:
        """All rules, without counters and comments."""
        return "".join(self.saved(kind, v6) for v6 in ("", "6")) + self.tables()

    def saved(self, kind: str, v6: str) -> str:
        """The rules of `ip6tables-save` for "6", of `iptables-save` for ""."""
        text = self.run(f"ip{v6}tables-{kind}-save")
        return re.sub(r" \[\d+:\d+\]|^#.*\n", "", text, flags=re.MULTILINE)

    def tables(self) -> str:
        return self.run("nft", "-s", "list", "tables")


def objects() -> Iterator[dict[str, object]]:
    """A Service for each setting that makes kube-proxy write another kind of chain."""
    for name, more in {
        "plain": {"type": "NodePort", "affinity_seconds": 60},
        "kept": {
            "type": "LoadBalancer",
            "external_policy": "Local",
            "source_ranges": ["198.51.100.0/24", "2001:db8:9::/64"],
        },
        "none": {"external_ips": ["203.0.113.1", "2001:db8:1::1"]},
    }.items():
        families = ("IPv4", "IPv6")
        rows = [port(80, "web"), port(53, "dns", "UDP")]
        yield service(name, *rows, families=families, **more)  # type: ignore[arg-type]
        for family, address in zip(families, ("10.244.1.2", "fd00:10:244:1::2"), strict=True):
            ends = [] if name == "none" else [endpoint(address, node="node-1")]
            ports = [slice_port(8080, "web"), slice_port(5353, "dns", "UDP")]
            yield endpoint_slice(name, *ends, ports=ports, family=family)


@pytest.fixture(scope="module")
def ground(programs: None, kube_proxy: Path) -> Iterator[Ground]:
    with Lab(1, "lo", apart=True) as lab, ApiServer(address=lab.outside_ip, netns=lab.outside) as api:
        yield Ground(lab, api)


@contextmanager
def kube_proxy_among_others(ground: Ground, mode: str, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """A kube-proxy that has written all of its rules, and runs during the block; the rules that
    were there before.
    """
    if mode == "iptables-legacy":
        patch.setenv("PATH", str(ground.legacy), prepend=os.pathsep)
    for v6, guard in (("", GUARD), ("6", "")):
        ground.run(f"ip{v6}tables-{KINDS[mode]}-restore", stdin=OTHERS % guard)
    ground.run("nft", "-f", "-", stdin=TABLES)
    before = ground.rules(KINDS[mode])
    with KubeProxy(ground.home, mode.removesuffix("-legacy"), ground.config) as proxy:
        until(f"its rules\n{proxy.tail()}", lambda: is_complete(ground, mode))
        yield before


@pytest.mark.parametrize("mode", KINDS)
def test_cleanup_removes_all_of_kube_proxy_and_nothing_else(ground: Ground, mode: str, monkeypatch):
    with kube_proxy_among_others(ground, mode, monkeypatch) as before:
        refused = ground.cleanup()
        assert refused.returncode == 1
        assert "kube-proxy is running on this node" in refused.stderr
        elsewhere = Path("/run/netns") / str(ground.home.lab.outside)
        assert netns.run_in(elsewhere, detect.detect)[::2] == ((), {})
    kind = KINDS[mode]
    assert ground.rules(kind) != before
    done = ground.cleanup(*UNSEEN)
    assert (done.returncode, done.stderr) == (0, "")
    assert ground.rules(kind) == before
    for table in ("table ip kube-proxy",) if mode == "nftables" else ("ip nat", "ip6 filter"):
        assert f"kube-proxy   {table}" in done.stdout
    again = ground.cleanup(*UNSEEN)
    assert (again.returncode, again.stdout) == (0, "nothing to remove of kube-proxy\n")
    assert ground.rules(kind) == before


def test_kube_proxys_own_cleanup_removes_its_legacy_rules(ground: Ground, monkeypatch):
    """docs/operate.md: for nodes on which our image lacks the programs of iptables-legacy."""
    with kube_proxy_among_others(ground, "iptables-legacy", monkeypatch) as before:
        pass
    (said,) = (span for span in docs.spans("docs/operate.md") if "kubectl debug node" in span)
    _, _, command = said.partition(" -- ")
    assert command == "kube-proxy --cleanup"
    ground.run(str(go_build.build("kube-proxy")), "--cleanup")
    assert ground.rules("legacy") == before


def is_complete(ground: Ground, mode: str) -> bool:
    """Whether chains of all kinds exist in both families."""
    if mode == "nftables":
        tables = ground.tables()
        return all(
            f"table {family} kube-proxy\n" in tables
            and "firewall-" in ground.run("nft", "list", "table", family, "kube-proxy")
            for family in ("ip", "ip6")
        )
    wanted = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-", "KUBE-FORWARD")
    saved = [ground.saved(KINDS[mode], v6) for v6 in ("", "6")]
    return all(f":{name}" in rules for name in wanted for rules in saved)
