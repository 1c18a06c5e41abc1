# SPDX-License-Identifier: Apache-2.0
"""Reads and changes the kernel state of the IPVS data plane.

Virtual services and real servers are in IPVS, addresses on the dummy device, everything else in the
nftables table. A removed real server is drained: it stays with weight 0 until its connections have
ended.
"""

import errno
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.cleanup import ROOT_HINT, refuse_foreign_table, virtual_service_of
from kbpf.dataplane.ipvs.diff import Changes
from kbpf.dataplane.ipvs.plan import (
    Element,
    RealServer,
    ServerPool,
    SetName,
    VirtualService,
    ownership_element,
)
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import (
    ConnectionTimeouts,
    IpvsClient,
    IpvsCommand,
    IpvsServiceFlag,
    RealServerKey,
    VirtualServiceKey,
    VirtualServiceSettings,
)
from kbpf.kernel.netfilter import forward_rules, nft
from kbpf.kernel.system import modules
from kbpf.model.address import Addr, family_of
from kbpf.model.metrics import UdpCuts
from kbpf.takeover import conntrack_keepalive

FALLBACK_SCHEDULER, LAST_RESORT_SCHEDULER = "wrr", "rr"
"""The scheduler that replaces a missing one, and the one that replaces that."""
ALREADY_ABSENT_ERRNOS: Final[Mapping[IpvsCommand, frozenset[int]]] = {
    IpvsCommand.IPVS_CMD_DEL_SERVICE: frozenset((errno.ESRCH,)),
    IpvsCommand.IPVS_CMD_DEL_DEST: frozenset((errno.ENOENT, errno.ESRCH)),
}
"""The kernel's errors for an object that does not exist, and so does not have to be deleted."""


@dataclass(frozen=True, slots=True)
class KernelRefusals:
    """What the kernel refused, with its errors: addresses, and virtual services. `actual_pools`:
    what the kernel holds of these virtual services (None: nothing).
    """

    addresses: Mapping[Addr, str]
    virtuals: Mapping[VirtualService, str]
    actual_pools: Mapping[VirtualService, ServerPool | None]


