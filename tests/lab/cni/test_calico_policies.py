# SPDX-License-Identifier: Apache-2.0
"""Calico's NetworkPolicies about Services' traffic, in the rules of both of its data planes
(imitated: tests/support/cni/calico.py), with kbpf, and in one of them with the real kube-proxy. The
rows and the policies are those of kube-router's.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.cni.test_network_policies import ROWS, SERVICES
from tests.support.cni.calico import CALICO, device_of
from tests.support.cni.calico_rules import Workload
from tests.support.cni.cluster import CniCluster
from tests.support.cni.dials import Row, check_policy
from tests.support.lab.field import OUT4, OUT6, crossed

KINDS = [*((name, "kbpf") for name in CALICO), (next(iter(CALICO)), "nftables")]


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def cluster(request, cni_programs: None, kube_proxy: Path) -> Iterator[CniCluster]:
    name, proxy = request.param
    cni = CALICO[name]
    with CniCluster(cni, proxy=proxy) as made:
        a2, a3, b2 = made["a2"], made["a3"], made["b2"]
        made.unhook("a3!", a3.netns, a3.ip, a3.ip6, made.home["a3"])
        admitted = (a2.ip, a2.ip6, OUT4, OUT6)
        for backend in ("a1", "b1"):
            device = device_of(made[backend].netns)
            cni.police(made.home[backend], Workload(device, ingress=admitted))
        cni.police(made.home["a3"], Workload(device_of(a3.netns), egress=(b2.ip, b2.ip6)))
        made.create(*made.all_of(SERVICES))
        made.settle()
        yield made


@crossed
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.client} {r.kind} {r.number}")
def test_policies_judge_as_with_kube_proxy(cluster: CniCluster, row: Row, protocol: str, v6: bool):
    check_policy(cluster, row, protocol, v6)
