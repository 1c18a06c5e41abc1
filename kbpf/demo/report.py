"""Who answered how often, and what failed: what the demo's client counts and its viewers add up."""

from collections import Counter
from collections.abc import Mapping

import msgspec


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests by answer (the backend's name) and by failure (the error's name)."""

    answered: Mapping[str, int] = {}
    failed: Mapping[str, int] = {}

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answers + self.failures

    @property
    def answers(self) -> int:
        """Those with an answer."""
        return sum(self.answered.values())

    @property
    def failures(self) -> int:
        """Those without."""
        return sum(self.failed.values())

    def __add__(self, other: "RequestCounts") -> "RequestCounts":
        return RequestCounts(
            dict(Counter(self.answered) + Counter(other.answered)),
            dict(Counter(self.failed) + Counter(other.failed)),
        )


class ClientReport(msgspec.Struct, frozen=True):
    """One line of the client: what happened since its last one, and in how many seconds.

    The first line says that the Service answers, the last one has `done`.
    """

    tcp: RequestCounts = RequestCounts()
    udp: RequestCounts = RequestCounts()
    seconds: float = 0.0
    done: bool = False

    def __add__(self, other: "ClientReport") -> "ClientReport":
        return ClientReport(
            self.tcp + other.tcp,
            self.udp + other.udp,
            self.seconds + other.seconds,
            self.done or other.done,
        )


def encode(report: ClientReport) -> str:
    """One line of JSON."""
    return msgspec.json.encode(report).decode()


def decode(line: str | bytes) -> ClientReport:
    """Back from it."""
    return msgspec.json.decode(line, type=ClientReport)
