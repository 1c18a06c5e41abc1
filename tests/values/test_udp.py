"""How many flows of datagrams end with their backends. Maps are dicts here; real ones, and sockets:
tests/programs/test_udp.py.
"""

from typing import Any, NamedTuple

import pytest

from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.layout import FLOW, FLOW_KEY, NAT, FlowPart, pack_target
from kbpf.model.address import parse_addr
from kbpf.model.desired import Backend
from kbpf.model.objects import Protocol

UDP, TCP = Protocol.UDP, Protocol.TCP
ONE, TWO, SIX = (Backend(parse_addr(at), 53, UDP) for at in ("10.0.0.1", "10.0.0.2", "fd00::1"))


class FakeMap(dict[bytes, bytes]):
    """As libbpf.Map, as far as it is asked. `moves`: an entry that begins anew before it is read
    for the second time.
    """

    moves: dict[bytes, bytes]

    def items(self) -> Any:
        return list(super().items())

    def lookup(self, key: bytes) -> bytes | None:
        return getattr(self, "moves", {}).get(key, self.get(key))

    def delete(self, key: bytes) -> None:
        self.pop(key, None)

    def replace(self, key: bytes, value: bytes) -> None:
        self[key] = value


def tracked(client: int, backend: Backend, part: FlowPart, protocol: Protocol = UDP) -> bytes:
    """An entry of `flows`: a client's connection to Service 1."""
    own = pack_target(parse_addr("192.0.2.9"), client, protocol)
    front = pack_target(parse_addr("10.96.0.1"), 53, protocol)
    end = pack_target(backend.address, backend.port, protocol)
    ports = client.to_bytes(2, "big")
    return NAT.pack(0, own, front, end, bytes(16), ports, ports, 1, 1, 0, 0, 0, part, 0, bytes(48))


def flow(*entries: tuple[int, Backend, Protocol]) -> FakeMap:
    """Each has its question and its answer."""
    found = FakeMap()
    for client, backend, protocol in entries:
        for part in (FlowPart.QUESTION, FlowPart.ANSWER):
            key = bytes([client, part]).ljust(18, b"\0") + bytes([protocol])
            found[key] = tracked(client, backend, part, protocol)
    return found


class Row(NamedTuple):
    """Flows of the packet path, which of them begin anew meanwhile, and what is counted."""

    name: str
    entries: tuple[tuple[int, Backend, Protocol], ...]
    ended: dict[int, int]
    anew: tuple[int, ...] = ()


ROWS = [
    Row("nobody's", (), {}),
    Row("to one that serves", ((1, TWO, UDP),), {}),
    Row("a flow is one, though it has several entries", ((1, ONE, UDP), (2, TWO, UDP)), {4: 1}),
    Row("each family's own", ((1, ONE, UDP), (2, ONE, UDP), (3, SIX, UDP)), {4: 2, 6: 1}),
    Row("TCP goes on", ((1, ONE, TCP),), {}),
    Row("one that has begun anew is another", ((1, ONE, UDP), (2, ONE, UDP)), {4: 1}, anew=(2,)),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_flows_of_the_packet_path_that_end(row: Row):
    flows = flow(*row.entries)
    flows.moves = {
        key: tracked(key[0], TWO, FlowPart(key[1])) for key in flows if key[0] in row.anew
    }
    maps: Any = {"udp_flows": FakeMap(), "udp_peers": FakeMap(), "flows": flows}
    assert udp.cut(maps, udp.predicate([(1, ONE), (1, SIX)], [])) == row.ended
    gone = {ONE, SIX}
    left = {client for client, backend, protocol in row.entries
            if backend not in gone or protocol is TCP or client in row.anew}  # fmt: skip
    assert {key[0] for key in flows} == left


def test_flows_of_unconnected_sockets_that_end():
    """Each once: what has lost its backend stays in the map."""
    flows = FakeMap()
    for cookie, backend in enumerate((ONE, ONE, TWO, SIX), 1):
        key = FLOW_KEY.pack(cookie, pack_target(parse_addr("10.96.0.1"), 53, UDP))
        end = pack_target(backend.address, backend.port, UDP)
        flows[key] = FLOW.pack(0, end, bytes(20), 7, 1)
    maps: Any = {"udp_flows": flows, "udp_reverse": FakeMap(), "udp_peers": FakeMap(),
                 "flows": FakeMap()}  # fmt: skip
    gone = udp.predicate([(1, ONE), (1, SIX)], [])
    assert udp.cut(maps, gone) == {4: 2, 6: 1}
    assert udp.cut(maps, gone) == {}
    assert len(flows) == 4
