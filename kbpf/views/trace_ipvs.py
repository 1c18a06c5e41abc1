# SPDX-License-Identifier: Apache-2.0
"""The decisions about a connection in mode ipvs (dataplane/ipvs/plan.py). Packets decide: sockets
keep the address that they dial.
"""

from typing import Final

from kbpf.model.address import is_loopback
from kbpf.model.desired import FrontendKind
from kbpf.model.inspection import EMPTY_SET, BackendSet
from kbpf.model.reasons import Reason
from kbpf.views.trace_row import Candidate, Origin, Step
from kbpf.views.trace_steps import Target, Tracer

NOT_LOOKED_AT: Final = Step(
    "not looked at",
    "routing, netfilter and masquerading",
    "`nft list table inet kbpf` has the rules, `ipvsadm -L -n` the virtual services",
)


class IpvsTracer(Tracer):
    """Follows one connection through IPVS and the nftables table."""

    def run(self) -> Reason:
        if is_loopback(self._to.address):
            self._add("IPVS", "does not serve it", "the kernel drops packets of loopback that IPVS has translated")
            return Reason.NOT_A_SERVICE
        self.seen_by = "ipvs"
        where = "OUTPUT" if self._is_on_host else "INPUT"
        self._add("seen by", "IPVS", f"in {where}, since this node has the Service's address")
        target = self._find_target(serves_loopback=False)
        if target is None:
            return self._explain_refused_port() if self._is_virtual() else self._explain_no_frontend()
        port, frontend = target
        self.service = port.text
        self._explain_frontend(target)
        if frontend.restricted:
            self._add(
                "source ranges",
                "dropped unless they admit the client",
                "the sets `sources4` and `sources6` of the table have them",
            )
        local = self._wants_local(target, by_socket=False)
        backends = frontend.local if local else self._cluster_set(target)
        if not backends.size:
            return self._explain_no_backends(port, local)
        shares = self._list_shares(port, backends, by_socket=False)
        if port.affinity_timeout:
            self._add(
                "affinity",
                "the client's last backend again, if it has one",
                f"persistent for {port.affinity_timeout} s, by address",
            )
        self.candidates = tuple(Candidate(str(backend), round(share, 4), "") for backend, share in shares.items())
        self.steps.append(NOT_LOOKED_AT)
        return Reason.NEW_FLOW

    def _is_virtual(self) -> bool:
        """Whether the address is on the dummy device, where all other ports are refused."""
        return any(
            frontend.kind is not FrontendKind.NODE_PORT and frontend.at.address == self._to.address
            for port in self._inspection.services
            for frontend in port.frontends
        )

    def _explain_refused_port(self) -> Reason:
        self._add("frontend", "none", f"a Service's address, but none has port {self._to.port}")
        return Reason.UNKNOWN_PORT

    def _cluster_set(self, target: Target) -> BackendSet:
        """The set for clients that reach the endpoints of all nodes. With external policy Local the
        frontend's own virtual service has only local ones; the short circuit has those of the
        ClusterIP.
        """
        if target.frontend.cluster.size or not target.port.external_local:
            return target.frontend.cluster
        self._add("short circuit", "by a packet mark", "to a virtual service of its own")
        if self._client.origin is Origin.POD:
            self._add("pods", "depends on --detect-local-mode", "a pod that is not recognised gets the local set")
        sets = (frontend.cluster for frontend in target.port.frontends if frontend.cluster.size)
        return next(sets, EMPTY_SET)
