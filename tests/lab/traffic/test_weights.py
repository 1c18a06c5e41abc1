# SPDX-License-Identifier: Apache-2.0
"""kbpf.io annotations of a Service, from a real API server to the slots of its backend sets."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster, Object
from tests.support.lab.dial import Dial, check
from tests.support.lab.lab import until

AT = "10.96.0.60:80/TCP"
WHO = {"a1": "web-0", "a2": "web-1", "b1": "web-2"}


def web(cluster: Cluster, **annotations: str) -> list[Object]:
    """A Service with these annotations; its backends a1, a2, b1 are the Pods web-0, web-1,
    web-2.
    """
    said = {f"kbpf.io/{name}": text for name, text in annotations.items()}
    made = cluster.web(60, " ".join(WHO), annotations=said)
    for end, pod in zip(made[1]["endpoints"], WHO.values(), strict=True):
        end["targetRef"] = {"kind": "Pod", "name": pod, "namespace": "default"}
    return made


def slots(cluster: Cluster) -> dict[str, Counter[str]]:
    """By agent: how many slots each Pod has."""
    pods = {f"{cluster[place].ip}:8080/TCP": pod for place, pod in WHO.items()}
    return {
        agent.node.name: Counter(pods[one] for one in cluster.served(agent)[AT]["cluster"]) for agent in cluster.agents
    }


@pytest.fixture
def plain(cluster: Cluster) -> Iterator[Cluster]:
    """The Service, without annotations."""
    with cluster.given(*web(cluster)):
        yield cluster


def shares(counts: Counter[str]) -> tuple[int, ...]:
    return tuple(counts[pod] for pod in WHO.values())


def test_weights_annotation_sets_the_slots_of_each_backend(plain: Cluster):
    assert {shares(found) for found in slots(plain).values()} == {(1, 1, 1)}

    plain.change(web(plain, weights="web-0=3, *=1")[0])
    assert {shares(found) for found in slots(plain).values()} == {(3, 1, 1)}

    node = plain.home["b1"].name
    address = plain["a2"].ip
    plain.change(web(plain, weights=f"node:{node}=5, {address}=0, zone:zone-1=2")[0])
    assert {shares(found) for found in slots(plain).values()} == {(2, 0, 5)}
    check(plain, Dial("a backend of weight 0 gets nothing", "a3", "10.96.0.60:80", "a1 b1"))

    plain.change(web(plain, weights="*=0")[0])
    assert {shares(found) for found in slots(plain).values()} == {(1, 1, 1)}
    check(plain, Dial("all weights are 0: all serve", "a3", "10.96.0.60:80", "a1 a2 b1"))


def test_maglev_tables_are_equal_on_all_nodes(plain: Cluster):
    plain.change(web(plain, algorithm="maglev")[0])
    behind = [plain.served(agent)[AT] for agent in plain.agents]
    assert behind[0]["cluster"] == behind[1]["cluster"]
    assert "MAGLEV" in behind[0]["flags"]
    (counts,) = {shares(found) for found in slots(plain).values()}
    assert sum(counts) == 251
    assert max(counts) - min(counts) <= 1
    check(plain, Dial("served by all", "a3", "10.96.0.60:80", "a1 a2 b1"))
    plain.change(web(plain)[0])
    assert "MAGLEV" not in plain.served()[AT]["flags"]


def test_a_bad_annotation_is_reported_and_the_service_still_served(plain: Cluster):
    plain.change(web(plain, algorithm="ring", weights="web-0=4, web-1=much")[0])
    assert {shares(found) for found in slots(plain).values()} == {(4, 1, 1)}

    def problems() -> list[str]:
        status = plain.agent.status() or {}
        return [line for line in status.get("problems", ()) if "web-60" in line]

    until("both problems are reported", lambda: len(problems()) == 2)
    algorithm, weights = sorted(problems())
    about = "Service default/web-60: metadata.annotations[kbpf.io/"
    assert algorithm == f"{about}algorithm]: 'ring' is unknown; write random or maglev"
    assert weights.startswith(f"{about}weights]: cannot use 'web-1=much'; write NAME=WEIGHT")
    plain.change(web(plain)[0])
    until("both problems are gone", lambda: problems() == [])
