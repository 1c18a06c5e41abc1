# SPDX-License-Identifier: Apache-2.0
"""Who owns a port of the node: a model of kbpf's rules, and a search through all of its states.

Two clients connect through the node to one backend, each once; an attacker forges packets of
everybody. All orders of their packets, of losses, time-outs, evictions and searches for a port are
tried, with a bounded number of packets under way between node and backend. What must hold:

    - nothing that the backend sends for one connection reaches another client
    - a port is not given away, and a connection does not end, while its ends still have it
    - no connection that only forged packets have made holds a port
    - a client can always get through in the end (without the attacker's help)

Sequence numbers are abstract: a segment has those of client 1's connection, of client 2's, or
others (FORGED), which no end accepts. An attacker may have the right numbers on the wrong device,
or wrong ones on the right device. With both it is on the path, and can do what the ends can.
Connections are not silent for their whole time-out, and no packet is under way for as long.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any, NamedTuple

UNDER_WAY = 1
"""Packets in each direction between node and backend; further ones are lost."""
FORGED = 0
CLOSES = 1
"""The client that may also end its connection by FINs; 2 only aborts."""
HALF_OPEN = ("new", "answered")
OPEN = ("established", "fin wait", "close wait", "last ack")

AFTER_FIN = {"established": "fin wait", "fin wait": "fin wait", "close wait": "last ack", "last ack": "last ack"}

State = tuple[Any, ...]
Step = tuple[tuple[Any, ...], State, str]
"""What happens, the state after it, and what must not have happened in it ("": nothing). What
happens begins with "!" if the attacker does it, with "~" if it may never happen, else with "".
"""


class Entry(NamedTuple):
    """What the node knows about a port."""

    owner: int
    numbers: int
    state: str = "new"
    fins: int = 0
    """1 and 2: FINs of client and backend; 4 and 8: the same, acknowledged."""
    owned: bool = True
    """The client's own entry leads here; otherwise the port is only reserved."""
    taken: bool = False
    """The backend still has another connection on it."""
    misled: bool = False
    """Forged numbers are stored."""


class Segment(NamedTuple):
    port: int
    kind: str
    """SYN, SYN-ACK, ACK (also data), FIN, RST, or REFUSED (a RST that answers a SYN)."""
    numbers: int
    acks_fin: bool = False

    def __str__(self) -> str:
        fin = ", acknowledges the FIN" if self.acks_fin else ""
        return f"({self.kind} of {self.numbers}'s connection, port {self.port}{fin})"


