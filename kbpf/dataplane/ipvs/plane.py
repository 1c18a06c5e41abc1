"""The IPVS data plane: adopts, plans, carries out, drains.

What it has made is known by the kernel alone: the sets OWN and OWN_MARKS of its table name every
virtual service of its own before that is there and until it is gone, so whatever kills an agent,
the next one finds what there is, and never touches what others have made.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from kbpf.dataplane.base import Report
from kbpf.dataplane.ipvs import notes, rules
from kbpf.dataplane.ipvs.measure import Meter
from kbpf.dataplane.ipvs.notes import Notes
from kbpf.dataplane.ipvs.plan import (
    NODE,
    NOTHING,
    Changes,
    Element,
    End,
    Ground,
    Ledger,
    Part,
    Pool,
    Programmed,
    SetName,
    Virtual,
    note,
    noted,
    program,
    program_node,
    wants_mark,
)
from kbpf.errors import KernelError
from kbpf.kernel import dummy, ipvs, modules, netfilter, sysctl
from kbpf.kernel.ipvs import Command, Ipvs, Server, Service, ServiceFlag, Settings
from kbpf.kernel.process import LOCK_SECONDS, lock_folder
from kbpf.model.address import Addr
from kbpf.model.config import Config, LocalMode
from kbpf.model.desired import DesiredState, FrontendKind, ServicePortKey, ServiceState
from kbpf.model.measures import Measures
from kbpf.model.objects import Protocol
from kbpf.model.status import ModeChoice, PacketStatus

log = logging.getLogger("kbpf.dataplane")

ROOT: Final = "run as root"
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
FIRST_MARK: Final = 0x6B620000
"""Marks of short circuits count up from here, "kb"; the masquerade bit is left out."""
FALLBACK: Final[Mapping[str, str]] = {"mh": "wrr", "sh": "wrr"}
"""What takes the place of a scheduler that the kernel does not have."""


class IpvsPlane:
    """DataPlane on IPVS and nftables. See base.DataPlane for the verbs."""

    name = "ipvs"

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._style = style_of(config)
        self._state = config.state_dir / config.ipvs_device
        self._lock = -1
        self._told: dict[str, None] = {}
        self._missing: set[str] = set()  # schedulers
        self._meter = Meter()
        self._clear()

    def choice(self) -> ModeChoice:
        """See base.DataPlane."""
        return ModeChoice(self.name, self.name)

    def _clear(self) -> None:
        self._ledger = Ledger()
        self._notes = Notes(self._state)
        self._ground: Ground | None = None
        self._marks: dict[ServicePortKey, int] = {}
        self._old_marks: dict[tuple[Part, ...], int] = {}  # by frontend, of an earlier agent
        self._last_mark = FIRST_MARK
        self._draining: dict[Virtual, set[End]] = {}
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
        self._lock = lock(self._state)
        try:
            self._ipvs = _open_ipvs()
            self._device = dummy.ensure(self._config.ipvs_device)
            netfilter.transaction(*rules.table(self._style), hint=ROOT)
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
            changes = self._ledger.difference(*self._read_kernel(elements), sound)
        changes.cut.update(self._cut_drained(after))
        report = self._carry_out(changes)
        self._settled = settled or sound
        return report

    def doubt(self) -> None:
        """See base.DataPlane."""
        self._settled = False

    def _look_at_ground(self, desired: DesiredState, keys: Collection[ServicePortKey]) -> Ground:
        """The node's own addresses are looked at when there are new ones among the frontends."""
        own = self._ground.own_addresses if self._ground is not None else None
        if own is None or any(self._is_new(desired.services.get(key), own) for key in keys):
            _, own = dummy.addresses(self._device)
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
                self._marks.pop(key, None)
                after[key] = NOTHING
            else:
                after[key] = program(state, ground, self._mark_of(state))
        return after

    def _mark_of(self, state: ServiceState) -> int:
        """Of its short circuit; 0 if it needs none. A mark that was another's is not used again:
        packets may still carry it.
        """
        if not wants_mark(state):
            self._marks.pop(state.key, None)
            return 0
        if state.key not in self._marks:
            ats = ((f.at.address, f.at.protocol, f.at.port) for f in state.frontends)
            known = next((self._old_marks.pop(at) for at in ats if at in self._old_marks), 0)
            if known in self._marks.values():
                known = 0
            self._marks[state.key] = known or self._new_mark()
        return self._marks[state.key]

    def _new_mark(self) -> int:
        self._last_mark += 1
        while self._last_mark & self._style.mark:
            self._last_mark += 1
        return self._last_mark

    def _cut_drained(
        self, after: Mapping[ServicePortKey, Programmed]
    ) -> Iterator[tuple[Virtual, End]]:
        """UDP that is drained, and whose real server has now stopped serving."""
        for programmed in after.values():
            for virtual in programmed.pools if programmed.serving is not None else ():
                for end in self._draining.get(virtual, set()) - (programmed.serving or set()):
                    yield virtual, end

    # ---- what the kernel holds -------------------------------------------------------------

    def _read_elements(self) -> frozenset[Element]:
        """Those of our sets. Marks of short circuits go on meaning what they meant."""
        try:
            listed = netfilter.transaction(rules.listing(self._style), hint=ROOT)
        except KernelError as error:
            if error.errno != errno.ENOENT:
                raise
            netfilter.transaction(*rules.table(self._style), hint=ROOT)
            listed = []
        elements = rules.read(listed)
        for name, parts in elements:
            mark = parts[-1]
            if name in (SetName.SHORT_CIRCUITS, SetName.OWN_MARKS) and isinstance(mark, int):
                self._last_mark = max(self._last_mark, mark)
                if name is SetName.SHORT_CIRCUITS:
                    self._old_marks[parts[:-1]] = mark
        return elements

    def _read_kernel(
        self, elements: frozenset[Element]
    ) -> tuple[frozenset[Element], dict[Virtual, Pool]]:
        """What is there of these elements, and our virtual services. Those of others on frontends
        that are ours now count as ours: kube-proxy's, or our own if our table was lost.
        """
        self._draining.clear()
        pools: dict[Virtual, Pool] = {}
        for service, settings in self._ipvs.services():
            virtual = _virtual(service)
            if virtual is not None and (note(virtual) in elements or virtual in self._ledger.pools):
                pools[virtual] = self._read_pool(virtual, service, settings)
        on_device, _ = dummy.addresses(self._device)
        wanted = set(_addresses(elements))
        dummy.drop(self._device, on_device - wanted)
        lost = {(SetName.VIRTUAL_IPS, (address,)) for address in wanted - on_device}
        return elements - lost, pools

    def _read_pool(self, virtual: Virtual, service: Service, settings: Settings) -> Pool:
        servers = []
        for load in self._ipvs.servers(service):
            end = End(*load.server)
            servers.append((end, load.weight))
            if load.weight == 0:
                self._draining.setdefault(virtual, set()).add(end)
        by_port = bool(settings.flags & ServiceFlag.BY_PORT)
        return Pool(settings.scheduler, settings.persistence, by_port, tuple(sorted(servers)))

    # ---- carrying out ----------------------------------------------------------------------

    def _carry_out(self, changes: Changes) -> Report:
        steps, style = changes.steps(), self._style
        self._nft([*rules.removal(style, steps.early), *rules.addition(style, steps.first)])
        dummy.add(self._device, _addresses(steps.first))
        made = list(self._additions(changes))
        self._change(made, (errno.EEXIST,))
        self._nft([*rules.removal(style, steps.gone), *rules.addition(style, steps.late)])
        removed = [self._of_service(Command.DEL_SERVICE, v) for v in changes.old_pools]
        self._change(removed, (errno.ESRCH,))
        for virtual in changes.old_pools:
            self._draining.pop(virtual, None)
        dummy.drop(self._device, _addresses(steps.gone))
        self._nft(rules.removal(style, steps.notes))
        counts = {"nft": sum(map(len, steps)), "ipvs": len(made) + len(removed)}
        return Report({name: n for name, n in counts.items() if n}, sum(counts.values()))

    def _change(self, changes: Sequence[ipvs.Change], allowed: Iterable[int]) -> None:
        """The next try does without a scheduler that the kernel does not have."""
        try:
            self._ipvs.change(changes, allowed)
        except KernelError as error:
            wanted = {c.settings.scheduler for c in changes if c.settings is not None}
            missing = wanted & FALLBACK.keys() - self._missing
            if error.errno == errno.ENOENT and missing:
                self._missing |= missing
                names = ", ".join(sorted(missing))
                self._tell(f"IPVS may lack a scheduler ({names}); spread by weight: {error}")
            raise

    def _nft(self, commands: list[netfilter.Json]) -> None:
        if commands:
            netfilter.transaction(*commands, hint=ROOT)

    def _additions(self, changes: Changes) -> Iterator[ipvs.Change]:
        for virtual, pool in changes.new_pools.items():
            yield self._of_service(Command.NEW_SERVICE, virtual, pool)
            for end, weight in pool.servers:
                yield _of_server(Command.NEW_SERVER, virtual, end, weight)
        for virtual, (old, new) in changes.changed_pools.items():
            yield from self._alter(virtual, old, new)
        for virtual, end in changes.cut:
            if end in self._draining.get(virtual, ()):
                yield _of_server(Command.DEL_SERVER, virtual, end)
                self._draining[virtual].discard(end)

    def _alter(self, virtual: Virtual, old: Pool, new: Pool) -> Iterator[ipvs.Change]:
        """Who comes is there before who leaves is drained."""
        draining = self._draining.setdefault(virtual, set())
        weights, wanted = dict(old.servers), dict(new.servers)
        for end, weight in new.servers:
            if end not in weights and end not in draining:
                yield _of_server(Command.NEW_SERVER, virtual, end, weight)
            elif end in draining or weights[end] != weight:
                yield _of_server(Command.SET_SERVER, virtual, end, weight)
                draining.discard(end)
        for end in (weights.keys() | draining) - wanted.keys():
            if end not in draining or weights.get(end):
                yield _of_server(Command.SET_SERVER, virtual, end, 0)
                draining.add(end)
        if not draining:
            del self._draining[virtual]
        if replace(old, servers=()) != replace(new, servers=()):
            yield self._of_service(Command.SET_SERVICE, virtual, new)

    def _of_service(
        self, command: Command, virtual: Virtual, pool: Pool | None = None
    ) -> ipvs.Change:
        settings = None if pool is None else self._settings(pool)
        return ipvs.Change(command, Service(*virtual), settings)

    def _settings(self, pool: Pool) -> Settings:
        if pool.scheduler in self._missing:
            return Settings(FALLBACK[pool.scheduler], pool.persistence)
        hashes = pool.scheduler in ("mh", "sh")
        flags = ServiceFlag.FALLBACK if hashes else ServiceFlag(0)
        if pool.by_port:
            flags |= ServiceFlag.BY_PORT
        return Settings(pool.scheduler, pool.persistence, flags)

    # ---- later -----------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Removes drained real servers that have no connections any more, and makes good what
        others have destroyed; when to come next.
        """
        if now >= self._look_due:
            self._look_due = now + LOOK_SECONDS
            self._drain()
            self._repair()
        return self._look_due

    def _repair(self) -> None:
        """Somebody may have flushed all rules. A look at a ruleset that nobody changed is one
        message to the kernel.
        """
        generation = netfilter.generation()
        if not self._settled or generation == self._generation:
            return
        try:
            netfilter.transaction(rules.listing(self._style), hint=ROOT)
        except KernelError as error:
            if error.errno != errno.ENOENT:
                raise
            log.warning("the nftables table has vanished and is made anew table=%s",
                        self._style.table)  # fmt: skip
            self._settled = False
            elements = self._read_elements()
            self._carry_out(self._ledger.difference(*self._read_kernel(elements), True))
            self._settled = True
        for chain in netfilter.forward_chains():
            if done := netfilter.let_pass(chain, self._style.mark):
                log.info("%s chain=%r mark=%#x", done, str(chain), self._style.mark)
        self._generation = generation

    def _drain(self) -> None:
        gone = []
        for virtual, ends in list(self._draining.items()):
            for load in self._ipvs.servers(Service(*virtual)):
                end = End(*load.server)
                if end in ends and not load.active and not load.inactive:
                    gone.append(_of_server(Command.DEL_SERVER, virtual, end))
                    ends.discard(end)
            if not ends:
                del self._draining[virtual]
        self._ipvs.change(gone, (errno.ENOENT, errno.ESRCH))

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
        return self._meter.read(dict(self._ledger.by_key))

    def write_status(self, text: bytes) -> None:
        """Into the state folder, with the names of what is programmed."""
        self._notes.write(text)

    def close(self) -> None:
        """See base.DataPlane."""
        if self._lock >= 0:
            self._ipvs.close()
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """See base.DataPlane."""
        self.close()
        remove(self._config)


# ---- without an agent ----------------------------------------------------------------------------


def style_of(config: Config) -> rules.Style:
    """What the chains depend on."""
    local = ""
    if config.detect_local_mode is LocalMode.BRIDGE:
        local = config.pod_bridge_interface
    elif config.detect_local_mode is LocalMode.PREFIX:
        local = f"{config.pod_interface_name_prefix}*"
    return rules.Style(
        config.nft_table, config.masquerade_bit, local, beside(config.masquerade_ports)
    )


def beside(ports: tuple[int, int]) -> tuple[int, int]:
    """The larger range of unprivileged ports that has none of these."""
    low, high = ports
    above, below = (high + 1, 65535), (1024, low - 1)
    return above if above[1] - above[0] >= below[1] - below[0] else below


def lock(folder: Path, patience: float = LOCK_SECONDS) -> int:
    """A descriptor that makes this process the only one at work with this device and table."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_folder(folder, patience, "stop it first")
    except OSError as error:
        raise KernelError("cannot make the state folder", str(folder), "run as root",
                          error.errno or 0) from error  # fmt: skip


