"""What the kernel holds of the IPVS data plane: read, and changed step by step.

Virtual services and their real servers are IPVS', addresses stand on the dummy device, all else in
the nftables table. A real server that has left is drained: it is there with weight 0 until its
connections are gone.
"""

import errno
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from kbpf.dataplane.base import Report
from kbpf.dataplane.ipvs import rules
from kbpf.dataplane.ipvs.ledger import Changes
from kbpf.dataplane.ipvs.plan import Element, End, Pool, SetName, Virtual, note
from kbpf.dataplane.ipvs.traces import ROOT
from kbpf.errors import KernelError
from kbpf.kernel import dummy, ipvs, modules, netfilter
from kbpf.kernel.ipvs import Command, Ipvs, Server, Service, ServiceFlag, Settings
from kbpf.model.address import Addr
from kbpf.model.objects import Protocol

FALLBACK: Final[Mapping[str, str]] = {"mh": "wrr", "sh": "wrr"}
"""What takes the place of a scheduler that the kernel does not have."""


class Holdings:
    """One agent's, by its device and table. `tell` is given what an operator should know, once.

    Opened when made: KernelError says what is missing.
    """

    def __init__(self, device: str, style: rules.Style, tell: Callable[[str], None]) -> None:
        self._style = style
        self._tell = tell
        self._missing: set[str] = set()  # schedulers
        self._draining: dict[Virtual, set[End]] = {}
        self._ipvs = _open_ipvs()
        try:
            self._device = dummy.ensure(device)
            netfilter.transaction(*rules.table(style), hint=ROOT)
        except KernelError:
            self._ipvs.close()
            raise

    def close(self) -> None:
        """What is there stays."""
        self._ipvs.close()

    def own_addresses(self) -> frozenset[Addr]:
        """Those that the node has itself, on any other device."""
        _, own = dummy.addresses(self._device)
        return own

    def draining(self, virtual: Virtual) -> frozenset[End]:
        """Its real servers that have left, and are still there."""
        return frozenset(self._draining.get(virtual, ()))

    # ---- reading ---------------------------------------------------------------------------

    def elements(self) -> frozenset[Element]:
        """Those of the table's sets; a table that is gone is made anew."""
        listed = self._listing()
        if listed is None:
            netfilter.transaction(*rules.table(self._style), hint=ROOT)
        return rules.read(listed or ())

    def has_table(self) -> bool:
        """Somebody may have flushed all rules."""
        return self._listing() is not None

    def _listing(self) -> Sequence[netfilter.Json] | None:
        try:
            return netfilter.transaction(rules.listing(self._style), hint=ROOT)
        except KernelError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def pools(
        self, elements: frozenset[Element], ours: Container[Virtual]
    ) -> tuple[frozenset[Element], dict[Virtual, Pool]]:
        """What is there of these elements, and our virtual services: those that they note. Those of
        others in `ours` count, too: kube-proxy's, or our own if our table was lost.
        """
        self._draining.clear()
        pools: dict[Virtual, Pool] = {}
        for service, settings in self._ipvs.services():
            virtual = _virtual(service)
            if virtual is not None and (note(virtual) in elements or virtual in ours):
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

    # ---- changing --------------------------------------------------------------------------

    def carry_out(self, changes: Changes) -> Report:
        """All steps, in their order; KernelError where the kernel refuses one."""
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
