# SPDX-License-Identifier: Apache-2.0
"""Ends the UDP flows that conntrack translates (`--forwarding netfilter`) when their backend or
frontend stops serving, as kube-proxy does: the next datagram chooses again.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from itertools import islice
from typing import Final

from kbpf.dataplane.bpf.maps.layout import ServiceValue, node_port_target, pack_target
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.netfilter import conntrack
from kbpf.model.address import Addr

BATCH: Final = 500
"""Entries that are read, and deleted if need be, in one step: about five milliseconds."""


def delete_stale(
    maps: Mapping[str, Map],
    is_gone: Callable[[int, bytes, bytes], bool],
    lost_frontends: Mapping[bytes, int],
) -> Generator[None, None, Counter[int]]:
    """Deletes the entries of stale flows, in steps; returns their number by family. `is_gone`: see
    udp.IsGone. An entry does not tell the id of its Service: that is the one which has the frontend
    now, or which has lost it (`lost_frontends`: struct target → service id). Flows that other
    programs translate have no such frontend.
    """
    deleted: Counter[int] = Counter()
    for number, family in ((4, "ip"), (6, "ip6")):
        entries = conntrack.iterate_translated_udp(family)
        while flows := tuple(islice(entries, BATCH)):
            stale = []
            for flow in flows:
                frontend = pack_target(*flow.frontend)
                backend = pack_target(*flow.backend)
                if any(
                    is_gone(service, frontend, backend)
                    for service in _find_services(maps, flow.frontend[0], frontend, lost_frontends)
                ):
                    stale.append(flow)
            deleted[number] += conntrack.delete(stale)
            yield
    return deleted


def _find_services(
    maps: Mapping[str, Map], address: Addr, frontend: bytes, lost_frontends: Mapping[bytes, int]
) -> set[int]:
    """The ids of the Services that have this frontend, or had it."""
    keys = [frontend]
    if maps["node_addresses"].lookup(address) is not None:
        keys.append(node_port_target(frontend))
    current = (maps["services"].lookup(key) for key in keys)
    ids = {ServiceValue.unpack(raw).id for raw in current if raw is not None}
    return ids | {lost_frontends[key] for key in keys if key in lost_frontends}
