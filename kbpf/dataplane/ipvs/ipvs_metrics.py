# SPDX-License-Identifier: Apache-2.0
"""Metrics from IPVS: connections opened and bytes, by Service port.

The kernel counts from the creation of a virtual service, so the counters survive a restart of the
agent. Any thread may call: each call opens a netlink socket, in the network namespace of the
thread.
"""

import contextlib
from collections.abc import Callable, Mapping

from kbpf.dataplane.base import SharedAccess
from kbpf.dataplane.ipvs.plan import NODE_KEY, ServicePortPlan, VirtualService
from kbpf.kernel.net.ipvs import IpvsClient
from kbpf.model.desired import ServicePortKey
from kbpf.model.metrics import IPVS_COUNTERS, ConnectionStats, Pause, PortName, TrafficStats
from kbpf.model.objects import Protocol


class IpvsAccess(SharedAccess):
    """`read_plans` may be called by any thread. There is nothing to do for the agent's sockets:
    IPVS cannot distinguish them (docs/limits.md).
    """

    def __init__(self, read_plans: Callable[[], Mapping[ServicePortKey, ServicePortPlan]]) -> None:
        self._read_plans = read_plans

    def count_traffic(self, pause: Pause) -> TrafficStats:
        return count_traffic(self._read_plans(), pause)


def count_traffic(plans: Mapping[ServicePortKey, ServicePortPlan], pause: Pause) -> TrafficStats:
    """Sums the counters of the virtual services of each Service port. Raises KernelError if IPVS
    does not answer.
    """
    owners = {
        tuple(virtual): (key.namespace, key.name, key.port, key.protocol.name)
        for key, plan in plans.items()
        if key != NODE_KEY
        for virtual in plan.pools
    }
    pause()
    totals: dict[PortName, ConnectionStats] = {}
    with contextlib.closing(IpvsClient()) as client:
        service_stats = client.read_stats()
    pause()
    for service, stats in service_stats:
        if service.protocol not in Protocol.__members__.values():  # another program's
            continue
        name = owners.get(tuple(VirtualService(Protocol(service.protocol), *service[1:])))
        if name is not None and stats.opened:
            totals[name] = totals.get(name, ConnectionStats()).plus(stats)
    return TrafficStats(totals=tuple(totals.items()), counted_fields=IPVS_COUNTERS)
