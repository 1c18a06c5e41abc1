# SPDX-License-Identifier: Apache-2.0
"""Decides which UDP clients each apply() cuts off; udp.py cuts them."""

import time
from collections.abc import Collection, Iterable, Mapping

from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.state.commit import pack_endpoint
from kbpf.dataplane.bpf.state.plan import ProgrammedPort, Retired
from kbpf.model.desired import Backend, FrontendAddress, ServicePortKey
from kbpf.model.metrics import UdpCuts
from kbpf.model.objects import Protocol


class UdpCutter:
    """Cuts UDP clients off the backends and frontends that a Service port has lost."""

    def __init__(self, agent_maps: AgentMaps, passes: udp.UdpPasses, uses_conntrack: bool = False) -> None:
        self._agent_maps, self._passes = agent_maps, passes
        self._uses_conntrack = uses_conntrack
        self._former = Retired()  # see remember()

    def read_cuts(self) -> None:
        """Reads the map `udp_cuts`, after another agent may have written to it."""
        self._cut_map = udp.UdpCutMap(self._agent_maps)

    def cut(self, retired: Retired, seconds: float, is_repeat: bool = True) -> None:
        """Cuts UDP clients off lost backends and frontends: writes `udp_cuts`, deletes flows of the
        packet path and destroys connected sockets (udp.py), for this many seconds; advance() of the
        passes continues. `is_repeat`: the second pass, after the grace period, for a connect() or
        packet that was in flight during the first. Flows of unconnected sockets need none: programs
        see that they are older than the entry of `udp_cuts`.
        """
        if not (retired.lost_backends or retired.lost_frontends):
            return
        if not is_repeat:
            self._cut_map.add(
                {(service_id, pack_endpoint(backend)) for service_id, backend in retired.lost_backends},
                time.monotonic_ns(),
            )
        self._passes.add(retired.lost_backends, retired.lost_frontends, count_flows=not is_repeat)
        self._passes.advance(seconds)

    def cut_unserved(self, programmed: Iterable[ProgrammedPort]) -> None:
        """Cuts UDP clients off everything except what these Service ports serve."""
        is_gone = udp.gone_unless_in(*_udp_targets(programmed))
        self._cut_map.add(udp.find_stale_flows(self._agent_maps.maps, is_gone), time.monotonic_ns())
        del self._agent_maps.writes["udp_cuts"]  # counted as UDP cuts, not as writes of a change
        start = time.perf_counter()
        cut_counts = udp.cut(
            self._agent_maps.maps,
            is_gone,
            lost_frontends={} if self._uses_conntrack else None,
            errors=self._passes.errors,
        )
        seconds = time.perf_counter() - start
        self._passes.results.append(UdpCuts(seconds, {family: cut_counts[family] for family in (4, 6)}))

    def spare_serving(self, ports: Iterable[ProgrammedPort | None], uncut: Collection[Retired]) -> None:
        """What serves again within the grace period is not cut a second time: by now it may have
        new clients.
        """
        if not uncut and not self._passes.is_busy:
            return
        backends, frontends = _udp_targets(port for port in ports if port is not None)
        for retired in uncut:
            retired.lost_backends -= backends
            retired.lost_frontends -= frontends
        self._passes.spare(backends, frontends)

    def remember(self, programmed: Iterable[ProgrammedPort], uncut: Iterable[Retired]) -> None:
        """Remembers which UDP flows may exist, before the maps are read again. They do not contain
        `serving`, so the next plan would not find the backends that have stopped serving since the
        last successful apply(). Cuts that were not finished are remembered as well.
        """
        backends, frontends = _udp_targets(programmed)
        self._former.lost_backends |= backends
        self._former.lost_frontends |= frontends
        for retired in uncut:
            self._former.lost_backends |= retired.lost_backends
            self._former.lost_frontends |= retired.lost_frontends

    def forget(self) -> None:
        """An apply() has succeeded, so nothing has to be remembered."""
        self._former = Retired()

    def plan_former_cuts(
        self,
        programmed: Mapping[ServicePortKey, ProgrammedPort],
        changes: Mapping[ServicePortKey, ProgrammedPort | None],
        refused: Iterable[ServicePortKey],
        retired: Retired,
        authoritative: bool,
    ) -> None:
        """Adds to `retired` what was remembered and is not served any more. An authoritative call
        needs none of this, since it cuts whatever is not served (cut_unserved()). The cuts of this
        call are remembered until it has succeeded.
        """
        former = self._former
        if not authoritative and (former.lost_backends or former.lost_frontends):
            ports, refused = {**programmed, **changes}, set(refused)
            backends, frontends = _udp_targets(port for port in ports.values() if port)
            # Of ports that stay as adopted it is not known which backends serve.
            unplanned_ids = {port.id for key, port in ports.items() if port and (key not in changes or key in refused)}
            retired.lost_backends |= {
                (service_id, backend)
                for service_id, backend in former.lost_backends - backends
                if service_id not in unplanned_ids
            }
            retired.lost_frontends |= {
                (service_id, frontend)
                for service_id, frontend in former.lost_frontends - frontends
                if service_id not in unplanned_ids
            }
        former.lost_backends |= retired.lost_backends
        former.lost_frontends |= retired.lost_frontends


def _udp_targets(ports: Iterable[ProgrammedPort]) -> tuple[set[tuple[int, Backend]], set[tuple[int, FrontendAddress]]]:
    """The backends that serve UDP, and the UDP frontends, each with its service id."""
    backends: set[tuple[int, Backend]] = set()
    frontends: set[tuple[int, FrontendAddress]] = set()
    for port in ports:
        backends.update((port.id, backend) for backend in port.serving)
        frontends.update((port.id, frontend.at) for frontend in port.frontends if frontend.at.protocol == Protocol.UDP)
    return backends, frontends
