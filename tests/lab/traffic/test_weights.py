# SPDX-License-Identifier: Apache-2.0
"""kbpf.io annotations of a Service, from a real API server to the slots of its backend sets. Shares,
Maglev tables and bad annotations: tests/values/policy.
"""

from collections import Counter

from tests.support.cluster.cluster import Cluster, Object
from tests.support.lab.dial import Dial, check

AT = "10.96.0.60:80"
WHO = {"a1": "web-0", "a2": "web-1", "b1": "web-2"}
"""The Service's backends, and the names of their Pods."""


def web(cluster: Cluster, **annotations: str) -> list[Object]:
    said = {f"kbpf.io/{name}": text for name, text in annotations.items()}
    made = cluster.web(60, " ".join(WHO), annotations=said)
    for end, pod in zip(made[1]["endpoints"], WHO.values(), strict=True):
        end["targetRef"] = {"kind": "Pod", "name": pod, "namespace": "default"}
    return made


def slots(cluster: Cluster) -> list[tuple[int, ...]]:
    """By agent: how many slots each Pod has."""
    counts = [Counter(cluster.served(agent)[f"{AT}/TCP"]["cluster"]) for agent in cluster.agents]
    return [tuple(count[f"{cluster[place].ip}:8080/TCP"] for place in WHO) for count in counts]


def test_annotations_set_the_slots_of_each_backend(cluster: Cluster):
    with cluster.given(*web(cluster)):
        assert slots(cluster) == [(1, 1, 1)] * 2
        cluster.change(web(cluster, weights="web-0=3, *=1")[0])
        assert slots(cluster) == [(3, 1, 1)] * 2
        weights = f"node:{cluster.home['b1'].name}=5, {cluster['a2'].ip}=0, zone:zone-1=2"
        cluster.change(web(cluster, weights=weights)[0])
        assert slots(cluster) == [(2, 0, 5)] * 2
        check(cluster, Dial("a backend of weight 0 gets nothing", "a3", AT, "a1 b1"))
        cluster.change(web(cluster, weights="*=0")[0])
        assert slots(cluster) == [(1, 1, 1)] * 2
        check(cluster, Dial("all weights are 0: all serve", "a3", AT, "a1 a2 b1"))
        cluster.change(web(cluster, algorithm="maglev")[0])
        tables = [cluster.served(agent)[f"{AT}/TCP"] for agent in cluster.agents]
        assert tables[0]["cluster"] == tables[1]["cluster"], "equal on all nodes"
        assert len(tables[0]["cluster"]) == 251
        check(cluster, Dial("served by all", "a3", AT, "a1 a2 b1"))
