# SPDX-License-Identifier: Apache-2.0
"""Intended differences between kbpf's state of a connection and nf_conntrack's: rows with reasons.

Outcomes are equal if both nodes or neither have the connection, if both or neither need it, and if
they keep it for the same time. Any other difference needs a row: the states of both, and a
condition on the script. docs/design/datapath.md has the reason under the row's name. Whatever the
rows allow, broken_promise() says what must never happen, and kbpf's state must always be the one
that the document gives for the script (reference.py).
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from tests.fuzz.packets.reference import Reading
from tests.fuzz.packets.twins import NOTHING, Outcome

Condition = Callable[[Reading], bool]

_HANDSHAKES: Final = (
    re.compile(r"(S|\.)( S| \.)* <SA( <SA| \.| S)* P?A(\+\d+)?(?= |$)"),
    re.compile(r"INIT( \.)* <INITACK( \.)* ECHO( \.)* <ECHOACK(?= |$)"),
)
_SYN: Final = re.compile(r"[ <]SA?\b")
_STRANGE: Final = re.compile(r"[~^!=]")
_RESET: Final = re.compile(r"(^|[ <])RA?\b")


def always(_: Reading) -> bool:
    """No condition on the script."""
    return True


def believed(reading: Reading) -> bool:
    """A side has ended the connection by a reset or a FIN with the right numbers."""
    return reading.believed_end


def not_believed(reading: Reading) -> bool:
    """There is a reset or a FIN with wrong numbers."""
    return reading.unbelieved_end


def again(reading: Reading) -> bool:
    """There is a SYN after the handshake, or after the end."""
    return reading.again


def unseen(reading: Reading) -> bool:
    """The node did not forward a packet of the backend, which kbpf would only have seen
    at egress.
    """
    return reading.unseen


def flawed(reading: Reading) -> bool:
    """A packet counted although its checksum is wrong or its TTL is 1."""
    return reading.flawed


def strange(reading: Reading) -> bool:
    """Some segment is one that no peer would send: by its numbers, its checksum or its TTL, because
    it comes before the end of the handshake, or because it is a SYN after it. Any reset counts as
    well.
    """
    script = reading.script
    begun = next((found for each in _HANDSHAKES if (found := each.match(script))), None)
    again = begun is not None and _SYN.search(script, begun.end())
    return begun is None or bool(again or _STRANGE.search(script) or _RESET.search(script))


class Row(NamedTuple):
    """An intended difference: `name` is the line of docs/design/datapath.md that has the reason."""

    name: str
    protocol: str
    kbpf: tuple[str, ...]
    linux: tuple[str, ...]
    having: Condition = always


_CLOSING: Final = ("FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT")
_OPENING: Final = ("SYN_SENT", "SYN_SENT2", "SYN_RECV")
_ENDED: Final = ("none", "CLOSE")
_SCTP: Final = (
    "CLOSED", "COOKIE_WAIT", "COOKIE_ECHOED", "SHUTDOWN_SENT", "SHUTDOWN_RECD",
    "SHUTDOWN_ACK_SENT", "HEARTBEAT_SENT",
)  # fmt: skip

ROWS: Final = (
    Row("not yet proven", "tcp", ("UNPROVEN",), ("ESTABLISHED",)),
    Row("unacknowledged data", "tcp", ("ESTABLISHED",), ("ESTABLISHED",)),
    Row("closing", "tcp", ("CLOSING", "CLOSED"), _CLOSING, believed),
    Row("closed", "tcp", ("CLOSED",), ("CLOSE",), believed),
    Row("segment after a reset", "tcp", ("CLOSING",), ("CLOSE",), believed),
    Row("end with wrong numbers", "tcp", ("NEW", "ANSWERED", "UNPROVEN", "ESTABLISHED"),
        _ENDED, not_believed),
    Row("reset before the handshake", "tcp", ("CLOSING", "CLOSED"), ("none",), believed),
    Row("end that Linux ignores", "tcp", ("CLOSING", "CLOSED"),
        (*_OPENING, "ESTABLISHED"), believed),
    Row("repeated SYN or SYN-ACK", "tcp", ("NEW", "ANSWERED"), ("ESTABLISHED",), again),
    Row("reply that is not forwarded", "tcp", ("NEW", "ANSWERED"), ("ESTABLISHED",), unseen),
    Row("first packet not checked", "tcp", ("NEW", "ANSWERED", "UNPROVEN"), ("none",), strange),
    Row("wrong numbers, evictable", "tcp", ("NEW", "ANSWERED", "UNPROVEN"),
        (*_OPENING, *_CLOSING, "CLOSE"), strange),
    Row("wrong numbers, proven", "tcp", ("ESTABLISHED",), (*_OPENING, *_CLOSING, *_ENDED), strange),
    Row("first packet not checked", "udp", ("NEW", "ANSWERED"), ("none", "DATAGRAMS"), flawed),
    Row("datagram not checked", "udp", ("NEW", "ANSWERED", "ESTABLISHED"),
        ("none", "DATAGRAMS", "STREAM"), flawed),
    Row("first packet not checked", "sctp", ("NEW", "ANSWERED", "ESTABLISHED"), ("none",), strange),
    Row("association not established", "sctp", ("NEW", "ANSWERED"), (*_SCTP, "ESTABLISHED")),
    Row("association that ends", "sctp", ("ESTABLISHED",), _SCTP),
    Row("association without INIT", "sctp", ("none",), (*_SCTP, "ESTABLISHED")),
)  # fmt: skip


def equal(kbpf: Outcome, linux: Outcome) -> bool:
    """Whether both outcomes are the same."""
    known = (kbpf != NOTHING) == (linux != NOTHING)
    return known and (kbpf.needed, kbpf.seconds) == (linux.needed, linux.seconds)


def row_for(protocol: str, reading: Reading, kbpf: Outcome, linux: Outcome) -> Row | None:
    """The first row that allows this difference."""
    for row in ROWS:
        states = kbpf.state in row.kbpf and linux.state in row.linux
        if row.protocol == protocol and states and row.having(reading):
            return row
    return None


def broken_promise(protocol: str, reading: Reading, kbpf: Outcome, linux: Outcome) -> str:
    """What must never happen, whatever the rows allow; "" if all is well."""
    if linux.needed and kbpf == NOTHING and protocol != "sctp":
        return "a connection that Linux needs is forgotten"
    if kbpf.state != reading.state:
        return f"{kbpf.state}, which the document calls {reading.state}"
    is_open = linux.needed and linux.state == "ESTABLISHED" and protocol == "tcp"
    if is_open and not (reading.believed_end or reading.again or reading.unseen):
        if kbpf.state not in ("UNPROVEN", "ESTABLISHED"):
            return "open for Linux, not ended by anybody, and not kept as long"
        if kbpf.seconds < linux.seconds:
            return "kept for a shorter time than Linux does"
    return ""


def complaint(protocol: str, reading: Reading, kbpf: Outcome, linux: Outcome) -> str:
    """What is wrong with the outcomes; "" if they are equal or a row allows the difference."""
    if broken := broken_promise(protocol, reading, kbpf, linux):
        return broken
    if equal(kbpf, linux) or row_for(protocol, reading, kbpf, linux):
        return ""
    return "a difference that no row has"