class World:
    """A state that changes: clients, ports, the backend's sockets, packets to it and from it."""

    def __init__(self, state: State, weaker: str) -> None:
        self.clients, self.entries, self.sockets, self.up, self.down = map(list, state)
        self.weaker, self.fault = weaker, ""

    def frozen(self) -> State:
        up, down = (sorted(set(each)) if each else () for each in (self.up, self.down))
        return tuple(self.clients), tuple(self.entries), tuple(self.sockets), tuple(up), tuple(down)

    # ---- the node --------------------------------------------------------------------------------

    def port_of(self, client: int) -> int | None:
        for port, entry in enumerate(self.entries):
            if entry and entry.owner == client and entry.owned:
                return port
        return None

    def has_both_ends(self, port: int) -> bool:
        entry, (state, numbers) = self.entries[port], self.sockets[port]
        is_open = self.clients[entry.owner - 1] in OPEN
        is_it = numbers == entry.owner == entry.numbers
        return entry.owned and is_open and is_it and state in OPEN

    def is_held(self, port: int) -> bool:
        """Whether the backend may still send for the connection of this entry."""
        entry, (state, numbers) = self.entries[port], self.sockets[port]
        is_it = numbers == entry.numbers and entry.state not in HALF_OPEN
        return is_it and state in OPEN and state != "last ack"

    def frees(self, entry: Entry | None) -> bool:
        if not entry or entry.state in ("done", "refused"):
            return True
        return entry.owned and self.weaker == f"frees {entry.state}"

    def candidates(self) -> list[int]:
        """Ports for a new connection: free ones, or else those of handshakes."""
        free = [port for port, entry in enumerate(self.entries) if self.frees(entry)]
        return free or [n for n, entry in enumerate(self.entries) if entry.state in HALF_OPEN]

    def syn(self, client: int, numbers: int, port: int) -> None:
        """A SYN of this client; it gets `port` if it needs one."""
        own = self.port_of(client)
        entry = None if own is None else self.entries[own]
        if entry and entry.taken and self.weaker != "keeps taken port":
            self.entries[own] = None
            if port == own and self.candidates() != [own]:
                port = next(each for each in self.candidates() if each != own)
            own = entry = None
        if entry is None:
            if port not in self.candidates():
                return
            own, old = port, self.entries[port]
            if old and self.is_held(port):
                self.fault = "a client gets a port on which the backend has another connection"
        if entry is None or entry.state in ("new", "refused", "closed", "done"):
            self.entries[own] = Entry(client, numbers)
        self.send_up(Segment(own, "SYN", numbers))

    def from_client(self, client: int, kind: str, numbers: int, acks_fin: bool = False, forged: bool = False) -> None:
        port = self.port_of(client)
        if port is None:
            return
        entry = self.entries[port]
        if entry.state != "new":
            self.entries[port] = self.after(entry, kind, numbers, acks_fin, 1, forged)
        if not forged:  # what the backend answers to these it also sends unasked
            self.send_up(Segment(port, kind, numbers, acks_fin))

    def after(self, entry: Entry, kind: str, numbers: int, acks_fin: bool, side: int, forged: bool) -> Entry:
        """The entry after a segment of the client (side 1) or the backend (2)."""
        knows = not forged or numbers != FORGED or entry.misled
        if not knows or (numbers != entry.numbers and not entry.misled):
            return entry._replace(misled=self.weaker == "stores before check" and kind == "ACK")
        if kind in ("RST", "REFUSED"):
            is_refusal = entry.state == "refused" or (side == 2 and entry.state in HALF_OPEN)
            is_done = entry.state == "done" or side == 2
            return entry._replace(state="refused" if is_refusal else "done" if is_done else "closed")
        state, fins = entry.state, entry.fins
        if side == 1 and state == "answered":
            state = "unproven"
        elif side == 2 and state == "unproven" and kind == "ACK":
            state = "established"
        if kind == "FIN" and state in ("unproven", "established", "closing", "closed"):
            fins |= side
        if acks_fin and fins & (3 - side):
            fins |= (3 - side) << 2
        if entry.numbers == FORGED and state in ("unproven", "established"):
            self.fault = "a forged connection holds a port"
        if kind == "SYN-ACK" and state == "refused":
            state = "answered"
        if fins and state != "done":
            ended = 3 if self.weaker == "frees unacknowledged fins" else 15
            state = "done" if fins & ended == ended else "closed" if state == "closed" else "closing"
        return entry._replace(state=state, fins=fins, taken=entry.taken and state in HALF_OPEN)

    def from_backend(self, segment: Segment, forged: bool = False, arrives: bool = True) -> None:
        """A packet of the backend, or a forged one. Not `arrives`: it gets lost after the node."""
        port, kind, numbers, acks_fin = segment
        entry = self.entries[port]
        if not entry:
            return
        if entry.state == "new":
            matches = kind in ("SYN-ACK", "REFUSED") and numbers == entry.numbers
            if matches:
                state = "answered" if kind == "SYN-ACK" else "refused"
                entry = entry._replace(state=state, misled=forged and kind == "SYN-ACK")
            elif kind != "RST":  # without ACK
                entry = entry._replace(taken=True)
            passes = matches or self.weaker == "passes challenge ack"
        else:
            if entry.state == "answered" and numbers != entry.numbers and kind not in ("RST", "REFUSED"):
                entry = entry._replace(taken=True)
            entry = self.after(entry, kind, numbers, acks_fin, 2, forged)
            passes = numbers == entry.numbers or self.weaker == "forwards outside window"
        self.entries[port] = entry
        if passes and entry.owned and not forged:
            if numbers in (1, 2) and numbers != entry.owner:
                self.fault = "a client receives a segment of another connection"
            elif arrives:
                self.client_receives(entry.owner, segment)

    def send_up(self, segment: Segment) -> None:
        if len(self.up) < UNDER_WAY or segment in self.up:
            self.up.append(segment)

    def send_down(self, *segment: Any) -> None:
        if len(self.down) < UNDER_WAY:
            self.down.append(Segment(*segment))

    def evict(self, port: int) -> None:
        entry = self.entries[port]
        is_over = self.frees(entry) or entry.state in HALF_OPEN
        if self.weaker == "evicts without reserving" and self.is_held(port):
            self.fault = "it is forgotten that the backend has a connection on a port"
        self.entries[port] = None if is_over else entry._replace(state="closed", owned=False)

    def expire(self, port: int) -> None:
        """Time passes: no packet stays under way for that long."""
        if self.has_both_ends(port):
            self.fault = "a connection ends that both ends still have"
        self.entries[port] = None
        self.up, self.down = [], []

    # ---- the ends --------------------------------------------------------------------------------

    def client_sends(self, client: int, kind: str, after: str) -> None:
        """`kind` may be "": its state becomes `after` without a packet."""
        has_fin = self.clients[client - 1] in ("close wait", "last ack")
        self.clients[client - 1] = after
        if kind:
            self.from_client(client, kind, client, has_fin)

    def backend_sends(self, port: int, kind: str, after: str) -> None:
        state, own = self.sockets[port]
        self.sockets[port] = (after, FORGED if after == "closed" else own)
        if kind:
            self.send_down(port, kind, own, state in ("close wait", "last ack"))

    def lose(self, segment: Segment) -> None:
        (self.up if segment in self.up else self.down).remove(segment)

    def node_receives(self, segment: Segment, arrives: bool) -> None:
        self.down.remove(segment)
        self.from_backend(segment, arrives=arrives)

    def client_receives(self, client: int, segment: Segment) -> None:
        _, kind, numbers, acks_fin = segment
        state = self.clients[client - 1]
        if state == "syn sent":
            if numbers == client and kind == "SYN-ACK":
                self.clients[client - 1] = "established"
                self.from_client(client, "ACK", client)
            elif numbers == client and kind == "REFUSED":
                self.clients[client - 1] = "closed"
            elif kind in ("SYN-ACK", "ACK") and numbers != client:
                self.from_client(client, "RST", numbers)
        elif numbers != client:
            return
        elif kind == "RST":
            self.clients[client - 1] = "closed"
        elif kind == "FIN":
            after = {"established": "close wait", "fin wait": "closed"}
            self.clients[client - 1] = after.get(state, state)
            self.from_client(client, "ACK", client, True)
        elif kind == "SYN-ACK" and state == "established":
            self.from_client(client, "ACK", client)
        elif state == "last ack" and acks_fin:
            self.clients[client - 1] = "closed"

    def backend_receives(self, segment: Segment, accepts: bool) -> None:
        """`accepts`: whether it listens, and whether a SYN ends TIME_WAIT (by its time stamp)."""
        self.up.remove(segment)
        port, kind, numbers, acks_fin = segment
        state, own = self.sockets[port]
        got_fin = state in ("close wait", "last ack", "time wait")
        is_again = state == "syn received" and own == numbers
        if kind == "SYN" and (is_again or (accepts and state in ("closed", "time wait"))):
            self.sockets[port] = ("syn received", numbers)
            self.send_down(port, "SYN-ACK", numbers)
        elif state == "closed":
            if kind != "RST":
                self.send_down(port, "REFUSED" if kind == "SYN" else "RST", numbers)
        elif numbers != own or kind == "SYN":
            if kind != "RST":
                self.send_down(port, "ACK", own, got_fin)
        elif kind == "RST" or (state == "last ack" and acks_fin):
            self.sockets[port] = ("closed", FORGED)
        elif kind == "FIN":
            state = "time wait" if state in ("fin wait", "time wait") else "close wait"
            if not got_fin:
                self.sockets[port] = (state, own)
            self.send_down(port, "ACK", own, True)
        elif state == "syn received":
            self.sockets[port] = ("established", own)


