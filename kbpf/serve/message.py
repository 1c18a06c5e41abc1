# SPDX-License-Identifier: Apache-2.0
"""HTTP/1 requests and responses: h11 reads the heads of the former and writes those of the latter.
No I/O.
"""

import re
from email.utils import formatdate
from http.client import responses
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import h11

MAX_BODY_BYTES: Final = 65_536
"""A longer request body is not read; the connection is closed after the response."""

HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
"""LF without CR ends a line, too, as in Go: hand-written health checks often omit the CR."""

HOST: Final = re.compile(rb"\nhost:", re.IGNORECASE)
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """A request. `query` is what follows the question mark, not decoded."""

    method: str
    path: str
    query: str


class HttpResponse(NamedTuple):
    """A response. `headers` are added to the usual ones. `body_tail` follows `body`; it is
    separate so that several responses can share a large page without copying it.
    """

    status: int
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()
    body_tail: bytes = b""

    @property
    def parts(self) -> tuple[bytes, ...]:
        return self.body, self.body_tail

    @property
    def length(self) -> int:
        """Length of body and tail in bytes."""
        return len(self.body) + len(self.body_tail)


class RequestHead(NamedTuple):
    """The head of a request, the number of body bytes to skip after it, and whether the connection
    is to be closed after the response, because the body is too long to skip, or of unknown length.
    """

    request: HttpRequest
    body_length: int
    close_after: bool


def parse_head(parser: h11.Connection, raw: bytes) -> RequestHead | None:
    """Parses the head of a request (without the empty line at its end); None if it is malformed."""
    if HOST.search(raw) is None:  # h11 wants it, hand-written health checks do not send it
        raw += b"\r\nHost:"
    parser.receive_data(raw + b"\r\n\r\n")
    try:
        event = parser.next_event()
    except h11.RemoteProtocolError:
        return None
    if not isinstance(event, h11.Request) or event.http_version not in (b"1.0", b"1.1"):
        return None
    method, target = event.method.decode(), _parse_target(event.target.decode())
    if target is None or method == "CONNECT":
        return None
    fields = dict(event.headers)
    length = int(fields.get(b"content-length", 0))
    is_skipped = length <= MAX_BODY_BYTES and b"transfer-encoding" not in fields
    return RequestHead(HttpRequest(method, *target), length, not is_skipped)


def _parse_target(text: str) -> tuple[str, str] | None:
    """Splits the request target into path and query: a path, or an absolute URL as sent to a
    proxy.
    """
    if text.startswith("/"):
        path, _, query = text.partition("?")
        return unquote(path), query
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    return (unquote(url.path), url.query) if url.path.startswith("/") else None


def encode_head(parser: h11.Connection, response: HttpResponse, close_after: bool) -> bytes:
    """Formats the head of a response. `close_after`: the connection is closed after it."""
    fields = [
        ("Content-Type", response.content_type),
        ("X-Content-Type-Options", "nosniff"),
        *response.headers,
        ("Date", formatdate(usegmt=True)),
        ("Content-Length", str(response.length)),
        *((("Connection", "close"),) if close_after else ()),
    ]
    head = h11.Response(status_code=response.status, headers=fields, reason=responses[response.status])
    return parser.send(head) or b""
