"""ClusterIPs, of which a port that no Service has refuses: what the map `cluster_ips` holds."""

from collections import Counter
from collections.abc import Collection, Iterable

from kbpf.dataplane.bpf.plan import Programmed
from kbpf.model.address import Addr
from kbpf.model.desired import FrontendKind


class ClusterIps:
    """How many frontends each has, and which of them the map holds."""

    def __init__(self, owners: Iterable[Programmed] = (), held: Iterable[Addr] = ()) -> None:
        self._counts = _counted(owners)
        self._held = set(held)

    def __len__(self) -> int:
        """How many the map holds."""
        return len(self._held)

    def change(
        self, before: Iterable[Programmed], after: Iterable[Programmed], everything: bool
    ) -> tuple[set[Addr], set[Addr]]:
        """Those that come and those that go when these Service ports become those. `everything`:
        what the map holds is not known to be right, so all of it is looked at.
        """
        change = _counted(after)
        change.subtract(_counted(before))
        for address, count in change.items():
            self._counts[address] += count
            if not self._counts[address]:
                del self._counts[address]
        seen: Collection[Addr] = self._counts.keys() | self._held if everything else change
        new = {a for a in seen if a in self._counts and a not in self._held}
        gone = {a for a in seen if a in self._held and a not in self._counts}
        return new, gone

    def written(self, new: set[Addr], gone: set[Addr]) -> None:
        """The map has changed so."""
        self._held |= new
        self._held -= gone


def _counted(owners: Iterable[Programmed]) -> Counter[Addr]:
    return Counter(
        f.at.address for o in owners for f in o.frontends if f.kind is FrontendKind.CLUSTER_IP
    )
