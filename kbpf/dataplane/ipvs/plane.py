"""The IPVS data plane: adopts, plans, carries out, drains.

What it has made is known by the kernel alone: the sets OWN and OWN_MARKS of its table name every
virtual service of its own before that is there and until it is gone, so whatever kills an agent,
the next one finds what there is, and never touches what others have made. MARKS says whose short
circuit has which mark.
"""

import contextlib
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import Final

from kbpf.dataplane import firewalls
from kbpf.dataplane.base import Report
from kbpf.dataplane.ipvs import cleanup, ignored_settings, metrics
from kbpf.dataplane.ipvs.diff import Changes, Ledger
from kbpf.dataplane.ipvs.executor import Holdings
from kbpf.dataplane.ipvs.fwmarks import Marks
from kbpf.dataplane.ipvs.nodeport_conflicts import Overlaps
from kbpf.dataplane.ipvs.plan import (
    NODE,
    NOTHING,
    Element,
    End,
    Ground,
    Programmed,
    SetName,
    Virtual,
    marked,
    noted,
    program,
    program_node,
    unmarked,
)
from kbpf.dataplane.ipvs.stale_names import Former
from kbpf.dataplane.ipvs.statefile import Notes
from kbpf.errors import KernelError
from kbpf.kernel.net.ipvs import Times
from kbpf.kernel.netfilter import forward_rules
from kbpf.kernel.system import sysctl
from kbpf.model.address import Addr, family_of
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import (
    DesiredState,
    Frontend,
    FrontendKind,
    ServicePortKey,
    ServiceState,
)
from kbpf.model.metrics import Ended, Measures, Pause, Traffic
from kbpf.model.status import ModeChoice, PacketStatus
from kbpf.takeover import conntrack_keepalive

log = logging.getLogger("kbpf.dataplane")

SYSCTLS: Final = {
    "net.ipv4.vs.conntrack": "1",  # masquerading needs it
    "net.ipv4.vs.expire_nodest_conn": "1",  # a connection ends with its real server
    "net.ipv4.vs.expire_quiescent_template": "1",  # affinity does, when it is drained
}
STRICT_ARP: Final = {"net.ipv4.conf.all.arp_ignore": "1", "net.ipv4.conf.all.arp_announce": "2"}
FORWARDING: Final = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
NO_IPV6: Final = "IPv6 is switched off on this node: Services have no IPv6 here"
LOOK_SECONDS: Final = 2.0
"""So often drained real servers are asked whether they still have connections, and the table is
looked after."""
HANDOVER_SECONDS: Final = 30.0
"""Between two looks at whether the last connection of a kube-proxy has ended."""


