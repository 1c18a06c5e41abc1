"""A kube-proxy that serves on this node when an agent of mode bpf starts: it has ended and its
rules have not, or it goes on beside.

Nothing of it is removed here: `kbpf cleanup --kube-proxy` does that when somebody says so. But two
things hold of it as of kbpf's own mode ipvs (docs/ipvs.md, "From one mode to the other"): what it
has begun while the programs are put on the devices stays its own, and for as long as its IPVS knows
connections nobody may get a port that stands for one of these.
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
"""So often IPVS is asked for its connections."""


class KubeProxyDrain:
    """base.Remains of a kube-proxy, in whatever mode it ran."""

    name = "kube-proxy"

    def __init__(self, config: Config) -> None:
        self._packet_path = config.packet_path
        self._own_device = config.ipvs_device
        self._due: float | None = None
        self._live_connections = 0

    def claim(self) -> bool:
        """See base.Remains. Rules are waited for only where a device loses packets when a program
        is put on it, which TCX does not; conntrack keeps their ports apart from ours.
        """
        if not self._packet_path:
            return False
        with contextlib.suppress(KernelError):  # what cannot be looked at is not waited for
            return _has_ipvs_state() or (tc.probe_tcx().works is not True and cleanup.has_rules())
        return False

    def drain(self, now: float) -> float | None:
        """See base.Remains. At first nothing: a packet may be on its way to it still."""
        if self._due is None:
            self._due = now + IPVS_POLL_INTERVAL_S
        if now < self._due:
            return self._due
        self._due = now + IPVS_POLL_INTERVAL_S
        if forward_rules.probe_nf_tables().works:
            conntrack_keepalive.remove_unneeded()
        self._live_connections = cleanup.count_connections(self._own_device)
        return self._due if self._live_connections else None

    def problems(self) -> tuple[str, ...]:
        """See base.Remains."""
        return (
            (f"{self._live_connections} connections go on by kube-proxy's IPVS",)
            if self._live_connections
            else ()
        )

    def close(self) -> None:
        """See base.Remains."""


def _has_ipvs_state() -> bool:
    """Whether kube-proxy leads connections by IPVS here, or has left some there."""
    if dummy.get_ifindex_or_zero(cleanup.IPVS_DEVICE):
        return True
    return bool(
        forward_rules.probe_nf_tables().works
        and conntrack_keepalive.list_kept_services(conntrack_keepalive.list_families())
    )
