# SPDX-License-Identifier: Apache-2.0
"""Devices of a node as lines of text."""

from kbpf.kernel.net.devices import Device
from kbpf.kernel.net.uapi import (
    ARPHRD_ETHER,
    ARPHRD_IP6GRE,
    ARPHRD_IPGRE,
    ARPHRD_NONE,
    ARPHRD_SIT,
    ARPHRD_TUNNEL,
    ARPHRD_TUNNEL6,
)

LINK_TYPES = {"none": ARPHRD_NONE, "loopback": 772, "infiniband": 32, "can": 280}
LINK_TYPES |= {"tunnel": ARPHRD_TUNNEL, "tunnel6": ARPHRD_TUNNEL6, "sit": ARPHRD_SIT}
LINK_TYPES |= {"gre": ARPHRD_IPGRE, "ip6gre": ARPHRD_IP6GRE}


def devices(text: str) -> tuple[dict[Device, str], dict[str, tuple[str, ...]]]:
    """The devices of a node with their roles, and the operator's settings, from lines ``NAME KIND ROLE``.

    The kind has suffixes: ``/pod`` for a peer in another namespace, ``/net`` for an address in a subnet, ``/down``
    for a device that is down, ``/nf`` for a bridge whose packets pass netfilter, ``/p2p`` for a tunnel to one address
    and ``/strict`` for a strict reverse path filter. ``master=NAME``, ``peer=IFINDEX`` and ``type=`` (the link type, by
    default Ethernet) follow. Lines ``named`` and ``excluded`` are the settings, with patterns.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    patterns = {words[0]: tuple(words[1:]) for words in lines if words[0] in ("named", "excluded")}
    rows = [words for words in lines if words[0] not in patterns]
    index = {words[0]: number for number, words in enumerate(rows, 2)}
    listing = {Device(1, "lo", loopback=True, link_type=LINK_TYPES["loopback"]): "skipped"}
    for name, word, role, *options in rows:
        more = dict(option.split("=") for option in options)
        link_type = more.get("type", str(ARPHRD_ETHER))
        kind, *suffixes = word.split("/")
        device = Device(
            ifindex=index[name],
            name=name,
            kind="" if kind == "hardware" else kind,
            up="down" not in suffixes,
            link_type=LINK_TYPES.get(link_type) or int(link_type),
            master=index[more["master"]] if "master" in more else 0,
            peer_netns=3 if "pod" in suffixes else None,
            has_subnet="net" in suffixes,
            bridge_netfilter="nf" in suffixes,
            point_to_point="p2p" in suffixes,
            strict_filter="strict" in suffixes,
            link=int(more.get("peer", 0)),
        )
        listing[device] = role
    return listing, {"patterns": patterns.get("named", ()), "excluded": patterns.get("excluded", ())}
