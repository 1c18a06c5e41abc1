# SPDX-License-Identifier: Apache-2.0
"""Random ways through the model of ports (tests/fuzz/model), with the real programs as its node.

The two clients, the backend and the attacker are the model's. What they send are packets here, with
the right sequence numbers unless they are forged. The programs may drop more than the model's node,
which is a loss in the model, too. They must not forward a segment of another connection, nor give
the port to a client that does not get it in the model.
"""

import copy
import random
import struct
import time
from collections.abc import Iterator

import pytest

from kbpf.dataplane.bpf.maps.flow_entries import DIRECTION, FINS, STATE, is_original
from kbpf.dataplane.bpf.maps.layout import U32, U64, FlowDirection, TcpState
from tests.fuzz.model.ports import FORGED, Segment, World, actions, tcp_start
from tests.programs.packets.path.single_packets import (
    CLUSTER,
    MASKED,
    NODE,
    Flow,
    client,
    end,
    owner,
    parsed,
    pod,
    set_only_port,
    vip,
)
from tests.programs.packets.path.test_node_ports import place_of
from tests.programs.packets.path.test_senders import BACKEND, OTHER, UPLINK, Node, node
from tests.support.packets.packets import tcp
from tests.support.packets.test_run import TC_ACT_SHOT

__all__ = ["node"]
WAYS, STEPS = 40, 40
SHARES = {"client_sends": 3, "backend_sends": 3, "backend_receives": 6, "node_receives": 6, "syn": 2}
"""How much more often an event happens than others."""
HANDSHAKE = (
    ("client_sends", 1, "", "syn sent"),
    ("syn", 1, 1, 0),
    ("backend_receives", Segment(0, "SYN", 1), True),
    ("node_receives", Segment(0, "SYN-ACK", 1), True),
    ("backend_receives", Segment(0, "ACK", 1), True),
)
"""How every second way begins."""
FLAGS = {"SYN": "S", "SYN-ACK": "SA", "ACK": "A", "FIN": "FA", "RST": "R", "REFUSED": "RA"}
LONG_AGO = bytes(8)
HALF_OPEN = (TcpState.NEW, TcpState.ANSWERED)
LASTING = (TcpState.UNPROVEN, TcpState.ESTABLISHED)
"""They expire after a day, and the machine may have started later."""
IDLE_SECONDS = 12
"""After that long any flow but an established one may be evicted."""


class Numbers:
    """The sequence numbers of a connection: of the client, and of the backend."""

    def __init__(self, connection: int) -> None:
        self.first = (connection + 1) << 28, (connection + 9) << 28
        self.next = [number + 1 for number in self.first]
        self.fin: list[int | None] = [None, None]

    def segment(self, kind: str, back: bool, acks_fin: bool, source: str, to: str) -> bytes:
        """The next segment of this kind. An ACK has new data; the backend's, once the client has sent
        some.
        """
        seq, ack, data = self.next[back], self.next[not back], b""
        if "SYN" in kind:
            seq, ack = self.first[back], self.first[not back] + 1
        elif kind == "REFUSED":
            seq, ack = 0, self.first[not back] + 1
        elif kind == "FIN":
            self.fin[back] = seq = self.fin[back] or seq
            self.next[back] = seq + 1
        elif kind == "ACK" and not self.fin[back] and (not back or ack > self.first[0] + 1):
            data = b"ten bytes."
            self.next[back] += len(data)
        if not acks_fin:
            ack = self.fin[not back] or ack
        return tcp(source, to, data, flags=FLAGS[kind], seq=seq, ack=ack if "A" in FLAGS[kind] else 0)


