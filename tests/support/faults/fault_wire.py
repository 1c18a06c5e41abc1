# SPDX-License-Identifier: Apache-2.0
"""HTTP of the fault proxy and the scripted server: reads and classifies requests, writes responses,
splits chunked bodies.

Written by hand instead of with http.server, because faults need control of every byte: a chunk
without its end, a line cut in the middle, a stream that breaks where a real one would end.
"""

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import parse_qsl, urlsplit

Object = dict[str, Any]

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "upgrade"}
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "accept-encoding"}  # no gzip: bodies are rewritten
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as received, to be forwarded."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def forwarded(self) -> dict[str, str]:
        """Return the headers that are sent to the real server."""
        return {k: v for k, v in self.headers.items() if k not in _NOT_FORWARDED}


@dataclass(frozen=True, slots=True)
class Answer:
    """An error response made by the proxy."""

    status: int
    message: str

    def status_object(self) -> Object:
        """Return it as the API's Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": _REASONS.get(self.status, "Unknown"),
            "details": {},
            "code": self.status,
        }

    def response(self) -> bytes:
        return response(self.status, {"Content-Type": "application/json"}, json.dumps(self.status_object()).encode())


def read_request(file: IO[bytes]) -> Incoming | None:
    """Return the next request of a connection, or None at its end.

    Raises ValueError if it is not HTTP/1.1 as API clients speak it.
    """
    line = file.readline(65536)
    if not line.strip():
        return None
    if b" HTTP/1." not in line:
        raise ValueError("not HTTP/1.1")
    method, target, _ = line.decode("latin-1").split()
    headers = {k.lower(): v for k, v in http.client.parse_headers(file).items()}
    if "transfer-encoding" in headers:
        raise ValueError("chunked request bodies are not supported")
    return Incoming(method, target, headers, file.read(int(headers.get("content-length", "0"))))


def response(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    return head(status, {**headers, "Content-Length": str(len(body))}) + body


def head(status: int, headers: Mapping[str, str]) -> bytes:
    """Return status line and headers of a response."""
    lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def kept_headers(answer: http.client.HTTPResponse) -> dict[str, str]:
    """Return the headers of the real server's response that are sent to the client."""
    return {k: v for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP}


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body; b"" gives the end of the body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a chunked body up to its end.

    Raises ConnectionError if the body ends early. (http.client can't tell the difference when a
    body is read line by line.)
    """
    while True:
        size = int(_whole(file.readline()).split(b";")[0], 16)
        data = file.read(size)
        if len(data) < size:
            raise ConnectionError("the body broke off")
        _whole(file.readline())
        if size == 0:
            return
        yield data


def lines(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield complete lines with their line ends; an incomplete last line is dropped."""
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line + b"\n"


def _whole(line: bytes) -> bytes:
    if not line.endswith(b"\n"):
        raise ConnectionError("the body broke off")
    return line
