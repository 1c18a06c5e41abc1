# SPDX-License-Identifier: Apache-2.0
"""Plans Service ports with what their plans have in common: the node's addresses, fwmarks, and
which Service port has which frontend.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from kbpf.dataplane.ipvs.diff import DesiredElements
from kbpf.dataplane.ipvs.executor import KernelState
from kbpf.dataplane.ipvs.plan import (
    EMPTY_PLAN,
    NODE_KEY,
    Element,
    ElementField,
    NodeContext,
    ServicePortPlan,
    SetName,
    external_frontend_keys,
    needs_fwmark,
    plan_node,
    plan_service_port,
)
from kbpf.model.address import ANY, Addr, family_of
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import (
    DesiredState,
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
)

log = logging.getLogger("kbpf.dataplane")

NO_IPV6_WARNING: Final = "IPv6 is disabled on this node: IPv6 Services are not served"
FIRST_FWMARK: Final = 0x6B620000
"""Fwmarks count up from here (ASCII "kb"); numbers that contain the masquerade bit are skipped."""


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
            self.refused_addresses = kernel.add_addresses(self.refused_addresses.keys() & frontend_addresses)
        mode = self._config.detect_local_mode
        self._context = context = NodeContext(
            desired.node_addresses,
            node_addresses,
            self._config.ipvs_scheduler,
            self._config.masquerade_all,
            bool(desired.local_networks) or mode in (LocalMode.BRIDGE_INTERFACE, LocalMode.INTERFACE_NAME_PREFIX),
            families,
            frozenset(self.refused_addresses),
        )
        # Plans of all Service ports depend on the context. Refused addresses concern only the
        # Service ports in `refused`, which are in `keys` already.
        if old_context is None or context != old_context._replace(refused_addresses=context.refused_addresses):
            keys |= desired.services.keys() | (self._elements.plans.keys() - {NODE_KEY})
            for key in keys:
                self._node_port_conflicts.update(key, desired.services.get(key))

    def _has_new_addresses(self, desired: DesiredState, keys: Collection[ServicePortKey], context: NodeContext) -> bool:
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

    def plan(self, desired: DesiredState, keys: Iterable[ServicePortKey]) -> dict[ServicePortKey, ServicePortPlan]:
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
        return [key for key, plan in self._elements.plans.items() if not plan.elements.isdisjoint(elements)]


def _frontends_of(desired: DesiredState, keys: Iterable[ServicePortKey]) -> Iterator[Frontend]:
    """The frontends of these Service ports; those that are not desired are skipped."""
    for key in keys:
        state = desired.services.get(key)
        if state is not None:
            yield from state.frontends


# ---- fwmarks of short circuits -------------------------------------------------------------------


class FwmarkAllocator:
    """Which Service port has which fwmark. A fwmark is never given to another Service port, since
    packets may still carry it.

    `unneeded`: fwmarks of short circuits that are kept only until they have no connections.
    """

    def __init__(self, reserved_bits: int) -> None:
        """`reserved_bits`: bits of a mark that have another meaning."""
        self._reserved_bits = reserved_bits
        self._by_key: dict[ServicePortKey, int] = {}
        self._used: set[int] = set()
        self.unneeded: dict[ServicePortKey, int] = {}
        # Fwmarks of an earlier agent, by frontend.
        self._adopted: dict[tuple[ElementField, ...], int] = {}
        self._last_fwmark = FIRST_FWMARK

    def adopt(self, elements: Iterable[Element]) -> None:
        """Adopts the fwmarks in these sets, so that they keep their meaning."""
        self._adopted.clear()
        for name, parts in elements:
            fwmark = parts[-1]
            if name in (SetName.FWMARKS, SetName.OWN_FWMARKS) and isinstance(fwmark, int):
                self._last_fwmark = max(self._last_fwmark, fwmark)
                is_free = fwmark not in self._used and not fwmark & self._reserved_bits
                if name is SetName.FWMARKS and is_free:
                    self._adopted[parts[:-1]] = fwmark

    def allocate(self, state: ServiceState) -> int:
        """Returns the fwmark of a Service port's short circuit; 0 if it has none.

        A fwmark that the Service port no longer needs becomes `unneeded`. It is kept until
        release(), or until the Service port has no external frontends any more.
        """
        key, is_needed = state.key, needs_fwmark(state)
        if not external_frontend_keys(state):
            self.release(key)
            return 0
        fwmark = self._by_key.get(key) or self._take_adopted(state) or (self._next_fwmark() if is_needed else 0)
        if fwmark:
            self._by_key[key] = fwmark
            self._used.add(fwmark)
        if fwmark and not is_needed:
            self.unneeded[key] = fwmark
        else:
            self.unneeded.pop(key, None)
        return fwmark

    def find(self, key: ServicePortKey) -> int:
        """The fwmark that the Service port has; 0 if it has none."""
        return self._by_key.get(key, 0)

    def release(self, key: ServicePortKey) -> None:
        """Frees the fwmark: the Service port or its short circuit was removed."""
        self._used.discard(self._by_key.pop(key, 0))
        self.unneeded.pop(key, None)

    def _take_adopted(self, state: ServiceState) -> int:
        """The adopted fwmark that most of its frontends had; 0 if there is none, or if another
        Service port has it by now.
        """
        counts = Counter(self._adopted.pop(frontend_key, 0) for frontend_key in external_frontend_keys(state))
        free = counts.keys() - self._used - {0}
        return min(free, key=lambda fwmark: (-counts[fwmark], fwmark), default=0)

    def _next_fwmark(self) -> int:
        self._last_fwmark += 1
        # Rounds up past the block of numbers that have the reserved bit set.
        while reserved := self._last_fwmark & self._reserved_bits:
            shift = reserved.bit_length()
            self._last_fwmark = (self._last_fwmark >> shift) + 1 << shift
        return self._last_fwmark


# ---- NodePorts and exact frontends ---------------------------------------------------------------


class NodePortConflicts:
    """Finds NodePorts that conflict with an exact frontend, for example with an ExternalIP that is
    an address of the node. It has all frontends by address; an update costs as much as the change.

    In the desired state a NodePort is one frontend with the ANY address. In IPVS it is one virtual
    service per node address, and where an exact frontend has the same address and port, the
    NodePort is not served: the exact frontend is the stronger claim (policy/frontends.py). Mode bpf
    has the same rule, since it looks up the exact frontend first.
    """

    def __init__(self) -> None:
        self.exact: dict[FrontendAddress, ServicePortKey] = {}
        self._node_ports: dict[FrontendAddress, ServicePortKey] = {}
        self._by_key: dict[ServicePortKey, frozenset[Frontend]] = {}

    def update(self, key: ServicePortKey, state: ServiceState | None) -> set[ServicePortKey]:
        """Replaces the frontends of a Service port. Returns the Service ports whose NodePorts are
        affected and must be planned again.
        """
        old = self._by_key.pop(key, frozenset())
        new = frozenset() if state is None else frozenset(state.frontends)
        if new:
            self._by_key[key] = new
        for frontend in old - new:
            table = self._table(frontend)
            if table.get(frontend.at) == key:
                del table[frontend.at]
        for frontend in new - old:
            self._table(frontend)[frontend.at] = key
        return {
            self._node_ports[wildcard]
            for frontend in old ^ new
            if frontend.kind is not FrontendKind.NODE_PORT
            and (wildcard := frontend.at._replace(address=ANY[family_of(frontend.at.address)])) in self._node_ports
        }

    def _table(self, frontend: Frontend) -> dict[FrontendAddress, ServicePortKey]:
        return self._node_ports if frontend.kind is FrontendKind.NODE_PORT else self.exact
