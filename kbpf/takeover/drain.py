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

LOOK_SECONDS: Final = 2.0
"""So often IPVS is asked for its connections."""


class KubeProxyRemains:
    """base.Remains of a kube-proxy, in whatever mode it ran."""

    name = "kube-proxy"

    def __init__(self, config: Config) -> None:
        self._packet_path = config.packet_path
        self._own = config.ipvs_device
        self._due: float | None = None
        self._live = 0

    def take(self) -> bool:
        """See base.Remains. Rules are waited for only where a device loses packets when a program
        is put on it, which TCX does not; conntrack keeps their ports apart from ours.
        """
        if not self._packet_path:
            return False
        with contextlib.suppress(KernelError):  # what cannot be looked at is not waited for
            return _has_ipvs() or (tc.tcx().works is not True and cleanup.has_rules())
        return False

    def retire(self, now: float) -> float | None:
        """See base.Remains. At first nothing: a packet may be on its way to it still."""
        if self._due is None:
            self._due = now + LOOK_SECONDS
        if now < self._due:
            return self._due
        self._due = now + LOOK_SECONDS
        if forward_rules.available().works:
            conntrack_keepalive.end()
        self._live = cleanup.connections(self._own)
        return self._due if self._live else None

    def problems(self) -> tuple[str, ...]:
        """See base.Remains."""
        return (f"{self._live} connections go on by kube-proxy's IPVS",) if self._live else ()

    def close(self) -> None:
        """See base.Remains."""


def _has_ipvs() -> bool:
    """Whether kube-proxy leads connections by IPVS here, or has left some there."""
    if dummy.index_or_zero(cleanup.DEVICE):
        return True
    return bool(
        forward_rules.available().works and conntrack_keepalive.kept(conntrack_keepalive.there())
    )
