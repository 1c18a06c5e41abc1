# SPDX-License-Identifier: Apache-2.0
"""Cuts off UDP clients from backends that have stopped serving.

TCP connections are left alone, as with kube-proxy. UDP has no end of connection: a connected socket
would send to such a backend for ever. Such sockets are destroyed (SOCK_DESTROY of sock_diag) in
every network namespace. Flows of unconnected sockets are ended by the programs, which find in
`udp_cuts` that the chosen backend no longer serves, and choose again. Only sockets in `sock_peers`
or `former_peers` are destroyed, never those that connected to a backend directly.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice, takewhile
from typing import Final, cast

from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.flow_entries import (
    DECISION,
    DIRECTION,
    FINS,
    NS_PER_SECOND,
    is_original,
    last_used,
    original_key,
)
from kbpf.dataplane.bpf.maps.layout import (
    CUT_KEY,
    FLOW,
    PEER,
    U64,
    UDP_FLOW,
    FinFlag,
    FlowDirection,
    ServiceValue,
    Target,
    node_port_target,
    pack_target,
)
from kbpf.dataplane.bpf.state.plan import UdpTargets
from kbpf.errors import KernelError, LastError
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.net import sock_diag
from kbpf.kernel.netfilter import conntrack
from kbpf.kernel.system import netns
from kbpf.model.address import Addr, family_of
from kbpf.model.metrics import UdpCuts
from kbpf.model.objects import Protocol

log = logging.getLogger("kbpf.dataplane")

COOKIE_MASK: Final = (1 << 44) - 1
"""The low bits of a socket id are the socket's cookie; see socket_id() in sock.c for the others."""

CUT_LIFETIME_NS: Final = 2 * 120 * 1_000_000_000
"""Lifetime of an entry in `udp_cuts`. A flow expires after FLOW_IDLE_NS (sock.c) without a
datagram, so no flow older than the cut is left after that time; twice that, as a margin.
"""

ANSWER_NS: Final = 5 * NS_PER_SECOND
"""How long a client may wait for the answer to a datagram: the timeout of resolv.conf."""

SERVICE_ID_BYTES: Final = 4
"""Size of the service id in front of a struct cut_key."""
_SOCKET_ID_BYTES: Final = 8
"""Size of the socket id in front of the flows in a struct udp_flows."""
_UDP_BYTE: Final = bytes([Protocol.UDP])
"""For comparison with byte 18 of a struct target, its protocol."""

STEP_ENTRIES: Final = 2_048
"""Entries examined in one step: about two milliseconds."""

SOCKET_WALKS: Final = 2
"""How many times the sockets are read. The kernel's iterator resumes by counting entries, so it
skips one entry for each socket that is closed meanwhile.
"""


IsGone = Callable[[int, bytes, bytes], bool]
"""(service id, frontend, backend), the latter two as struct target: whether that choice is stale.
For example, (7, 10.96.0.10:53, 10.1.2.3:53) if Service 7 has lost this backend or this frontend.
"""


