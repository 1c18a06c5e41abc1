# SPDX-License-Identifier: Apache-2.0
"""Decides which UDP clients each apply() cuts off; udp.py cuts them."""

import time
from collections.abc import Collection, Iterable, Mapping

from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.state.commit import pack_endpoint
from kbpf.dataplane.bpf.state.plan import ProgrammedPort, Retired, UdpTargets
from kbpf.model.desired import ServicePortKey
from kbpf.model.metrics import UdpCuts
from kbpf.model.objects import Protocol


class UdpCutter:
    """Cuts UDP clients off the backends and frontends that a Service port has lost."""

    def __init__(self, agent_maps: AgentMaps, passes: udp.UdpPasses) -> None:
        self._agent_maps, self._passes = agent_maps, passes
        self._former = UdpTargets()  # see remember()

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
        if not retired.lost:
            return
        if not is_repeat:
            backends = {(service_id, pack_endpoint(backend)) for service_id, backend in retired.lost.backends}
            self._cut_map.add(backends, time.monotonic_ns())
        self._passes.add(retired.lost, count_flows=not is_repeat)
        self._passes.advance(seconds)

    def cut_unserved(self, programmed: Iterable[ProgrammedPort]) -> None:
        """Cuts UDP clients off everything except what these Service ports serve."""
        is_gone = udp.gone_unless_in(_udp_targets(programmed))
        self._cut_map.add(udp.find_stale_flows(self._agent_maps.maps, is_gone), time.monotonic_ns())
        del self._agent_maps.writes["udp_cuts"]  # counted as UDP cuts, not as writes of a change
        start = time.perf_counter()
        none_lost = dict[bytes, int]() if self._passes.uses_conntrack else None
        cut_counts = udp.cut(self._agent_maps.maps, is_gone, none_lost, self._passes.errors)
        seconds = time.perf_counter() - start
        self._passes.results.append(UdpCuts(seconds, {family: cut_counts[family] for family in (4, 6)}))

    def spare_serving(self, ports: Iterable[ProgrammedPort | None], uncut: Collection[Retired]) -> None:
        """What serves again within the grace period is not cut a second time: by now it may have
        new clients.
        """
        if not uncut and not self._passes.is_busy:
            return
        serving = _udp_targets(filter(None, ports))
        for retired in uncut:
            retired.lost.remove(serving)
        self._passes.spare(serving)

    def remember(self, programmed: Iterable[ProgrammedPort], uncut: Iterable[Retired]) -> None:
        """Remembers which UDP flows may exist, before the maps are read again. They do not contain
        `serving`, so the next plan would not find the backends that have stopped serving since the
        last successful apply(). Cuts that were not finished are remembered as well.
        """
        self._former.add(_udp_targets(programmed))
        for retired in uncut:
            self._former.add(retired.lost)

    def forget(self) -> None:
        """An apply() has succeeded, so nothing has to be remembered."""
        self._former = UdpTargets()

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
        if not authoritative and former:
            ports, refused = {**programmed, **changes}, set(refused)
            serving = _udp_targets(filter(None, ports.values()))
            # Of ports that stay as adopted it is not known which backends serve.
            unplanned_ids = {port.id for key, port in ports.items() if port and (key not in changes or key in refused)}
            retired.lost.backends |= {b for b in former.backends - serving.backends if b[0] not in unplanned_ids}
            retired.lost.frontends |= {f for f in former.frontends - serving.frontends if f[0] not in unplanned_ids}
        former.add(retired.lost)


def _udp_targets(ports: Iterable[ProgrammedPort]) -> UdpTargets:
    """The backends that serve UDP, and the UDP frontends."""
    targets = UdpTargets()
    for port in ports:
        targets.backends.update((port.id, backend) for backend in port.serving)
        targets.frontends.update((port.id, f.at) for f in port.frontends if f.at.protocol == Protocol.UDP)
    return targets