def tcp_start(ports: int = 1, forgotten: bool = False) -> State:
    """Two clients that will connect, free ports, and a backend without connections. `forgotten`:
    client 1 is gone, and only the backend still has its connection, at the first port.
    """
    sockets = [("closed", FORGED)] * ports
    if forgotten:
        sockets[0] = ("established", 1)
    first = "gone" if forgotten else "idle"
    return (first, "idle"), (None,) * ports, tuple(sockets), (), ()


def tcp_steps(state: State, weaker: str) -> Iterator[Step]:
    """All that may happen next."""
    world = World(state, weaker)
    for what in actions(world):
        _, action, *arguments = what
        after = World(state, weaker)
        getattr(after, action)(*arguments)
        yield what, after.frozen(), after.fault


Action = tuple[Any, ...]
"""A mark, the name of a method of World, and its arguments."""


def actions(world: World) -> Iterator[Action]:
    """All that may happen next."""
    return chain(_clients(world), _backend(world), _packets(world), _node(world), _attacker(world))


def _clients(world: World) -> Iterator[Action]:
    for client, state in enumerate(world.clients, 1):
        if state == "idle":
            yield "", "client_sends", client, "", "syn sent"
        elif state == "syn sent":
            for port in range(len(world.entries)):
                yield "", "syn", client, client, port
        elif state != "closed" and "gone" not in world.clients:
            yield "", "client_sends", client, "ACK", state
            yield "", "client_sends", client, "RST", "closed"
            yield "", "client_sends", client, "", "closed"
            if client == CLOSES:
                yield "", "client_sends", client, "FIN", AFTER_FIN[state]


