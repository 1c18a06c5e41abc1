"""Descriptions of the reasons that the programs count."""

from typing import Final

from kbpf.dataplane.bpf.maps.layout import Reason

DESCRIPTIONS: Final = {
    Reason.NOT_A_SERVICE: "not translated: no Service has this address",
    Reason.TRANSLATED: "sent to a backend",
    Reason.TRANSLATED_BY_AFFINITY: "sent to the client's last backend (session affinity)",
    Reason.TRANSLATED_BY_FLOW: "datagrams sent to the backend of their flow",
    Reason.REVERSED: "replies translated back to the Service's address",
    Reason.NO_ENDPOINTS: "refused: the Service has no endpoints",
    Reason.NO_LOCAL_ENDPOINTS: "dropped: policy Local, and no endpoint on this node",
    Reason.NEEDS_SOURCE: "sockets not translated: source ranges need the packet path",
    Reason.SET_VANISHED: "refused: the backends changed too often during the lookup",
    Reason.NOT_RECORDED: "the state of a connection could not be stored",
    Reason.NO_SNAT_PORT: "dropped: no free port of the node for SNAT",
    Reason.NOT_REWRITTEN: "dropped: the packet could not be rewritten",
    Reason.NOT_ALLOWED: "dropped: the client is not in the Service's source ranges",
    Reason.UNKNOWN_PORT: "refused: a ClusterIP, but no Service has this port",
    Reason.NEW_FLOW: "connections that a packet started, and that are tracked now",
    Reason.REDIRECTED: "packets redirected to another device, past the stack",
    Reason.EVICTED: "active UDP streams that were evicted for new connections",
    Reason.NO_ROUTE: "dropped: a socket of this node has no route to the backend",
    Reason.PAUSED: "dropped, to be retransmitted: the programs were switching to other maps",
    Reason.TABLE_FULL: "dropped: all tracked connections are in use (--max-connections)",
    Reason.RATE_LIMITED: "dropped without a reply: refusals are limited (icmp_msgs_per_sec)",
    Reason.LEFT_TO_PACKETS: "sockets not translated: --socket-lb, exempt, or no Service has "
    "the port",
}


def describe(reason: Reason) -> str:
    """The description; "" if there is none."""
    return DESCRIPTIONS.get(reason, "")
