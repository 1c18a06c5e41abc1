"""What the kernel holds of the IPVS data plane: read, and changed step by step.

Virtual services and their real servers are IPVS', addresses stand on the dummy device, all else in
the nftables table. A real server that has left is drained: it is there with weight 0 until its
connections are gone.
"""

import errno
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.cleanup import ROOT, refuse_others, virtual_of
from kbpf.dataplane.ipvs.diff import Changes
from kbpf.dataplane.ipvs.plan import Element, End, Pool, SetName, Virtual, note
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import Command, Ipvs, Server, Service, ServiceFlag, Settings, Times
from kbpf.kernel.netfilter import forward_rules, nft
from kbpf.kernel.system import modules
from kbpf.model.address import Addr, family_of
from kbpf.model.metrics import Ended
from kbpf.takeover import conntrack_keepalive

WEIGHTED, SIMPLEST = "wrr", "rr"
"""Schedulers: what takes the place of one that the kernel does not have, and that one's place."""
GONE: Final[Mapping[Command, frozenset[int]]] = {
    Command.DEL_SERVICE: frozenset((errno.ESRCH,)),
    Command.DEL_SERVER: frozenset((errno.ENOENT, errno.ESRCH)),
}
"""How the kernel says of what is to be removed that it is not there."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """What the kernel has not done, in its words: addresses that it does not take, and virtual
    services, with what it holds of each instead (None: nothing).
    """

    addresses: Mapping[Addr, str]
    virtuals: Mapping[Virtual, str]
    held: Mapping[Virtual, Pool | None]


class Holdings:
    """One agent's, by its device and table. `tell` is given what an operator should know, once.

    Opened when made: KernelError says what is missing.
    """

    def __init__(self, device: str, style: ruleset.Style, tell: Callable[[str], None]) -> None:
        self._style = style
        self._tell = tell
        self._missing: set[str] = set()  # schedulers
        self._draining: dict[Virtual, set[End]] = {}
        self._made: nft.Sight | None = None  # of the table, as it was written
        self.transactions = 0  # of nf_tables, by us
        self.changes = 0  # of IPVS, by us
        self._ended: list[Ended] = []
        self._name = device
        if device in conntrack_keepalive.DEVICES:
            raise KernelError("a device of this name stands for another data plane", device,
                              "give kbpf another name with --ipvs-device")  # fmt: skip
        self._ipvs = _open_ipvs()
        try:
            _refuse_without_conntrack()
            self._device = dummy.ensure(device)
            self.make_table()
        except KernelError:
            self._ipvs.close()
            raise

    def set_times(self, times: Times) -> None:
        """When idle connections are forgotten; those that are 0 stay as they are."""
        if any(times):
            self._ipvs.set_times(times)

    def close(self) -> None:
        """What is there stays."""
        self._ipvs.close()

    def own_addresses(self, but: Iterable[str]) -> frozenset[Addr]:
        """Those that the node has itself, on any other device than these; what kube-proxy keeps on
        its own goes with that.
        """
        _, own = dummy.addresses(self._device, *conntrack_keepalive.DEVICES, *but)
        return own

    def families(self) -> frozenset[int]:
        """Those of which the node takes addresses: 4, and 6 where it is not switched off."""
        return frozenset((4, 6) if dummy.takes_ipv6(self._name) else (4,))

    def take_ended(self) -> tuple[Ended, ...]:
        """What was ended since this was asked last."""
        found, self._ended = tuple(self._ended), []
        return found

    def draining(self, virtual: Virtual) -> frozenset[End]:
        """Its real servers that have left, and are still there."""
        return frozenset(self._draining.get(virtual, ()))

    # ---- reading ---------------------------------------------------------------------------

    def elements(self) -> frozenset[Element]:
        """Those of the table's sets; a table that is not as we made it is made anew, and so is a
        device that is gone.
        """
        self._device = dummy.ensure(self._name)
        if not self.is_whole():
            self.make_table()
        return ruleset.read(forward_rules.transaction(ruleset.listing(self._style), hint=ROOT))

    def is_whole(self) -> bool:
        """Whether the table is the one that we made, with its chains, rules and sets: somebody may
        have flushed all rules. Who takes elements away is not noticed.
        """
        return self._made is not None and self._made == nft.look("inet", self._style.table)

    def has_device(self) -> bool:
        """Somebody may have removed it, or have made another one of its name."""
        return dummy.index_or_zero(self._name) == self._device

    def addresses(self) -> frozenset[Addr]:
        """Those that stand on the device."""
        return dummy.addresses(self._device)[0]

    def pools(self, elements: frozenset[Element], ours: Container[Virtual]) -> dict[Virtual, Pool]:
        """Our virtual services: those that these elements note. Those of others in `ours` count,
        too: kube-proxy's, or our own if our table was lost.
        """
        self._draining.clear()
        pools: dict[Virtual, Pool] = {}
        for service, settings in self._ipvs.services():
            virtual = virtual_of(service)
            if virtual is not None and (note(virtual) in elements or virtual in ours):
                pools[virtual] = self._read_pool(virtual, service, settings)
        return pools

    def _pool(self, virtual: Virtual) -> Pool | None:
        """One of them; None if it is not there."""
        self._draining.pop(virtual, None)
        service = Service(*virtual)
        settings = self._ipvs.settings(service)
        return None if settings is None else self._read_pool(virtual, service, settings)

    def _read_pool(self, virtual: Virtual, service: Service, settings: Settings) -> Pool:
        servers = []
        for load in self._ipvs.servers(service):
            end = End(*load.server)
            servers.append((end, load.weight))
            if load.weight == 0:
                self._draining.setdefault(virtual, set()).add(end)
        by_port = bool(settings.flags & ServiceFlag.BY_PORT)
        return Pool(settings.scheduler, settings.persistence, by_port, tuple(sorted(servers)))

    def serves(self, virtual: Virtual | None) -> bool:
        """Whether IPVS still has this one, if any. If it has not, somebody may have flushed them
        all, or loaded the module anew, which wants another conversation: that is begun.
        """
        if virtual is None or self._ipvs.settings(Service(*virtual)) is not None:
            return True
        self._ipvs.close()
        self._ipvs = _open_ipvs()
        return False

    def is_idle(self, virtual: Virtual) -> bool:
        """Whether it has no connections, nor remembers any that have ended."""
        return not self._ipvs.connections(Service(*virtual))

    # ---- changing --------------------------------------------------------------------------

    def try_addresses(self, wanted: Iterable[Addr]) -> dict[Addr, str]:
        """Puts these on the device; those that the kernel does not take, in its words."""
        return {address: str(e) for address, e in dummy.add(self._device, wanted).items()}

    def make_table(self) -> None:
        """What is missing of it, and all rules anew. Elements stay. KernelError if somebody else
        has a table of this name.
        """
        refuse_others(self._style.table)
        wanted = ruleset.table(self._style)
        self._nft(wanted)
        made = nft.look("inet", self._style.table)
        # Somebody may have flushed it again meanwhile.
        whole = made is not None and len(made.rules) == sum(
            "rule" in c.get("add", ()) for c in wanted
        )
        self._made = made if whole else None

    def begin(self, changes: Changes) -> Refusals:
        """The steps 1 and 2, one by one, whatever becomes of the others; KernelError where the
        kernel does not take the elements, or does not answer.
        """
        steps, style = changes.steps(), self._style
        self._nft([*ruleset.removal(style, steps.early), *ruleset.addition(style, steps.first)])
        addresses = self.try_addresses(_addresses(steps.first))
        start = time.perf_counter()
        flows = self._flows(changes.cut)
        virtuals = self._change(dict(self._additions(changes)))
        if flows:
            self._ended.append(Ended(time.perf_counter() - start, flows))
        return Refusals(
            addresses,
            virtuals,
            {virtual: self._pool(virtual) for virtual in virtuals},
        )

    def finish(self, changes: Changes) -> None:
        """The other steps."""
        steps, style = changes.steps(), self._style
        self._nft([*ruleset.removal(style, steps.gone), *ruleset.addition(style, steps.late)])
        removed = [self._of_service(Command.DEL_SERVICE, v) for v in changes.old_pools]
        self._ipvs.change(removed, GONE[Command.DEL_SERVICE])
        self.changes += len(removed)
        for virtual in changes.old_pools:
            self._draining.pop(virtual, None)
        dummy.drop(self._device, changes.strays | {*_addresses(steps.gone)})
        self._nft(ruleset.removal(style, steps.notes))

    def _flows(self, cut: Iterable[tuple[Virtual, End]]) -> dict[int, int]:
        """How many the kernel forgets with these real servers, at the next packet of each, by
        family.
        """
        ends: dict[Virtual, set[End]] = {}
        for virtual, end in cut:
            ends.setdefault(virtual, set()).add(end)
        found: dict[int, int] = {}
        for virtual, some in ends.items():
            loads = self._ipvs.servers(Service(*virtual))
            flows = sum(one.active + one.inactive for one in loads if End(*one.server) in some)
            family = family_of(virtual.address)
            found[family] = found.get(family, 0) + flows
        return found

    def _change(self, wanted: Mapping[Virtual, Sequence[ipvs.Change]]) -> dict[Virtual, str]:
        """The words for those that were refused. Where the kernel may not have a scheduler, another
        one takes its place at once.
        """
        made = [(virtual, change) for virtual, some in wanted.items() for change in some]
        codes = self._ipvs.try_([change for _, change in made])
        failed: dict[Virtual, list[tuple[ipvs.Change, int]]] = {}
        for (virtual, change), code in zip(made, codes, strict=True):
            if code and code not in GONE.get(change.command, ()):
                failed.setdefault(virtual, []).append((change, code))
        self.changes += len(made) - sum(map(len, failed.values()))
        again = self._without_scheduler(failed)
        refused = {v: _words(*some[0]) for v, some in failed.items() if v not in again}
        return refused | self._change(again) if again else refused

    def _without_scheduler(
        self, failed: Mapping[Virtual, Sequence[tuple[ipvs.Change, int]]]
    ) -> dict[Virtual, list[ipvs.Change]]:
        """What failed for want of a scheduler that was not known to be missing, without it."""
        missing = {
            virtual: change.settings.scheduler
            for virtual, some in failed.items()
            for change, code in some
            if code == errno.ENOENT
            and change.settings is not None
            and change.settings.scheduler not in {SIMPLEST, *self._missing}
        }
        self._missing |= {*missing.values()}
        for name in sorted({*missing.values()}):
            self._tell(f"IPVS may lack the scheduler {name} (CONFIG_IP_VS_{name.upper()}): "
                       f"{self._instead(name)} takes its place")  # fmt: skip
        return {v: [self._spread_else(change) for change, _ in failed[v]] for v in missing}

    def _spread_else(self, change: ipvs.Change) -> ipvs.Change:
        """The same, without a scheduler that the kernel does not have."""
        settings = change.settings
        if settings is None or settings.scheduler not in self._missing:
            return change
        instead = Settings(self._instead(settings.scheduler), settings.persistence)
        return change._replace(settings=instead)

    def _instead(self, scheduler: str) -> str:
        """This one, or what takes its place."""
        while scheduler in self._missing:
            scheduler = SIMPLEST if scheduler == WEIGHTED else WEIGHTED
        return scheduler

    def _nft(self, commands: list[forward_rules.Json]) -> None:
        if commands:
            forward_rules.transaction(*commands, hint=ROOT)
            self.transactions += 1

    def _additions(self, changes: Changes) -> Iterator[tuple[Virtual, list[ipvs.Change]]]:
        """By virtual service."""
        cut: dict[Virtual, set[End]] = {}
        for virtual, end in changes.cut:
            cut.setdefault(virtual, set()).add(end)
        for virtual, pool in changes.new_pools.items():
            made = [self._of_service(Command.NEW_SERVICE, virtual, pool)]
            made += [_of_server(Command.NEW_SERVER, virtual, end, w) for end, w in pool.servers]
            yield virtual, made
        for virtual, (old, new) in changes.changed_pools.items():
            made = list(self._alter(virtual, old, new))
            yield virtual, [*made, *self._cut(virtual, cut.pop(virtual, set()))]
        for virtual, ends in cut.items():
            yield virtual, list(self._cut(virtual, ends))

    def _cut(self, virtual: Virtual, ends: set[End]) -> Iterator[ipvs.Change]:
        """Those of them that are drained are removed at once."""
        draining = self._draining.get(virtual, set())
        for end in ends & draining:
            yield _of_server(Command.DEL_SERVER, virtual, end)
        draining -= ends

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
        if self._settings(old) != self._settings(new):
            yield self._of_service(Command.SET_SERVICE, virtual, new)

    def _of_service(
        self, command: Command, virtual: Virtual, pool: Pool | None = None
    ) -> ipvs.Change:
        settings = None if pool is None else self._settings(pool)
        return ipvs.Change(command, Service(*virtual), settings)

    def _settings(self, pool: Pool) -> Settings:
        if pool.scheduler in self._missing:
            return Settings(self._instead(pool.scheduler), pool.persistence)
        hashes = pool.scheduler in ("mh", "sh")
        flags = ServiceFlag.FALLBACK if hashes else ServiceFlag(0)
        if pool.by_port:
            flags |= ServiceFlag.BY_PORT
        return Settings(pool.scheduler, pool.persistence, flags)

    def drain(self) -> None:
        """Removes what has left and has no connections any more."""
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


def _open_ipvs() -> Ipvs:
    """The kernel loads schedulers by itself, but not IPVS."""
    try:
        return Ipvs()
    except KernelError as error:
        if error.errno != errno.ENOENT or not modules.load(("ip_vs",)):
            raise
    return Ipvs()


def _refuse_without_conntrack() -> None:
    if ipvs.knows_conntrack() is False:
        raise KernelError(
            "this kernel's IPVS masquerades nobody", f"there is no {ipvs.CONNTRACK}",
            "the kernel needs CONFIG_IP_VS_NFCT; or use --mode bpf",
        )  # fmt: skip


# ---- words of the two sides ----------------------------------------------------------------------


def _words(change: ipvs.Change, code: int) -> str:
    return str(KernelError(f"cannot {change}", "IPVS", os.strerror(code), code))


def _of_server(command: Command, virtual: Virtual, end: End, weight: int = 0) -> ipvs.Change:
    return ipvs.Change(command, Service(*virtual), None, Server(*end), weight)


def _addresses(elements: Iterable[Element]) -> list[Addr]:
    return [
        Addr(parts[0])
        for name, parts in elements
        if name is SetName.VIRTUAL_IPS and isinstance(parts[0], bytes)
    ]
