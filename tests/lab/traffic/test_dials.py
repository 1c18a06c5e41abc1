# SPDX-License-Identifier: Apache-2.0
"""What answers at a Service's addresses and which endpoints serve which client, tried with real sockets: the rows of
tests/rows/services.py and tests/rows/policy.py.
"""

from collections.abc import Iterator

import pytest

from tests.rows import policy, services
from tests.support.cluster.cluster import Cluster
from tests.support.lab.dial import Dial, check
from tests.support.lab.lab import ip
from tests.support.lab.prediction import check_prediction


@pytest.fixture(scope="module", autouse=True)
def _served(cluster: Cluster) -> Iterator[None]:
    for agent in cluster.agents:
        # Bound to a device, as kube-vip or kube-router do: still served.
        ip("addr replace 198.51.100.74/32 dev lo", netns=agent.node.netns)
    # a3 listens on the NodePorts itself: its own loopback must not be translated.
    cluster["a3"].serve(30070, udp=(30071,))
    with cluster.given(*services.objects(cluster), *policy.objects(cluster)):
        yield


@pytest.mark.parametrize("row", [*services.ROWS, *policy.ROWS], ids=lambda row: row.name)
def test_dial(cluster: Cluster, row: Dial):
    check_prediction(cluster, row)
    check(cluster, row)