class KernelState:
    """The kernel state of one agent, by its device and table. `warn` is called with warnings for
    the operator, once each.

    The constructor opens IPVS and creates the device and the table; it raises KernelError with what
    is missing.
    """

    def __init__(
        self, device: str, options: ruleset.RulesetOptions, warn: Callable[[str], None]
    ) -> None:
        self._options = options
        self._warn = warn
        self._missing_schedulers: set[str] = set()
        self._draining: dict[VirtualService, set[RealServer]] = {}
        self._table_summary: nft.TableSummary | None = None  # of the table as it was written
        self.nft_transactions = 0  # our nf_tables transactions
        self.ipvs_changes = 0  # our IPVS requests
        self._udp_cuts: list[UdpCuts] = []
        self._device_name = device
        if device in conntrack_keepalive.SERVICE_DEVICES:
            raise KernelError("the device belongs to another data plane", device,
                              "choose another name with --ipvs-device")  # fmt: skip
        self._client = _open_ipvs()
        try:
            _refuse_without_conntrack()
            self._ifindex = dummy.ensure(device)
            self.write_table()
        except KernelError:
            self._client.close()
            raise

    def set_timeouts(self, timeouts: ConnectionTimeouts) -> None:
        """Sets the timeouts of idle connections, in seconds; 0 keeps the kernel's value."""
        if any(timeouts):
            self._client.set_timeouts(timeouts)

    def close(self) -> None:
        """Closes the socket; the kernel state stays."""
        self._client.close()

    def read_node_addresses(self) -> frozenset[Addr]:
        """The node's own addresses: those on any device except ours and kube-proxy's. What
        kube-proxy has on its device belongs to Services.
        """
        _, addresses = dummy.list_addresses(self._ifindex, *conntrack_keepalive.SERVICE_DEVICES)
        return addresses

    def address_families(self) -> frozenset[int]:
        """The families whose addresses the node accepts: 4, and 6 unless it is disabled."""
        return frozenset((4, 6) if dummy.accepts_ipv6(self._device_name) else (4,))

    def take_udp_cuts(self) -> tuple[UdpCuts, ...]:
        """The UDP flows that were cut since the last call."""
        cuts, self._udp_cuts = tuple(self._udp_cuts), []
        return cuts

    def draining_servers(self, virtual: VirtualService) -> frozenset[RealServer]:
        """Real servers of this virtual service that were removed but still have connections."""
        return frozenset(self._draining.get(virtual, ()))

    # ---- reading ---------------------------------------------------------------------------

    def read_elements(self) -> frozenset[Element]:
        """The elements of the table's sets. A damaged table or a missing device is created again
        first.
        """
        self._ifindex = dummy.ensure(self._device_name)
        if not self.is_table_intact():
            self.write_table()
        return ruleset.parse_elements(
            forward_rules.run_transaction(ruleset.list_table(self._options), hint=ROOT_HINT)
        )

    def is_table_intact(self) -> bool:
        """Whether chains, rules and sets of the table are as we wrote them; another program may
        have flushed all rules. Missing elements are not detected.
        """
        return self._table_summary is not None and self._table_summary == nft.read_table(
            "inet", self._options.table
        )

    def has_device(self) -> bool:
        """Whether the device exists and is the one that we created, not another one of its name."""
        return dummy.get_ifindex_or_zero(self._device_name) == self._ifindex

    def read_addresses(self) -> frozenset[Addr]:
        """The addresses on the device."""
        return dummy.list_addresses(self._ifindex)[0]

    def read_pools(
        self, elements: frozenset[Element], owned: Container[VirtualService]
    ) -> dict[VirtualService, ServerPool]:
        """Our virtual services: those whose ownership is recorded in `elements`, and those in
        `owned`, which may be kube-proxy's, or ours if the table was lost.
        """
        self._draining.clear()
        pools: dict[VirtualService, ServerPool] = {}
        for service, settings in self._client.list_services():
            virtual = virtual_service_of(service)
            if virtual is not None and (ownership_element(virtual) in elements or virtual in owned):
                pools[virtual] = self._read_pool(virtual, service, settings)
        return pools

    def _read_current_pool(self, virtual: VirtualService) -> ServerPool | None:
        """Reads one virtual service; None if it does not exist."""
        self._draining.pop(virtual, None)
        service = VirtualServiceKey(*virtual)
        settings = self._client.read_settings(service)
        return None if settings is None else self._read_pool(virtual, service, settings)

    def _read_pool(
        self, virtual: VirtualService, service: VirtualServiceKey, settings: VirtualServiceSettings
    ) -> ServerPool:
        servers = []
        for status in self._client.list_servers(service):
            server = RealServer(*status.server)
            servers.append((server, status.weight))
            if status.weight == 0:
                self._draining.setdefault(virtual, set()).add(server)
        by_port = bool(settings.flags & IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_PORT)
        # Sorted, so that it compares equal to a planned pool: the kernel's order is arbitrary.
        return ServerPool(settings.scheduler, settings.persistence, by_port, tuple(sorted(servers)))

    def check_service(self, virtual: VirtualService | None) -> bool:
        """Whether IPVS still has this virtual service, if any. If not, another program may have
        flushed IPVS or reloaded the module, so a new netlink socket is opened.
        """
        if virtual is None or self._client.read_settings(VirtualServiceKey(*virtual)) is not None:
            return True
        self._client.close()
        self._client = _open_ipvs()
        return False

    def is_idle(self, virtual: VirtualService) -> bool:
        """Whether it has no connections, neither active nor inactive."""
        return not self._client.count_connections(VirtualServiceKey(*virtual))

    # ---- changing --------------------------------------------------------------------------

    def add_addresses(self, addresses: Iterable[Addr]) -> dict[Addr, str]:
        """Adds addresses to the device. Returns those that the kernel refused, with its errors."""
        return {
            address: str(error)
            for address, error in dummy.add_addresses(self._ifindex, addresses).items()
        }

    def write_table(self) -> None:
        """Creates what is missing of the table, and all its rules; elements are kept. Raises
        KernelError if another program owns a table of this name.
        """
        refuse_foreign_table(self._options.table)
        commands = ruleset.create_table(self._options)
        self._run_nft(commands)
        summary = nft.read_table("inet", self._options.table)
        # Another program may have flushed the table between the two calls. Then the summary must
        # not become the reference that is_table_intact() compares with.
        is_complete = summary is not None and len(summary.rules) == sum(
            "rule" in command.get("add", ()) for command in commands
        )
        self._table_summary = summary if is_complete else None

    def apply_additions(self, changes: Changes) -> KernelRefusals:
        """Executes steps 1 and 2 of the order. A refused address or virtual service does not stop
        the others. Raises KernelError if the elements are refused or the kernel does not answer.
        """
        steps, options = changes.steps(), self._options
        # One transaction: a map element or interval is replaced without a gap.
        self._run_nft(
            [
                *ruleset.delete_elements(options, steps.removed_first),
                *ruleset.add_elements(options, steps.added_first),
            ]
        )
        addresses = self.add_addresses(_virtual_ips(steps.added_first))
        # Counted before the requests: IPVS does not list a deleted real server.
        start = time.perf_counter()
        flows = self._count_flows(changes.udp_cuts)
        refused = self._apply_requests(dict(self._addition_requests(changes)))
        if flows:
            self._udp_cuts.append(UdpCuts(time.perf_counter() - start, flows))
        return KernelRefusals(
            addresses,
            refused,
            {virtual: self._read_current_pool(virtual) for virtual in refused},
        )

    def apply_removals(self, changes: Changes) -> None:
        """Executes the other steps of the order."""
        steps, options = changes.steps(), self._options
        self._run_nft(
            [
                *ruleset.delete_elements(options, steps.removed_late),
                *ruleset.add_elements(options, steps.added_late),
            ]
        )
        removed = [
            self._service_request(IpvsCommand.IPVS_CMD_DEL_SERVICE, v) for v in changes.old_pools
        ]
        self._client.apply(removed, ALREADY_ABSENT_ERRNOS[IpvsCommand.IPVS_CMD_DEL_SERVICE])
        self.ipvs_changes += len(removed)
        for virtual in changes.old_pools:
            self._draining.pop(virtual, None)
        dummy.delete_addresses(
            self._ifindex, changes.unclaimed_addresses | {*_virtual_ips(steps.removed_late)}
        )
        self._run_nft(ruleset.delete_elements(options, steps.removed_ownership))

    def _count_flows(self, cuts: Iterable[tuple[VirtualService, RealServer]]) -> dict[int, int]:
        """The number of flows, by family, that the kernel will drop with these real servers (at the
        next packet of each flow).
        """
        servers: dict[VirtualService, set[RealServer]] = {}
        for virtual, server in cuts:
            servers.setdefault(virtual, set()).add(server)
        flows_by_family: dict[int, int] = {}
        for virtual, cut_servers in servers.items():
            statuses = self._client.list_servers(VirtualServiceKey(*virtual))
            flows = sum(
                status.active_conns + status.inactive_conns
                for status in statuses
                if RealServer(*status.server) in cut_servers
            )
            family = family_of(virtual.address)
            flows_by_family[family] = flows_by_family.get(family, 0) + flows
        return flows_by_family

    def _apply_requests(
        self, requests: Mapping[VirtualService, Sequence[ipvs.IpvsRequest]]
    ) -> dict[VirtualService, str]:
        """Executes requests. Returns the errors of the refused ones. A request that failed because
        of a missing scheduler is retried at once with a replacement.
        """
        pairs = [
            (virtual, request)
            for virtual, service_requests in requests.items()
            for request in service_requests
        ]
        codes = self._client.try_apply([request for _, request in pairs])
        failures: dict[VirtualService, list[tuple[ipvs.IpvsRequest, int]]] = {}
        for (virtual, request), code in zip(pairs, codes, strict=True):
            if code and code not in ALREADY_ABSENT_ERRNOS.get(request.command, ()):
                failures.setdefault(virtual, []).append((request, code))
        self.ipvs_changes += len(pairs) - sum(map(len, failures.values()))
        retries = self._replace_missing_schedulers(failures)
        refused = {
            v: _error_text(*service_requests[0])
            for v, service_requests in failures.items()
            if v not in retries
        }
        return refused | self._apply_requests(retries) if retries else refused

    def _replace_missing_schedulers(
        self, failures: Mapping[VirtualService, Sequence[tuple[ipvs.IpvsRequest, int]]]
    ) -> dict[VirtualService, list[ipvs.IpvsRequest]]:
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
            and request.settings.scheduler not in {LAST_RESORT_SCHEDULER, *self._missing_schedulers}
        }
        self._missing_schedulers |= {*missing.values()}
        for name in sorted({*missing.values()}):
            self._warn(f"IPVS may lack the scheduler {name} (CONFIG_IP_VS_{name.upper()}): "
                       f"{self._substitute_scheduler(name)} is used instead")  # fmt: skip
        return {
            v: [self._with_available_scheduler(request) for request, _ in failures[v]]
            for v in missing
        }

    def _with_available_scheduler(self, request: ipvs.IpvsRequest) -> ipvs.IpvsRequest:
        """The request with a scheduler that the kernel has."""
        settings = request.settings
        if settings is None or settings.scheduler not in self._missing_schedulers:
            return request
        replacement = VirtualServiceSettings(
            self._substitute_scheduler(settings.scheduler), settings.persistence
        )
        return request._replace(settings=replacement)

    def _substitute_scheduler(self, scheduler: str) -> str:
        """This scheduler, or its replacement if it is missing."""
        while scheduler in self._missing_schedulers:
            scheduler = (
                LAST_RESORT_SCHEDULER if scheduler == FALLBACK_SCHEDULER else FALLBACK_SCHEDULER
            )
        return scheduler

    def _run_nft(self, commands: list[forward_rules.Json]) -> None:
        if commands:
            forward_rules.run_transaction(*commands, hint=ROOT_HINT)
            self.nft_transactions += 1

    def _addition_requests(
        self, changes: Changes
    ) -> Iterator[tuple[VirtualService, list[ipvs.IpvsRequest]]]:
        """Requests by virtual service."""
        cuts: dict[VirtualService, set[RealServer]] = {}
        for virtual, server in changes.udp_cuts:
            cuts.setdefault(virtual, set()).add(server)
        for virtual, pool in changes.new_pools.items():
            requests = [self._service_request(IpvsCommand.IPVS_CMD_NEW_SERVICE, virtual, pool)]
            requests += [
                _server_request(IpvsCommand.IPVS_CMD_NEW_DEST, virtual, server, weight)
                for server, weight in pool.servers
            ]
            yield virtual, requests
        for virtual, (old, new) in changes.changed_pools.items():
            requests = list(self._update_requests(virtual, old, new))
            yield virtual, [*requests, *self._delete_draining(virtual, cuts.pop(virtual, set()))]
        for virtual, servers in cuts.items():
            yield virtual, list(self._delete_draining(virtual, servers))

    def _delete_draining(
        self, virtual: VirtualService, servers: set[RealServer]
    ) -> Iterator[ipvs.IpvsRequest]:
        """Deletes those of these real servers at once that are draining."""
        draining = self._draining.get(virtual, set())
        for server in servers & draining:
            yield _server_request(IpvsCommand.IPVS_CMD_DEL_DEST, virtual, server)
        draining -= servers

    def _update_requests(
        self, virtual: VirtualService, old: ServerPool, new: ServerPool
    ) -> Iterator[ipvs.IpvsRequest]:
        """Adds new real servers before it drains the removed ones."""
        draining = self._draining.setdefault(virtual, set())
        old_weights, new_weights = dict(old.servers), dict(new.servers)
        for server, weight in new.servers:
            # A real server that is still draining exists in IPVS: NEW_DEST would fail with EEXIST.
            if server not in old_weights and server not in draining:
                yield _server_request(IpvsCommand.IPVS_CMD_NEW_DEST, virtual, server, weight)
            elif server in draining or old_weights[server] != weight:
                yield _server_request(IpvsCommand.IPVS_CMD_SET_DEST, virtual, server, weight)
                draining.discard(server)
        for server in (old_weights.keys() | draining) - new_weights.keys():
            if server not in draining or old_weights.get(server):
                yield _server_request(IpvsCommand.IPVS_CMD_SET_DEST, virtual, server, 0)
                draining.add(server)
        if not draining:
            del self._draining[virtual]
        if self._service_settings(old) != self._service_settings(new):
            yield self._service_request(IpvsCommand.IPVS_CMD_SET_SERVICE, virtual, new)

    def _service_request(
        self, command: IpvsCommand, virtual: VirtualService, pool: ServerPool | None = None
    ) -> ipvs.IpvsRequest:
        settings = None if pool is None else self._service_settings(pool)
        return ipvs.IpvsRequest(command, VirtualServiceKey(*virtual), settings)

    def _service_settings(self, pool: ServerPool) -> VirtualServiceSettings:
        if pool.scheduler in self._missing_schedulers:
            return VirtualServiceSettings(
                self._substitute_scheduler(pool.scheduler), pool.persistence
            )
        # Without FALLBACK, a connection whose hash selects a draining real server (weight 0) is
        # refused instead of being sent to another one.
        is_hashing = pool.scheduler in ("mh", "sh")
        flags = IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_FALLBACK if is_hashing else IpvsServiceFlag(0)
        if pool.by_port:
            flags |= IpvsServiceFlag.IP_VS_SVC_F_SCHED_SH_PORT
        return VirtualServiceSettings(pool.scheduler, pool.persistence, flags)

    def remove_drained(self) -> None:
        """Deletes drained real servers that have no connections left."""
        requests = []
        for virtual, servers in list(self._draining.items()):
            for status in self._client.list_servers(VirtualServiceKey(*virtual)):
                server = RealServer(*status.server)
                if server in servers and not status.active_conns and not status.inactive_conns:
                    requests.append(_server_request(IpvsCommand.IPVS_CMD_DEL_DEST, virtual, server))
                    servers.discard(server)
            if not servers:
                del self._draining[virtual]
        self._client.apply(requests, (errno.ENOENT, errno.ESRCH))


