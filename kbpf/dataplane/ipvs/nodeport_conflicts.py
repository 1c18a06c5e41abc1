"""Where a NodePort meets an exact frontend: an ExternalIP, say, that is an address of the node.

Policy has settled who has which frontend, and a NodePort is one for all addresses. Here it is many,
and at an address where an exact frontend stands on its port it gives way: the exact one is the
stronger claim (policy/frontends.py), and mode bpf looks for it first.
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
    """All frontends, by what they stand on. A change costs the change."""

    def __init__(self) -> None:
        self.exact: dict[FrontendAddress, ServicePortKey] = {}
        self._node_ports: dict[FrontendAddress, ServicePortKey] = {}
        self._by_key: dict[ServicePortKey, frozenset[Frontend]] = {}

    def update(self, key: ServicePortKey, state: ServiceState | None) -> set[ServicePortKey]:
        """These are its frontends now; whose NodePorts may come back or give way by that."""
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
