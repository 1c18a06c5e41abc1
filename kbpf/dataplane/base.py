# SPDX-License-Identifier: Apache-2.0
"""The interface of a data plane: all that the agent and the tests use of one."""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kbpf.model.desired import DesiredState, ServicePortKey
from kbpf.model.metrics import (
    ConnectionProbe,
    DataPlaneMetrics,
    FailingBackend,
    Pause,
    TrafficStats,
    UdpCuts,
)
from kbpf.model.objects import ServiceName
from kbpf.model.status import ModeChoice, PacketStatus


@dataclass(frozen=True, slots=True)
class Report:
    """What one apply() did, and what it could not do.

    - `writes`: number of writes by map or table.
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
    refused: Mapping[ServicePortKey, str] = field(default_factory=dict)
    degraded: Mapping[ServicePortKey, str] = field(default_factory=dict)
    examined: Collection[ServicePortKey] | None = None
    deferred: Set[ServiceName] = frozenset()
    next_apply_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PlaneStatus:
    """The state of a data plane.

    - `choice`: which data plane this is, and why.
    - `ready`: it serves all new connections. Work that the first apply() started may continue in
      the background until then.
    - `problems`: one line for each problem that is not a refused Service port.
    - `faults`: one line for each reason why not everything is served, or why the next agent would
      not find this state. Shown by /readyz.
    - `packets`: the state of the packet path; None if this data plane has none.
    """

    choice: ModeChoice
    ready: bool = True
    problems: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    packets: PacketStatus | None = None


class TickResult(NamedTuple):
    """When to call tick() next (time.monotonic; None: only after another apply()), and the passes
    that deleted UDP flows of removed backends, since the last tick().
    """

    due: float | None = None
    udp_cuts: tuple[UdpCuts, ...] = ()


class SharedAccess:
    """The part of a data plane that other threads use, also while its own thread writes. These
    methods count nothing and do nothing.
    """

    def read_metrics(self) -> DataPlaneMetrics:
        """The kernel's counters that are cheap to read. Any thread may call, one at a time."""
        return DataPlaneMetrics()

    def refresh_neighbours(self) -> None:
        """Looks for a kube-proxy on this node, if that is due. May wait for seconds. Called by the
        thread of count_traffic().
        """

    def count_traffic(self, pause: Pause) -> TrafficStats:
        """The counters that are expensive to read. Any thread may call, one at a time, also during
        read_metrics(). `pause` is called between pieces of the work.
        """
        return TrafficStats()

    def find_failing_backends(self) -> tuple[FailingBackend, ...] | None:
        """Backends that keep failing, as seen by calls at equal intervals from one thread. None if
        this is not known: nothing counts failures, or the maps cannot be read.
        """
        return None

    def probe_connections(self) -> ConnectionProbe | None:
        """Connects to a few Services and looks where that leads. None if nothing could be tried.
        Called by one thread.
        """
        return None

    def claim_socket(self, cookie: int) -> None:
        """Registers a socket (by its SO_COOKIE) that the agent is about to connect to the API
        server: of all Service addresses, only ClusterIPs are translated for it. Any thread may
        call, several at a time; never fails.
        """


class DataPlane(Protocol):
    """Programs a desired state into the kernel, in O(change). Called by one thread, except for
    maintain_host() and what `shared` has.
    """

    def open(self, coexisting: bool = False) -> None:
        """Does everything that can fail at start, and adopts the state of an earlier agent.
        `coexisting`: connections of another data plane still exist on this node
        (takeover.previous), which this one may replace once it is ready.
        """

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

    def tick(self, now: float, coexisting: bool = False) -> TickResult:
        """Does the deferred work that is due at `now` (time.monotonic). `coexisting`: as for
        open(); never True again once it was False.
        """

    def maintain_host(self, now: float) -> None:
        """Repairs settings of the node that other programs change as well, and asks what may take
        seconds, such as firewall rules; does only what is due at `now` (time.monotonic). Called
        every second or so by another thread than the other methods, between open() and close(),
        also while they run.
        """

    def status(self) -> PlaneStatus:
        """The state after the last call. Call after open()."""

    @property
    def shared(self) -> SharedAccess:
        """What other threads may use. Get it again for each use: a mode may be replaced."""

    def write_status(self, text: bytes) -> None:
        """Stores the agent's status where `kbpf inspect status` reads it."""

    def close(self) -> None:
        """Releases all descriptors. What is programmed stays in the kernel and keeps serving."""
