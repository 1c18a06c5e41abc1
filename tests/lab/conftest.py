# SPDX-License-Identifier: Apache-2.0
"""One cluster shared by all tests that restore its state."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.folder_cluster import FolderCluster
from tests.support.lab.modes import PACKETS

LABEL = ("--socket-lb-label", "true")


@pytest.fixture(scope="session")
def cluster(programs: None) -> Iterator[Cluster]:
    """A cluster of two nodes. A test creates separate Services and deletes them."""
    with FolderCluster(2, "s") if PACKETS else Cluster(2, "s", arguments=LABEL) as made:
        yield made
