# SPDX-License-Identifier: Apache-2.0
"""Intended differences between kbpf's state of a connection and nf_conntrack's: rows with reasons.

Each of kbpf's states corresponds to some of Linux's (SAME). Any other pair needs a row: the states
of both, and a condition on the script. README.md has the reason under the row's name.
Whatever the rows allow, broken_promise() says what must never happen.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz.packets.twins import NOTHING, Outcome

Condition = Callable[[str], object]

_CLOSING = ("FIN_WAIT", "CLOSE_WAIT", "LAST_ACK")
_UP_TO_OPEN = ("NEW", "ANSWERED", "UNPROVEN", "ESTABLISHED")
_OPENING = ("SYN_SENT", "SYN_SENT2", "SYN_RECV")
SAME = {
    "tcp": {
        "none": ("none",),
        "NEW": ("SYN_SENT",),
        "ANSWERED": ("SYN_RECV",),
        "UNPROVEN": ("ESTABLISHED",),
        "ESTABLISHED": ("ESTABLISHED",),
        "CLOSING": _CLOSING,
        "CLOSED": ("LAST_ACK", "TIME_WAIT", "CLOSE"),
    },
    "udp": {"none": ("none",), "NEW": ("DATAGRAMS",), "ANSWERED": ("DATAGRAMS",), "ESTABLISHED": ("STREAM",)},
    "sctp": {
        "none": ("none",),
        "NEW": ("CLOSED",),
        "ANSWERED": ("COOKIE_WAIT", "COOKIE_ECHOED"),
        "ESTABLISHED": ("ESTABLISHED",),
    },
}
"""Protocol → kbpf's state → Linux's states that are the same."""


def having(pattern: str) -> Condition:
    """A condition: the script has a match."""
    return re.compile(pattern).search


always = having("")
_RESET = having(r"R")
_AGAIN = having(r"( |^)SA?\b.* (SA?\b|=)|<SA\b.*<(SA\b|=)|<S\b")
_FLAWED = having(r"!")
_PROVEN = {
    "tcp": having(r"<(?!SA)\S*(\+|F|~near)|(\+|F)\S* .*<(?!SA)\S*(A|=)"),
    "udp": having(r"<"),
    "sctp": having(r"<(?!INIT|INITACK|ABORT|SHUTDONE)"),
}
"""What happens before kbpf says ESTABLISHED: for TCP, the backend sends or acknowledges data."""


class Row(NamedTuple):
    """An intended difference: `name` is the line of README.md that has the reason. No
    states: any.
    """

    name: str
    protocol: str
    kbpf: tuple[str, ...]
    linux: tuple[str, ...]
    having: Condition = always


ROWS = (
    Row("segment after a reset", "tcp", ("CLOSING",), ("CLOSE",), _RESET),
    Row("reset before the handshake", "tcp", (), ("none",), _RESET),
    Row("segment before the answer", "tcp", _UP_TO_OPEN, (), having(r"(^| )S .*[FR]\S* (.* )?<SA")),
    Row("answer with another number", "tcp", ("NEW",), ("SYN_RECV",), having(r"<SA\S*\^")),
    Row("segment without ACK", "tcp", (), (), having(r"(^| )<?F(\+\d+)?(\^\w+)? ")),
    Row("numbers ahead", "tcp", ("CLOSING", "CLOSED"), ("ESTABLISHED",), having(r"[~^].*F")),
    Row("numbers ahead", "tcp", ("CLOSED",), _CLOSING, having(r"<\S+[~^]\S* (.* )?F|(^| )[^<.]\S*[~^]\S* (.* )?<F")),
    Row("numbers ahead", "tcp", ("ANSWERED",), (), having(r"(^| )S <SA( <\S+)* <\S*[~^]")),
    Row(
        "reset that Linux ignores",
        "tcp",
        ("CLOSING", "CLOSED"),
        (*_OPENING, "ESTABLISHED", *_CLOSING),
        having(r"RA\S*\^|[~^].* <?R(A|\^\w+)?( |$)"),
    ),
    Row(
        "reset that Linux ignores",
        "tcp",
        ("CLOSED",),
        ("SYN_RECV", "ESTABLISHED", *_CLOSING),
        having(r"<SA <\S*\+.*<R"),
    ),
    Row("reset that kbpf ignores", "tcp", _UP_TO_OPEN, ("CLOSE",), having(r"[~^].*R|R\S*[~^]")),
    Row("reset that kbpf ignores", "tcp", ("NEW",), ("CLOSE",), _RESET),
    Row("two FINs of one side", "tcp", ("CLOSING",), ("TIME_WAIT",), having(r"F.*[F=]")),
    Row("FIN before the handshake ends", "tcp", ("ANSWERED",), ("FIN_WAIT",), having(r"<\S*F")),
    Row("repeated SYN or SYN-ACK", "tcp", (), (), _AGAIN),
    Row("packet not checked", "tcp", (), (), _FLAWED),
    Row("packet not checked", "udp", (), (), _FLAWED),
    Row("packet not checked", "sctp", (), (), _FLAWED),
    Row("association not established", "sctp", ("NEW", "ANSWERED"), ()),
    Row("association that ends", "sctp", ("ESTABLISHED",), (), having(r"SHUT|ABORT")),
    Row("association out of order", "sctp", ("ESTABLISHED",), ("CLOSED", *SAME["sctp"]["ANSWERED"])),
    Row("association without INIT", "sctp", ("none",), ()),
)


def equal(protocol: str, kbpf: Outcome, linux: Outcome) -> bool:
    """Whether both states are the same."""
    return linux.state in SAME[protocol].get(kbpf.state, ())


def row_for(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> Row | None:
    """The first row that allows this difference."""
    for row in ROWS:
        states = kbpf.state in (row.kbpf or (kbpf.state,)) and linux.state in (row.linux or (linux.state,))
        if row.protocol == protocol and states and row.having(script):
            return row
    return None


def broken_promise(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> str:
    """What must never happen, whatever the rows allow; "" if all is well."""
    if linux.needed and kbpf == NOTHING and protocol != "sctp":
        return "a connection that Linux needs is forgotten"
    if kbpf.state == "ESTABLISHED" and not _PROVEN[protocol](script):
        return "established without proof by the backend"
    is_open = linux.needed and linux.state == "ESTABLISHED" and protocol == "tcp"
    is_plain = not (re.search(r"[RF]", script) or _AGAIN(script) or _FLAWED(script))
    if is_open and is_plain and kbpf.state not in ("UNPROVEN", "ESTABLISHED"):
        return "open for Linux, not ended by anybody, and not kept as long"
    return ""


def complaint(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> str:
    """What is wrong with the outcomes; "" if they are the same or a row allows the difference."""
    if broken := broken_promise(protocol, script, kbpf, linux):
        return broken
    if equal(protocol, kbpf, linux) or row_for(protocol, script, kbpf, linux):
        return ""
    return "a difference that no row has"
