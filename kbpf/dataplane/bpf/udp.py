"""Ends what UDP clients still hold of a backend that stopped serving.

TCP connections are left alone, as kube-proxy leaves them. UDP has no end of its
own: a connected socket would talk to the dead address for ever. So such sockets are destroyed in
every network namespace. Flows of unconnected ones are the programs' to forget: they find in
`udp_cuts` that what a flow chose serves no more, and choose anew. Sockets that went
to the backend directly, not through a Service, are nobody's business here: only what is in
`sock_peers` or `former_peers` is destroyed.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, cast

from kbpf.dataplane.bpf.maps.agent_maps import Tables
from kbpf.dataplane.bpf.maps.flow_entries import CHOSEN, is_question
from kbpf.dataplane.bpf.maps.layout import CUT_KEY, NAT, PEER, U64, UDP_FLOW, Target, pack_target
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.net import sock_diag
from kbpf.kernel.system import netns
from kbpf.model.address import ANY4, ANY6, family_of
from kbpf.model.desired import Backend, FrontendAddress
from kbpf.model.metrics import Ended
from kbpf.model.objects import Protocol

log = logging.getLogger("kbpf.dataplane")

COOKIE_MASK: Final = (1 << 44) - 1
"""sock.c, socket_id(): the low bits are the socket's cookie, but for what is mixed in above."""

KEPT_NS: Final = 2 * 120 * 1_000_000_000
"""A flow that has been idle for FLOW_IDLE_NS (sock.c) is over, so no flow that is older than a cut
can be used after this time; twice, to be sure."""

_SOCKET: Final = 8
"""Bytes of a socket's id, before its flows."""
_UDP: Final = bytes([Protocol.UDP])

PIECE: Final = 2_048
"""Entries that are looked at in one step: some two milliseconds."""

WALKS: Final = 2
"""How often the sockets are read: the kernel's iterator continues by counting entries, so it passes
over one for each socket that is closed meanwhile."""


def backend_of(raw: bytes) -> Backend:
    """A struct target that is a backend."""
    target = Target.unpack(raw)
    return Backend(target.address, target.port, Protocol(target.protocol))


Gone = Callable[[int, bytes, bytes], bool]
"""(service id, frontend, backend), the two as struct target: whether that is no more."""


