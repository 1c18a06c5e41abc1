# SPDX-License-Identifier: Apache-2.0
"""A small HTTP client inside a network namespace."""

import http.client
from typing import NamedTuple

from tests.support.lab import sockets
from tests.support.lab.lab import PATIENCE


class Got(NamedTuple):
    """A response; header names are as the server wrote them."""

    status: int
    headers: dict[str, str]
    body: bytes


def get(netns: str | None, host: str, port: int, path: str = "/", method: str = "GET") -> Got:
    """The response to one request on a new connection; OSError if it cannot connect."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    connection.sock = sockets.connect(netns, host, port, PATIENCE)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return Got(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()
