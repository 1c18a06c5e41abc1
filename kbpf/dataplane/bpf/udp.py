"""Ends what UDP clients still hold of a backend that stopped serving.

TCP connections are left alone, as kube-proxy leaves them. UDP has no end of its
own: a connected socket would talk to the dead address for ever. So such sockets are destroyed in
every network namespace, and flows of unconnected ones are forgotten. A socket whose owner goes on
with it, or has dissolved its connection before, is led to that backend no more. Sockets that went
to the backend directly, not through a Service, are nobody's business here: only what stands in
`udp_peers` is destroyed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from kbpf.dataplane.bpf.flows import CHOSEN, is_question
from kbpf.dataplane.bpf.layout import FLOW, FLOW_KEY, NAT, PEER, TARGET, Target, pack_target
from kbpf.errors import KernelError
from kbpf.kernel import netns, sockdiag
from kbpf.kernel.libbpf import Map
from kbpf.model.address import ANY4, ANY6, family_of
from kbpf.model.desired import Backend, FrontendAddress
from kbpf.model.objects import Protocol

log = logging.getLogger("kbpf.dataplane")

COOKIE_MASK: Final = (1 << 44) - 1
"""sock.c, socket_id(): the low bits are the socket's cookie, but for what is mixed in above."""

BACKEND: Final = slice(TARGET.size, 2 * TARGET.size)
"""Where it stands in a struct peer."""
_UDP: Final = bytes([Protocol.UDP])


def backend_of(raw: bytes) -> Backend:
    """A struct target that is a backend."""
    target = Target.unpack(raw)
    return Backend(target.address, target.port, Protocol(target.protocol))


Gone = Callable[[int, bytes, bytes], bool]
"""(service id, frontend, backend), the two as struct target: whether that is no more."""


def cut(maps: dict[str, Map], gone: Gone) -> Counter[int]:
    """Forgets flows and destroys sockets whose backend serves no more, or whose frontend is no
    more the Service's that chose it. How many of either, by family.
    """
    ended = _forget_flows(maps, gone) + _forget_packets(maps, gone)
    sockets = _end_sockets(maps["udp_peers"], gone)
    if sockets:
        log.info("udp sockets destroyed=%d", sockets.total())
    return ended + sockets


def _end_sockets(peers: Map, gone: Gone) -> Counter[int]:
    """Destroys connected sockets, and forgets whom they were connected to: who goes on with such a
    socket chooses anew.
    """
    doomed = {}
    for key, raw in peers.items():
        frontend, backend, service, _ = PEER.unpack(raw)
        if gone(service, frontend, backend):
            doomed[key] = raw
    if not doomed:
        return Counter()
    ended = _destroy(
        {int.from_bytes(key, "little") & COOKIE_MASK: raw[BACKEND] for key, raw in doomed.items()}
    )
    for key, raw in doomed.items():
        if peers.lookup(key) == raw:
            peers.delete(key)
    return ended


def _forget_flows(maps: dict[str, Map], gone: Gone) -> Counter[int]:
    """A flow loses its backend, so that its next datagram chooses anew. The entry itself stays
    in its socket's list, which close() walks.
    """
    ended: Counter[int] = Counter()
    for key, raw in maps["udp_flows"].items():
        last_used, backend, following, backend_id, service = FLOW.unpack(raw)
        if backend_id and gone(service, key[8:28], backend):
            maps["udp_flows"].replace(key, FLOW.pack(last_used, backend, following, 0, service))
            maps["udp_reverse"].delete(FLOW_KEY.pack(int.from_bytes(key[:8], "little"), backend))
            ended[_family(backend)] += 1
    return ended


def _family(raw: bytes) -> int:
    """Of a struct target."""
    return family_of(raw[:16])


def _forget_packets(maps: dict[str, Map], gone: Gone) -> Counter[int]:
    """Flows of the packet path: all entries go, and the next datagram chooses anew. The client's
    own go last: without them the others would never make room. A flow that has begun anew since it
    was read stays.
    """
    ended: Counter[int] = Counter()
    questions: list[tuple[bytes, bytes]] = []
    answers: list[tuple[bytes, bytes]] = []
    for key, raw in maps["flows"].items():
        if key[18:19] == _UDP:
            _, _, frontend, backend, _, _, _, service, *_ = NAT.unpack(raw)
            if gone(service, frontend, backend):
                (questions if is_question(raw) else answers).append((key, raw))
    for key, raw in (*answers, *questions):
        now = maps["flows"].lookup(key)
        if now is not None and now[CHOSEN] == raw[CHOSEN]:
            maps["flows"].delete(key)
            if is_question(raw):
                ended[_family(NAT.unpack(raw)[3])] += 1
    return ended


def _destroy(doomed: dict[int, bytes]) -> Counter[int]:
    def is_doomed(found: sockdiag.DiagSocket) -> bool:
        backend = doomed.get(found.cookie & COOKIE_MASK)
        if backend is None:
            return False
        target = Target.unpack(backend)
        return target.address == found.address and target.port == found.port

    ended: Counter[int] = Counter()
    for path in netns.all_namespaces():
        try:
            found = netns.inside(path, lambda: sockdiag.destroy_connected_udp(is_doomed))
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
