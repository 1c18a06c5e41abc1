"""What every data plane can do. The agent and the tests know no more than this."""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.metrics import DataPlaneMetrics, Pause, TrafficStats, UdpCuts
from kbpf.model.objects import ServiceName
from kbpf.model.status import ModeChoice, PacketStatus


@dataclass(frozen=True, slots=True)
class Report:
    """What one apply() did: writes by map or table, system calls, and what it could not do.

    `refused`: Service ports that are not programmed as desired, with the reason; they keep what
    they had and are tried again. `plain`: those that are served, but spread evenly instead of as
    their annotations ask. Both are the data plane's own, and change with its next apply().
    `deferred`: Services with ports that are programmed later, in slices, by calls of apply() that
    name nothing; `due` is when to call it for them (time.monotonic).
    `looked_at`: the Service ports that may have entered or left these two; None: all.
    """

    writes: Mapping[str, int] = field(default_factory=dict)
    syscalls: int = 0
    refused: Mapping[ServicePortKey, str] = field(default_factory=dict)
    degraded: Mapping[ServicePortKey, str] = field(default_factory=dict)
    examined: Collection[ServicePortKey] | None = None
    deferred: Set[ServiceName] = frozenset()
    next_apply_at: float = 0.0


class DataPlane(Protocol):
    """Makes a desired state true, in O(change). One thread calls."""

    @property
    def name(self) -> str:
        """Of the mode: "bpf" or "ipvs"."""

    def mode_choice(self) -> ModeChoice:
        """Which mode this is, and why."""

    def set_coexisting(self, coexisting: bool) -> None:
        """Told before open(), and again when it changes: whether another data plane has connections
        on this node, which go on (Remains). ready() says when this one may take its place.
        """

    def open(self) -> None:
        """Prepares everything that can fail, and adopts what an earlier agent left."""

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        authoritative: bool = True,
    ) -> Report:
        """Makes the touched Service ports as desired; None: all, and nothing else stays.

        Not `sound`: some objects could not be read, so what an earlier agent programmed and this
        desired state does not know of stays, until a call that is sound.
        """

    def invalidate(self) -> None:
        """Others may have changed what is programmed: the next apply() reads it all, and writes
        what differs.
        """

    def claim_socket(self, cookie: int) -> None:
        """The agent is about to connect the socket of this cookie (SO_COOKIE) to the API server: of
        all addresses of Services only ClusterIPs count for it. Any thread; never fails.
        """

    def tick(self, now: float) -> float | None:
        """Does what was put off and is due at `now` (time.monotonic); when to come next."""

    def take_udp_cuts(self) -> tuple[UdpCuts, ...]:
        """The looks for UDP of backends that have left, since this was asked last."""

    def is_ready(self) -> bool:
        """Whether what the first apply() began is done, and all that begins is served by this data
        plane; it may go on in the background.
        """

    def packet_status(self) -> PacketStatus | None:
        """How the packet path is doing; None where there is no such thing."""

    def problems(self) -> tuple[str, ...]:
        """What is not as it should be, a line each, though nothing was refused."""

    def faults(self) -> tuple[str, ...]:
        """What keeps it from serving all that it should, or from being found again by the next
        agent: a line each. /readyz says them.
        """

    def read_metrics(self) -> DataPlaneMetrics:
        """What is known at once of the kernel's own counting, for metrics. Any thread but one at a
        time, also while another one writes.
        """

    def count_traffic(self, pause: Pause) -> TrafficStats:
        """What takes long to count. As measure(), and beside it. `pause` is called between pieces
        of the work.
        """

    def write_status(self, text: bytes) -> None:
        """Leaves the agent's own words where `kbpf inspect status` finds them."""

    def close(self) -> None:
        """Lets go. What is programmed stays and goes on serving."""

    def remove(self) -> None:
        """Removes every trace from the kernel."""


class PreviousDataPlane(Protocol):
    """What an agent of another mode has left on this node and that still serves. One thread calls.

    `name` is that mode's.
    """

    name: str

    def claim(self) -> bool:
        """Whether there is anything; then no agent of that mode can start until close().
        KernelError while one runs.
        """

    def drain(self, now: float) -> float | None:
        """Ends what serves nobody any more: nothing new comes here, connections that live go on
        where the kernel lets them. When to come again (time.monotonic), None when nothing is left.
        """

    def problems(self) -> tuple[str, ...]:
        """What still goes on, a line each."""

    def close(self) -> None:
        """Lets go. What is there stays."""
