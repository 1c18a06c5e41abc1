"""Descriptions of the reasons that the programs count."""

from typing import Final

from kbpf.dataplane.bpf.maps.layout import Reason

DESCRIPTIONS: Final = {
    Reason.NOT_A_SERVICE: "left alone: no Service has this address",
    Reason.TRANSLATED: "led to a backend",
    Reason.TRANSLATED_BY_AFFINITY: "led to the client's last backend (session affinity)",
    Reason.TRANSLATED_BY_FLOW: "datagrams that went on to the backend of their flow",
    Reason.REVERSED: "answers that were given the Service's address again",
    Reason.NO_ENDPOINTS: "refused: the Service has no endpoints",
    Reason.NO_LOCAL_ENDPOINTS: "dropped: policy Local, and no endpoint on this node",
    Reason.NEEDS_SOURCE: "sockets left alone: source ranges need the packet path",
    Reason.SET_VANISHED: "refused: the backends changed too often while they were looked up",
    Reason.NOT_RECORDED: "what belongs to a connection could not be written down",
    Reason.NO_SNAT_PORT: "dropped: no free port of the node for a translated source",
    Reason.NOT_REWRITTEN: "dropped: the packet could not be rewritten",
    Reason.NOT_ALLOWED: "dropped: the client is not in the Service's source ranges",
    Reason.UNKNOWN_PORT: "refused: a ClusterIP, but a port that no Service has",
    Reason.NEW_FLOW: "connections that a packet began, and that are tracked since",
    Reason.REDIRECTED: "packets that went to another device, past the stack",
    Reason.EVICTED: "streams of UDP that were in use, and had to make room for new connections",
    Reason.NO_ROUTE: "dropped: this node's own socket has no route to the backend",
    Reason.PAUSED: "dropped, to come again: the programs changed over to other maps",
    Reason.TABLE_FULL: "dropped: all tracked connections are in use (--max-connections)",
    Reason.RATE_LIMITED: "dropped without an answer: refusals are limited (icmp_msgs_per_sec)",
    Reason.LEFT_TO_PACKETS: "sockets left alone: --socket-lb, exempt, or no Service has the port",
}


def describe(reason: Reason) -> str:
    """In a few words; nothing where this version has none."""
    return DESCRIPTIONS.get(reason, "")
