"""The IPVS data plane: adopts, plans, carries out, drains.

What it has made is known by the kernel alone: the sets OWN and OWN_MARKS of its table name every
virtual service of its own before that is there and until it is gone, so whatever kills an agent,
the next one finds what there is, and never touches what others have made.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from kbpf.dataplane.base import Report
from kbpf.dataplane.ipvs import measure, traces
from kbpf.dataplane.ipvs.holdings import Holdings
from kbpf.dataplane.ipvs.ledger import Changes, Ledger
from kbpf.dataplane.ipvs.marks import Marks
from kbpf.dataplane.ipvs.notes import Notes
from kbpf.dataplane.ipvs.plan import (
    NODE,
    NOTHING,
    Element,
    End,
    Ground,
    Programmed,
    SetName,
    Virtual,
    program,
    program_node,
)
from kbpf.errors import KernelError
from kbpf.kernel import netfilter, sysctl
from kbpf.model.address import Addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import DesiredState, FrontendKind, ServicePortKey, ServiceState
from kbpf.model.measures import Measures, Pause, Traffic
from kbpf.model.status import ModeChoice, PacketStatus

log = logging.getLogger("kbpf.dataplane")

SYSCTLS: Final = {
    "net.ipv4.vs.conntrack": "1",  # masquerading needs it
    "net.ipv4.vs.expire_nodest_conn": "1",  # a connection ends with its real server
    "net.ipv4.vs.expire_quiescent_template": "1",  # affinity does, when it is drained
}
STRICT_ARP: Final = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}
FORWARDING: Final = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
LOOK_SECONDS: Final = 2.0
"""So often drained real servers are asked whether they still have connections, and the table is
looked after."""


class IpvsPlane:
    """DataPlane on IPVS and nftables. See base.DataPlane for the verbs."""

    name = "ipvs"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._style = traces.style_of(config)
        self._state = config.state_dir / config.ipvs_device
        self._lock = -1
        self._told: dict[str, None] = {}
        self._clear()

    def choice(self) -> ModeChoice:
        """See base.DataPlane."""
        return ModeChoice(self.name, self.name)

    def _clear(self) -> None:
        self._ledger = Ledger()
        self._notes = Notes(self._state)
        self._ground: Ground | None = None
        self._marks = Marks(but=self._style.mark)
        self._look_due = 0.0
        self._generation = -1
        self._settled = False  # whether what the kernel holds is what the ledger says

    def follow(self, other: bool) -> None:
        """See base.DataPlane. BPF's programs know their own connections, and see packets first."""

    # ---- opening ---------------------------------------------------------------------------

    def open(self) -> None:
        """Makes the table and the device, or takes those that are there. KernelError says what
        is missing.
        """
        self._lock = traces.lock(self._state)
        try:
            self._held = Holdings(self._config.ipvs_device, self._style, self._tell)
        except KernelError:
            os.close(self._lock)
            self._lock = -1
            raise
        self._set_sysctls()
        self._clear()
        log.info("opened device=%s table=%s", self._config.ipvs_device, self._style.table)

    def _set_sysctls(self) -> None:
        wanted = SYSCTLS | (STRICT_ARP if self._config.strict_arp else {})
        for name, value in wanted.items():
            try:
                if sysctl.read(name) != value:
                    sysctl.write(name, value)
            except KernelError as error:
                self._tell(str(error))
        for name in FORWARDING:
            with contextlib.suppress(KernelError):
                if sysctl.read(name) == "0":
                    self._tell(f"{name} is 0: this node forwards nothing to pods; set it to 1")

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told[line] = None
            log.warning("%s", line)

    # ---- applying --------------------------------------------------------------------------

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        sound: bool = True,
    ) -> Report:
        """See base.DataPlane. After a KernelError the next call reads again what the kernel holds,
        and makes good what is missing.
        """
        settled, self._settled = self._settled, False
        elements = frozenset[Element]() if settled else self._read_elements()
        everything = set(desired.services) | (self._ledger.by_key.keys() - {NODE})
        keys = everything if touched is None else set(touched)
        ground = self._look_at_ground(desired, keys)
        if ground != self._ground:
            keys, self._ground = everything, ground
        after = self._program(desired, keys, ground)
        changes = self._ledger.change(after)
        if not settled:
            changes = self._difference(elements, sound)
        changes.cut.update(self._cut_drained(after))
        report = self._held.carry_out(changes)
        self._settled = settled or sound
        return report

    def doubt(self) -> None:
        """See base.DataPlane."""
        self._settled = False

    def _look_at_ground(self, desired: DesiredState, keys: Collection[ServicePortKey]) -> Ground:
        """The node's own addresses are looked at when there are new ones among the frontends."""
        own = self._ground.own_addresses if self._ground is not None else None
        if own is None or any(self._is_new(desired.services.get(key), own) for key in keys):
            own = self._held.own_addresses()
        mode = self._config.detect_local_mode
        return Ground(
            desired.node_addresses,
            own,
            self._config.ipvs_scheduler,
            self._config.masquerade_all,
            bool(desired.local_networks) or mode in (LocalMode.BRIDGE, LocalMode.PREFIX),
        )

    def _is_new(self, state: ServiceState | None, own: frozenset[Addr]) -> bool:
        return state is not None and any(
            f.kind is not FrontendKind.NODE_PORT
            and not self._ledger.holds((SetName.VIRTUAL_IPS, (f.at.address,)))
            and f.at.address not in own
            for f in state.frontends
        )

    def _program(
        self, desired: DesiredState, keys: Iterable[ServicePortKey], ground: Ground
    ) -> dict[ServicePortKey, Programmed]:
        after = {NODE: program_node(desired, ground)}
        for key in sorted(keys):
            state = desired.services.get(key)
            self._notes.note(key, state)
            if state is None:
                self._marks.drop(key)
                after[key] = NOTHING
            else:
                after[key] = program(state, ground, self._marks.of(state))
        return after

    def _cut_drained(
        self, after: Mapping[ServicePortKey, Programmed]
    ) -> Iterator[tuple[Virtual, End]]:
        """UDP that is drained, and whose real server has now stopped serving."""
        for programmed in after.values():
            for virtual in programmed.pools if programmed.serving is not None else ():
                for end in self._held.draining(virtual) - (programmed.serving or set()):
                    yield virtual, end

    def _read_elements(self) -> frozenset[Element]:
        """Marks of short circuits go on meaning what they meant."""
        elements = self._held.elements()
        self._marks.adopt(elements)
        return elements

    def _difference(self, elements: frozenset[Element], sound: bool) -> Changes:
        """What the kernel lacks, or has too much, where its sets hold these."""
        return self._ledger.difference(*self._held.pools(elements, self._ledger.pools), sound)

    # ---- later -----------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Removes drained real servers that have no connections any more, and makes good what
        others have destroyed; when to come next.
        """
        if now >= self._look_due:
            self._look_due = now + LOOK_SECONDS
            self._held.drain()
            self._repair()
        return self._look_due

    def _repair(self) -> None:
        """Somebody may have flushed all rules. A look at a ruleset that nobody changed is one
        message to the kernel.
        """
        generation = netfilter.generation()
        if not self._settled or generation == self._generation:
            return
        if not self._held.has_table():
            log.warning("the nftables table has vanished and is made anew table=%s",
                        self._style.table)  # fmt: skip
            self._settled = False
            self._held.carry_out(self._difference(self._read_elements(), True))
            self._settled = True
        for chain in netfilter.forward_chains():
            if done := netfilter.let_pass(chain, self._style.mark):
                log.info("%s chain=%r mark=%#x", done, str(chain), self._style.mark)
        self._generation = generation

    def ready(self) -> bool:
        """Nothing goes on in the background."""
        return True

    def packet_status(self) -> PacketStatus | None:
        """There is no packet path of BPF."""
        return None

    def problems(self) -> tuple[str, ...]:
        """What was said once."""
        return tuple(self._told)

    def measure(self) -> Measures:
        """See base.DataPlane."""
        return Measures()

    def count(self, pause: Pause) -> Traffic:
        """See base.DataPlane."""
        return measure.count(dict(self._ledger.by_key), pause)

    def write_status(self, text: bytes) -> None:
        """Into the state folder, with the names of what is programmed."""
        self._notes.write(text)

    def close(self) -> None:
        """See base.DataPlane."""
        if self._lock >= 0:
            self._held.close()
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """See base.DataPlane."""
        self.close()
        traces.remove(self._config)
