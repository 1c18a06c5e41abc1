"""One cluster for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.folder_cluster import FolderCluster
from tests.support.lab.modes import PACKETS

LABEL = ("--socket-lb-label", "true")


@pytest.fixture(scope="session")
def cluster(programs: None) -> Iterator[Cluster]:
    """Two nodes. A test uses Services of its own, and removes them."""
    with FolderCluster(2, "s") if PACKETS else Cluster(2, "s", arguments=LABEL) as made:
        yield made
