# SPDX-License-Identifier: Apache-2.0
"""Parses HTTP/1 requests and formats responses. No I/O.

h11 is not used. It is more careful than a health check needs (27 us for the head of a kubelet
probe and 1 MB of memory; 5 us here), and it rejects a request without `Host`, which hand-written
health checks of load balancers do not send. tests/fuzz/inputs/http_requests.py compares the two:
what h11 accepts is parsed to the same request here.
"""

import re
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

MAX_BODY_BYTES: Final = 65_536
"""A longer request body is not read; the connection is closed after the response."""

MAX_LENGTH_DIGITS: Final = len(str(MAX_BODY_BYTES))
HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
"""LF without CR ends a line, too, as in Go: hand-written health checks often omit the CR."""

REQUEST_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.([01])")
HEADER_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
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
    def length(self) -> int:
        """Length of body and tail in bytes."""
        return len(self.body) + len(self.body_tail)


class RequestHead(NamedTuple):
    """The parsed head of a request, the number of body bytes to skip after it, and whether the
    connection is to be closed after the response.
    """

    request: HttpRequest
    body_length: int
    close_after: bool


def parse_head(raw: bytes) -> RequestHead | None:
    """Parses the head of a request (without the empty line at its end); None if it is malformed."""
    lines = raw.decode("latin-1").replace("\r\n", "\n").split("\n")
    request_line = REQUEST_LINE.fullmatch(lines[0])
    target = _parse_target(request_line[2]) if request_line else None
    if request_line is None or target is None:
        return None
    fields: dict[str, str] = {}
    for line in lines[1:]:
        field = HEADER_FIELD.fullmatch(line)
        if field is None:
            return None
        name, value = field[1].lower(), field[2].rstrip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    connection = fields.get("connection", "").lower()
    close_after = "close" in connection or (
        request_line[3] == "0" and "keep-alive" not in connection
    )
    length = _parse_length(fields.get("content-length", "0"))
    if length is None or "transfer-encoding" in fields:
        length, close_after = 0, True
    return RequestHead(HttpRequest(request_line[1], *target), length, close_after)


def _parse_length(text: str) -> int | None:
    """Returns the length of the body; None if it is too long or unclear. The number of digits is
    limited first: int() takes milliseconds for 4,000 digits and raises for more.
    """
    if len(text) > MAX_LENGTH_DIGITS or not text.isdecimal() or int(text) > MAX_BODY_BYTES:
        return None
    return int(text)


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


def encode_head(response: HttpResponse, close_after: bool) -> bytes:
    """Formats the head of a response. `close_after`: the connection is closed after it."""
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = ""
    lines = [
        f"HTTP/1.1 {response.status} {phrase}",
        f"Content-Type: {response.content_type}",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in response.headers),
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Length: {response.length}",
        *(("Connection: close",) if close_after else ()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
