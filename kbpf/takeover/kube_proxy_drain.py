# SPDX-License-Identifier: Apache-2.0
"""Take-over from a kube-proxy found when an agent in mode bpf starts.

Its process may have exited and left its rules in place, or may still be running. This module
removes nothing; `kbpf cleanup --kube-proxy` does, when the operator asks for it. As with kbpf's
own mode ipvs (docs/ipvs.md, "From one mode to the other"), two rules hold: connections that
kube-proxy begins while the programs are being attached remain its own, and as long as its IPVS has
connections, we never allocate a source port that one of them uses.
"""

import contextlib

from kbpf.errors import KernelError
from kbpf.kernel.bpf import tc
from kbpf.kernel.net import dummy
from kbpf.kernel.netfilter import forward_rules
from kbpf.takeover import conntrack_keepalive
from kbpf.takeover import kube_proxy_cleanup as cleanup
from kbpf.takeover.previous import PreviousDataPlane


class KubeProxyDrain(PreviousDataPlane):
    """A kube-proxy, in any of its modes. It has no lock, and nothing of it is removed."""

    name = "kube-proxy"
    connections = "connections still use kube-proxy's IPVS"

    def claim(self) -> bool:
        """Whether to wait for a kube-proxy's connections: for those of its IPVS always; for those
        of its rules only if programs are not attached by TCX links, since attaching by other means
        may lose packets. (Their source ports are reserved: packet_path/snat_ports.py.)
        """
        if not self._config.packet_path:
            return False
        with contextlib.suppress(KernelError):  # we do not wait for state that cannot be read
            return _has_ipvs_state() or (tc.probe_tcx().works is not True and cleanup.has_rules())
        return False

    def _remove_idle(self) -> int:
        # The table that keeps connections, and its rule in FORWARD, are in nf_tables.
        if forward_rules.probe_nf_tables().works:
            conntrack_keepalive.remove_unneeded()
        return cleanup.count_connections()

    def _remove(self) -> None:
        pass


def _has_ipvs_state() -> bool:
    """Whether kube-proxy has IPVS state here, in use or kept for its last connections."""
    if dummy.get_ifindex_or_zero(cleanup.KUBE_PROXY_DEVICE):
        return True
    return bool(
        forward_rules.probe_nf_tables().works
        and conntrack_keepalive.list_kept_services(conntrack_keepalive.list_families())
    )
