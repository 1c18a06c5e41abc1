# SPDX-License-Identifier: Apache-2.0
"""The reasons that the BPF programs count: number, name, verdict, and words for operators.

`enum reason` in bpf/types.h has the same numbers, which a test compares. They index the map
`reasons`. Reasons are only appended: version N of that map has the first N of them.
"""

from enum import IntEnum, StrEnum
from typing import Final, NamedTuple


class Verdict(StrEnum):
    """What the sender sees. A note is counted in addition to a verdict."""

    TRANSLATE = "translate"
    PASS = "pass"
    REFUSE = "refuse"
    DROP = "drop"
    NOTE = "note"


class EventVerdict(StrEnum):
    """What has become of a connection or datagram flow, in `kbpf monitor` and `kbpf top`."""

    NEW = "new"
    REFUSED = "refused"
    DROPPED = "dropped"
    EVICTED = "evicted"
    FAILED = "failed"


class Seen(NamedTuple):
    """Who sees a reason.

    - `event`: the verdict of its events; None if it is no event.
    - `client_saw`: the result of the client's system call; "" if nothing has failed.
    - `blames_backend`: a backend with many such failures is reported as failing.
    """

    event: EventVerdict | None
    client_saw: str
    blames_backend: bool


NEW: Final = Seen(EventVerdict.NEW, "", blames_backend=False)
NO_EVENT: Final = Seen(None, "", blames_backend=False)
SEEN_BY_VERDICT: Final = {
    Verdict.PASS: NO_EVENT,
    Verdict.REFUSE: Seen(EventVerdict.REFUSED, "ECONNREFUSED", blames_backend=False),
    Verdict.DROP: Seen(EventVerdict.DROPPED, "ETIMEDOUT", blames_backend=False),
}
"""Reasons with other verdicts have to say it themselves."""


class Reason(IntEnum):
    """Why a program decided as it did. The words say what happened and why; those of refusals and
    drops also say what to do.
    """

    verdict: Verdict
    words: str
    seen: Seen

    def __new__(cls, number: int, verdict: Verdict, words: str, seen: Seen | None = None) -> "Reason":
        """Raises KeyError for a reason without `seen` whose verdict does not imply it."""
        reason = int.__new__(cls, number)
        reason._value_ = number
        reason.verdict, reason.words = verdict, words
        reason.seen = SEEN_BY_VERDICT[verdict] if seen is None else seen
        return reason

    NOT_A_SERVICE = 0, Verdict.PASS, "not translated: no Service has this address"
    TRANSLATED = 1, Verdict.TRANSLATE, "sockets sent to a backend", NEW
    TRANSLATED_BY_AFFINITY = (2, Verdict.TRANSLATE, "sockets sent to the client's last backend (session affinity)", NEW)
    TRANSLATED_BY_FLOW = (3, Verdict.TRANSLATE, "datagrams sent to the backend of their flow", NO_EVENT)
    REVERSED = (4, Verdict.TRANSLATE, "replies, and getpeername() calls, that got the Service's address back", NO_EVENT)
    NO_ENDPOINTS = (
        5,
        Verdict.REFUSE,
        "refused: the Service has no endpoints; check its selector and whether its Pods are ready",
    )
    NO_LOCAL_ENDPOINTS = (
        6,
        Verdict.DROP,
        "dropped: policy Local, and no endpoint on this node; use policy Cluster, or a node that has one",
    )
    NEEDS_SOURCE = 7, Verdict.PASS, "sockets not translated: source ranges need the packet path"
    SET_VANISHED = (
        8,
        Verdict.REFUSE,
        "refused: the backends changed too often during the lookup; the client has to try again",
    )
    NOT_RECORDED = (
        9,
        Verdict.NOTE,
        "served, but not stored: a socket's peer or flow, or a client's session affinity, for "
        "which its memory or its share of the map is used up",
        NO_EVENT,
    )
    NO_SNAT_PORT = (10, Verdict.DROP, "dropped: no free port of the node for SNAT; widen --masquerade-ports")
    NOT_REWRITTEN = (
        11,
        Verdict.DROP,
        "dropped: the packet could not be rewritten; report it with the output of `kbpf check`",
    )
    NOT_ALLOWED = (
        12,
        Verdict.DROP,
        "dropped: the client is not in the Service's source ranges; add it to them if it should be served",
    )
    UNKNOWN_PORT = (
        13,
        Verdict.REFUSE,
        "refused: a ClusterIP, but no Service has this port; check the port that the client uses",
    )
    NEW_FLOW = 14, Verdict.NOTE, "connections that a packet started, and that are tracked now", NEW
    EVICTED = (
        15,
        Verdict.NOTE,
        "connections in use, normally UDP, that were evicted for new ones",
        Seen(EventVerdict.EVICTED, "", blames_backend=False),
    )
    NO_ROUTE = (
        16,
        Verdict.DROP,
        "dropped: a socket of this node has no route to the backend; check the routes to pods (ip route get)",
    )
    LEFT_TO_PACKETS = (
        17,
        Verdict.PASS,
        "sockets left to the packet path: by --socket-lb, exempt, the kernel's own, bound to a device or "
        "to loopback, or UDP to a ClusterIP's unknown port",
    )
    PAUSED = (18, Verdict.DROP, "dropped while the programs switched to other maps; clients retransmit, nothing to do")
    TABLE_FULL = (19, Verdict.DROP, "dropped: the table is full of connections in use; raise --max-connections")
    RATE_LIMITED = (
        20,
        Verdict.DROP,
        "dropped without a reply: refusals have the limits of the kernel's own ICMP errors "
        "(net.ipv4.icmp_msgs_per_sec, icmp_ratelimit)",
    )
    REDIRECTED = 21, Verdict.NOTE, "packets redirected to another device, past the stack", NO_EVENT
    NOT_TRACKED = (
        22,
        Verdict.DROP,
        "dropped: the state of a connection could not be stored; clients retransmit; if it "
        "grows and the map flows is full, raise --max-connections",
    )
    UNSTEADY_READ = (
        23,
        Verdict.REFUSE,
        "refused: the Service was being written during each lookup; the client has to try again",
    )
    TOO_LONG = (
        24,
        Verdict.NOTE,
        "packets too long for the next device: their senders were told the path MTU",
        NO_EVENT,
    )
    BACKEND_REFUSED = (
        25,
        Verdict.NOTE,
        "refused by a backend: does a process listen on its port?",
        Seen(EventVerdict.FAILED, "ECONNREFUSED", blames_backend=True),
    )
    BACKEND_UNANSWERED = (
        26,
        Verdict.NOTE,
        "not answered by a backend within a second: is its pod reachable, and does a NetworkPolicy admit the client?",
        Seen(EventVerdict.FAILED, "ETIMEDOUT, unless a later SYN was answered", blames_backend=True),
    )
    # Not to blame: the backend has accepted the connection, and some servers end each like that.
    BACKEND_RESET = (
        27,
        Verdict.NOTE,
        "accepted by a backend, and ended by a reset or a time-out",
        Seen(EventVerdict.FAILED, "ECONNRESET or ETIMEDOUT", blames_backend=False),
    )
    INVALID = (
        28,
        Verdict.DROP,
        "dropped: not part of the connection that uses its ports, which it may have been earlier; "
        "or forged. conntrack calls such packets invalid, too",
    )
    OTHER_NETWORK = (
        29,
        Verdict.PASS,
        "sockets left alone: no device of their network namespace leads to this node, as in a cluster inside a pod",
    )
