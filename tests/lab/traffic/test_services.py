# SPDX-License-Identifier: Apache-2.0
"""What answers at a Service's addresses, tried with real sockets: the rows of
tests/rows/services.py.
"""

from collections.abc import Iterator

import pytest

from tests.rows.services import ROWS, objects
from tests.support.cluster.cluster import Cluster
from tests.support.lab.dial import Dial, check, spread
from tests.support.lab.prediction import check_prediction


@pytest.fixture(scope="module", autouse=True)
def _served(cluster: Cluster) -> Iterator[None]:
    with cluster.given(*objects(cluster)):
        yield


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_dial(cluster: Cluster, row: Dial):
    check_prediction(cluster, row)
    check(cluster, row)


def test_connections_spread_evenly(cluster: Cluster):
    """The choice is uniform: of 300 connections each of three backends gets 100, within six
    sigma.
    """
    assert all(50 < n < 150 for n in spread(cluster["b2"], "10.96.0.20", 80).values())


def test_an_endpoint_in_two_slices_is_one_backend(cluster: Cluster):
    behind = cluster.served()["10.96.0.30:80/TCP"]["cluster"]
    assert behind == [f"{cluster[name].ip}:8080/TCP" for name in ("a1", "a2", "b1")]


def test_headless_and_external_name_services_are_ignored(cluster: Cluster):
    for agent in cluster.agents:
        owners = {behind["service"] for behind in cluster.served(agent).values()}
        assert "default/web" in owners
        assert not owners & {f"default/{name}" for name in ("headless", "alias", "ignored")}
