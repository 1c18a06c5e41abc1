"""Where kbpf's state of a connection differs from nf_conntrack's on purpose: rows with reasons.

An outcome is equal if both nodes know of the connection or neither does, if both need it or neither
does, and if they keep it for the same time. Everything else needs a row: the states of both, and
what the script has to be like. docs/datapath.md has the reason under the row's name. Whatever the
rows allow, broken_promise() says what must never be, and kbpf's state is always the one that the
document gives for the script (reference.py).
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
    """Whatever the script is like."""
    return True


def believed(reading: Reading) -> bool:
    """A side has ended the connection by a reset or a FIN with the right numbers."""
    return reading.believed_end


def not_believed(reading: Reading) -> bool:
    """There is a reset or a FIN whose numbers are wrong."""
    return reading.unbelieved_end


def again(reading: Reading) -> bool:
    """There is a SYN after the handshake, or after the end."""
    return reading.again


def unseen(reading: Reading) -> bool:
    """The node has not forwarded a packet of the backend, and kbpf would have met it then only."""
    return reading.unseen


def flawed(reading: Reading) -> bool:
    """A packet counted although its checksum is wrong or its TTL 1."""
    return reading.flawed


def strange(reading: Reading) -> bool:
    """Some segment is one that no peer would send: by its numbers, its checksum, its TTL, or as it
    comes before the handshake is over, or is a SYN after it. Resets too are judged by numbers.
    """
    script = reading.script
    begun = next((found for each in _HANDSHAKES if (found := each.match(script))), None)
    again = begun is not None and _SYN.search(script, begun.end())
    return begun is None or bool(again or _STRANGE.search(script) or _RESET.search(script))


class Row(NamedTuple):
    """An intended difference: `name` is the line of docs/datapath.md that has the reason."""

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
    Row("data on the way", "tcp", ("ESTABLISHED",), ("ESTABLISHED",)),
    Row("closing", "tcp", ("CLOSING", "CLOSED"), _CLOSING, believed),
    Row("closed", "tcp", ("CLOSED",), ("CLOSE",), believed),
    Row("reset, and it continues", "tcp", ("CLOSING",), ("CLOSE",), believed),
    Row("end that is not believed", "tcp", ("NEW", "ANSWERED", "UNPROVEN", "ESTABLISHED"),
        _ENDED, not_believed),
    Row("reset before the handshake", "tcp", ("CLOSING", "CLOSED"), ("none",), believed),
    Row("end that Linux does not believe", "tcp", ("CLOSING", "CLOSED"),
        (*_OPENING, "ESTABLISHED"), believed),
    Row("begun again", "tcp", ("NEW", "ANSWERED"), ("ESTABLISHED",), again),
    Row("answer that is not forwarded", "tcp", ("NEW", "ANSWERED"), ("ESTABLISHED",), unseen),
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
    """Whether both come to the same."""
    known = (kbpf != NOTHING) == (linux != NOTHING)
    return known and (kbpf.needed, kbpf.seconds) == (linux.needed, linux.seconds)


def row_for(protocol: str, reading: Reading, kbpf: Outcome, linux: Outcome) -> Row | None:
    """The first row that has this difference."""
    for row in ROWS:
        states = kbpf.state in row.kbpf and linux.state in row.linux
        if row.protocol == protocol and states and row.having(reading):
            return row
    return None


def broken_promise(protocol: str, reading: Reading, kbpf: Outcome, linux: Outcome) -> str:
    """What must never be, whatever row there is; empty if all is well."""
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
    """What is wrong with the outcome; empty if both come to the same, or a row allows it."""
    if broken := broken_promise(protocol, reading, kbpf, linux):
        return broken
    if equal(kbpf, linux) or row_for(protocol, reading, kbpf, linux):
        return ""
    return "a difference that no row has"
