# SPDX-License-Identifier: Apache-2.0
"""Intended differences between kbpf's state of a connection and nf_conntrack's: rows with reasons.

Each of kbpf's states corresponds to some of Linux's (SAME). Any other pair needs a row: the states
of both, and what the script has to match. README.md has the reason under the row's name.
Whatever the rows allow, broken_promise() says what must never happen.
"""

import re
from typing import NamedTuple

from tests.fuzz.packets.twins import NOTHING, Outcome
from tests.support.table import pairs, table

SAME = """
tcp none → none
tcp NEW → SYN_SENT
tcp ANSWERED → SYN_RECV
tcp UNPROVEN → ESTABLISHED
tcp ESTABLISHED → ESTABLISHED
tcp CLOSING → FIN_WAIT CLOSE_WAIT LAST_ACK
tcp CLOSED → LAST_ACK TIME_WAIT CLOSE
udp none → none
udp NEW → DATAGRAMS
udp ANSWERED → DATAGRAMS
udp ESTABLISHED → STREAM
sctp none → none
sctp NEW → CLOSED
sctp ANSWERED → COOKIE_WAIT COOKIE_ECHOED
sctp ESTABLISHED → ESTABLISHED
"""
"""kbpf's states → Linux's states that are the same."""
STATES = dict(pairs(SAME))


OPENING, ENDING = "SYN_SENT SYN_SENT2 SYN_RECV", "FIN_WAIT CLOSE_WAIT LAST_ACK"
AGAIN = r"( |^)SA?\b.* (SA?\b|=)|<SA\b.*<(SA\b|=)|<S\b"
PROVEN = {
    "tcp": r"<(?!SA)\S*(\+|F|~near)|(\+|F)\S* .*<(?!SA)\S*(A|=)",
    "udp": r"<",
    "sctp": r"<(?!INIT|INITACK|ABORT|SHUTDONE)",
}
"""What happens before kbpf says ESTABLISHED: for TCP, the backend sends or acknowledges data."""


class Row(NamedTuple):
    """An intended difference: `name` is the line of README.md that has the reason; the states of both,
    and what the script has to match.
    """

    name: str
    protocol: str
    kbpf: str
    linux: str
    having: str = ""


ROWS = table(
    Row,
    rf"""
segment after a reset | tcp | CLOSING | CLOSE | R
reset before the handshake | tcp | any | none | R
segment before the answer | tcp | NEW ANSWERED UNPROVEN ESTABLISHED | any | (^| )S .*[FR]\S* (.* )?<SA
answer with another number | tcp | NEW | SYN_RECV | <SA\S*\^
segment without ACK | tcp | any | any | (^| )<?F(\+\d+)?(\^\w+)?\s
numbers ahead | tcp | CLOSING CLOSED | ESTABLISHED | [~^].*F
numbers ahead | tcp | CLOSED | FIN_WAIT CLOSE_WAIT LAST_ACK | <\S+[~^]\S* (.* )?F|(^| )[^<.]\S*[~^]\S* (.* )?<F
numbers ahead | tcp | ANSWERED | any | (^| )S <SA( <\S+)* <\S*[~^]
reset that Linux ignores | tcp | CLOSING CLOSED | {OPENING} ESTABLISHED {ENDING} | RA\S*\^|[~^].* <?R(A|\^\w+)?( |$)
reset that Linux ignores | tcp | CLOSED | SYN_RECV ESTABLISHED {ENDING} | <SA <\S*\+.*<R
reset that kbpf ignores | tcp | NEW ANSWERED UNPROVEN ESTABLISHED | CLOSE | [~^].*R|R\S*[~^]
reset that kbpf ignores | tcp | NEW | CLOSE | R
two FINs of one side | tcp | CLOSING | TIME_WAIT | F.*[F=]
FIN before the handshake ends | tcp | ANSWERED | FIN_WAIT | <\S*F
repeated SYN or SYN-ACK | tcp | any | any | {AGAIN}
packet not checked | tcp | any | any | !
packet not checked | udp | any | any | !
packet not checked | sctp | any | any | !
association not established | sctp | NEW ANSWERED | any
association that ends | sctp | ESTABLISHED | any | SHUT|ABORT
association out of order | sctp | ESTABLISHED | CLOSED COOKIE_WAIT COOKIE_ECHOED
association without INIT | sctp | none | any
""",
)


def equal(protocol: str, kbpf: Outcome, linux: Outcome) -> bool:
    """Whether both states are the same."""
    return linux.state in STATES.get(f"{protocol} {kbpf.state}", "").split()


def row_for(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> Row | None:
    """The first row that allows this difference."""
    for row in ROWS:
        both = ((kbpf.state, row.kbpf), (linux.state, row.linux))
        fits = all(those == "any" or state in those.split() for state, those in both)
        if fits and row.protocol == protocol and re.search(row.having, script):
            return row
    return None


def broken_promise(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> str:
    """What must never happen, whatever the rows allow; "" if all is well."""
    if linux.needed and kbpf == NOTHING and protocol != "sctp":
        return "a connection that Linux needs is forgotten"
    if kbpf.state == "ESTABLISHED" and not re.search(PROVEN[protocol], script):
        return "established without proof by the backend"
    is_open = linux.needed and linux.state == "ESTABLISHED" and protocol == "tcp"
    if is_open and kbpf.state not in ("UNPROVEN", "ESTABLISHED") and not re.search(f"[RF!]|{AGAIN}", script):
        return "open for Linux, not ended by anybody, and not kept as long"
    return ""


def complaint(protocol: str, script: str, kbpf: Outcome, linux: Outcome) -> str:
    """What is wrong with the outcomes; "" if they are the same or a row allows the difference."""
    if broken := broken_promise(protocol, script, kbpf, linux):
        return broken
    if equal(protocol, kbpf, linux) or row_for(protocol, script, kbpf, linux):
        return ""
    return "a difference that no row has"
