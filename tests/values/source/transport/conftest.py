# SPDX-License-Identifier: Apache-2.0
"""Fixtures of requests: certificates, servers and connections."""

from collections.abc import Iterator
from typing import Any

import pytest

from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.transport import ApiConnection
from tests.values.source.transport.kubeconfigs import Connect


@pytest.fixture
def connect() -> Iterator[Connect]:
    """connect(server, **access_fields) opens a connection that is closed after the test."""
    opened: list[ApiConnection] = []

    def begin(server: str, **fields: Any) -> ApiConnection:
        opened.append(ApiConnection(Cluster(Access(server, "the test", **fields)), response_timeout=60))
        return opened[-1]

    yield begin
    for connection in opened:
        connection.close()
        connection.drop()
