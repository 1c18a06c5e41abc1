"""One connection as a row: who dials what, who must answer, and as whom the backend sees it.

Every row also checks that the client believes to talk to what it dialled.
"""

import ipaddress
from dataclasses import dataclass
from typing import Any

from tests.support.cluster import Places
from tests.support.lab import Place

REFUSED = "ECONNREFUSED"
CLOSED = "ECONNREFUSED by a host"
"""Not by the programs: nobody listens there."""
DROPPED = "ETIMEDOUT"
UNSERVED = "EHOSTUNREACH"
"""What an address gets that is nobody's business (tests/support/cluster.py)."""


@dataclass(frozen=True, slots=True)
class Dial:
    """A row.

    `to` is host:port; `protocol` is tcp, udp (one sendto) or udp-connected. `outcome` are the
    places that must answer, all of them and nobody else, as ``a1 b1`` or with the port that they
    must serve on, ``a1:8081``; or REFUSED, CLOSED, DROPPED, UNSERVED. `backend_sees`: the client's
    address; by default the client's own, as if it had dialled the backend itself.
    """

    name: str
    client: str
    to: str
    outcome: str
    protocol: str = "tcp"
    backend_sees: str = ""


def check(places: Places, row: Dial) -> None:
    """Dials, often enough to meet every backend, and compares with the row."""
    host, _, number = row.to.rpartition(":")
    host = host.strip("[]")
    place = places[row.client]
    names = row.outcome.split()
    fails = row.outcome in (REFUSED, CLOSED, DROPPED, UNSERVED)
    # 25 dials a backend: that one is never met has a chance of 1 in 10^11.
    answer = place.many(
        3 if fails else 25 * len(names) if len(names) > 1 else 8,
        host,
        int(number),
        protocol=row.protocol.removesuffix("-connected"),
        connected=row.protocol.endswith("-connected"),
    )
    why = f"{row}\ngot {answer}\n{explain(places, row.client, host)}"
    if fails:
        check_failure(row, answer, why)
        return
    assert not answer["errors"], why
    v6 = is_v6(host)
    seen = {tuple(each) for each in answer["seen"]}
    got = {name if name in names else f"{name}:{served}" for name, served, *_ in seen}
    assert got == set(names), why
    for name, _, client, peer, peer_port in seen:
        wanted = row.backend_sees or places.seen_as(row.client, name, v6)
        assert client == wanted, f"{name} must see {wanted}: {why}"
        assert (peer, peer_port) == (host, int(number)), f"the client must see what it dialled{why}"


def check_failure(row: Dial, answer: dict[str, Any], why: str) -> None:
    """It must fail in this way, and at once: no network is asked, unless a host is to answer."""
    assert not answer["names"], why
    errno, _, by_a_host = row.outcome.partition(" ")
    assert set(answer["errors"]) == {errno}, why
    assert answer["at_once"] == (0 if by_a_host else answer["errors"][errno]), why


def is_v6(host: str) -> bool:
    """Whether IPv6 packets carry it: v4-mapped addresses are IPv4."""
    address = ipaddress.ip_address(host)
    return isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None


def explain(places: Places, client: str, host: str) -> str:
    """What the client's node has programmed for what it dials, and its agent's last words."""
    home = places.home[client]
    agent = home.agent
    assert agent is not None
    bare = host.removeprefix("::ffff:")
    keys = (bare, f"[{bare}]", "0.0.0.0", "[::]")
    if not agent.pin_dir.exists():
        return f"on {home.name}: nothing is pinned; {agent.tail(5)}"
    lines = [f"{at}: {to}" for at, to in places.served(agent).items() if at.startswith(keys)]
    return "\n".join([f"on {home.name}:", *(lines or ["no such frontend"]), agent.tail(5)])


def spread(place: Place, host: str, number: int, count: int = 300) -> dict[str, int]:
    """Who answered how often."""
    answer = place.many(count, host, number)
    assert not answer["errors"], answer
    return dict(answer["names"])