class UdpCutMap:
    """The map `udp_cuts`: which backend stopped serving a Service, and when. Entries are deleted
    when no flow can be as old. When the map is full, the Service ports that have the most lose
    their oldest ones: endpoints that change all the time must not end the cuts of others.
    """

    def __init__(self, agent_maps: AgentMaps) -> None:
        self._agent_maps = agent_maps
        cuts = ((U64.unpack(raw)[0], key) for key, raw in agent_maps.maps["udp_cuts"].items())
        self._times = {key: cut_at for cut_at, key in sorted(cuts)}  # in this order: oldest first
        agent_maps.fill["udp_cuts"] = len(self._times)

    def add(self, stopped_backends: Iterable[tuple[int, bytes]], now: int) -> None:
        """Adds cuts (service id, struct target) at `now` (ns, CLOCK_MONOTONIC)."""
        keys = dict.fromkeys(CUT_KEY.pack(service, backend) for service, backend in stopped_backends)
        # pop() and |= move a repeated cut to the end
        repeated = {key for key in keys if self._times.pop(key, None) is not None}
        self._times |= dict.fromkeys(keys, now)
        removed = self._remove(now)
        self._agent_maps.delete("udp_cuts", removed - (keys.keys() - repeated))
        added, stamp = keys.keys() - removed, U64.pack(now)
        self._agent_maps.put("udp_cuts", ((key, stamp) for key in added), len(added - repeated))

    def _remove(self, now: int) -> set[bytes]:
        """Forgets expired cuts, and those for which there is no room; returns them."""
        times, max_entries = self._times, self._agent_maps.maps["udp_cuts"].max_entries
        # sorted by time, so this ends at the first cut that is kept
        removed = set(takewhile(lambda key: now - times[key] >= CUT_LIFETIME_NS, times))
        if len(times) - len(removed) > max_entries:
            counts = Counter(key[:SERVICE_ID_BYTES] for key in times if key not in removed)
            # with room for the next ones, since all of this takes milliseconds
            share = _equal_share(counts.values(), max_entries - max_entries // 8)
            for key in times:
                if key not in removed and counts[key[:SERVICE_ID_BYTES]] > share:
                    counts[key[:SERVICE_ID_BYTES]] -= 1
                    removed.add(key)
        for key in removed:
            del times[key]
        return removed


def _equal_share(counts: Collection[int], room: int) -> int:
    """The largest limit for each of these counts with which all of them fit."""
    for number, count in enumerate(sorted(counts)):
        share = room // (len(counts) - number)
        if count > share:
            return share
        room -= count
    return room


CutSteps = Generator[None, None, Counter[int]]
"""Work in steps; returns the number of ended flows or sockets by family."""


def cut(
    maps: dict[str, Map], is_gone: IsGone, lost_frontends: Mapping[bytes, int] | None, errors: LastError
) -> Counter[int]:
    """Runs cut_stepwise() to its end."""
    steps = cut_stepwise(maps, is_gone, True, lost_frontends, errors)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast("Counter[int]", stop.value)


def cut_stepwise(
    maps: dict[str, Map],
    is_gone: IsGone,
    count_flows: bool,
    lost_frontends: Mapping[bytes, int] | None,
    errors: LastError,
) -> CutSteps:
    """Destroys sockets and deletes flows that use a stale backend or frontend. Returns their number
    by family. `count_flows`: also count flows of unconnected sockets. `lost_frontends`: see
    delete_stale_translations(); None if conntrack does not translate flows. `errors`: what was
    logged by the pass before, which is not logged again. A step examines STEP_ENTRIES entries.
    """
    # An error here is raised, and the pass repeated. Those below are only logged: a kernel without
    # BTF cannot list the maps of sockets, and would fail each time.
    cut_counts = yield from _delete_packet_flows(maps["flows"], is_gone)
    if lost_frontends is not None:
        cut_counts += yield from delete_stale_translations(maps, is_gone, lost_frontends)
    try:
        if count_flows:
            # Only counted: the programs end these flows, by `udp_cuts`.
            for number, (_, backend) in enumerate(_iter_stale_flows(maps["udp_flows"], is_gone), 1):
                cut_counts[_target_family(backend)] += 1
                if number % STEP_ENTRIES == 0:
                    yield
        yield
        sockets = yield from _destroy_stale_sockets((maps["sock_peers"], maps["former_peers"]), is_gone)
    except KernelError as error:
        if errors.replace(error):
            log.warning("cannot destroy UDP sockets whose backend no longer serves: %s", error)
        return cut_counts
    errors.replace(None)
    if sockets:
        log.info("destroyed UDP sockets whose backend no longer serves count=%d", sockets.total())
    return cut_counts + sockets


def find_stale_flows(maps: dict[str, Map], is_gone: IsGone) -> set[tuple[int, bytes]]:
    """The stale choices of unconnected sockets' flows, as service id and struct target."""
    try:
        return set(_iter_stale_flows(maps["udp_flows"], is_gone))
    except KernelError as error:
        log.warning("cannot read the UDP flows of an earlier agent: %s", error)
        return set()


def _destroy_stale_sockets(maps: Iterable[Map], is_gone: IsGone) -> CutSteps:
    """Destroys connected sockets whose choice is stale. Such a socket is no longer connected, so
    the client's next connect() or sendto() chooses again.
    """
    targets_by_socket: defaultdict[int, list[Target]] = defaultdict(list)
    walks = (peers.items() for peers in maps for _ in range(SOCKET_WALKS))
    for number, (_, raw) in enumerate(chain.from_iterable(walks), 1):
        socket, frontend, backend, service, _ = PEER.unpack(raw)
        backend = backend[:19] + b"\0"  # without enum peer_flags
        # byte 18 of a struct target is its protocol
        if backend[18:19] == _UDP_BYTE and is_gone(service, frontend, backend):
            target = Target.unpack(backend)
            # Both walks find it, and it may be in both maps.
            if target not in targets_by_socket[socket & COOKIE_MASK]:
                targets_by_socket[socket & COOKIE_MASK].append(target)
        if number % STEP_ENTRIES == 0:
            yield
    # Only after the walks, which would skip an entry for each destroyed socket.
    return _destroy_sockets(targets_by_socket) if targets_by_socket else Counter()


def _iter_stale_flows(map_: Map, is_gone: IsGone) -> Iterator[tuple[int, bytes]]:
    """The stale choices of unconnected sockets' flows, as service id and struct target."""
    for _, raw in map_.items():
        for _, _, _, frontend, backend, service, _ in UDP_FLOW.iter_unpack(raw[_SOCKET_ID_BYTES:]):
            # protocol 0: this element of the array is free
            if frontend[18] and is_gone(service, frontend, backend):
                yield service, backend


def _target_family(raw: bytes) -> int:
    """The address family of a struct target."""
    return family_of(raw[:16])


def _delete_packet_flows(flows: Map, is_gone: IsGone) -> CutSteps:
    """Deletes stale flows of the packet path; the next datagram chooses again. The entries for
    replies stay while the client may wait for an answer, and those for replies to the node until
    they expire, since no other client may get the answer; flow_gc.py deletes both. The
    original-direction entries go last, since without them the others would never be evicted. A flow
    that has started again since it was read is kept. A datagram that comes earlier chooses again,
    too, if its backend has no id any more (check_restart() in known.h).
    """
    cut_counts: Counter[int] = Counter()
    asked_since = time.monotonic_ns() - ANSWER_NS
    originals: list[tuple[bytes, bytes]] = []
    for number, (key, raw) in enumerate(flows.items(), 1):
        # the protocol of the first struct target in a struct flow_key
        if key[18:19] == _UDP_BYTE:
            _, _, frontend, backend, _, _, _, service, *_ = FLOW.unpack(raw)
            if is_gone(service, frontend, backend):
                if is_original(raw):
                    originals.append((key, raw))
                elif raw[DIRECTION] == FlowDirection.SNAT_REPLY:
                    _reserve(flows, key, raw)
                elif not _has_asked(flows, raw, asked_since):
                    _delete_if_unchanged(flows, key, raw)
        if number % STEP_ENTRIES == 0:
            yield
    for number, (key, raw) in enumerate(originals, 1):
        if _delete_if_unchanged(flows, key, raw):
            cut_counts[_target_family(FLOW.unpack(raw)[3])] += 1
        if number % STEP_ENTRIES == 0:
            yield
    return cut_counts


def _has_asked(flows: Map, raw: bytes, since: int) -> bool:
    """Whether the client of this flow has sent a datagram since then (ns, CLOCK_MONOTONIC)."""
    original = flows.lookup(original_key(raw))
    return original is not None and original[DECISION] == raw[DECISION] and last_used(original) > since


def _reserve(flows: Map, key: bytes, raw: bytes) -> None:
    """Lets this reply entry expire as late as its client's last datagram may be answered. What the
    backend sends until then does not prolong that.
    """
    original = flows.lookup(original_key(raw))
    if original is None or original[DECISION] != raw[DECISION]:
        return
    reserved = bytearray(max(original, raw, key=last_used)[:8] + raw[8:])
    reserved[FINS] |= FinFlag.RESERVED
    flows.update(key, bytes(reserved))


def _delete_if_unchanged(flows: Map, key: bytes, raw: bytes) -> bool:
    """Deletes the entry if it still belongs to the flow that was read. Not atomic: a flow that
    starts again between the two calls loses this entry, and the next datagram chooses a backend.
    """
    current = flows.lookup(key)
    if current is None or current[DECISION] != raw[DECISION]:
        return False
    flows.delete(key)
    return True


def _destroy_sockets(targets_by_socket: Mapping[int, Collection[Target]]) -> Counter[int]:
    """Destroys the sockets (low bits of the id → backends) still connected to one of these
    backends. A socket may have connected elsewhere since its map entry was read.
    """

    def should_destroy(destroyed: sock_diag.DiagSocket) -> bool:
        # Before Linux v5.10, sockets of different namespaces may have the same cookie. So these are
        # the backends of all of them, and the socket's own peer has to be one.
        backends = targets_by_socket.get(destroyed.cookie & COOKIE_MASK, ())
        return any(backend.address == destroyed.address and backend.port == destroyed.port for backend in backends)

    cut_counts: Counter[int] = Counter()
    # sock_diag sees only the sockets of the calling thread's namespace.
    for path in netns.list_namespaces():
        try:
            destroyed = netns.run_in(path, lambda: sock_diag.destroy_connected_udp(should_destroy))
            cut_counts.update(family_of(socket.address) for socket in destroyed)
        except KernelError as error:
            log.warning("cannot destroy UDP sockets in a network namespace: %s", error)
    return cut_counts


PackedTargets = set[tuple[int, bytes]]


def _pack(targets: UdpTargets) -> tuple[PackedTargets, PackedTargets]:
    """Backends and frontends as the maps hold them: service id and struct target."""
    backends = {
        (service, pack_target(backend.address, backend.port, backend.protocol)) for service, backend in targets.backends
    }
    return backends, {(service, pack_target(*address)) for service, address in targets.frontends}


class GoneTargets:
    """IsGone for these: a choice is stale if its backend or its frontend is one of them."""

    def __init__(self, targets: UdpTargets) -> None:
        self._backends, self._frontends = _pack(targets)

    def __call__(self, service: int, frontend: bytes, backend: bytes) -> bool:
        return (
            (service, backend) in self._backends
            or (service, frontend) in self._frontends
            # The client used an address of a node; a NodePort is programmed under the wildcard.
            or (service, node_port_target(frontend)) in self._frontends
        )

    def remove(self, targets: UdpTargets) -> None:
        """Removes what serves again."""
        backends, frontends = _pack(targets)
        self._backends -= backends
        self._frontends -= frontends


def gone_unless_in(targets: UdpTargets) -> IsGone:
    """IsGone for everything except these. A choice is live only if its backend and its frontend are
    both listed under its service id. After a restart, this finds what changed while no agent ran.
    """
    backends, frontends = _pack(targets)

    def is_gone(service: int, frontend: bytes, backend: bytes) -> bool:
        return (service, backend) not in backends or (
            (service, frontend) not in frontends and (service, node_port_target(frontend)) not in frontends
        )

    return is_gone


class UdpPasses:
    """Cuts stale UDP in passes over the maps, one step at a time, so that the writing thread never
    walks over all flows at once. What is added during a pass waits for the next one. A pass that
    fails with a KernelError starts again in the next call of advance().
    """

    def __init__(self, maps: dict[str, Map], uses_conntrack: bool = False) -> None:
        self._maps, self.uses_conntrack = maps, uses_conntrack
        self._waiting, self._count_flows = UdpTargets(), False  # for the next pass
        self._gone_targets: GoneTargets | None = None  # what the current pass cuts
        self._begin_pass: Callable[[], CutSteps] | None = None  # begins the current pass
        self._steps: CutSteps | None = None
        self._families: set[int] = set()
        self._seconds = 0.0
        self.results: list[UdpCuts] = []
        self.errors = LastError()

    @property
    def is_busy(self) -> bool:
        """Whether there is anything left to do."""
        return self._steps is not None or bool(self._waiting)

    def add(self, targets: UdpTargets, count_flows: bool) -> None:
        """Queues these. `count_flows`: see cut_stepwise()."""
        self._waiting.add(targets)
        self._count_flows |= count_flows

    def spare(self, targets: UdpTargets) -> None:
        """Removes these from the current pass and from what waits for the next one, because they
        serve again.
        """
        self._waiting.remove(targets)
        if self._gone_targets is not None:
            self._gone_targets.remove(targets)

    def advance(self, seconds: float) -> None:
        """Works for this many seconds; the last step may take longer. Raises KernelError if a map
        cannot be read or written.
        """
        start = now = time.perf_counter()
        while self.is_busy and now - start < seconds:
            result = self._step()
            previous, now = now, time.perf_counter()
            self._seconds += now - previous
            if result is not None:
                self.results.append(UdpCuts(self._seconds, {family: result[family] for family in self._families}))
                self._steps, self._seconds = None, 0.0

    def _step(self) -> Counter[int] | None:
        """Does one step. At the end of a pass, returns the numbers by family."""
        if self._steps is None:
            waiting = self._waiting
            self._families = {family_of(backend.address) for _, backend in waiting.backends}
            self._families |= {family_of(at.address) for _, at in waiting.frontends}
            self._gone_targets = GoneTargets(waiting)
            lost_frontends = {pack_target(*at): service for service, at in waiting.frontends}
            self._begin_pass = partial(
                cut_stepwise,
                self._maps,
                self._gone_targets,
                self._count_flows,
                lost_frontends if self.uses_conntrack else None,
                self.errors,
            )
            self._steps = self._begin_pass()
            # What is added during this pass waits for the next one.
            self._waiting, self._count_flows = UdpTargets(), False
        try:
            next(self._steps)
        except StopIteration as stop:
            return cast("Counter[int]", stop.value)
        except KernelError:
            # A generator that has raised is finished, and the pass is not.
            assert self._begin_pass is not None
            self._steps = self._begin_pass()
            raise
        return None


# ---- flows of conntrack --------------------------------------------------------------------------


BATCH: Final = 500
"""Entries that are read, and deleted if need be, in one step: about five milliseconds."""


def delete_stale_translations(
    maps: Mapping[str, Map],
    is_gone: Callable[[int, bytes, bytes], bool],
    lost_frontends: Mapping[bytes, int],
) -> Generator[None, None, Counter[int]]:
    """Deletes the entries of stale flows that conntrack translates (`--forwarding netfilter`), as
    kube-proxy does, so that the next datagram chooses again. Works in steps; returns the number of
    entries by family. `is_gone`: see IsGone. An entry does not tell the id of its Service: it is
    the one which has the frontend now, or which has lost it (`lost_frontends`: struct target →
    service id). Flows that other programs translate have no such frontend.
    """
    deleted: Counter[int] = Counter()
    for number, family in ((4, "ip"), (6, "ip6")):
        entries = conntrack.iterate_translated_udp(family)
        while flows := tuple(islice(entries, BATCH)):
            stale = []
            for flow in flows:
                frontend = pack_target(*flow.frontend)
                backend = pack_target(*flow.backend)
                if any(
                    is_gone(service, frontend, backend)
                    for service in _find_services(maps, flow.frontend[0], frontend, lost_frontends)
                ):
                    stale.append(flow)
            deleted[number] += conntrack.delete(stale)
            yield
    return deleted


def _find_services(
    maps: Mapping[str, Map], address: Addr, frontend: bytes, lost_frontends: Mapping[bytes, int]
) -> set[int]:
    """The ids of the Services that have this frontend, or had it."""
    keys = [frontend]
    if maps["node_addresses"].lookup(address) is not None:
        keys.append(node_port_target(frontend))
    current = (maps["services"].lookup(key) for key in keys)
    ids = {ServiceValue.unpack(raw).id for raw in current if raw is not None}
    return ids | {lost_frontends[key] for key in keys if key in lost_frontends}
