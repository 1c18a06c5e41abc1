# SPDX-License-Identifier: Apache-2.0
"""Plans Service ports with what their plans have in common: the node's addresses, fwmarks, and
which Service port has which frontend.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from kbpf.dataplane.ipvs.diff import DesiredElements
from kbpf.dataplane.ipvs.executor import KernelState
from kbpf.dataplane.ipvs.fwmarks import FwmarkAllocator
from kbpf.dataplane.ipvs.nodeport_conflicts import NodePortConflicts
from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    NODE_KEY,
    NodeContext,
    ServicePortPlan,
    SetName,
    plan_node,
    plan_service_port,
)
from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import DesiredState, Frontend, FrontendKind, ServicePortKey, ServiceState

log = logging.getLogger("kbpf.dataplane")

NO_IPV6_WARNING: Final = "IPv6 is disabled on this node: IPv6 Services are not served"


class PortPlanner:
    """Remembers which Service ports cannot be programmed as desired.

    - `refused`: the reason by Service port.
    - `refused_addresses`: addresses that the kernel does not accept on the device, with its error.
    - `unsupported_family`: Service ports of an address family that the node does not have.
    """

    def __init__(self, config: Config, elements: DesiredElements, reserved_bits: int) -> None:
        self._config, self._elements = config, elements
        self._context: NodeContext | None = None
        self._node_port_conflicts = NodePortConflicts()
        self.fwmarks = FwmarkAllocator(reserved_bits)
        self.refused: dict[ServicePortKey, str] = {}
        self.refused_addresses: dict[Addr, str] = {}
        self.unsupported_family: set[ServicePortKey] = set()

    def read_context(
        self,
        kernel: KernelState,
        desired: DesiredState,
        keys: set[ServicePortKey],
        must_read: bool,
    ) -> None:
        """Reads the node's part of a plan's input. The node's own addresses are read if `must_read`
        or if frontends have new addresses; addresses that the kernel refused are retried. Adds the
        Service ports that have to be planned again to `keys`.
        """
        for key in list(keys):
            keys |= self._node_port_conflicts.update(key, desired.services.get(key))
        old_context = self._context
        if old_context is None or must_read or self._has_new_addresses(desired, keys, old_context):
            node_addresses = kernel.read_node_addresses()
            families = kernel.address_families()
        else:
            node_addresses, families = old_context.own_addresses, old_context.families
        if self.refused_addresses:
            frontend_addresses = {
                frontend.at.address for frontend in _frontends_of(desired, self.refused)
            } - node_addresses
            self.refused_addresses = kernel.add_addresses(
                self.refused_addresses.keys() & frontend_addresses
            )
        mode = self._config.detect_local_mode
        self._context = context = NodeContext(
            desired.node_addresses,
            node_addresses,
            self._config.ipvs_scheduler,
            self._config.masquerade_all,
            bool(desired.local_networks)
            or mode in (LocalMode.BRIDGE_INTERFACE, LocalMode.INTERFACE_NAME_PREFIX),
            families,
            frozenset(self.refused_addresses),
        )
        # Plans of all Service ports depend on the context. Refused addresses concern only the
        # Service ports in `refused`, which are in `keys` already.
        if old_context is None or context != old_context._replace(
            refused_addresses=context.refused_addresses
        ):
            keys |= desired.services.keys() | (self._elements.plans.keys() - {NODE_KEY})
            for key in keys:
                self._node_port_conflicts.update(key, desired.services.get(key))

    def _has_new_addresses(
        self, desired: DesiredState, keys: Collection[ServicePortKey], context: NodeContext
    ) -> bool:
        """Whether these frontends have addresses that have not been compared with the node's
        own.
        """
        return any(
            frontend.kind is not FrontendKind.NODE_PORT
            and family_of(frontend.at.address) in context.families
            and frontend.at.address not in context.refused_addresses
            and frontend.at.address not in context.own_addresses
            and not self._elements.contains((SetName.VIRTUAL_IPS, (frontend.at.address,)))
            for frontend in _frontends_of(desired, keys)
        )

    def plan(
        self, desired: DesiredState, keys: Iterable[ServicePortKey]
    ) -> dict[ServicePortKey, ServicePortPlan]:
        """The plans of the node and of these Service ports."""
        context = self._context
        assert context is not None
        after = {NODE_KEY: plan_node(desired, context)}
        for key in sorted(keys):
            state = desired.services.get(key)
            self.refused.pop(key, None)
            self.unsupported_family.discard(key)
            if state is None:
                self.fwmarks.release(key)
                after[key] = EMPTY_PLAN
            else:
                after[key] = plan_service_port(
                    state, context, self.fwmarks.allocate(state), self._node_port_conflicts.exact
                )
                self._record_unsupported(state, context)
        return after

    def _record_unsupported(self, state: ServiceState, context: NodeContext) -> None:
        """Records a Service port that the node or its kernel does not support."""
        if state.key.family not in context.families:
            if not self.unsupported_family:
                log.warning("%s", NO_IPV6_WARNING)
            self.unsupported_family.add(state.key)
        elif context.refused_addresses:
            for frontend in state.frontends:
                if frontend.at.address in context.refused_addresses:
                    self.refused[state.key] = self.refused_addresses[frontend.at.address]

    def find_refused(self) -> list[ServicePortKey]:
        """The Service ports with addresses that the kernel has refused since read_context(). Their
        next plans are without these addresses.
        """
        assert self._context is not None
        addresses = frozenset(self.refused_addresses)
        if addresses <= self._context.refused_addresses:
            return []
        self._context = self._context._replace(refused_addresses=addresses)
        elements = {(SetName.VIRTUAL_IPS, (address,)) for address in addresses}
        return [
            key
            for key, plan in self._elements.plans.items()
            if not plan.elements.isdisjoint(elements)
        ]


def _frontends_of(desired: DesiredState, keys: Iterable[ServicePortKey]) -> Iterator[Frontend]:
    """The frontends of these Service ports; those that are not desired are skipped."""
    for key in keys:
        state = desired.services.get(key)
        if state is not None:
            yield from state.frontends
