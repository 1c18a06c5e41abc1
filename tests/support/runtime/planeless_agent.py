# SPDX-License-Identifier: Apache-2.0
"""`kbpf` for kernels without IPVS: a fake replaces the IPVS data plane, programs nothing, and
writes the same status. Used by tests of which data plane the agent selects, and why.
"""

from collections.abc import Collection

from kbpf.cli.app import main
from kbpf.dataplane.base import Report, SharedAccess, TickResult
from kbpf.dataplane.ipvs import plane
from kbpf.model.desired import DesiredState, ServicePortKey


class FakePlane(plane.IpvsPlane):
    """An IPVS data plane that programs nothing."""

    def open(self, coexisting: bool = False) -> None:
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self._reset()
        self.shared = SharedAccess()  # type: ignore[assignment]

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        return Report()

    def tick(self, now: float, coexisting: bool = False) -> TickResult:
        return TickResult()

    def maintain_host(self, now: float) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


if __name__ == "__main__":
    plane.IpvsPlane = FakePlane  # type: ignore[misc]
    main()
