# SPDX-License-Identifier: Apache-2.0
"""A process of a node connects to a ClusterIP: kbpf's socket hooks compared with a real kube-proxy
and with the pod's own address, which is the upper limit. The set-up is that of nodeport.py.

kbpf translates at connect(), so there is no work per packet.
"""

from typing import Any

from benchmarks.nodeport import Frontend, Way, World, compare
from benchmarks.tools.common import sysctl
from kbpf.dataplane.bpf.maps.layout import Reason
from tests.support.lab.lab import inside

WAYS = ("direct", "stack", "nftables", "iptables")


class FromTheNode(World):
    """Like World, but the clients run on the first node of each pair, in its cgroup."""

    def frontend(self, way: Way, backend: str) -> Frontend:
        vip = way.vip(backend)
        return Frontend(
            (vip, 80),
            Reason.TRANSLATED,
            rf"-A KUBE-SERVICES -d {vip}/32 -p tcp .*KUBE-SVC-",
            "service-ips",
            rf"{vip} \. tcp \. 80",
        )

    def enter(self, way: Way) -> list[str]:
        sysctl(way.front.netns, ipv4__tcp_max_tw_buckets=0)
        return inside(way.front.netns, way.front.host.cgroup, "env")

    def comes_as(self, way: Way) -> set[str]:
        return {way.front.ip, f"10.244.{way.front.number}.1"}


def run() -> dict[str, Any]:
    """Returns all results and the proofs."""
    return compare(FromTheNode(WAYS), ("short", "requests"))
