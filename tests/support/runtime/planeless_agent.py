# SPDX-License-Identifier: Apache-2.0
"""`kbpf` for kernels without IPVS: a fake replaces the IPVS data plane, programs nothing, and
writes the same status. Used by tests of which data plane the agent selects, and why.
"""

from collections.abc import Collection

from kbpf.cli.app import main
from kbpf.dataplane.base import Report
from kbpf.dataplane.ipvs import plane
from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.metrics import Pause, TrafficStats, UdpCuts


class FakePlane(plane.IpvsPlane):
    """An IPVS data plane that programs nothing."""

    def open(self) -> None:
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self._reset()

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        return Report()

    def tick(self, now: float) -> float | None:
        return None

    def take_udp_cuts(self) -> tuple[UdpCuts, ...]:
        return ()

    def count_traffic(self, pause: Pause) -> TrafficStats:
        return TrafficStats()

    def close(self) -> None:
        """Does nothing."""


if __name__ == "__main__":
    plane.IpvsPlane = FakePlane  # type: ignore[misc]
    main()
