# SPDX-License-Identifier: Apache-2.0
"""UDP flows that end with their backends, and how they are counted. Maps are dicts here;
tests/programs/sockets/udp has real maps and sockets.
"""

import errno
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.maps.agent_maps import AgentMaps
from kbpf.dataplane.bpf.maps.layout import CUT_KEY, FLOW, PEER, U64, FlowDirection, pack_target
from kbpf.dataplane.bpf.maps.pinning import Pins
from kbpf.dataplane.bpf.state.plan import UdpTargets
from kbpf.errors import KernelError, LastError
from kbpf.model.address import parse_addr
from kbpf.model.config import MapSizes
from kbpf.model.desired import Backend
from kbpf.model.objects import Protocol
from tests.support.table import each_cells, each_named_pair

UDP, TCP = Protocol.UDP, Protocol.TCP
ONE, TWO, SIX = (Backend(parse_addr(at), 53, UDP) for at in ("10.0.0.1", "10.0.0.2", "fd00::1"))
BACKENDS = {"one": ONE, "two": TWO, "six": SIX}


class FakeMap(dict[bytes, bytes]):
    """The methods of Map that are used here. `moves`: new values of entries whose flow is replaced
    before the entry is read a second time.
    """

    moves: dict[bytes, bytes]
    max_entries = 2
    key_size = CUT_KEY.size

    def items(self) -> Any:
        return list(super().items())

    def lookup(self, key: bytes) -> bytes | None:
        return getattr(self, "moves", {}).get(key, self.get(key))

    def delete(self, key: bytes) -> None:
        self.pop(key, None)

    def update(self, key: bytes, value: bytes) -> None:  # type: ignore[override]
        self[key] = value

    def update_batch(self, keys: bytes, values: bytes) -> None:
        size = len(values) // (len(keys) // self.key_size)
        for at in range(len(keys) // self.key_size):
            self[self._key(keys, at)] = values[at * size :][:size]

    def delete_batch(self, keys: bytes) -> None:
        for at in range(len(keys) // self.key_size):
            del self[self._key(keys, at)]

    def _key(self, keys: bytes, at: int) -> bytes:
        return keys[at * self.key_size :][: self.key_size]


def maps(**held: FakeMap) -> Any:
    """The maps that are searched for flows: these, and the others empty."""
    return {name: FakeMap() for name in ("udp_flows", "sock_peers", "former_peers", "flows")} | held


def packed(one: Backend, protocol: Protocol = UDP) -> bytes:
    return pack_target(one.address, one.port, protocol)


FRONT = pack_target(parse_addr("10.96.0.1"), 53, UDP)


def cuts_of(held: FakeMap) -> tuple[udp.UdpCutMap, AgentMaps]:
    tables = AgentMaps(Pins(Path("unused")), MapSizes())
    tables.maps["udp_cuts"] = cast("Any", held)
    return udp.UdpCutMap(tables), tables


def tracked(client: int, backend: Backend, part: FlowDirection, protocol: Protocol = UDP) -> bytes:
    """An entry of `flows`: one direction of a client's connection to Service 1."""
    own = pack_target(parse_addr("192.0.2.9"), client, protocol)
    front = pack_target(parse_addr("10.96.0.1"), 53, protocol)
    end = packed(backend, protocol)
    ports = client.to_bytes(2, "big")
    return FLOW.pack(0, own, front, end, bytes(16), ports, ports, 1, 1, 0, 0, 0, part, 0, bytes(32), 0, 0, bytes(48))


def flow(*entries: tuple[int, Backend, Protocol]) -> FakeMap:
    """The map `flows` with both directions of each connection."""
    found = FakeMap()
    for client, backend, protocol in entries:
        for part in (FlowDirection.ORIGINAL, FlowDirection.REPLY):
            key = bytes([client, part]).ljust(18, b"\0") + bytes([protocol])
            found[key] = tracked(client, backend, part, protocol)
    return found


@each_cells(
    "entries_text, anew_text, four, six",
    """\
no flows |  |  | 0 | 0
to a serving backend | 1:two |  | 0 | 0
a flow counts once, though it has two entries | 1:one 2:two |  | 1 | 0
families are counted separately | 1:one 2:one 3:six |  | 2 | 1
TCP continues | 1:one:TCP |  | 0 | 0
a replaced flow is not ended | 1:one 2:one | 2 | 1 | 0
""",
    four=int,
    six=int,
)
def test_flows_of_the_packet_path_end_with_their_backend(entries_text, anew_text, four, six):
    """Flows of the packet path as CLIENT:BACKEND, with TCP if it is TCP; the clients whose flow is replaced meanwhile;
    and the numbers of ended flows of IPv4 and IPv6.
    """
    entries = []
    for word in entries_text.split():
        client, backend, *protocol = word.split(":")
        entries.append((int(client), BACKENDS[backend], TCP if protocol else UDP))
    flows, anew = flow(*entries), set(map(int, anew_text.split()))
    flows.moves = {key: tracked(key[0], TWO, FlowDirection(key[1])) for key in flows if key[0] in anew}
    ended = udp.cut(maps(flows=flows), udp.GoneTargets(UdpTargets({(1, ONE), (1, SIX)})), None, LastError())
    assert ended == {family: count for family, count in ((4, four), (6, six)) if count}
    left = {client for client, backend, protocol in entries if backend == TWO or protocol is TCP}
    assert {key[0] for key in flows} == left | anew


KEPT = udp.CUT_LIFETIME_NS // 10**9


@each_named_pair(
    "ends, left",
    f"""\
one backend: 1 one → one
a backend that stops again: 1 one, 2 two, 3 one → two one
removed when no flow can be as old: 1 one, {1 + KEPT} two → two
kept until then: 1 one, {KEPT} two → one two
the oldest is evicted: 1 one, 2 two, 3 six → two six
""",
)
@pytest.mark.parametrize("restarts", [False, True])
def test_stopped_backends_are_kept_while_their_flows_may_exist(ends, left, restarts):
    """Backends that stop at these seconds → those in the map afterwards, in this order."""
    held = FakeMap()
    cuts, tables = cuts_of(held)
    for end in ends.split(", "):
        second, name = end.split()
        if restarts:
            cuts, tables = cuts_of(held)
        cuts.add([(1, packed(BACKENDS[name]))], int(second) * 10**9)
        assert tables.fill["udp_cuts"] == len(held)
    wanted = [CUT_KEY.pack(1, packed(BACKENDS[name])) for name in left.split()]
    assert [key for key, _ in sorted(held.items(), key=lambda pair: U64.unpack(pair[1]))] == wanted


@pytest.mark.parametrize("at_once", [False, True])
def test_cuts_of_one_service_evict_none_of_another(at_once):
    held = FakeMap()
    held.max_entries = 32
    cuts, tables = cuts_of(held)
    of = {
        id_: [(id_, pack_target(ONE.address, port, UDP)) for port in range(1, count)]
        for id_, count in {1: 4, 2: 100, 3: 60}.items()
    }
    batches = [[*of[2], *of[3], *of[1]]] if at_once else [of[1], *([one] for one in of[2] + of[3])]
    for second, batch in enumerate(batches):
        cuts.add(batch, second)
        assert tables.fill["udp_cuts"] == len(held) <= 32
    counts = Counter(CUT_KEY.unpack(key)[0] for key in held)
    assert counts[1] == 3
    assert min(counts[2], counts[3]) >= 10
    assert all(CUT_KEY.pack(*one) in held for one in of[1])


def test_a_full_table_is_processed_in_steps_and_each_flow_ends_once(monkeypatch):
    """Backends that are added during a pass wait for the next pass."""
    monkeypatch.setattr(udp, "STEP_ENTRIES", 64)
    count, flows, read = 1024, FakeMap(), [0]
    for client in range(count):
        for part in (FlowDirection.ORIGINAL, FlowDirection.REPLY):
            key = client.to_bytes(17, "big") + bytes([part, UDP])
            flows[key] = tracked(client, (ONE, TWO)[client % 2], part)

    class Watched(FakeMap):
        def items(self) -> Any:
            for pair in super().items():
                read[0] += 1
                yield pair

    held = maps(flows=Watched(flows))
    passes = udp.UdpPasses(held)
    passes.add(UdpTargets({(1, ONE)}), count_flows=True)
    steps = 0
    while passes.is_busy:
        before = read[0]
        passes.advance(1e-9)
        assert read[0] - before <= 64
        steps += 1
        if steps == 2:
            passes.add(UdpTargets({(1, TWO)}), count_flows=False)
    assert held["flows"] == {}
    assert [each.flows for each in passes.results] == [{4: count // 2}, {4: count // 2}]


@pytest.mark.parametrize("method", ["items", "lookup", "delete"])
def test_a_pass_that_failed_starts_again(monkeypatch, method):
    flows = flow((1, ONE, UDP), (2, TWO, UDP))
    passes = udp.UdpPasses(maps(flows=flows))
    passes.add(UdpTargets({(1, ONE)}), count_flows=True)

    def fail(*_: Any) -> Any:
        raise KernelError("cannot read", "map flows", errno=errno.ENOMEM)

    with monkeypatch.context() as patch:
        patch.setattr(flows, method, fail)
        with pytest.raises(KernelError):
            passes.advance(float("inf"))
    assert passes.is_busy
    for _ in range(10):  # at least one step each
        passes.advance(1e-9)
    assert not passes.is_busy
    assert {key[0] for key in flows} == {2}
    assert [each.flows for each in passes.results] == [{4: 1}]


def test_sockets_that_cannot_be_listed_are_logged_once(caplog):
    """Some kernels never list them, and each change of endpoints is a pass. Flows are ended."""

    class Unlisted(FakeMap):
        def items(self) -> Any:
            raise KernelError("the kernel refuses the iterator", errno=errno.EPERM)

    flows = flow((1, ONE, UDP), (2, TWO, UDP))
    passes = udp.UdpPasses(maps(sock_peers=Unlisted(), flows=flows))
    for backend in (ONE, TWO, SIX):
        passes.add(UdpTargets({(1, backend), (2, backend)}), count_flows=True)
        passes.advance(float("inf"))
    assert not flows
    assert [record.message for record in caplog.records] == [
        "cannot destroy UDP sockets whose backend no longer serves: the kernel refuses the iterator: EPERM"
    ]


def test_a_socket_skipped_once_by_the_iterator_is_ended(monkeypatch):
    """The kernel's iterator can skip a socket if another one is closed meanwhile."""

    class Churning(FakeMap):
        reads = 0

        def items(self) -> Any:
            self.reads += 1
            return super().items()[self.reads == 1 :]

    def destroy(doomed: Mapping[int, list[Any]]) -> Counter[int]:
        ended.append({socket: len(backends) for socket, backends in doomed.items()})
        return Counter()

    peers, ended = Churning(), list[dict[int, int]]()
    for number in range(2):
        peers[bytes([number])] = PEER.pack(number, FRONT, packed(ONE), 1, 1)
    monkeypatch.setattr(udp, "_destroy_sockets", destroy)
    held = maps(sock_peers=peers)
    udp.cut(held, lambda *_: True, None, LastError())
    assert ended == [{0: 1, 1: 1}]
