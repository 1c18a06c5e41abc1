# SPDX-License-Identifier: Apache-2.0
"""What `kbpf trace` says of the lab's rows, from the live maps and routes of the client's node.

The rows' own tests dial them and compare the answers with the same rows, so a prediction that fits
its row is what happens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.kernel.net.routes import find_route
from kbpf.kernel.system import netns
from kbpf.kernel.system.pods import list_cgroup_ids
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.desired import Backend
from kbpf.model.reasons import Verdict
from kbpf.views import trace
from kbpf.views.trace_page import Client, NodeFacts, Origin, Trace
from tests.support.cluster.cluster import Places
from tests.support.lab.dial import Dial
from tests.support.lab.lab import Node, Place, cgroup2
from tests.support.lab.modes import PACKETS
from tests.support.lab.paper import expected, named, target
from tests.support.plane import split

T = TypeVar("T")


def check_prediction(places: Places, row: Dial) -> None:
    """Compares the trace with the row: verdict, backends and their shares, what the client sees,
    and the source that the backends see. A backend that answers has a route.
    """
    if PACKETS:
        return  # mode ipvs
    predicted, (verdict, names) = predict(places, row), expected(row)
    why = f"{row}\n{predicted}"
    assert predicted.verdict == verdict, why
    backends = {
        candidate.backend: Backend(*split(candidate.backend.partition("/")[0]), target(row).protocol)
        for candidate in predicted.candidates
    }
    assert {named(backend, names) for backend in backends.values()} == names, why
    sees = {Verdict.REFUSE: "ECONNREFUSED", Verdict.DROP: "ETIMEDOUT"}.get(Verdict(verdict), "")
    assert predicted.client_sees == sees, why
    own = places[row.client].ip6 if "." not in row.backend_sees else places[row.client].ip
    source = "node" if row.backend_sees not in ("", own) else "client"
    for candidate in predicted.candidates:
        assert abs(candidate.share - 1 / len(names)) < 0.001, why
        assert candidate.source == source, why
        assert candidate.next_hop, why


def predict(places: Places, row: Dial) -> Trace:
    """The trace of the client's node or, if that leaves it alone, of the node that has the
    address.
    """
    home, client = places.home[row.client], client_of(places, row)
    address = format_addr(target(row).address)
    there = next((n for n in places.home.values() if address in (n.ip, n.ip6)), home)
    seen = _trace_at(places, home, client, row) if client.origin is not Origin.OUTSIDE else None
    if seen is not None and (seen.verdict != Verdict.PASS or there is home):
        return seen
    return _trace_at(places, there, Client(Origin.OUTSIDE, addresses=client.addresses), row)


def _trace_at(places: Places, node: Node, client: Client, row: Dial) -> Trace:
    inspection = snapshot.read(node.agent.pin_dir, trace.NEEDS)
    find_client_route = None
    if client.origin is not Origin.OUTSIDE:
        find_client_route = lambda *query: _in_netns(places[row.client], find_route, *query)  # noqa: E731
    facts = NodeFacts(find_route, find_client_route)
    return _in_netns(node, trace.build_trace, inspection, client, target(row), facts)


def _in_netns(where: Node | Place, action: Callable[..., T], *arguments: Any) -> T:
    return netns.run_in(Path("/run/netns") / str(where.netns), lambda: action(*arguments))


def client_of(places: Places, row: Dial) -> Client:
    """The client of this row, as `kbpf trace` finds it on its node."""
    place, home = places[row.client], places.home[row.client]
    addresses = (parse_addr(place.ip), parse_addr(place.ip6))
    if row.client == "outside":
        return Client(Origin.OUTSIDE, addresses=addresses)
    cgroups = list_cgroup_ids(place.cgroup or own_cgroup(), cgroup2())
    origin = Origin.HOST if place is home.host else Origin.POD
    return Client(
        origin,
        "" if origin is Origin.HOST else f"default/{row.client}",
        cgroups,
        addresses,
        _in_netns(place, netns.read_cookie),
    )


def own_cgroup() -> Path:
    """The cgroup of this process, in which places without one are."""
    return cgroup2() / Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
