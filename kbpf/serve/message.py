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

BODY_BYTES: Final = 65_536
"""A longer body of a request is not read: the connection ends after the answer."""

LENGTH_DIGITS: Final = len(str(BODY_BYTES))
HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
"""Checks of load balancers are often typed by hand, their lines without CR; Go lets them."""

REQUEST_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.([01])")
FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"


class Request(NamedTuple):
    """What was asked for. `query` is what follows the question mark, undecoded; `accept` and
    `agent` are the headers Accept and User-Agent.
    """

    method: str
    path: str
    query: str
    accept: str = ""
    agent: str = ""


class Answer(NamedTuple):
    """What goes back. `headers` are those beside the usual ones. `rest` follows `body`: large pages
    share it without a copy.
    """

    status: int
    body: bytes
    kind: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()
    rest: bytes = b""

    @property
    def length(self) -> int:
        """Bytes of the whole body."""
        return len(self.body) + len(self.rest)


class Head(NamedTuple):
    """The head of a request: what it asks for, bytes of the body behind it that are to be skipped,
    and whether the connection ends after the answer.
    """

    request: Request
    body: int
    last: bool


def parse(raw: bytes) -> Head | None:
    """The head of a request, without the empty line at its end; None if it is not one."""
    lines = raw.decode("latin-1").replace("\r\n", "\n").split("\n")
    first = REQUEST_LINE.fullmatch(lines[0])
    target = _target(first[2]) if first else None
    if first is None or target is None:
        return None
    fields: dict[str, str] = {}
    for line in lines[1:]:
        field = FIELD.fullmatch(line)
        if field is None:
            return None
        name, value = field[1].lower(), field[2].rstrip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    wish = fields.get("connection", "").lower()
    last = "close" in wish or (first[3] == "0" and "keep-alive" not in wish)
    length = _length(fields.get("content-length", "0"))
    if length is None or "transfer-encoding" in fields:
        length, last = 0, True
    wanted = fields.get("accept", ""), fields.get("user-agent", "")
    return Head(Request(first[1], *target, *wanted), length, last)


def _length(text: str) -> int | None:
    """Bytes of the body; None for one that is too long, or without a clear length. int() takes
    milliseconds for 4,000 digits and raises for more.
    """
    if len(text) > LENGTH_DIGITS or not text.isdecimal() or int(text) > BODY_BYTES:
        return None
    return int(text)


def _target(text: str) -> tuple[str, str] | None:
    """Path and query of what is asked for: a path, or a whole address as proxies are asked."""
    if text.startswith("/"):
        path, _, query = text.partition("?")
        return unquote(path), query
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    return (unquote(url.path), url.query) if url.path.startswith("/") else None


def head_of(answer: Answer, last: bool) -> bytes:
    """The head of an answer. `last`: the connection ends after it."""
    try:
        phrase = HTTPStatus(answer.status).phrase
    except ValueError:
        phrase = ""
    lines = [
        f"HTTP/1.1 {answer.status} {phrase}",
        f"Content-Type: {answer.kind}",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers),
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Length: {answer.length}",
        *(("Connection: close",) if last else ()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