def _backend(world: World) -> Iterator[Action]:
    for port, (state, own) in enumerate(world.sockets):
        if state in OPEN:
            yield "~", "backend_sends", port, "ACK", state
            yield "~", "backend_sends", port, "RST", "closed"
            if own == CLOSES:
                yield "~", "backend_sends", port, "FIN", AFTER_FIN[state]
        elif state == "syn received":
            yield "~", "backend_sends", port, "SYN-ACK", state
        is_alone = own not in (1, 2) or world.clients[own - 1] in ("closed", "gone")
        if state != "closed" and (is_alone or state not in OPEN):
            yield "~", "backend_sends", port, "", "closed"


def _packets(world: World) -> Iterator[Action]:
    for segment in world.up:
        for accepts in (False, True) if segment.kind == "SYN" else (True,):
            yield "", "backend_receives", segment, accepts
        yield "", "lose", segment
    for segment in world.down:
        for arrives in (True, False):
            yield "", "node_receives", segment, arrives
        yield "", "lose", segment


def _node(world: World) -> Iterator[Action]:
    for port, entry in enumerate(world.entries):
        if not entry:
            continue
        if entry.owned and entry.state != "established":
            yield "~", "evict", port
        lasts = entry.state in ("unproven", "established", "closing")
        is_asked = entry.owned and world.clients[entry.owner - 1] == "syn sent"
        if not (lasts and world.has_both_ends(port)) and not is_asked:
            yield "~", "expire", port