def _open_ipvs() -> IpvsClient:
    try:
        return IpvsClient()
    except KernelError as error:
        # Older kernels load IPVS schedulers on demand, but not ip_vs itself.
        if error.errno != errno.ENOENT or not modules.load(("ip_vs",)):
            raise
    return IpvsClient()


def _refuse_without_conntrack() -> None:
    if ipvs.supports_conntrack() is False:
        raise KernelError(
            "IPVS of this kernel cannot masquerade", f"{ipvs.CONNTRACK_SYSCTL} is missing",
            "use a kernel with CONFIG_IP_VS_NFCT, or --mode bpf",
        )  # fmt: skip


# ---- requests and errors -------------------------------------------------------------------------


def _error_text(request: ipvs.IpvsRequest, code: int) -> str:
    return str(KernelError(f"cannot {request}", "IPVS", os.strerror(code), code))


def _server_request(
    command: IpvsCommand, virtual: VirtualService, server: RealServer, weight: int = 0
) -> ipvs.IpvsRequest:
    return ipvs.IpvsRequest(
        command, VirtualServiceKey(*virtual), None, RealServerKey(*server), weight
    )


def _virtual_ips(elements: Iterable[Element]) -> list[Addr]:
    return [
        Addr(parts[0])
        for name, parts in elements
        if name is SetName.VIRTUAL_IPS and isinstance(parts[0], bytes)
    ]
