# SPDX-License-Identifier: Apache-2.0
"""One connection as a row: the client, what it dials, the backends that must answer, and the client
address that a backend sees.

Every row also checks that getpeername() in the client shows the dialled address.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.cluster.cluster import Places
from tests.support.lab.modes import PACKETS, SILENCE

REFUSED = "ECONNREFUSED"
CLOSED = "ECONNREFUSED by a host"
"""Refused by a host on which no process listens, not by our programs."""
DROPPED = "ETIMEDOUT"
CLUSTER_IPS = ("10.96.", "fd00:10:96::")
UNSERVED = "EHOSTUNREACH"
"""The error for an address that no Service has (tests/support/cluster/cluster.py routes it so)."""


@dataclass(frozen=True, slots=True)
class Dial:
    """A row.

    `to` is host:port. `protocol` is tcp, udp (one sendto) or udp-connected. `outcome` lists the
    places that must answer, exactly these, as ``a1 b1`` or with the port that they must serve on,
    ``a1:8081``; or it is REFUSED, CLOSED, DROPPED or UNSERVED. `backend_sees` is the client address
    that the backend must see; by default the client's own, as if it had dialled the backend itself.
    """

    name: str
    client: str
    to: str
    outcome: str
    protocol: str = "tcp"
    backend_sees: str = ""


def check(places: Places, row: Dial) -> None:
    """Dials often enough to reach every backend, and compares the answers with the row."""
    host, _, number = row.to.rpartition(":")
    host = host.strip("[]")
    place = places[row.client]
    names = row.outcome.split()
    fails = row.outcome in (REFUSED, CLOSED, DROPPED, UNSERVED)
    silent = PACKETS and row.outcome == DROPPED
    # 25 dials for each backend: the chance to miss one of them is 1 in 10^11.
    answer = place.many(
        1 if silent else 3 if fails else 25 * len(names) if len(names) > 1 else 8,
        host,
        int(number),
        protocol=row.protocol.removesuffix("-connected"),
        # An unconnected UDP socket gets no ICMP errors.
        connected=row.protocol.endswith("-connected") or (PACKETS and fails),
        **({"timeout": SILENCE} if silent else {}),
    )

    def why() -> str:
        return f"{row}\ngot {answer}\n{explain(places, row.client, host)}"

    if fails:
        check_failure(row, answer, why)
        return
    assert not answer["errors"], why()
    seen = {tuple(each) for each in answer["seen"]}
    got = {name if name in names else f"{name}:{served}" for name, served, *_ in seen}
    assert got == set(names), why()
    for name, _, client, peer, peer_port in seen:
        wanted = _seen(places, row, host, name)
        assert client in wanted, f"{name} must see {wanted}: {why()}"
        dialled = (host, int(number))
        assert (peer, peer_port) == dialled, f"the client must see what it dialled: {why()}"


def _seen(places: Places, row: Dial, host: str, server: str) -> set[str]:
    """The addresses that the backend may see. If packets are translated (mode ipvs), it is the
    node's for the node itself, for hairpin connections and for external addresses, except for its
    own pods with policy Local (as with kube-proxy; tests/programs/ipvs/test_ipvs.py checks it
    exactly).
    """
    v6 = is_v6(host)
    if row.backend_sees or not PACKETS:
        return {row.backend_sees or places.seen_as(row.client, server, v6)}
    home = places.home[row.client]
    node = {home.ip6, f"fd00:10:244:{home.number}::1"} if v6 else {home.ip, f"10.244.{home.number}.1"}
    if places[row.client] not in home.pods or server == row.client:
        return node
    own = {places.seen_as(row.client, server, v6)}
    bare = ipaddress.ip_address(host)
    mapped = bare.ipv4_mapped if isinstance(bare, ipaddress.IPv6Address) else None
    return own if str(mapped or bare).startswith(CLUSTER_IPS) else own | node


def check_failure(row: Dial, answer: dict[str, Any], why: Callable[[], str]) -> None:
    """It must fail with this error, and at once: without a packet on the network, unless a host is
    expected to refuse it.
    """
    assert not answer["names"], why()
    if PACKETS:
        errno = "timeout" if row.outcome == DROPPED else row.outcome.partition(" ")[0]
        got = set(answer["errors"])
        if row.outcome == UNSERVED and is_v6(row.to.rpartition(":")[0].strip("[]")):
            assert got <= {errno, "ENETUNREACH"}, why()  # a router's "no route", ICMPv6 code 0
        else:
            assert got == {errno}, why()
        return
    errno, _, by_a_host = row.outcome.partition(" ")
    assert set(answer["errors"]) == {errno}, why()
    assert answer["at_once"] == (0 if by_a_host else answer["errors"][errno]), why()


def is_v6(host: str) -> bool:
    """Whether it is sent as IPv6; v4-mapped addresses are sent as IPv4."""
    address = ipaddress.ip_address(host)
    return isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None


def explain(places: Places, client: str, host: str) -> str:
    """What the client's node has programmed for the host, and the end of its agent's log."""
    home = places.home[client]
    agent = home.agent
    assert agent is not None
    bare = host.removeprefix("::ffff:")
    keys = (bare, f"[{bare}]", "0.0.0.0", "[::]")
    if not agent.pin_dir.exists():
        return f"on {home.name}: nothing is pinned; {agent.tail(5)}"
    served = [f"{at}: {to}" for at, to in places.served(agent).items() if at.startswith(keys)]
    lines = [f"on {home.name}:", *(served or ["no such frontend"])]
    if agent.mode != "ipvs":
        counted = {reason.name: count for reason, count in agent.reasons().items() if count}
        lines.append(f"counted: {counted}")
    return "\n".join([*lines, agent.tail(5)])
