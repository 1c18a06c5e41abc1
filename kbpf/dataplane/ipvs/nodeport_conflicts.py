# SPDX-License-Identifier: Apache-2.0
"""Finds NodePorts that conflict with an exact frontend, for example with an ExternalIP that is an
address of the node.

In the desired state a NodePort is one frontend with the ANY address. In IPVS it is one virtual
service per node address, and where an exact frontend has the same address and port, the NodePort is
not served: the exact frontend is the stronger claim (policy/frontends.py). Mode bpf has the same
rule, since it looks up the exact frontend first.
"""

from kbpf.model.address import ANY4, ANY6, family_of
from kbpf.model.desired import (
    Frontend,
    FrontendAddress,
    FrontendKind,
    ServicePortKey,
    ServiceState,
)


class NodePortConflicts:
    """All frontends by address. The cost of an update is proportional to the change."""

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
        return self._affected_node_ports(old ^ new)

    def _table(self, frontend: Frontend) -> dict[FrontendAddress, ServicePortKey]:
        return self._node_ports if frontend.kind is FrontendKind.NODE_PORT else self.exact

    def _affected_node_ports(self, changed: frozenset[Frontend]) -> set[ServicePortKey]:
        affected = set()
        for frontend_address in (
            frontend.at for frontend in changed if frontend.kind is not FrontendKind.NODE_PORT
        ):
            wildcard = frontend_address._replace(
                address=ANY4 if family_of(frontend_address.address) == 4 else ANY6
            )
            if wildcard in self._node_ports:
                affected.add(self._node_ports[wildcard])
        return affected
