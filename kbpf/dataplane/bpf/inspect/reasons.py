# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the reasons that the programs count, for `kbpf inspect status`.

Each says what happened and why; those of refusals and drops also say what to do.
"""

from typing import Final

from kbpf.dataplane.bpf.maps.layout import Reason

DESCRIPTIONS: Final = {
    Reason.NOT_A_SERVICE: "not translated: no Service has this address",
    Reason.TRANSLATED: "sockets sent to a backend",
    Reason.TRANSLATED_BY_AFFINITY: "sockets sent to the client's last backend (session affinity)",
    Reason.TRANSLATED_BY_FLOW: "datagrams sent to the backend of their flow",
    Reason.REVERSED: "replies, and getpeername() calls, that got the Service's address back",
    Reason.NO_ENDPOINTS: "refused: the Service has no endpoints; check its selector and whether "
    "its Pods are ready",
    Reason.NO_LOCAL_ENDPOINTS: "dropped: policy Local, and no endpoint on this node; use policy "
    "Cluster, or a node that has one",
    Reason.NEEDS_SOURCE: "sockets not translated: source ranges need the packet path",
    Reason.SET_VANISHED: "refused: the backends changed too often during the lookup; the client "
    "has to try again",
    Reason.NOT_RECORDED: "served, but not stored: a socket's peer or flow, or a client's session "
    "affinity, for which its memory or its share of the map is used up",
    Reason.NOT_TRACKED: "dropped: the state of a connection could not be stored; clients "
    "retransmit; if it grows and the map flows is full, raise --max-connections",
    Reason.NO_SNAT_PORT: "dropped: no free port of the node for SNAT; widen --masquerade-ports",
    Reason.NOT_REWRITTEN: "dropped: the packet could not be rewritten; report it with the output "
    "of `kbpf check`",
    Reason.NOT_ALLOWED: "dropped: the client is not in the Service's source ranges; add it to them "
    "if it should be served",
    Reason.UNKNOWN_PORT: "refused: a ClusterIP, but no Service has this port; check the port that "
    "the client uses",
    Reason.NEW_FLOW: "connections that a packet started, and that are tracked now",
    Reason.REDIRECTED: "packets redirected to another device, past the stack",
    Reason.EVICTED: "connections in use, normally UDP, that were evicted for new ones",
    Reason.NO_ROUTE: "dropped: a socket of this node has no route to the backend; check the routes "
    "to pods (ip route get)",
    Reason.PAUSED: "dropped while the programs switched to other maps; clients retransmit, nothing "
    "to do",
    Reason.TABLE_FULL: "dropped: the table is full of connections in use; raise --max-connections",
    Reason.RATE_LIMITED: "dropped without a reply: refusals have the limits of the kernel's own "
    "ICMP errors (net.ipv4.icmp_msgs_per_sec, icmp_ratelimit)",
    Reason.LEFT_TO_PACKETS: "sockets left to the packet path: by --socket-lb, exempt, or UDP to "
    "a ClusterIP's unknown port",
}


def describe(reason: Reason) -> str:
    """The description; "" if there is none."""
    return DESCRIPTIONS.get(reason, "")
