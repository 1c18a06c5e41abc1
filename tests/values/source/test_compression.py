# SPDX-License-Identifier: Apache-2.0
"""Responses with `Content-Encoding: gzip`: the same results and limits as plain ones."""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kbpf.errors import SourceError
from kbpf.source.api import transport
from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.transport import READ_SIZE, ApiConnection, ReadTimeout, ResponseLimitExceeded
from tests.support.faults import fault_wire as wire
from tests.support.faults.scripted import Exchange, ScriptedServer, Step
from tests.support.table import each_case

TEXT = random.Random(7).randbytes(300_000) + bytes(1_000_000)
GZIP = {"Content_Encoding": "gzip"}


@pytest.fixture
def serve() -> Iterator[Callable[..., ApiConnection]]:
    """Returns a connection to a ScriptedServer with the given steps."""
    ends: list[Callable[[], Any]] = []

    def made(*steps: Step) -> ApiConnection:
        server = ScriptedServer(*steps)
        server.__enter__()
        connection = ApiConnection(Cluster(Access(server.url, "the test")))
        connection.server = server  # type: ignore[attr-defined]
        ends.extend((server.__exit__, connection.drop))
        return connection

    yield made
    for end in reversed(ends):
        end()


def sends(data: bytes, *sizes: int) -> Step:
    """A chunked response. The chunk sizes repeat in the order given."""

    def step(exchange: Exchange) -> None:
        exchange.head(200, Transfer_Encoding="chunked", **GZIP)
        at = number = 0
        while at < len(data):
            size = sizes[number % len(sizes)]
            exchange.line(data[at : at + size])
            at, number = at + size, number + 1
        exchange.end()

    return step


def whole(connection: ApiConnection) -> bytes:
    """Reads the body with read_chunk(); no chunk may be longer than READ_SIZE."""
    response, parts = connection.request("/"), []
    while part := response.read_chunk():
        assert len(part) <= READ_SIZE
        parts.append(part)
    return b"".join(parts)


MEMBERS = gzip.compress(TEXT) + gzip.compress(b"") * 3 + gzip.compress(b"end")


@pytest.mark.parametrize("sizes", [(1 << 20,), (1, 7, 4096), (65_536,), (10,)], ids=str)
def test_several_gzip_members_are_one_body(serve, sizes: tuple[int, ...]):
    assert whole(serve(sends(MEMBERS, *sizes))) == TEXT + b"end"


@pytest.mark.parametrize("size", [READ_SIZE - 1, READ_SIZE, READ_SIZE + 1, 3 * READ_SIZE, 0])
def test_flushed_bytes_are_returned_at_once(serve, size):
    """Flushed bytes are returned before the server sends anything more."""
    text = bytes(size)
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH)

    def step(exchange: Exchange) -> None:
        headers = {"Transfer-Encoding": "chunked", "Content-Encoding": "gzip"}
        exchange.sock.sendall(wire.head(200, headers) + wire.chunk(packed))  # no silence between
        exchange.hang()

    response, got = serve(step).request("/", silence_timeout=0.5), 0
    while got < size:
        got += len(response.read_chunk())
    with pytest.raises(ReadTimeout):
        response.read_chunk()


def test_gzip_bodies_are_read_in_full_and_the_connection_is_kept(serve):
    connection = serve(
        lambda e: e.answer(200, gzip.compress(TEXT), **GZIP),
        lambda e: e.answer(200, {"plain": True}),
        sends(MEMBERS, 4096),
        lambda e: e.answer(503, gzip.compress(b"no"), **GZIP),
    )
    assert connection.request("/").read(2 << 20) == TEXT
    assert json.loads(connection.request("/").read()) == {"plain": True}
    assert connection.request("/").read(2 << 20) == TEXT + b"end"
    assert connection.request("/").read_error_body() == b"no"
    requests = connection.server.requests
    assert len({each.port for each in requests}) == 1
    assert {each.headers["accept-encoding"] for each in requests} == {"gzip"}


BOMB = gzip.compress(bytes(64 << 20))


def test_gzip_bomb_is_limited_by_its_uncompressed_size(serve, monkeypatch):
    taken: list[int] = []
    connection = serve(lambda e: e.answer(200, BOMB, **GZIP), lambda e: e.answer(200, BOMB, **GZIP))
    with pytest.raises(ResponseLimitExceeded, match="has more than 1024 KiB"):
        connection.request("/").read(1 << 20, reserve=taken.append)
    assert sum(taken) <= 1 << 20
    assert max(taken) <= READ_SIZE
    assert len(connection.request("/").read_error_body()) == transport.MAX_ERROR_BYTES


BROKEN = {
    "cut inside a member": (MEMBERS[:2000], "the server closed the connection"),
    "cut inside a member's header": (MEMBERS + b"\x1f\x8b", "the server closed the connection"),
    "not gzip": (b"{}" * 100, "not gzip"),
    "garbage after a member": (gzip.compress(b"{}") + b"more", "not gzip"),
    "a wrong checksum": (gzip.compress(TEXT)[:-8] + bytes(8), "not gzip"),
}


@each_case("body, what", BROKEN)
def test_broken_gzip_is_an_error(serve, body, what):
    connection = serve(sends(body, 4096), lambda e: e.answer(200, body, **GZIP))
    with pytest.raises(SourceError, match=what):
        whole(connection)
    with pytest.raises(SourceError, match=what):
        connection.request("/").read(2 << 20)


def test_empty_gzip_members_count_as_silence(serve):
    def step(exchange: Exchange) -> None:
        exchange.head(200, Transfer_Encoding="chunked", **GZIP)
        while not exchange.closing(0.01):
            exchange.line(gzip.compress(b"") * 100)
        exchange.open = False

    response = serve(step).request("/", silence_timeout=0.5)
    with pytest.raises(ReadTimeout):
        response.read_chunk()