class IpvsPlane:
    """DataPlane on IPVS and nftables. See base.DataPlane for the verbs."""

    name = "ipvs"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._style = cleanup.style_of(config)
        self._state = config.state_dir / config.ipvs_device
        self._lock = -1
        self._former: Former | None = None
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
        self._handover_due = 0.0
        self._seen = (-1, 0)  # of nf_tables: its generation, and transactions of ours until then
        self._overlaps = Overlaps()
        self._desired = DesiredState({})  # of the last apply()
        self._refused: dict[ServicePortKey, str] = {}
        self._owed: set[ServicePortKey] = set()  # of an apply() that has failed
        self._foreign: set[ServicePortKey] = set()  # of a family that the node does not have
        self._barred: dict[Addr, str] = {}  # what the kernel does not take at the device
        self._firewalls: tuple[str, ...] = ()  # what is said of them
        self._true = False  # whether the kernel holds what the ledger says
        self._whole = False  # whether nothing of an earlier agent is left that nobody wants
        self._left: frozenset[Virtual] = frozenset()  # what is, until then
        self._begun = False  # whether anything was ever applied

    def follow(self, other: bool) -> None:
        """See base.DataPlane. BPF's programs know their own connections, and see packets first."""

    # ---- opening ---------------------------------------------------------------------------

    def open(self) -> None:
        """Makes the table and the device, or takes those that are there. KernelError says what
        is missing.
        """
        is_new = not self._state.exists()
        self._lock = cleanup.lock(self._state)
        try:
            self._former = Former(self._config)
            self._held = Holdings(self._config.ipvs_device, self._style, self._tell)
        except KernelError:
            if is_new:  # it would look like what an agent that served has left
                shutil.rmtree(self._state, ignore_errors=True)
            self._let_go()
            raise
        self._set_sysctls()
        self._set_times()
        self._clear()
        log.info("opened device=%s table=%s", self._config.ipvs_device, self._style.table)
        if names := ignored_settings.given(self._config):
            log.info("settings that do nothing in mode ipvs: %s (docs/ipvs.md)", ", ".join(names))
        with contextlib.suppress(KernelError):  # the first tick() looks again
            self._look_at_firewalls(forward_rules.list_chains())

    def _let_go(self) -> None:
        """Others may have the names now."""
        if self._former is not None:
            self._former.close()
            self._former = None
        os.close(self._lock)
        self._lock = -1

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

    def _set_times(self) -> None:
        try:
            self._held.set_times(Times(*astuple(self._config.ipvs_times)))
        except KernelError as error:
            self._tell(f"IPVS keeps its times: {error}")

    def _look_at_firewalls(self, listed: Collection[forward_rules.Json]) -> None:
        """Those of others; what was not so before is told."""
        style = self._style
        found = (*firewalls.forward(style.mark, listed), *firewalls.inputs(style.table, listed))
        for line in found:
            if line not in self._firewalls:
                log.warning("%s", line)
        self._firewalls = found

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
        and makes good what is missing; it programs those again that this one was about, and whom
        they meet.
        """
        true, self._true = self._true, False
        anew = not true or (sound and not self._whole)
        keys = {*(desired.services if touched is None else touched), *self._refused, *self._owed}
        if touched is None:
            keys |= self._ledger.by_key.keys() - {NODE}
        self._owed = keys
        elements = self._read_elements() if anew else None
        for key in list(keys):
            keys |= self._overlaps.put(key, desired.services.get(key))
        ground = self._look_at_ground(desired, keys, anew or touched is None)
        if self._ground is None or ground != self._ground._replace(barred=ground.barred):
            keys |= self._all(desired)
        self._ground, self._desired = ground, desired
        after = self._program(desired, keys, ground)
        if elements is None and self._meets_what_is_left(after):
            elements = self._read_elements()
        changes = self._ledger.change(after)
        self._whole = self._whole or sound
        if elements is not None:
            changes = self._difference(elements)
        changes.cut.update(self._cut_drained(after))
        written = self._carry_out(changes)
        if self._barred.keys() - ground.barred:
            written += self._do_without_barred()
        self._owed = set()
        self._true = self._begun = True
        return Report(dict(written), sum(written.values()), dict(self._refused))

    def claim_socket(self, cookie: int) -> None:
        """See base.DataPlane. IPVS cannot tell one socket from another: docs/limits.md."""

    def doubt(self) -> None:
        """See base.DataPlane."""
        self._true = False

    def _all(self, desired: DesiredState) -> set[ServicePortKey]:
        """All Service ports that there are or were."""
        keys = set(desired.services) | (self._ledger.by_key.keys() - {NODE})
        for key in keys:
            self._overlaps.put(key, desired.services.get(key))
        return keys

    def _meets_what_is_left(self, after: Mapping[ServicePortKey, Programmed]) -> bool:
        """Whether an earlier agent's virtual service, which nobody wanted yet, is wanted now."""
        return bool(self._left) and any(not self._left.isdisjoint(p.pools) for p in after.values())

    def _do_without_barred(self) -> Counter[str]:
        """What stands on addresses that the kernel does not take is taken back."""
        assert self._ground is not None
        self._ground = self._ground._replace(barred=frozenset(self._barred))
        gone = {(SetName.VIRTUAL_IPS, (address,)) for address in self._barred}
        keys = [k for k, p in self._ledger.by_key.items() if not p.elements.isdisjoint(gone)]
        after = self._program(self._desired, keys, self._ground)
        return self._carry_out(self._ledger.change(after))

    def _carry_out(self, changes: Changes) -> Counter[str]:
        """Writes by kind. What the kernel refuses keeps no other from being programmed."""
        before = self._held.changes
        refusals = self._held.begin(changes)
        self._barred |= refusals.addresses
        for virtual, key in self._ledger.correct(refusals.held, changes).items():
            self._refused[key] = refusals.virtuals[virtual]
        self._held.finish(changes)
        counts = {"nft": sum(map(len, changes.steps())), "ipvs": self._held.changes - before}
        return Counter({name: n for name, n in counts.items() if n})

    def _look_at_ground(
        self, desired: DesiredState, keys: Collection[ServicePortKey], anew: bool
    ) -> Ground:
        """What the node itself has is looked at when that is asked for, and when there are new
        addresses among the frontends; what the kernel did not take is tried again.
        """
        had = self._ground
        if had is None or anew or self._is_new(desired, keys, had):
            left = self._former.devices if self._former is not None else ()
            own, families = self._held.own_addresses(left), self._held.families()
        else:
            own, families = had.own_addresses, had.families
        if self._barred:
            wanted = {f.at.address for f in _frontends(desired, self._refused)} - own
            self._barred = self._held.try_addresses(self._barred.keys() & wanted)
        mode = self._config.detect_local_mode
        return Ground(
            desired.node_addresses,
            own,
            self._config.ipvs_scheduler,
            self._config.masquerade_all,
            bool(desired.local_networks) or mode in (LocalMode.BRIDGE, LocalMode.PREFIX),
            families,
            frozenset(self._barred),
        )

    def _is_new(self, desired: DesiredState, keys: Collection[ServicePortKey], had: Ground) -> bool:
        """Whether there are addresses among their frontends of which nothing is known."""
        return any(
            frontend.kind is not FrontendKind.NODE_PORT
            and family_of(frontend.at.address) in had.families
            and frontend.at.address not in had.barred
            and frontend.at.address not in had.own_addresses
            and not self._ledger.holds((SetName.VIRTUAL_IPS, (frontend.at.address,)))
            for frontend in _frontends(desired, keys)
        )

    def _program(
        self, desired: DesiredState, keys: Iterable[ServicePortKey], ground: Ground
    ) -> dict[ServicePortKey, Programmed]:
        after = {NODE: program_node(desired, ground)}
        for key in sorted(keys):
            state = desired.services.get(key)
            self._notes.note(key, state)
            self._refused.pop(key, None)
            self._foreign.discard(key)
            if state is None:
                self._marks.drop(key)
                after[key] = NOTHING
            else:
                after[key] = program(state, ground, self._marks.of(state), self._overlaps.exact)
                self._note_what_is_left_out(state, ground)
        return after

    def _note_what_is_left_out(self, state: ServiceState, ground: Ground) -> None:
        """Of a Service port, because the node or its kernel cannot have it."""
        if state.key.family not in ground.families:
            if not self._foreign:
                log.warning("%s", NO_IPV6)
            self._foreign.add(state.key)
        elif ground.barred:
            for frontend in state.frontends:
                if frontend.at.address in ground.barred:
                    self._refused[state.key] = self._barred[frontend.at.address]

    def _cut_drained(
        self, after: Mapping[ServicePortKey, Programmed]
    ) -> Iterator[tuple[Virtual, End]]:
        """UDP that is drained, and whose real server has now stopped serving."""
        for programmed in after.values():
            for virtual in programmed.pools if programmed.serving is not None else ():
                for end in self._held.draining(virtual) - (programmed.serving or set()):
                    yield virtual, end

    def _read_elements(self) -> frozenset[Element]:
        """Marks of short circuits go on meaning what they meant, in a table of a former name too:
        its rules mark packets for as long as it is there.
        """
        elements = self._held.elements()
        self._marks.adopt(elements, *(self._former.elements() if self._former is not None else ()))
        return elements

    def _difference(self, elements: frozenset[Element]) -> Changes:
        """What the kernel lacks, or has too much, where its sets hold these."""
        held, ledger = self._held, self._ledger
        pools = held.pools(elements, ledger.pools)
        left = elements - ledger.elements if not self._whole else ()
        self._left = frozenset(v for element in left if (v := noted(element)) is not None)
        return ledger.difference(elements, held.addresses(), pools, self._whole)

    # ---- later -----------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Removes drained real servers that have no connections any more, and makes good what
        others have destroyed; when to come next.
        """
        if now >= self._look_due:
            self._look_due = now + LOOK_SECONDS
            try:
                self._held.drain()
            finally:
                self._look_after()
            if self._former is not None and self._whole and self._true:
                self._former.retire(self._ledger.pools)
        if now >= self._handover_due:
            self._handover_due = now + HANDOVER_SECONDS
            for family in conntrack_keepalive.end():
                log.info("the last connection of kube-proxy is over family=%s", family)
        return self._look_due

    def _look_after(self) -> None:
        """Somebody may have flushed all rules, or closed FORWARD. A look at rulesets that nobody
        else has changed is one message to the kernel: each transaction of ours is one generation.
        """
        seen = forward_rules.generation(), self._held.transactions
        others = seen[0] - self._seen[0] != seen[1] - self._seen[1]
        try:
            if others:
                listed = forward_rules.list_chains()
                self._look_at_firewalls(listed)
                self._let_pass(listed)
        finally:
            if self._begun:
                self._repair(others)
        self._seen = seen

    def _let_pass(self, listed: Iterable[forward_rules.Json]) -> None:
        chains = forward_rules.forward_chains(listed)
        for chain in chains:
            if done := forward_rules.let_pass(chain, self._style.mark):
                log.info("%s chain=%r mark=%#x", done, str(chain), self._style.mark)
        for done in conntrack_keepalive.let_pass(chains):
            log.info("%s", done)

    def _repair(self, others: bool) -> None:
        """What others have destroyed is made anew, and so is what a repair has left undone."""
        whole = not others or self._held.is_whole()
        device = self._held.has_device()
        served = self._held.serves(next(iter(self._ledger.pools), None))
        if not whole:
            log.warning("the nftables table is not whole and is made anew table=%s",
                        self._style.table)  # fmt: skip
        if not device:
            log.warning("the device is gone and is made anew device=%s", self._config.ipvs_device)
        if not served:
            log.warning("the virtual services are gone and are made anew")
            self._set_sysctls()
            self._set_times()
        if not (self._true and whole and device and served):
            self._true = False
            self.apply(self._desired, (), sound=False)
        else:
            self._end_short_circuits()

    def _end_short_circuits(self) -> None:
        """Those that nobody wants any more go with their last connection."""
        after: dict[ServicePortKey, Programmed] = {}
        for key, mark in self._marks.unwanted.items():
            virtual, had = marked(key.family, mark), self._ledger.by_key.get(key, NOTHING)
            if virtual in had.pools and self._held.is_idle(virtual):
                after[key] = unmarked(had, virtual)
        if after:
            self._true = False
            for key in after:
                self._marks.drop(key)
            self._carry_out(self._ledger.change(after))
            self._true = True

    def ended(self) -> tuple[Ended, ...]:
        """See base.DataPlane."""
        return self._held.take_ended()

    def ready(self) -> bool:
        """Nothing goes on in the background."""
        return True

    def packet_status(self) -> PacketStatus | None:
        """There is no packet path of BPF."""
        return None

    def problems(self) -> tuple[str, ...]:
        """What was said once, and what the kernel refuses."""
        lines = [
            *self._told,
            *self._firewalls,
            *(f"{key}: {words}" for key, words in self._refused.items()),
        ]
        return (*lines, NO_IPV6) if self._foreign else tuple(lines)

    def faults(self) -> tuple[str, ...]:
        """See base.DataPlane. What is wrong here is an error of apply()."""
        return ()

    def measure(self) -> Measures:
        """See base.DataPlane."""
        return Measures()

    def count(self, pause: Pause) -> Traffic:
        """See base.DataPlane."""
        return metrics.count(dict(self._ledger.by_key), pause)

    def write_status(self, text: bytes) -> None:
        """Into the state folder, with the names of what is programmed."""
        self._notes.write(text)

    def close(self) -> None:
        """See base.DataPlane."""
        if self._lock >= 0:
            self._held.close()
            self._let_go()

    def remove(self) -> None:
        """See base.DataPlane."""
        self.close()
        cleanup.remove(self._config)


def _frontends(desired: DesiredState, keys: Iterable[ServicePortKey]) -> Iterator[Frontend]:
    """Those of these Service ports, as far as they are there."""
    for key in keys:
        state = desired.services.get(key)
        if state is not None:
            yield from state.frontends