def _attacker(world: World) -> Iterator[Action]:
    for client, state in enumerate(world.clients, 1):
        own = world.port_of(client)
        if state == "gone":
            continue
        for port in range(len(world.entries)) if own is None else (own,):
            yield "!", "syn", client, FORGED, port
        for kind in ("ACK", "FIN", "RST") if own is not None else ():
            yield "!", "from_client", client, kind, FORGED, False, True
    for port, entry in enumerate(world.entries):
        if not entry:
            continue
        on_any_device = {entry.numbers} if world.weaker == "ignores device" else set()
        for numbers in {FORGED} - {entry.numbers} | on_any_device:
            for kind in ("SYN-ACK", "ACK", "FIN", "RST", "REFUSED"):
                yield "!", "from_backend", Segment(port, kind, numbers), True


def udp_start(ports: int = 1) -> State:
    """Nobody has asked; owners of the ports, packets to and from the backend, its questions."""
    return (None,) * ports, (), (), ()


def udp_steps(state: State, weaker: str) -> Iterator[Step]:
    """As tcp_steps(). A question or answer is (port, client). The backend answers what it is asked
    before the port's entry expires.
    """
    owners, up, down, asked = state

    def own(port: int, client: int | None) -> State:
        return (*owners[:port], client, *owners[port + 1 :])

    for client, port in product((1, 2), range(len(owners))):
        mine = owners[port] == client
        may_take = client not in owners and (owners[port] is None or weaker == "frees asked")
        if (mine or may_take) and len(up) < UNDER_WAY:
            questions = tuple(sorted({*up, (port, client)}))
            yield ("", "client", client, "asks, port", port), (own(port, client), questions, down, asked), ""
    for each in up:
        rest = tuple(other for other in up if other != each)
        yield ("", "lost:", each), (owners, rest, down, asked), ""
        yield ("", "backend gets", each), (owners, rest, down, tuple(sorted({*asked, each}))), ""
    for each in asked:
        rest = tuple(other for other in asked if other != each)
        yield ("", "backend answers", each), (owners, up, tuple(sorted({*down, each})), rest), ""
    for port, client in down:
        rest = tuple(other for other in down if other != (port, client))
        wrong = owners[port] not in (None, client)
        fault = "a client receives an answer to another" if wrong else ""
        yield ("", "node gets", (port, client)), (owners, up, rest, asked), fault
    for port, owner in enumerate(owners):
        is_due = any(each[0] == port for each in (*up, *down, *asked))
        if owner and (weaker == "evicts without reserving" or not is_due):
            yield ("", "port", port, "is evicted or expires"), (own(port, None), up, down, asked), ""


def explore(
    start: State, steps: Callable[[State], Iterator[Step]], waits: Callable[[State], bool]
) -> tuple[int, list[str]]:
    """How many states there are, and the steps to the first fault, which is the last item; an empty
    list if there is none. From a state that `waits`, steps that nobody has to wait for must lead to
    one that does not.
    """
    came: dict[State, tuple[State, tuple[Any, ...]] | None] = {start: None}
    before: dict[State, list[State]] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for what, after, fault in steps(state):
            if fault:
                return len(came), [*_way(came, state), _say(what), fault]
            if after not in came:
                came[after] = state, what
                queue.append(after)
            if not what[0]:
                before.setdefault(after, []).append(state)
    hopeful = [state for state in came if not waits(state)]
    seen = set(hopeful)
    while hopeful:
        for state in before.get(hopeful.pop(), ()):
            if state not in seen:
                seen.add(state)
                hopeful.append(state)
    for state in came:
        if state not in seen:
            return len(came), [*_way(came, state), "a client waits although a port is free"]
    return len(came), []


def waits(state: State) -> bool:
    """Whether client 2 has no connection yet, but there is a port that nobody uses."""
    clients, entries, sockets, *_ = state
    is_free = (None, ("closed", FORGED)) in zip(entries, sockets, strict=True)
    return clients[1] == "syn sent" and is_free


def _way(came: dict[State, Any], state: State) -> list[str]:
    found = []
    while (link := came[state]) is not None:
        state = link[0]
        found.append(_say(link[1]))
    return found[::-1]


def _say(what: tuple[Any, ...]) -> str:
    return " ".join(map(str, what)).strip().replace("_", " ")
