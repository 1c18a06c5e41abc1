"""Requests and answers of HTTP/1, and reading the one and writing the other. No I/O.

h11 reads requests with more care than health checks need: 27 us for the head of a kubelet's probe
and 1 MB of memory, against 5 us here, and it refuses a request without `Host`, which the checks of
load balancers that are typed by hand do not send. tests/fuzz/inputs/http_requests.py compares both:
what h11 takes for a request is the same request here.
"""

import re
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

MAX_BODY_BYTES: Final = 65_536
"""A longer body of a request is not read: the connection ends after the answer."""

MAX_LENGTH_DIGITS: Final = len(str(MAX_BODY_BYTES))
HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
"""Checks of load balancers are often typed by hand, their lines without CR; Go lets them."""

REQUEST_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.([01])")
HEADER_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


class HttpRequest(NamedTuple):
    """What was asked for. `query` is what follows the question mark, undecoded; `accept` and
    `agent` are the headers Accept and User-Agent.
    """

    method: str
    path: str
    query: str
    accept: str = ""
    user_agent: str = ""


class HttpResponse(NamedTuple):
    """What goes back. `headers` are those beside the usual ones. `rest` follows `body`: large pages
    share it without a copy.
    """

    status: int
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()
    body_tail: bytes = b""

    @property
    def length(self) -> int:
        """Bytes of the whole body."""
        return len(self.body) + len(self.body_tail)


class RequestHead(NamedTuple):
    """The head of a request: what it asks for, bytes of the body behind it that are to be skipped,
    and whether the connection ends after the answer.
    """

    request: HttpRequest
    body_length: int
    close_after: bool


def parse_head(raw: bytes) -> RequestHead | None:
    """The head of a request, without the empty line at its end; None if it is not one."""
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
    negotiation = fields.get("accept", ""), fields.get("user-agent", "")
    return RequestHead(HttpRequest(request_line[1], *target, *negotiation), length, close_after)


def _parse_length(text: str) -> int | None:
    """Bytes of the body; None for one that is too long, or without a clear length. int() takes
    milliseconds for 4,000 digits and raises for more.
    """
    if len(text) > MAX_LENGTH_DIGITS or not text.isdecimal() or int(text) > MAX_BODY_BYTES:
        return None
    return int(text)


def _parse_target(text: str) -> tuple[str, str] | None:
    """Path and query of what is asked for: a path, or a whole address as proxies are asked."""
    if text.startswith("/"):
        path, _, query = text.partition("?")
        return unquote(path), query
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    return (unquote(url.path), url.query) if url.path.startswith("/") else None


def encode_head(response: HttpResponse, close_after: bool) -> bytes:
    """The head of an answer. `last`: the connection ends after it."""
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