class Cuts:
    """The map `udp_cuts`: backends that stopped serving a Service, and when, until no flow is as
    old. The oldest makes room.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        found = ((U64.unpack(raw)[0], key) for key, raw in tables.maps["udp_cuts"].items())
        self._times = {key: when for when, key in sorted(found)}
        tables.fill["udp_cuts"] = len(self._times)

    def add(self, ended: Iterable[tuple[int, bytes]], now: int) -> None:
        """These, as service id and struct target, from now (ns, CLOCK_MONOTONIC) on."""
        most = self._tables.maps["udp_cuts"].max_entries
        keys = dict.fromkeys(CUT_KEY.pack(service, backend) for service, backend in ended)
        times = dict.fromkeys(list(keys)[:most], now)
        known = sum(self._times.pop(key, None) is not None for key in times)
        self._make_room(now, most - len(times))
        stamp = U64.pack(now)
        self._tables.put("udp_cuts", ((key, stamp) for key in times), len(times) - known)
        self._times |= times

    def _make_room(self, now: int, most: int) -> None:
        """Deletes the cuts that no flow is older than, and the oldest beyond so many."""
        excess = len(self._times) - most
        gone: list[bytes] = []
        for key, when in self._times.items():
            if now - when < KEPT_NS and len(gone) >= excess:
                break
            gone.append(key)
        self._tables.drop("udp_cuts", gone)
        for key in gone:
            del self._times[key]


Steps = Generator[None, None, Counter[int]]
"""Work in pieces, and at its end how many flows or sockets have ended, by family."""


def cut(maps: dict[str, Map], gone: Gone, flows: bool = True) -> Counter[int]:
    """cut_in_steps(), at once."""
    steps = cut_in_steps(maps, gone, flows)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast("Counter[int]", done.value)


def cut_in_steps(maps: dict[str, Map], gone: Gone, flows: bool = True) -> Steps:
    """Destroys sockets and forgets flows whose backend serves no more, or whose frontend is no
    more the Service's that chose it. How many of either, by family. `flows`: those of unconnected
    sockets are counted, too. Looks at PIECE entries at a time.
    """
    ended = yield from _forget_packets(maps["flows"], gone)
    try:
        if flows:
            for at, (_, backend) in enumerate(_flows(maps["udp_flows"], gone), 1):
                ended[_family(backend)] += 1
                if at % PIECE == 0:
                    yield
        yield
        sockets = yield from _end_sockets((maps["sock_peers"], maps["former_peers"]), gone)
    except KernelError as error:
        log.warning("UDP sockets whose backend is gone are not ended: %s", error)
        return ended
    if sockets:
        log.info("udp sockets destroyed=%d", sockets.total())
    return ended + sockets


def stale(maps: dict[str, Map], gone: Gone) -> set[tuple[int, bytes]]:
    """What flows of sockets have chosen that is gone, as service id and struct target."""
    try:
        return set(_flows(maps["udp_flows"], gone))
    except KernelError as error:
        log.warning("UDP flows of before are not looked at: %s", error)
        return set()


def _end_sockets(maps: Iterable[Map], gone: Gone) -> Steps:
    """Destroys connected sockets. Who goes on with such a socket chooses anew, since it is
    connected no more.
    """
    doomed: defaultdict[int, list[Target]] = defaultdict(list)
    walks = (peers.items() for peers in maps for _ in range(WALKS))
    for at, (_, raw) in enumerate(chain.from_iterable(walks), 1):
        socket, frontend, backend, service, _ = PEER.unpack(raw)
        if backend[18:19] == _UDP and gone(service, frontend, backend):
            target = Target.unpack(backend)
            if target not in doomed[socket & COOKIE_MASK]:
                doomed[socket & COOKIE_MASK].append(target)
        if at % PIECE == 0:
            yield
    return _destroy(doomed) if doomed else Counter()


def _flows(held: Map, gone: Gone) -> Iterator[tuple[int, bytes]]:
    """What flows of sockets have chosen that is gone, as service id and struct target."""
    for _, raw in held.items():
        for _, _, _, frontend, backend, service, _ in UDP_FLOW.iter_unpack(raw[_SOCKET:]):
            if frontend[18] and gone(service, frontend, backend):
                yield service, backend


def _family(raw: bytes) -> int:
    """Of a struct target."""
    return family_of(raw[:16])


def _forget_packets(flows: Map, gone: Gone) -> Steps:
    """Flows of the packet path: all entries go, and the next datagram chooses anew. The client's
    own go last: without them the others would never make room. A flow that has begun anew since it
    was read stays. The programs find the end of a backend by its id as well (begins_anew() in
    tc.c), so no packet waits for this.
    """
    ended: Counter[int] = Counter()
    questions: list[tuple[bytes, bytes]] = []
    for at, (key, raw) in enumerate(flows.items(), 1):
        if key[18:19] == _UDP:
            _, _, frontend, backend, _, _, _, service, *_ = NAT.unpack(raw)
            if gone(service, frontend, backend):
                if is_question(raw):
                    questions.append((key, raw))
                else:
                    _forget_entry(flows, key, raw)
        if at % PIECE == 0:
            yield
    for at, (key, raw) in enumerate(questions, 1):
        if _forget_entry(flows, key, raw):
            ended[_family(NAT.unpack(raw)[3])] += 1
        if at % PIECE == 0:
            yield
    return ended


def _forget_entry(flows: Map, key: bytes, raw: bytes) -> bool:
    """Deletes the entry if it is still of the flow that was read."""
    now = flows.lookup(key)
    if now is None or now[CHOSEN] != raw[CHOSEN]:
        return False
    flows.delete(key)
    return True


def _destroy(doomed: Mapping[int, Collection[Target]]) -> Counter[int]:
    """Sockets (low bits of the id → backends) that are still connected to one of these backends."""

    def is_doomed(found: sock_diag.DiagSocket) -> bool:
        backends = doomed.get(found.cookie & COOKIE_MASK, ())
        return any(b.address == found.address and b.port == found.port for b in backends)

    ended: Counter[int] = Counter()
    for path in netns.all_namespaces():
        try:
            found = netns.inside(path, lambda: sock_diag.destroy_connected_udp(is_doomed))
            ended.update(family_of(one.address) for one in found)
        except KernelError as error:
            log.warning("UDP sockets in one network namespace were not looked at: %s", error)
    return ended


def node_port_of(frontend: bytes) -> bytes:
    """The key that a dialled NodePort is programmed under: its address is the wildcard."""
    return (ANY4 if family_of(frontend[:16]) == 4 else ANY6) + frontend[16:]


Packed = set[tuple[int, bytes]]


def _packed(
    backends: Collection[tuple[int, Backend]], frontends: Collection[tuple[int, FrontendAddress]]
) -> tuple[Packed, Packed]:
    """Both as the maps hold them: service id and struct target."""
    ends = {(service, pack_target(b.address, b.port, b.protocol)) for service, b in backends}
    return ends, {(service, pack_target(*at)) for service, at in frontends}


def predicate(
    backends: Collection[tuple[int, Backend]], frontends: Collection[tuple[int, FrontendAddress]]
) -> Gone:
    """For cut(): gone are these backends and these frontends, each of a service id."""
    ends, fronts = _packed(backends, frontends)

    def gone(service: int, frontend: bytes, backend: bytes) -> bool:
        return (
            (service, backend) in ends
            or (service, frontend) in fronts
            or (service, node_port_of(frontend)) in fronts
        )

    return gone


def all_but(
    backends: Collection[tuple[int, Backend]], frontends: Collection[tuple[int, FrontendAddress]]
) -> Gone:
    """For cut(): gone is everything else."""
    ends, fronts = _packed(backends, frontends)

    def gone(service: int, frontend: bytes, backend: bytes) -> bool:
        return (service, backend) not in ends or (
            (service, frontend) not in fronts and (service, node_port_of(frontend)) not in fronts
        )

    return gone


class Passes:
    """Ends what is to be ended in passes over the maps, a step at a time: a writer with other
    things to do never walks over all flows at once. What comes during a pass waits for the next.
    """

    def __init__(self, maps: dict[str, Map]) -> None:
        self._maps = maps
        self._backends: set[tuple[int, Backend]] = set()
        self._frontends: set[tuple[int, FrontendAddress]] = set()
        self._flows = False
        self._steps: Steps | None = None
        self._families: set[int] = set()
        self._seconds = 0.0
        self.ended: list[Ended] = []

    @property
    def is_busy(self) -> bool:
        """Whether there is anything left to do."""
        return self._steps is not None or bool(self._backends or self._frontends)

    def add(
        self,
        backends: Collection[tuple[int, Backend]],
        frontends: Collection[tuple[int, FrontendAddress]],
        flows: bool,
    ) -> None:
        """These backends and frontends, each of a service id, are gone. `flows`: see cut()."""
        self._backends |= set(backends)
        self._frontends |= set(frontends)
        self._flows |= flows

    def advance(self, seconds: float) -> None:
        """Works for so long; the last step may take longer."""
        start = now = time.perf_counter()
        while self.is_busy and now - start < seconds:
            result = self._step()
            before, now = now, time.perf_counter()
            self._seconds += now - before
            if result is not None:
                self.ended.append(Ended(self._seconds, {f: result[f] for f in self._families}))
                self._steps, self._seconds = None, 0.0

    def _step(self) -> Counter[int] | None:
        """What has ended, once a pass is over."""
        if self._steps is None:
            self._families = {family_of(backend.address) for _, backend in self._backends}
            self._families |= {family_of(at.address) for _, at in self._frontends}
            gone = predicate(self._backends, self._frontends)
            self._steps = cut_in_steps(self._maps, gone, self._flows)
            self._backends, self._frontends, self._flows = set(), set(), False
        try:
            next(self._steps)
        except StopIteration as done:
            return cast("Counter[int]", done.value)
        return None
