"""Where kbpf's state of a connection differs from nf_conntrack's on purpose: rows with reasons.

An outcome is equal if both nodes know of the connection or neither does, if both need it or neither
does, and if they keep it for the same time. Everything else needs a row: the states of both, and
what the script has to be like. docs/datapath.md has the reason under the row's name. Whatever the
rows allow, broken_promise() says what must never be.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from tests.fuzz.twins import NOTHING, Outcome

Condition = Callable[[str], bool]

_HANDSHAKES: Final = (
    re.compile(r"(S|\.)( S| \.)* <SA( <SA| \.| S)* P?A(\+\d+)?(?= |$)"),
    re.compile(r"INIT( \.)* <INITACK( \.)* ECHO( \.)* <ECHOACK(?= |$)"),
)
_SYN: Final = re.compile(r"[ <]SA?\b")
_STRANGE: Final = re.compile(r"[~^!=]")
_RESET: Final = re.compile(r"(^|[ <])RA?\b")
_FLAWED: Final = re.compile(r"!|=")
_ENDS: Final = re.compile(r"(^|[ <])(RA?|FA?)\b")
_PROOF: Final = re.compile(r"<SA\b.* <(P?A|FA?)\b")
"""A SYN-ACK, and later a segment of the backend that is neither SYN nor reset."""


def always(_: str) -> bool:
    """Whatever the script is like."""
    return True


def resets(script: str) -> bool:
    """Some side resets the connection, or somebody in its name."""
    return bool(_RESET.search(script))


def flawed(script: str) -> bool:
    """A checksum is wrong, or a TTL 1."""
    return bool(_FLAWED.search(script))


def ends(script: str) -> bool:
    """Some side closes or resets the connection, or somebody in its name."""
    return bool(_ENDS.search(script))


def strange(script: str) -> bool:
    """Some segment is one that no peer would send: by its numbers, its checksum, its TTL, or as it
    comes before the handshake is over, or is a SYN after it. Resets too are judged by numbers.
    """
    begun = next((found for each in _HANDSHAKES if (found := each.match(script))), None)
    again = begun is not None and _SYN.search(script, begun.end())
    return begun is None or bool(again or _STRANGE.search(script)) or resets(script)


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
    Row("closing", "tcp", ("CLOSING", "CLOSED"), _CLOSING),
    Row("closed", "tcp", ("CLOSED",), ("CLOSE",), resets),
    Row("reset, and it continues", "tcp", ("CLOSING",), ("CLOSE",), resets),
    Row("reset that is not believed", "tcp", ("NEW", "ANSWERED", "UNPROVEN", "ESTABLISHED"),
        _ENDED, resets),
    Row("reset before the handshake", "tcp", ("CLOSING", "CLOSED"), ("none",), resets),
    Row("forged end", "tcp", ("CLOSING", "CLOSED"), ("ESTABLISHED",), ends),
    Row("first packet not checked", "tcp", ("NEW", "ANSWERED", "UNPROVEN", "CLOSING", "CLOSED"),
        ("none",), strange),
    Row("wrong numbers, evictable", "tcp", ("NEW", "ANSWERED", "UNPROVEN", "CLOSING", "CLOSED"),
        (*_OPENING, *_CLOSING, "ESTABLISHED", "CLOSE"), strange),
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


def row_for(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> Row | None:
    """The first row that has this difference."""
    for row in ROWS:
        states = kbpf.state in row.kbpf and linux.state in row.linux
        if row.protocol == protocol and states and row.having(script):
            return row
    return None


def broken_promise(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> str:
    """What must never be, whatever row there is; empty if all is well."""
    if linux.needed and kbpf == NOTHING and protocol != "sctp":
        return "a connection that Linux needs is forgotten"
    if protocol == "tcp" and kbpf.needed and not _PROOF.search(script):
        return "needed without proof of the backend"
    if kbpf.needed and "<" not in script:
        return "needed although the backend has said nothing"
    if protocol == "tcp" and kbpf.state == "CLOSED" and not ends(script):
        return "closed although neither side has ended it"
    return ""


def complaint(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> str:
    """What is wrong with the outcome; empty if both come to the same, or a row allows it."""
    if broken := broken_promise(protocol, script, kbpf, linux):
        return broken
    if equal(kbpf, linux) or row_for(protocol, script, kbpf, linux):
        return ""
    return "a difference that no row has"