class Replay(World):
    """The model; whatever happens at its node also happens to the programs."""

    def __init__(self, node: Node, v: int) -> None:
        super().__init__(tcp_start(), "")
        self.node, self.v, self.path = node, v, node.path
        self.number = set_only_port(self.path)
        self.flows = {each: Flow(self.path, v, CLUSTER, client(v)) for each in (1, 2)}
        self.numbers = {each: Numbers(each) for each in (FORGED, 1, 2)}
        self.asked: set[tuple[int, int]] = set()
        """Clients, and the numbers of their SYNs, genuine or forged."""
        self.path.site.drain_queue()

    # ---- what happens at the node ----------------------------------------------------------------

    def syn(self, client: int, numbers: int, port: int) -> None:
        self.asked.add((client, numbers))
        self._pass_time()
        passes = self._client_sends(client, Segment(port, "SYN", numbers), numbers == FORGED)
        entry, up = self.entries[port], list(self.up)
        super().syn(client, numbers, port)
        assert not passes or self.port_of(client) is not None, "a client gets a port that is not free"
        if not passes:  # as if it was lost on its way to the node
            self.entries[port], self.up = entry, up
        self._compare()

    def from_client(self, client: int, kind: str, numbers: int, acks_fin: bool = False, forged: bool = False) -> None:
        self._client_sends(client, Segment(0, kind, numbers, acks_fin), forged)
        super().from_client(client, kind, numbers, acks_fin, forged)
        self._compare()

    def from_backend(self, segment: Segment, forged: bool = False, arrives: bool = True) -> None:
        port, kind, numbers, _ = segment
        entry = self.entries[port]
        if entry and forged:
            if kind in ("SYN-ACK", "REFUSED") and (entry.owner, numbers) in self.asked:
                return  # it answers the SYN that it has forged itself: it is on the path
            before = self._states()
            self._backend_sends(segment._replace(numbers=entry.numbers), True, OTHER)
            assert self._states() == before, "a packet on another device counts"
        arrived = self._backend_sends(segment, forged, BACKEND)
        to = next((each for each, flow in self.flows.items() if flow.own == arrived), None)
        assert to is None or numbers in (to, FORGED), "a client receives a segment of another connection"
        if entry and to and entry.state == "new":  # the programs know the first SYN, too
            self.entries[port] = entry._replace(numbers=numbers)
        super().from_backend(segment, forged, arrives and to is not None)
        self._compare()

    def evict(self, port: int) -> None:
        """By a client of another backend. The programs may refuse."""
        entry = self.entries[port]
        assert entry
        flow = self.flows[entry.owner]
        idle = IDLE_SECONDS * 10**9
        flow.change(lambda raw: struct.pack("=Q", max(self._used(raw) - idle, 0)) + raw[8:])
        for _ in range(3):  # keys of flows that are gone may come first
            other = Flow(self.path, self.v, MASKED)
            with self.path.site.pinned("flow_count") as count:
                count.update(U32.pack(0), U64.pack(1 << 20))
                self.path.ingress(other.packet("S"))
                count.update(U32.pack(0), U64.pack(0))
            other.change(lambda _: b"")
            if not flow.entries():
                super().evict(port)
                break
        self._compare()

    def expire(self, port: int) -> None:
        for flow in self.flows.values():
            flow.change(lambda raw: b"" if raw[STATE] in LASTING else LONG_AGO + raw[8:])
        block, place = place_of(self.v, 8080, self.number)
        with self.path.site.pinned("doubtful_ports") as doubts:
            raw = bytearray(doubts.lookup(U32.pack(block)) or b"")
            raw[4 * place : 4 * place + 4] = bytes(4)
            doubts.update(U32.pack(block), bytes(raw))
        super().expire(port)

    # ---- the programs ----------------------------------------------------------------------------

    def _send(self, ends: tuple[str, str], segment: Segment, forged: bool, device: str) -> str:
        """Where the segment arrives, if the programs let it pass: a denied answer becomes the client's
        reset. What they drop is repeated with the same numbers.
        """
        numbers, back = copy.deepcopy(self.numbers[segment.numbers]), ends[0] == pod(self.v)
        verdict, got = self.node.come(numbers.segment(segment.kind, back, segment.acks_fin, *ends), device)
        to = parsed(got).destination
        if verdict == TC_ACT_SHOT or to in ends:
            return ""
        if not forged:
            self.numbers[segment.numbers] = numbers
        return to

    def _client_sends(self, client: int, segment: Segment, forged: bool) -> str:
        return self._send((self.flows[client].own, vip(self.v, CLUSTER)), segment, forged, UPLINK)

    def _backend_sends(self, segment: Segment, forged: bool, device: str) -> str:
        return self._send((pod(self.v), end(NODE[self.v], self.number)), segment, forged, device)

    def _entries(self) -> list[bytes]:
        return [raw for raw in self.path.site.entries("flows").values() if raw[:8] != LONG_AGO]

    def _states(self) -> list[bytes]:
        return sorted(raw[: FINS + 1] for raw in self._entries())

    def _compare(self) -> None:
        """The client that has the port, and what the model itself says."""
        assert not self.fault
        owners = {owner(raw) for raw in self._entries() if raw[DIRECTION] == FlowDirection.SNAT_REPLY}
        allowed = {self.flows[entry.owner].own for entry in self.entries if entry}
        assert owners & {flow.own for flow in self.flows.values()} <= allowed, "another client has the port"

    @staticmethod
    def _used(raw: bytes) -> int:
        """When this entry has matched its last packet."""
        return int(struct.unpack_from("=Q", raw)[0])

    def _pass_time(self) -> None:
        """Handshakes are idle for two seconds, and give up their port. Nothing is idle for longer,
        however slow this machine is.
        """
        used = time.monotonic_ns() - 2 * 10**9

        def idle(raw: bytes) -> bytes:
            changes = raw[STATE] in HALF_OPEN or self._used(raw) < used
            return struct.pack("=Q", used) + raw[8:] if changes and raw[:8] != LONG_AGO else raw

        for flow in self.flows.values():
            flow.change(idle)


@pytest.fixture
def known_doubts(node: Node) -> Iterator[None]:
    """Where doubts are kept is no secret."""
    with node.path.site.pinned("doubtful_ports") as doubts:
        secret = doubts.lookup(bytes(4)) or b""
        doubts.update(bytes(4), bytes(len(secret)))
        yield
        doubts.update(bytes(4), secret)


@pytest.mark.usefixtures("known_doubts")
def test_programs_give_and_forward_no_more_than_the_model(node: Node, v: int):
    seen = set()
    for seed in range(WAYS):
        node.path.site.clear("flows")
        rng, way, world = random.Random(f"{v} {seed}"), list[str](), Replay(node, v)
        planned = list(HANDSHAKE) if seed % 2 else []
        for _ in range(STEPS):
            able = [what[1:] for what in actions(world)]
            if not able:
                break
            name, *arguments = planned.pop(0) if planned else rng.choices(able, [SHARES.get(w[0], 1) for w in able])[0]
            way.append(f"{name} {', '.join(map(str, arguments))}")
            try:
                getattr(world, name)(*arguments)
            except AssertionError as error:
                raise AssertionError("\n  ".join((*way, str(error)))) from error
            seen |= {TcpState(raw[STATE]) for raw in world._entries() if is_original(raw)}
    assert seen == set(TcpState)
