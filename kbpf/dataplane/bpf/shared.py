# SPDX-License-Identifier: Apache-2.0
"""What other threads use of the BPF data plane."""

from dataclasses import dataclass, field

import msgspec

from kbpf.dataplane.base import SharedAccess
from kbpf.dataplane.bpf.attachments import Attachments
from kbpf.dataplane.bpf.connection_probe import ConnectionProber
from kbpf.dataplane.bpf.failing_backends import FailingBackends
from kbpf.dataplane.bpf.map_metrics import MapCollector
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.agent_sockets import AgentSockets
from kbpf.model.metrics import (
    ConnectionProbe,
    DataPlaneMetrics,
    FailingBackend,
    Pause,
    TrafficStats,
)
from kbpf.takeover.neighbour import KubeProxyWatch


@dataclass(frozen=True, slots=True)
class BpfAccess(SharedAccess):
    collector: MapCollector
    agent_maps: AgentMaps
    attachments: Attachments
    sockets: AgentSockets
    failing: FailingBackends
    prober: ConnectionProber
    kube_proxy: KubeProxyWatch = field(default_factory=KubeProxyWatch)

    def read_metrics(self) -> DataPlaneMetrics:
        return msgspec.structs.replace(
            self.collector.read(dict(self.agent_maps.fill)),
            hooks=tuple(self.attachments.hooks.states.items()),
            # filters of other kinds are no balancers
            foreign_programs=sum(
                bool(foreign.program) for foreign in self.attachments.foreign_programs()
            ),
            bypassed_chains=self.attachments.bypassed_chains,
        )

    def refresh_neighbours(self) -> None:
        self.kube_proxy.refresh()

    def count_traffic(self, pause: Pause) -> TrafficStats:
        kube_proxy = self.kube_proxy.state
        return msgspec.structs.replace(
            self.collector.count(pause),
            kube_proxy_running=bool(kube_proxy.running),
            kube_proxy_rules=None if kube_proxy.unreadable else kube_proxy.has_rules,
        )

    def find_failing_backends(self) -> tuple[FailingBackend, ...] | None:
        return self.failing.find()

    def probe_connections(self) -> ConnectionProbe | None:
        return self.prober.probe()

    def claim_socket(self, cookie: int) -> None:
        self.sockets.claim(cookie)
