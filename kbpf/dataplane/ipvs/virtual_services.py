# SPDX-License-Identifier: Apache-2.0
"""Reads and changes virtual services and their real servers in IPVS.

A removed real server is drained: it stays with weight 0 until its connections have ended. A
scheduler that the kernel does not have is replaced by a simpler one.
"""

import errno
import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kbpf.dataplane.ipvs.diff import Changes
from kbpf.dataplane.ipvs.plan import Element, ServerPool, ServicePortPlan, ownership_element
from kbpf.errors import KernelError
from kbpf.kernel.net.ipvs import (
    ConnectionTimeouts,
    IpvsClient,
    IpvsCommand,
    IpvsRequest,
    IpvsServiceFlag,
    VirtualServiceSettings,
)
from kbpf.kernel.system import modules
from kbpf.model.desired import RealServer, VirtualService
from kbpf.model.metrics import UdpCuts

FALLBACK_SCHEDULER, LAST_RESORT_SCHEDULER = "wrr", "rr"
"""The scheduler that replaces a missing one, and the one that replaces that."""
ALREADY_ABSENT_ERRNOS: Final[Mapping[IpvsCommand, frozenset[int]]] = {
    IpvsCommand.IPVS_CMD_DEL_SERVICE: frozenset((errno.ESRCH,)),
    IpvsCommand.IPVS_CMD_DEL_DEST: frozenset((errno.ENOENT, errno.ESRCH)),
}
"""The kernel's errors for an object that does not exist, and so does not have to be deleted."""

RequestErrors = Mapping[VirtualService, Sequence[tuple[IpvsRequest, int]]]
"""The refused requests by virtual service, with their errno."""