def remove(config: Config, forward: bool = True) -> tuple[str, ...]:
    """Every trace of an agent with these settings, in an order that leaves nobody half served;
    what there was. Rules in FORWARD stay if another mode needs them (not `forward`). KernelError if
    the kernel refuses.
    """
    style, gone = style_of(config), []
    try:
        elements = rules.read(netfilter.transaction(rules.listing(style)))
    except KernelError as error:
        if error.errno != errno.ENOENT:
            raise
        elements = None
    if elements is not None:
        ours = [v for element in elements if (v := noted(element)) is not None]
        if ours:
            face = Ipvs()
            try:
                face.change([ipvs.Change(Command.DEL_SERVICE, Service(*v)) for v in sorted(ours)],
                            (errno.ESRCH,))  # fmt: skip
            finally:
                face.close()
            gone.append(f"{len(ours)} virtual services")
    if dummy.remove(config.ipvs_device):
        gone.append(f"device {config.ipvs_device}")
    if elements is not None:
        for chain in netfilter.forward_chains() if forward else ():
            netfilter.remove_ours(chain)
        netfilter.transaction(*rules.no_table(style), hint=ROOT)
        gone.append(f"nftables inet {style.table}")
    folder = config.state_dir / config.ipvs_device
    notes.remove(folder)
    for one in (folder, config.state_dir):
        with contextlib.suppress(OSError):
            one.rmdir()
    return tuple(gone)


def _open_ipvs() -> Ipvs:
    """The kernel loads schedulers by itself, but not IPVS."""
    try:
        return Ipvs()
    except KernelError as error:
        if error.errno != errno.ENOENT or not modules.load(("ip_vs",)):
            raise
    return Ipvs()


# ---- words of the two sides ----------------------------------------------------------------------


def _virtual(service: Service) -> Virtual | None:
    """None for protocols that no Service has."""
    try:
        return Virtual(Protocol(service.protocol), service.address, service.port, service.mark)
    except ValueError:
        return None


def _of_server(command: Command, virtual: Virtual, end: End, weight: int = 0) -> ipvs.Change:
    return ipvs.Change(command, Service(*virtual), None, Server(*end), weight)


def _addresses(elements: Iterable[Element]) -> list[Addr]:
    return [
        Addr(parts[0])
        for name, parts in elements
        if name is SetName.VIRTUAL_IPS and isinstance(parts[0], bytes)
    ]
