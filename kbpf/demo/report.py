# SPDX-License-Identifier: Apache-2.0
"""The reports of the demo's client: answers by backend, and failures by error."""

from collections import Counter
from collections.abc import Mapping

import msgspec


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests by answer (the backend's name) and by failure (the error's name). `connect_us`:
    duration in microseconds → number of successful connect() calls.
    """

    answered: Mapping[str, int] = {}
    failed: Mapping[str, int] = {}
    connect_us: Mapping[int, int] = {}

    @property
    def requests(self) -> int:
        """Number of all requests."""
        return self.answers + self.failures

    @property
    def answers(self) -> int:
        """Number of requests that were answered."""
        return sum(self.answered.values())

    @property
    def failures(self) -> int:
        """Number of requests that failed."""
        return sum(self.failed.values())

    def connect_seconds(self, share: float) -> float | None:
        """The time in which this share (0 to 1) of the connect() calls returned, or None."""
        wanted = share * sum(self.connect_us.values())
        for microseconds, count in sorted(self.connect_us.items()):
            wanted -= count
            if wanted <= 0:
                return microseconds / 1e6
        return None

    def __add__(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            dict(Counter(self.answered) + Counter(other.answered)),
            dict(Counter(self.failed) + Counter(other.failed)),
            dict(Counter(self.connect_us) + Counter(other.connect_us)),
        )


class ClientReport(msgspec.Struct, frozen=True):
    """One line of the client: its requests since the previous line, and the seconds in between.

    The first line has no requests; it means that the load begins. The last one has `is_last`.
    `start`: when the seconds began, by CLOCK_MONOTONIC, which all processes share.
    """

    tcp: RequestCounts = RequestCounts()
    udp: RequestCounts = RequestCounts()
    seconds: float = 0.0
    is_last: bool = False
    start: float = 0.0

    def __add__(self, other: "ClientReport") -> "ClientReport":
        return ClientReport(
            self.tcp + other.tcp,
            self.udp + other.udp,
            self.seconds + other.seconds,
            self.is_last or other.is_last,
            self.start or other.start,
        )


def encode(report: ClientReport) -> str:
    """Encodes a report as one line of JSON."""
    return msgspec.json.encode(report).decode()


def decode(line: str | bytes) -> ClientReport:
    """Decodes a line."""
    return msgspec.json.decode(line, type=ClientReport)
