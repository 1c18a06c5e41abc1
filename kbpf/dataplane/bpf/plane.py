"""The BPF data plane: adopts, plans, writes, flips, retires.

It keeps what it programmed, so that a change costs the change and not the cluster. Retiring waits
for the grace period in a queue that tick() empties; nobody sleeps.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Final, TypeVar

import msgspec

from kbpf.dataplane.base import Report
from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.attachments import Attached
from kbpf.dataplane.bpf.changes import adopt, commit
from kbpf.dataplane.bpf.changes.capacity import Room
from kbpf.dataplane.bpf.changes.commit import ZERO, target
from kbpf.dataplane.bpf.changes.deferred import Deferred, Turn
from kbpf.dataplane.bpf.changes.grace import GRACE_SECONDS, SHORT_GRACE_SECONDS, Retiring
from kbpf.dataplane.bpf.changes.large_tables import TableBuilder
from kbpf.dataplane.bpf.changes.plan import Planner, Programmed, Retired, Writes
from kbpf.dataplane.bpf.changes.quotas import Budgets, TableLimits, order_of, size_of
from kbpf.dataplane.bpf.changes.shared_values import (
    Counted,
    cluster_ips_of,
    pack_ports,
    ports_of,
    unpack_ports,
)
from kbpf.dataplane.bpf.growth import POLL_SECONDS, Growth
from kbpf.dataplane.bpf.maps import pinning
from kbpf.dataplane.bpf.maps.affinity_shares import Shares
from kbpf.dataplane.bpf.maps.agent_maps import Tables
from kbpf.dataplane.bpf.maps.agent_sockets import AgentSockets
from kbpf.dataplane.bpf.maps.ids import BackendTable, Ids, SharedTables
from kbpf.dataplane.bpf.maps.layout import MAPS, PAIR, U32
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.metrics import Meter
from kbpf.dataplane.bpf.programs import unpinned
from kbpf.errors import CapacityError, PinsGone
from kbpf.kernel.system import mounts
from kbpf.model.address import Addr
from kbpf.model.config import Config, is_system
from kbpf.model.desired import DesiredState, ServicePortKey, ServiceState
from kbpf.model.metrics import Ended, Measures, Pause, Traffic
from kbpf.model.objects import Cidr, Protocol
from kbpf.model.status import ModeChoice, PacketStatus

log = logging.getLogger("kbpf.dataplane")

T = TypeVar("T")

NODE_PORTS: Final = 0
"""The id in source_ranges of those who may dial NodePorts; no Service has it."""

SLICE_SECONDS: Final = 0.0015
"""Work that can wait is done for this long at a time: tables are built and large Service ports
programmed in one slice, old sets and UDP flows are deleted in another."""

LARGE: Final = 256
"""Entries from which on a Service port may be deferred when the time is over."""

MOST_RETRIED: Final = 16
"""Refused Service ports that are tried again at a time. Those that fail again go last."""


class BpfPlane:
    """DataPlane on BPF socket hooks. See base.DataPlane for the verbs."""

    name = "bpf"

    def __init__(
        self,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
        sockets_first: bool = False,
    ) -> None:
        """`sockets_first`: see Attached. tick() has to be called then."""
        self._config = config
        self._clock = clock
        self._pins = Pins(config.pin_dir)
        self._tables = Tables(self._pins, config.sizes, config.packet_path)
        self._programmed: dict[ServicePortKey, Programmed] = {}
        self._addresses: set[Addr] = set()
        self._cluster_ips = Counted(cluster_ips_of)
        self._ports = Counted(ports_of)
        self._refused: dict[ServicePortKey, str] = {}
        self._refused_system: dict[ServicePortKey, None] = {}  # the cluster's own of them
        self._plain: dict[ServicePortKey, str] = {}  # spread evenly instead of as they ask
        self._table_limits = TableLimits()
        self._stray: adopt.Adopted | None = None  # until the first complete apply
        self._lock = -1
        self._attached = Attached(config, self._pins, self._tables, sockets_first)
        self._growth = Growth(self._tables, self._attached)
        self._kept: adopt.Adopted | None = None  # what an unsound first apply left as it was
        self._hidden = ""  # why the folder of pins cannot be seen by its name
        self._unsure = False  # whether what is kept here is what the maps hold
        self._meter = Meter(self._pins, config)
        self._shares = Shares(
            lambda: self._tables.maps,
            lambda: {owner.id: owner.affinity_timeout for owner in self._programmed.values()},
        )
        self._agent_sockets = AgentSockets()

    def choice(self) -> ModeChoice:
        """See base.DataPlane."""
        return ModeChoice(self.name, self.name)

    def follow(self, other: bool) -> None:
        """See base.DataPlane."""
        self._attached.follow(other)

    # ---- opening ---------------------------------------------------------------------------

    def open(self) -> None:
        """Compiles or takes the artifact, opens or makes the maps, loads the programs, adopts.

        Raises CompileError or KernelError; what an earlier agent attached goes on serving.
        """
        cgroup = self._config.cgroup or mounts.cgroup_root()
        mounts.ensure_bpffs(self._config.pin_dir)
        self._lock = pinning.lock(self._pins)
        self._pins.hold(self._lock)
        with self._pins.named():
            unpinned.refuse(self._pins, self._config.pin_dir, cgroup)
            self._attached.compile(cgroup)
            adopted = self._tables.open()
            self._agent_sockets.open(self._tables.maps["agent_sockets"])
            self._attached.load(cgroup)
            self._adopt()
        log.info("opened pin_dir=%s cgroup=%s adopted=%s", self._config.pin_dir, cgroup, adopted)

    def _adopt(self) -> None:
        maps = self._tables.maps
        self._ids = Ids(adopt.next_ids(maps["meta"]), self._holds_id)
        self._table = BackendTable(self._ids)
        found = adopt.read(maps)
        self._ids.at_least(found.highest_service, found.highest_backend, found.highest_set)
        for backend, backend_id in found.backends.items():
            self._table.adopt(backend, backend_id)
        self._shared, self._budgets = SharedTables(self._ids), Budgets()
        for key, owner in found.programmed.items():
            for one in (owner.cluster, owner.local):
                self._table.hold(one.backends)
                if one.table:
                    self._shared.adopt(one.table)
            self._budgets.replace(key.namespace, None, owner)
        self._programmed = found.programmed
        self._tables.fill = Counter(found.fill)
        self._addresses = {Addr(key) for key, _ in maps["node_addresses"].items()}
        self._tables.fill["node_addresses"] = len(self._addresses)
        refusing = (Addr(key) for key, _ in maps["cluster_ips"].items())
        self._cluster_ips = Counted(cluster_ips_of, found.programmed.values(), refusing)
        self._tables.fill["cluster_ips"] = len(self._cluster_ips.held)
        self._adopt_ports(found)
        self._cuts = udp.Cuts(self._tables)
        # What was to be retired is found again as stray.
        self._passes = udp.Passes(self._tables.maps)
        self._builder = TableBuilder(self._tables, self._ids, self._shared)
        self._deferred, self._deferred_due = Deferred(), 0.0
        self._turns = 0  # of tick()
        self._retiring = Retiring(self._tables, self._table, self._shared, self._cut)
        self._stray, self._kept = found, None

    def _adopt_ports(self, found: adopt.Adopted) -> None:
        """Sets the bits of all ports that `services` has: an agent of an earlier version kept none,
        and programs that are attached next find only frontends whose bit is set.
        """
        held = set(unpack_ports(self._tables.maps["frontend_ports"].items()))
        used = {at.port for at in found.stray_frontends}
        used |= {port for owner in found.programmed.values() for port in ports_of(owner)}
        self._ports = Counted(ports_of, found.programmed.values(), held)
        self._write_ports(new=used - held)

    def _holds_id(self, which: int, number: int) -> bool:
        """Whether a map holds this id: see ids.Taken."""
        name = ("service_names", "backends", "backend_slots")[which]
        key = PAIR.pack(number, 0) if name == "backend_slots" else U32.pack(number)
        return self._tables.maps[name].lookup(key) is not None

    # ---- applying --------------------------------------------------------------------------

    def apply(
        self,
        desired: DesiredState,
        touched: Collection[ServicePortKey] | None,
        sound: bool = True,
    ) -> Report:
        """See base.DataPlane. The first call must be complete (touched None).

        After a KernelError the maps may hold a part of the change: every frontend still has a
        complete set (plan.py), and the next call first reads again what they hold.
        """
        if self._unsure:
            self._adopt()
            touched = None
        self._unsure = True
        if sound and self._kept is not None:
            touched = None
        with self._pins.named():
            report = self._apply(desired, touched, sound)
        self._unsure = False
        return report

    def doubt(self) -> None:
        """See base.DataPlane. And whether the packet path can be had now."""
        self._attached.try_again()
        self._unsure = True
        self._tables.counted()  # what was written until now is none of the next report's

    def _apply(
        self, desired: DesiredState, touched: Collection[ServicePortKey] | None, sound: bool
    ) -> Report:
        keys = set(desired.services) if touched is None else set(touched)
        if touched is None and (sound or self._stray is None):
            keys |= self._programmed.keys()
        after, writes = self._plan(desired, keys, in_steps=touched is not None)
        if self._stray is not None:
            ranges = dict.fromkeys(self._config.node_port_source_ranges)
            writes.new_ranges += [(NODE_PORTS, cidr) for cidr in ranges]
            _claim_ranges(writes, self._stray.stray_ranges)
            if sound:
                writes.removed |= self._stray.stray_frontends - writes.flips.keys()
            writes.new_frontends -= len(self._stray.stray_frontends & writes.flips.keys())
        ips = self._changed(self._cluster_ips, after, sound)
        ports = self._changed(self._ports, after, sound)
        self._attached.describe_node(desired)
        new_addresses = len(set(desired.node_addresses) - self._addresses)
        self._grow(writes, new_addresses, len(ips[0]), at_once=touched is None)
        self._write(writes, set(desired.node_addresses), ips, ports)
        for key, owner in after.items():
            if owner is None:
                self._programmed.pop(key, None)
            else:
                self._programmed[key] = owner
        if self._stray is not None:
            self._complete(writes.retired, sound)
        elif self._kept is not None and sound:
            found, self._kept = self._kept, None
            ours = {f.at for o in self._programmed.values() for f in o.frontends}
            self._tables.drop("services", map(target, found.stray_frontends - ours))
            self._sweep(found, writes.retired)
        self._retiring.add(self._clock(), writes.retired)
        self._attached.exemptions.want(desired.exempt_pods, desired.pods_known, self._clock())
        written, calls = self._tables.counted()
        looked_at = None if touched is None else frozenset(after.keys() | keys)
        return Report(
            written, calls, self._refused, self._plain, looked_at, self._deferred.services,
            self._deferred_due,
        )  # fmt: skip

    def _plan(
        self, desired: DesiredState, keys: set[ServicePortKey], in_steps: bool
    ) -> tuple[dict[ServicePortKey, Programmed | None], Writes]:
        """`in_steps`: large Service ports are deferred, and have their turn in the next apply that
        has nothing else to do.
        """
        unused = self._stray.unused_names if self._stray else None
        turn = Turn(
            Planner(self._ids, self._table, unused, self._shared),
            Room(self._tables, self._table, self._shared, self._budgets, self._retiring),
            {},
        )
        if not in_steps:
            self._deferred.clear()
        keys |= self._table_limits.update(desired.services, keys)
        wanted = {key: self._effective(desired, key) for key in keys}
        orders = {key: order_of(key, wanted[key], self._leads(key)) for key in keys}
        busy = False
        for key in sorted(wanted, key=orders.__getitem__):
            if in_steps and _is_large(wanted[key]):
                self._deferred.add(key, orders[key])
                self._take_off(key, wanted[key], turn)
            else:
                self._deferred.discard(key)
                self._program(key, wanted[key], turn)
                busy = True
        if in_steps and not busy:
            keys |= self._go_on(desired, turn)
        if not self._deferred:
            turn.planner.writes.retired.slot_keys += self._builder.release()
        return turn.after, turn.planner.finish()

    def _go_on(self, desired: DesiredState, turn: Turn) -> set[ServicePortKey]:
        """One slice for deferred Service ports, in their order; those that were refused are tried
        again when there are none. Which ones have been looked at.
        """
        end, self._deferred_due = time.perf_counter() + SLICE_SECONDS, 0.0
        looked_at = set() if self._deferred else self._try_refused_again(desired, turn)
        while (key := self._deferred.first()) is not None:
            new = self._effective(desired, key)
            looked_at.add(key)
            if not self._program(key, new, turn, end):
                break
            self._deferred.discard(key)
            if time.perf_counter() >= end:
                break
        return looked_at

    def _try_refused_again(self, desired: DesiredState, turn: Turn) -> set[ServicePortKey]:
        """Some of those that found no room, the cluster's own first."""
        retried = dict.fromkeys(islice(self._refused_system, MOST_RETRIED))
        retried |= dict.fromkeys(islice(self._refused, MOST_RETRIED - len(retried)))
        for key in retried:
            new = self._effective(desired, key)
            if _is_large(new):
                self._deferred.add(key, order_of(key, new, self._leads(key)))
            else:
                self._program(key, new, turn)
        return set(retried)

    def _program(
        self,
        key: ServicePortKey,
        new: ServiceState | None,
        turn: Turn,
        end: float | None = None,
    ) -> bool:
        """Plans one Service port, if there is room for it. False if it waits for maps that grow,
        or its table is not built at `end` (time.perf_counter).
        """
        self._refused.pop(key, None)
        self._refused_system.pop(key, None)
        old = turn.after.get(key, self._programmed.get(key))
        try:
            expired = self._clock() - SHORT_GRACE_SECONDS
            turn.room.take(key, old, new, turn.planner, self._leads(key), expired)
            if end is not None and self._waits_for_room(turn):
                self._deferred_due = time.monotonic() + POLL_SECONDS
                return False
        except CapacityError as error:
            self._refused[key] = str(error)
            if self._leads(key):
                self._refused_system[key] = None
            self._take_off(key, new, turn)
            return True
        if end is not None and new is not None and self._waits_for_table(new, end):
            return False
        turn.after[key] = turn.planner.change(key, old, new)
        self._budgets.replace(key.namespace, old, turn.after[key])
        return True

    def _take_off(self, key: ServicePortKey, new: ServiceState | None, turn: Turn) -> None:
        """Frontends that a Service port has lost go at once, though the rest of its change waits:
        another one may have them now, and must not lose them to this one later.
        """
        old = turn.after.get(key, self._programmed.get(key))
        if old is None:
            return
        turn.after[key] = turn.planner.take_off(old, new)
        self._budgets.replace(key.namespace, old, turn.after[key])

    def _waits_for_table(self, new: ServiceState, end: float) -> bool:
        """Builds what this Service port needs until `end` (time.perf_counter), but at least one
        piece; whether there is more to build.
        """
        while (missing := self._builder.missing(new)) is not None:
            if not self._builder.is_busy:
                self._builder.begin(*missing)
            self._builder.step()
            if time.perf_counter() >= end:
                return self._builder.missing(new) is not None
        return False

    def _effective(self, desired: DesiredState, key: ServicePortKey) -> ServiceState | None:
        """What is wanted, as far as its namespace may have it."""
        self._plain.pop(key, None)
        state = desired.services.get(key)
        if state is not None and (reason := self._table_limits.reason(key)):
            self._plain[key] = reason
            return self._table_limits.effective(state)
        return state

    def _leads(self, key: ServicePortKey) -> bool:
        """Whether this Service port comes before those of tenants."""
        return is_system(key.service, self._config)

    def _changed(
        self, values: Counted[T], after: Mapping[ServicePortKey, Programmed | None], sound: bool
    ) -> tuple[set[T], set[T]]:
        """ClusterIPs, or ports, that come and go with this change."""
        new, gone = values.change(
            (self._programmed[key] for key in after if key in self._programmed),
            (owner for owner in after.values() if owner is not None),
            everything=self._stray is not None or self._kept is not None,
        )
        return new, gone if sound else set()

    def _grow(self, writes: Writes, addresses: int, cluster_ips: int, at_once: bool) -> None:
        self._make_room(
            {
                "services": writes.new_frontends,
                "service_names": len(writes.names),
                "backend_slots": sum(len(ids) for _, ids in writes.slots),
                "set_members": sum(len(ids) for _, ids in writes.members),
                "backends": len(writes.backends),
                "node_addresses": addresses,
                "cluster_ips": cluster_ips,
            },
            at_once,
        )

    def _make_room(self, more: Mapping[str, int], at_once: bool) -> None:
        """Makes maps larger that so many more entries would overfill: at once where they do not
        fit, or no other change waits, else while others are programmed.
        """
        services = self._tables.maps["services"].id
        if self._growth.is_busy and not self._tables.fits(more):
            self._growth.finish()
        if bigger := self._tables.too_small(more):
            if at_once or not self._tables.fits(more):
                self._growth.finish(bigger)
            else:
                self._growth.begin(bigger, time.monotonic())
        # In the first apply they wait until the maps are filled, unless they read what is filled.
        first = self._stray is not None
        if self._attached.out_of_step(services) if first else self._attached.unpublished:
            self._attached.publish()

    def _waits_for_room(self, turn: Turn) -> bool:
        """Whether what is planned has to wait until maps have grown. CapacityError if they cannot
        grow.
        """
        more = {name: count for name, count in turn.room.taken.items() if MAPS[name].grows}
        if bigger := self._tables.too_small(more):
            self._growth.begin(bigger, time.monotonic())
        if self._tables.fits(more):
            return False
        if self._growth.error:
            raise CapacityError(f"maps cannot be made larger, trying again: {self._growth.error}")
        return True

    def _write(
        self,
        writes: Writes,
        addresses: set[Addr],
        cluster_ips: tuple[set[Addr], set[Addr]],
        ports: tuple[set[int], set[int]],
    ) -> None:
        """Programs look for a frontend only if its port is in `frontend_ports`, so that is a
        superset of what `services` has at any time.
        """
        nodes = addresses - self._addresses, self._addresses - addresses
        self._write_ports(new=ports[0])
        commit.write(self._tables, self._ids, writes, nodes, cluster_ips)
        self._write_ports(gone=ports[1])
        self._cluster_ips.written(*cluster_ips)
        self._addresses = addresses
        self._cut(writes.retired, again=False)

    def _write_ports(self, new: Collection[int] = (), gone: Collection[int] = ()) -> None:
        self._ports.written(set(new), set(gone))
        words = pack_ports(self._ports.held, (*new, *gone))
        self._tables.put("frontend_ports", words, new=0)

    def _cut(self, retired: Retired, again: bool = True) -> None:
        """`again`: a connect() may have been on its way the first time. Flows of sockets know by
        their time that they are from before: they are not looked at again.
        """
        if not (retired.cut or retired.left):
            return
        if not again:
            self._cuts.add({(i, target(b)) for i, b in retired.cut}, time.monotonic_ns())
        self._passes.add(retired.cut, retired.left, flows=not again)
        self._passes.advance(SLICE_SECONDS)

    def _end_at_once(self, gone: udp.Gone) -> None:
        start = time.perf_counter()
        ended = udp.cut(self._tables.maps, gone)
        seconds = time.perf_counter() - start
        self._passes.ended.append(Ended(seconds, {family: ended[family] for family in (4, 6)}))

    def _complete(self, retired: Retired, sound: bool) -> None:
        """The end of the first apply: attach, and retire what was adopted and nobody claims. That
        has to wait while not all objects could be read: they may claim it.
        """
        found, self._stray = self._stray, None
        assert found is not None
        changed = self._attached.publish()
        self._attached.remove_unwanted()
        self._attached.catch_up()
        log.info("attached hooks_changed=%d", changed)
        if sound:
            self._sweep(found, retired)
            return
        log.warning("kept what an earlier agent left: not all objects could be read")
        self._kept = found

    def _sweep(self, found: adopt.Adopted, retired: Retired) -> None:
        retired.names += sorted({*found.stray_names, *found.unused_names.values()})
        retired.slot_keys += found.stray_slots
        retired.member_keys += found.stray_members
        retired.backend_ids += self._table.sweep() + found.stray_backends
        self._tables.drop("services", found.damaged_frontends)
        owners = self._programmed.values()
        live = {(o.id, backend) for o in owners for backend in o.serving}
        fronts = {
            (o.id, f.at) for o in owners for f in o.frontends if f.at.protocol == Protocol.UDP
        }
        gone = udp.all_but(live, fronts)
        self._cuts.add(udp.stale(self._tables.maps, gone), time.monotonic_ns())
        del self._tables.writes["udp_cuts"]  # they are due to flows: nobody had changed them
        self._end_at_once(gone)

    def claim_socket(self, cookie: int) -> None:
        """See base.DataPlane."""
        self._agent_sockets.claim(cookie)

    # ---- the end of what is old ------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Deletes old sets whose grace period is over, lets maps grow, and looks after what the
        packet path needs beside itself. See base.DataPlane.
        """
        work: deque[Callable[[float], None]] = deque(
            (
                lambda seconds: self._retiring.until(now - GRACE_SECONDS, seconds),
                self._passes.advance,
                self._grow_on,
                lambda seconds: self._shares.advance(now, seconds),
            )
        )
        self._turns += 1
        work.rotate(self._turns)
        left, end = SLICE_SECONDS, time.perf_counter() + SLICE_SECONDS
        for one in work:
            one(left)
            left = end - time.perf_counter()
        due = (
            self._attached.tick(now, self._stray is None),
            self._retiring.due,
            now if self._passes.is_busy or self._shares.is_busy else None,
            self._growth.due(now),
        )
        return min((one for one in due if one is not None), default=None)

    def _grow_on(self, seconds: float) -> None:
        """Goes on with maps that grow, and has them used as soon as they can be. And the packet
        path, if it comes later.
        """
        with self._pins.named():
            self._attached.take_packets()
            self._growth.advance(seconds)
            if self._attached.unpublished and self._stray is None:
                self._attached.publish()

    def ended(self) -> tuple[Ended, ...]:
        """See base.DataPlane."""
        found, self._passes.ended = tuple(self._passes.ended), []
        return found

    def flush(self) -> None:
        """Retires everything now, without the grace period: for tests."""
        self._retiring.until(float("inf"))
        self._passes.advance(float("inf"))

    # ---- the rest --------------------------------------------------------------------------

    def measure(self) -> Measures:
        """See base.DataPlane."""
        measures = self._meter.read(dict(self._tables.fill))
        return msgspec.structs.replace(
            measures,
            hooks=tuple(self._attached.hooks().items()),
            foreign=len(self._attached.foreign()),
        )

    def count(self, pause: Pause) -> Traffic:
        """See base.DataPlane."""
        return self._meter.count(pause)

    def write_status(self, text: bytes) -> None:
        """Leaves the agent's own words beside the maps, for `kbpf inspect status`."""
        self._check_pins()
        status = self._tables.maps["agent_status"]
        status.update(ZERO, text[: status.value_size].ljust(status.value_size, b"\0"))

    def ready(self) -> bool:
        """See base.DataPlane."""
        return self._attached.ready()

    def packet_status(self) -> PacketStatus:
        """See base.DataPlane."""
        return self._attached.packet_status()

    def problems(self) -> tuple[str, ...]:
        """See base.DataPlane."""
        return (*self.faults(), *self._attached.problems(self._clock()))

    def faults(self) -> tuple[str, ...]:
        """See base.DataPlane."""
        hidden = (self._hidden,) if self._hidden else ()
        return (*hidden, *self._attached.faults())

    def _check_pins(self) -> None:
        """Somebody may have removed the pins beside us: then nothing that we write is seen. Or
        mounted something over them: then we go on, by our descriptor, and say so.
        """
        gone = not self._pins.links.is_dir() and self._stray is None
        if gone or mounts.is_removed(self._config.pin_dir, self._lock):
            raise PinsGone(
                "the pins were removed while the agent ran",
                str(self._config.pin_dir),
                "the agent ends; start it again to serve Services again",
            )
        before, self._hidden = self._hidden, self._why_hidden()
        if self._hidden and not before:
            log.error("%s", self._hidden)
        if before and not self._hidden:
            log.info("the folder of pins can be seen again pin_dir=%s", self._config.pin_dir)

    def _why_hidden(self) -> str:
        folder = self._config.pin_dir
        if mounts.is_same(folder, self._lock):
            return ""
        return (
            f"the folder of pins {folder} is hidden by what is mounted over it, so the next agent "
            f"will not find the programs and will refuse to start: unmount it (findmnt -T {folder})"
        )

    def fill(self) -> dict[str, tuple[int, int]]:
        """Entries and room of each map that the agent writes."""
        return {
            name: (self._tables.fill[name], held.max_entries)
            for name, held in self._tables.maps.items()
            if name in self._tables.fill
        }

    def close(self) -> None:
        """Lets go of all descriptors; pins and attachments stay. Programs go first: a thread of
        theirs uses maps.
        """
        self._growth.close()
        self._attached.close()
        self._agent_sockets.close()
        self._tables.close()
        if self._lock >= 0:
            self._pins.let_go()
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Detaches and removes everything below the pin folder."""
        self.close()
        self._attached.remove_packet_path()
        pinning.remove(self._pins)


def _is_large(state: ServiceState | None) -> bool:
    return state is not None and size_of(state) >= LARGE


def _claim_ranges(writes: Writes, found: Iterable[tuple[int, Cidr]]) -> None:
    """Ranges that were found without their Service: those that are wanted stay, the rest goes."""
    stray, wanted = set(found), set(writes.new_ranges)
    writes.new_ranges = [one for one in writes.new_ranges if one not in stray]
    writes.old_ranges += sorted(stray - wanted)
