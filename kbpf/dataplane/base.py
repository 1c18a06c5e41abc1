# SPDX-License-Identifier: Apache-2.0
"""The interface of a data plane: all that the agent and the tests use of one."""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.metrics import DataPlaneMetrics, Pause, TrafficStats, UdpCuts
from kbpf.model.objects import ServiceName
from kbpf.model.status import ModeChoice, PacketStatus


@dataclass(frozen=True, slots=True)
class Report:
    """What one apply() did, and what it could not do.

    - `writes`: number of writes by map or table; `syscalls`: number of system calls.
    - `refused`: Service ports that are not programmed as desired, with the reason. They keep what
      they had and are retried.
    - `degraded`: Service ports that are served but spread evenly, instead of as their annotations
      ask, with the reason.
    - `examined`: the Service ports that may have entered or left `refused` or `degraded`;
      None: all of them.
    - `deferred`: Services with ports that are programmed later, a part at a time, by calls of
      apply() without touched Service ports. `next_apply_at`: when to make the next such call
      (time.monotonic).

    `refused` and `degraded` belong to the data plane, which updates them in its next apply().
    """

    writes: Mapping[str, int] = field(default_factory=dict)
    syscalls: int = 0
    refused: Mapping[ServicePortKey, str] = field(default_factory=dict)
    degraded: Mapping[ServicePortKey, str] = field(default_factory=dict)
    examined: Collection[ServicePortKey] | None = None
    deferred: Set[ServiceName] = frozenset()
    next_apply_at: float = 0.0


class DataPlane(Protocol):
    """Programs a desired state into the kernel, in O(change). Called by one thread."""

    @property
    def name(self) -> str:
        """The mode: "bpf" or "ipvs"."""

    def mode_choice(self) -> ModeChoice:
        """Which mode this is, and why."""

    def set_coexisting(self, coexisting: bool) -> None:
        """Sets whether connections of another data plane still exist on this node
        (takeover.previous). Called before open(), and again when it changes. is_ready() says when
        this data plane may take its place.
        """

    def open(self) -> None:
        """Does everything that can fail at start, and adopts the state of an earlier agent."""

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        """Programs the touched Service ports as desired. With None, programs all of them and
        removes everything else.

        `authoritative` is False if some objects could not be read: state of an earlier agent that
        is not in `desired` is then kept until the next authoritative call.
        """

    def invalidate(self) -> None:
        """Marks the programmed state as unknown, since another program may have changed it: the
        next apply() reads it back and writes the difference.
        """

    def claim_socket(self, cookie: int) -> None:
        """Registers a socket (by its SO_COOKIE) that the agent is about to connect to the API
        server: of all Service addresses, only ClusterIPs are translated for it. Any thread may
        call; never fails.
        """

    def tick(self, now: float) -> float | None:
        """Does the deferred work that is due at `now`; returns when to call next
        (time.monotonic).
        """

    def take_udp_cuts(self) -> tuple[UdpCuts, ...]:
        """The passes that deleted UDP flows of removed backends, since the last call."""

    def is_ready(self) -> bool:
        """Whether this data plane serves all new connections. Work that the first apply() started
        may continue in the background until then.
        """

    def packet_status(self) -> PacketStatus | None:
        """The state of the packet path; None if this data plane has none."""

    def problems(self) -> tuple[str, ...]:
        """One line for each problem that is not a refused Service port."""

    def faults(self) -> tuple[str, ...]:
        """One line for each reason why not everything is served, or why the next agent would not
        find this state. Shown by /readyz.
        """

    def read_metrics(self) -> DataPlaneMetrics:
        """The kernel's counters that are cheap to read. Any thread may call, one at a time, also
        while another thread writes.
        """

    def count_traffic(self, pause: Pause) -> TrafficStats:
        """The counters that are expensive to read. Same threading rules as read_metrics(), and may
        run concurrently with it. `pause` is called between pieces of the work.
        """

    def write_status(self, text: bytes) -> None:
        """Stores the agent's status where `kbpf inspect status` reads it."""

    def close(self) -> None:
        """Releases all descriptors. What is programmed stays in the kernel and keeps serving."""

    def remove(self) -> None:
        """Removes everything of kbpf from the kernel."""
