"""A small HTTP client that asks from inside a network namespace."""

import http.client
from typing import NamedTuple

from tests.support.lab import sockets
from tests.support.lab.lab import PATIENCE


class Got(NamedTuple):
    """An answer; the names of headers as they came."""

    status: int
    headers: dict[str, str]
    body: bytes


def get(
    netns: str | None, host: str, port: int, path: str = "/", method: str = "GET", **headers: str
) -> Got:
    """The answer to one request by a connection of its own; OSError when there is nobody."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
    connection.sock = sockets.connect(netns, host, port, PATIENCE)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Got(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()
