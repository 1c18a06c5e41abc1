# SPDX-License-Identifier: Apache-2.0
"""Take-over from a kube-proxy found when an agent in mode bpf starts.

Its process may have exited and left its rules in place, or may still be running. This module
removes nothing; `kbpf cleanup --kube-proxy` does, when the operator asks for it. As with kbpf's
own mode ipvs (docs/ipvs.md, "From one mode to the other"), two rules hold: connections that
kube-proxy begins while the programs are being attached remain its own, and as long as its IPVS has
connections, we never allocate a source port that one of them uses.
"""

import contextlib
from typing import Final

from kbpf.errors import KernelError
from kbpf.kernel.bpf import tc
from kbpf.kernel.net import dummy
from kbpf.kernel.netfilter import forward_rules
from kbpf.model.config import Config
from kbpf.takeover import cleanup, conntrack_keepalive

IPVS_POLL_INTERVAL_S: Final = 2.0
"""How often IPVS connections are counted."""


class KubeProxyDrain:
    """The base.PreviousDataPlane of a kube-proxy, in any of its modes."""

    name = "kube-proxy"

    def __init__(self, config: Config) -> None:
        self._packet_path = config.packet_path
        self._own_device = config.ipvs_device
        self._due: float | None = None
        self._live_connections = 0

    def claim(self) -> bool:
        """Whether to wait for a kube-proxy's connections: for those of its IPVS always; for those
        of its rules only if programs are not attached by TCX links, since attaching by other means
        may lose packets. (Their source ports need no care: conntrack keeps them apart from ours.)
        """
        if not self._packet_path:
            return False
        with contextlib.suppress(KernelError):  # we do not wait for state that cannot be read
            return _has_ipvs_state() or (tc.probe_tcx().works is not True and cleanup.has_rules())
        return False

    def drain(self, now: float) -> float | None:
        # Not at the first call: packets may still be on their way to kube-proxy's rules.
        if self._due is None:
            self._due = now + IPVS_POLL_INTERVAL_S
        if now < self._due:
            return self._due
        self._due = now + IPVS_POLL_INTERVAL_S
        # The table that keeps connections, and its rule in FORWARD, are in nf_tables.
        if forward_rules.probe_nf_tables().works:
            conntrack_keepalive.remove_unneeded()
        self._live_connections = cleanup.count_connections(self._own_device)
        return self._due if self._live_connections else None

    def problems(self) -> tuple[str, ...]:
        return (
            (f"{self._live_connections} connections still use kube-proxy's IPVS",)
            if self._live_connections
            else ()
        )

    def close(self) -> None:
        """Nothing to release: this class holds no lock."""


def _has_ipvs_state() -> bool:
    """Whether kube-proxy has IPVS state here, in use or kept for its last connections."""
    if dummy.get_ifindex_or_zero(cleanup.IPVS_DEVICE):
        return True
    return bool(
        forward_rules.probe_nf_tables().works
        and conntrack_keepalive.list_kept_services(conntrack_keepalive.list_families())
    )