class Schedulers:
    """The schedulers that the kernel lacks, as its refusals have shown, and their replacements."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._missing: set[str] = set()

    def replace_missing(self, failures: RequestErrors) -> dict[VirtualService, list[IpvsRequest]]:
        """The requests that failed because of a scheduler that was not known to be missing, each
        with its replacement.
        """
        # ENOENT is the kernel's error for an unknown scheduler; it does not say what is missing.
        missing = {
            virtual: request.settings.scheduler
            for virtual, service_failures in failures.items()
            for request, code in service_failures
            if code == errno.ENOENT
            and request.settings is not None
            and request.settings.scheduler not in {LAST_RESORT_SCHEDULER, *self._missing}
        }
        self._missing |= {*missing.values()}
        for name in sorted({*missing.values()}):
            self._warn(
                f"IPVS may lack the scheduler {name} (CONFIG_IP_VS_{name.upper()}): "
                f"{self._substitute(name)} is used instead"
            )
        return {v: [self._with_available(request) for request, _ in failures[v]] for v in missing}

    def _with_available(self, request: IpvsRequest) -> IpvsRequest:
        """The request with a scheduler that the kernel has."""
        settings = request.settings
        if settings is None or settings.scheduler not in self._missing:
            return request
        replacement = VirtualServiceSettings(self._substitute(settings.scheduler), settings.persistence)
        return request._replace(settings=replacement)

    def _substitute(self, scheduler: str) -> str:
        """This scheduler, or its replacement if it is missing."""
        while scheduler in self._missing:
            scheduler = LAST_RESORT_SCHEDULER if scheduler == FALLBACK_SCHEDULER else FALLBACK_SCHEDULER
        return scheduler

    def settings(self, pool: ServerPool) -> VirtualServiceSettings:
        if pool.scheduler in self._missing:
            return VirtualServiceSettings(self._substitute(pool.scheduler), pool.persistence)
        # Without FALLBACK, a connection whose hash selects a draining real server (weight 0) is
        # refused instead of being sent to another one.
        is_hashing = pool.scheduler in ("mh", "sh")
        flags = IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_FALLBACK if is_hashing else IpvsServiceFlag(0)
        if pool.by_port:
            flags |= IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_PORT
        return VirtualServiceSettings(pool.scheduler, pool.persistence, flags)


class VirtualServices:
    """The virtual services of one agent. The constructor opens IPVS."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._schedulers = Schedulers(warn)
        self._draining: dict[VirtualService, set[RealServer]] = {}
        self._udp_cuts: list[UdpCuts] = []
        self.change_count = 0  # our IPVS requests
        self._client = _open_ipvs()

    def close(self) -> None:
        """Closes the socket; the kernel state stays."""
        self._client.close()

    def set_timeouts(self, timeouts: ConnectionTimeouts) -> None:
        """Sets the timeouts of idle connections, in seconds; 0 keeps the kernel's value."""
        if any(timeouts):
            self._client.set_timeouts(timeouts)

    def take_udp_cuts(self) -> tuple[UdpCuts, ...]:
        """The UDP flows that were cut since the last call."""
        cuts, self._udp_cuts = tuple(self._udp_cuts), []
        return cuts

    def find_drained_udp(self, plans: Iterable[ServicePortPlan]) -> Iterator[tuple[VirtualService, RealServer]]:
        """Yields real servers of UDP services that were removed but still have connections, and
        that have stopped serving.
        """
        for plan in plans:
            if plan.serving is not None:
                for virtual in plan.pools:
                    for server in self._draining.get(virtual, set()) - plan.serving:
                        yield virtual, server

    # ---- reading ---------------------------------------------------------------------------

    def read_pools(
        self, elements: frozenset[Element], owned: Container[VirtualService]
    ) -> dict[VirtualService, ServerPool]:
        """Our virtual services: those whose ownership is recorded in `elements`, and those in
        `owned`, which may be kube-proxy's, or ours if the table was lost.
        """
        self._draining.clear()
        pools: dict[VirtualService, ServerPool] = {}
        for virtual, settings in self._client.list_services():
            if ownership_element(virtual) in elements or virtual in owned:
                pools[virtual] = self._read_pool(virtual, settings)
        return pools

    def read_current_pool(self, virtual: VirtualService) -> ServerPool | None:
        """Reads one virtual service; None if it does not exist."""
        self._draining.pop(virtual, None)
        settings = self._client.read_settings(virtual)
        return None if settings is None else self._read_pool(virtual, settings)

    def _read_pool(self, virtual: VirtualService, settings: VirtualServiceSettings) -> ServerPool:
        servers = []
        for status in self._client.list_servers(virtual):
            servers.append((status.server, status.weight))
            if status.weight == 0:
                self._draining.setdefault(virtual, set()).add(status.server)
        by_port = bool(settings.flags & IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_PORT)
        # Sorted, so that it compares equal to a planned pool: the kernel's order is arbitrary.
        return ServerPool(settings.scheduler, settings.persistence, by_port, tuple(sorted(servers)))

    def check_service(self, virtual: VirtualService | None) -> bool:
        """Whether IPVS still has this virtual service, if any. If not, another program may have
        flushed IPVS or reloaded the module, so a new netlink socket is opened.
        """
        if virtual is None or self._client.read_settings(virtual) is not None:
            return True
        self._client.close()
        self._client = _open_ipvs()
        return False

    def is_idle(self, virtual: VirtualService) -> bool:
        """Whether it has no connections, neither active nor inactive."""
        return not self._client.count_connections(virtual)

    # ---- changing --------------------------------------------------------------------------

    def apply_additions(self, changes: Changes) -> dict[VirtualService, str]:
        """Creates and updates virtual services, and cuts UDP flows. A refused one does not stop the
        others; returns the errors.
        """
        # Counted before the requests: IPVS does not list a deleted real server.
        start = time.perf_counter()
        flows = self._count_flows(changes.udp_cuts)
        refused = self._apply_requests(dict(self._addition_requests(changes)))
        if flows:
            self._udp_cuts.append(UdpCuts(time.perf_counter() - start, flows))
        return refused

    def delete(self, virtuals: Collection[VirtualService]) -> None:
        """Deletes virtual services; missing ones are ignored."""
        requests = [IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, v) for v in virtuals]
        self._client.apply(requests, ALREADY_ABSENT_ERRNOS[IpvsCommand.IPVS_CMD_DEL_SERVICE])
        self.change_count += len(requests)
        for virtual in virtuals:
            self._draining.pop(virtual, None)

    def _count_flows(self, cuts: Iterable[tuple[VirtualService, RealServer]]) -> dict[int, int]:
        """The number of flows, by family, that the kernel will drop with these real servers (at the
        next packet of each flow).
        """
        flows_by_family: dict[int, int] = {}
        for virtual, cut_servers in _by_service(cuts).items():
            statuses = self._client.list_servers(virtual)
            flows = sum(status.connections for status in statuses if status.server in cut_servers)
            flows_by_family[virtual.family] = flows_by_family.get(virtual.family, 0) + flows
        return flows_by_family

    def _apply_requests(self, requests: Mapping[VirtualService, Sequence[IpvsRequest]]) -> dict[VirtualService, str]:
        """Executes requests. Returns the errors of the refused ones. A request that failed because
        of a missing scheduler is retried at once with a replacement.
        """
        pairs = [(virtual, request) for virtual, service_requests in requests.items() for request in service_requests]
        codes = self._client.try_apply([request for _, request in pairs])
        failures: dict[VirtualService, list[tuple[IpvsRequest, int]]] = {}
        for (virtual, request), code in zip(pairs, codes, strict=True):
            if code and code not in ALREADY_ABSENT_ERRNOS.get(request.command, ()):
                failures.setdefault(virtual, []).append((request, code))
        self.change_count += len(pairs) - sum(map(len, failures.values()))
        retries = self._schedulers.replace_missing(failures)
        refused = {v: _error_text(*service_requests[0]) for v, service_requests in failures.items() if v not in retries}
        return refused | self._apply_requests(retries) if retries else refused

    def _addition_requests(self, changes: Changes) -> Iterator[tuple[VirtualService, list[IpvsRequest]]]:
        """Requests by virtual service."""
        cuts = _by_service(changes.udp_cuts)
        for virtual, pool in changes.new_pools.items():
            requests = [self._service_request(IpvsCommand.IPVS_CMD_NEW_SERVICE, virtual, pool)]
            requests += [
                IpvsRequest(IpvsCommand.IPVS_CMD_NEW_DEST, virtual, server, weight) for server, weight in pool.servers
            ]
            yield virtual, requests
        for virtual, (old, new) in changes.changed_pools.items():
            requests = list(self._update_requests(virtual, old, new))
            yield virtual, [*requests, *self._delete_draining(virtual, cuts.pop(virtual, set()))]
        for virtual, servers in cuts.items():
            yield virtual, list(self._delete_draining(virtual, servers))

    def _delete_draining(self, virtual: VirtualService, servers: set[RealServer]) -> Iterator[IpvsRequest]:
        """Deletes those of these real servers at once that are draining."""
        draining = self._draining.get(virtual, set())
        for server in servers & draining:
            yield IpvsRequest(IpvsCommand.IPVS_CMD_DEL_DEST, virtual, server)
        draining -= servers

    def _update_requests(self, virtual: VirtualService, old: ServerPool, new: ServerPool) -> Iterator[IpvsRequest]:
        """Adds new real servers before it drains the removed ones."""
        draining = self._draining.setdefault(virtual, set())
        old_weights, new_weights = dict(old.servers), dict(new.servers)
        for server, weight in new.servers:
            # A real server that is still draining exists in IPVS: NEW_DEST would fail with EEXIST.
            if server not in old_weights and server not in draining:
                yield IpvsRequest(IpvsCommand.IPVS_CMD_NEW_DEST, virtual, server, weight)
            elif server in draining or old_weights[server] != weight:
                yield IpvsRequest(IpvsCommand.IPVS_CMD_SET_DEST, virtual, server, weight)
                draining.discard(server)
        for server in (old_weights.keys() | draining) - new_weights.keys():
            if server not in draining or old_weights.get(server):
                yield IpvsRequest(IpvsCommand.IPVS_CMD_SET_DEST, virtual, server, 0)
                draining.add(server)
        if not draining:
            del self._draining[virtual]
        if self._schedulers.settings(old) != self._schedulers.settings(new):
            yield self._service_request(IpvsCommand.IPVS_CMD_SET_SERVICE, virtual, new)

    def _service_request(self, command: IpvsCommand, virtual: VirtualService, pool: ServerPool) -> IpvsRequest:
        return IpvsRequest(command, virtual, settings=self._schedulers.settings(pool))

    def remove_drained(self) -> None:
        """Deletes drained real servers that have no connections left."""
        requests = []
        for virtual, servers in list(self._draining.items()):
            for status in self._client.list_servers(virtual):
                if status.server in servers and not status.connections:
                    requests.append(IpvsRequest(IpvsCommand.IPVS_CMD_DEL_DEST, virtual, status.server))
                    servers.discard(status.server)
            if not servers:
                del self._draining[virtual]
        self._client.apply(requests, ALREADY_ABSENT_ERRNOS[IpvsCommand.IPVS_CMD_DEL_DEST])


def _by_service(servers: Iterable[tuple[VirtualService, RealServer]]) -> dict[VirtualService, set[RealServer]]:
    by_service: dict[VirtualService, set[RealServer]] = {}
    for virtual, server in servers:
        by_service.setdefault(virtual, set()).add(server)
    return by_service


def _open_ipvs() -> IpvsClient:
    try:
        return IpvsClient()
    except KernelError as error:
        # Older kernels load IPVS schedulers on demand, but not ip_vs itself.
        if error.errno != errno.ENOENT or not modules.load(("ip_vs",)):
            raise
    return IpvsClient()


def _error_text(request: IpvsRequest, code: int) -> str:
    return str(KernelError(f"cannot {request}", "IPVS", os.strerror(code), code))
