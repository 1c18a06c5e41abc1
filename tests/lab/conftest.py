"""One cluster for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(programs: None) -> Iterator[Cluster]:
    """Two nodes. A test uses Services of its own, and removes them."""
    with Cluster(2, "s") as made:
        yield made
