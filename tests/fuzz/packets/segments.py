# SPDX-License-Identifier: Apache-2.0
"""Packet sequences of one connection: scripts, the packets they stand for, and random scripts.

    S <SA A A+100 <A+100 R~far . A!sum

is a TCP script. A token is a packet; `<` marks those of the backend. After the flags:

    +N      bytes of payload
    ~near   the sequence number is in the window, but not the next one
    ~far    it is far beyond the window; ~old: far before it; ~new: a new initial number (SYN only)
    ^far    it acknowledges data that was never sent; ^old: less than was acknowledged before
    !sum    its checksum is wrong; !ttl: its TTL is 1, so that it never arrives

`=` repeats the sender's previous packet, and `.` is a pause of IDLE_SECONDS in which neither side
sends. `o0:<R~far` is forged: it arrives on the device o0, and the side that it names did not send
it. UDP has `U`; SCTP has the names of its chunks, and ~tag for a wrong verification tag. The
same script and port always give the same packets.
"""

import copy
import random
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support.packets.packets import chunk, sctp, sctp_init, tcp, udp

IDLE_SECONDS = 2.2
"""A little more than the 2 s after which Linux treats UDP packets as a stream."""
MOST_PACKETS = 12
MOST_PAUSES = 2
PAUSE = "."
FAR = 1 << 30
OLD = -(1 << 24)
NEAR = 1000
NEW = 50_000_000
GUESS = 0x0BAD_CAFE
"""The ACK of a client that has received nothing from the backend."""

_TOKEN = re.compile(
    r"(?:(?P<device>\w\d):)?(?P<back><?)(?P<kind>=|[A-Z]+)(?:\+(?P<size>\d+))?"
    r"(?:~(?P<where>\w+))?(?:\^(?P<ack>\w+))?(?:!(?P<flaw>\w+))?"
)
_PLACES = {"near": NEAR, "far": FAR, "old": OLD}


class Token(NamedTuple):
    back: bool
    kind: str
    size: int
    where: str
    ack: str
    flaw: str
    device: str
    """Of a forged packet; "": the side's own."""


def parse_token(text: str) -> Token:
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise ValueError(f"not a packet: {text!r}")
    part = match.groupdict("")
    part |= {"back": part["back"] == "<", "size": int(part["size"] or 0)}
    return Token(**part)


@dataclass
class _Side:
    """What one end has sent, as the other end would have it if nothing was lost."""

    isn: int
    next: int = 0
    spoke: bool = False
    began: bool = False
    """It has sent a SYN; packets before it belonged to no connection."""
    last: "dict[str, Any] | None" = None


@dataclass
class Speaker:
    """Makes a script's packets one by one. Each packet carries `tag` (in TCP's urgent pointer, or
    in UDP's payload), so that a translated client is recognised when it arrives.
    """

    protocol: str
    tag: int
    sides: tuple[_Side, _Side] = field(init=False)

    def __post_init__(self) -> None:
        self.sides = (_Side(7_000_000 + self.tag), _Side(900_000_000 + self.tag))

    def packet(self, text: str, source: str, to: str) -> bytes | None:
        """The packet of this token between these ends; None for a repetition without a previous
        packet.
        """
        fields = self.fields(text)
        return None if fields is None else BUILDERS[self.protocol](source, to, **fields)

    def fields(self, text: str) -> dict[str, Any] | None:
        """The fields of this token's packet: arguments of tcp(), udp() or sctp()."""
        token = parse_token(text)
        sides = copy.deepcopy(self.sides) if token.device else self.sides
        own, other = sides[token.back], sides[not token.back]
        if token.kind == "=":
            fields = own.last
        else:
            fields = {"tcp": self._tcp, "udp": self._udp, "sctp": self._sctp}[self.protocol](token, own, other)
            own.last = {**fields, "checksum": "right", "ttl": 64}
        return fields

    @staticmethod
    def _ip(token: Token) -> dict[str, Any]:
        return {"checksum": "wrong" if token.flaw == "sum" else "right", "ttl": 1 if token.flaw == "ttl" else 64}

    def _tcp(self, token: Token, own: _Side, other: _Side) -> dict[str, Any]:
        syn, fin = "S" in token.kind, "F" in token.kind
        if syn and token.where == "new" and not token.flaw:
            own.isn = (own.isn + NEW) % (1 << 32)
            own.spoke = other.spoke = own.began = other.began = False
        base = own.isn if syn or not own.spoke else own.next
        seq = base + _PLACES.get(token.where, 0)
        ack = 0
        if "A" in token.kind:
            ack = other.next if other.spoke else GUESS
            ack += _PLACES.get(token.ack, 0)
        if not token.flaw and token.where in ("", "new") and "R" not in token.kind:
            end = seq + syn + fin + token.size
            if not own.spoke or end > own.next or (syn and not own.began):
                own.next, own.spoke = end, True
            own.began = own.began or syn
        return {
            "payload": bytes(token.size),
            "flags": token.kind,
            "seq": seq % (1 << 32),
            "ack": ack % (1 << 32),
            "urgent": self.tag,
            **self._ip(token),
        }

    def _udp(self, token: Token, own: _Side, other: _Side) -> dict[str, Any]:
        return {"payload": struct.pack("!H", self.tag) + bytes(token.size), **self._ip(token)}

    def _sctp(self, token: Token, own: _Side, other: _Side) -> dict[str, Any]:
        tag = 0 if token.kind == "INIT" else other.isn
        if token.where == "tag":
            tag ^= 0x5555
        return {"chunks": CHUNKS[token.kind](own.isn), "tag": tag, **self._ip(token)}


def _plain(kind: int, body: bytes = b"") -> Callable[[int], bytes]:
    return lambda _: chunk(kind, body)


CHUNKS = {
    "INIT": sctp_init,
    "INITACK": lambda tag: sctp_init(tag, 2),
    "ECHO": _plain(10, b"cook"),
    "ECHOACK": _plain(11),
    "DATA": _plain(0, struct.pack("!IHHI", 1, 0, 0, 0) + b"data"),
    "SACK": _plain(3, struct.pack("!IIHH", 1, 65536, 0, 0)),
    "HB": _plain(4, b"\0\1\0\4"),
    "HBACK": _plain(5, b"\0\1\0\4"),
    "ABORT": _plain(6),
    "SHUT": _plain(7, bytes(4)),
    "SHUTACK": _plain(8),
    "SHUTDONE": _plain(14),
}
BUILDERS = {"tcp": tcp, "udp": udp, "sctp": sctp}


# ---- random scripts ----------------------------------------------------------------------------

_FLAGS = "S SA A A A+100 F FA R R RA PA+10 ="
_HANDSHAKES = {"tcp": "S <SA A", "sctp": "INIT <INITACK ECHO <ECHOACK", "udp": "U"}
_USUAL = {
    "tcp": "A A+100 <A <A+100 FA <FA A <A R <R",
    "sctp": "DATA <SACK <DATA SACK HB <HBACK SHUT <SHUTACK SHUTDONE <SHUT SHUTACK <SHUTDONE ABORT <ABORT",
    "udp": "U <U U <U <U+40",
}


def random_script(rng: random.Random, protocol: str) -> str:
    """A handshake with some deviations, then usual and unusual packets. One script in five has no
    planned handshake.
    """
    count = rng.randint(1, MOST_PACKETS)
    plan = _HANDSHAKES[protocol].split() if rng.random() < 0.8 else []
    tokens: list[str] = []
    pauses = 0
    while sum(token != PAUSE for token in tokens) < count:
        luck = rng.random()
        if luck < 0.06 and tokens and pauses < MOST_PAUSES and tokens[-1] != PAUSE:
            tokens.append(PAUSE)
            pauses += 1
        elif luck < 0.30:
            tokens.append(_odd(rng, protocol))
        elif plan:
            tokens.append(plan.pop(0))
        else:
            tokens.append(rng.choice(_USUAL[protocol].split()))
    return " ".join(tokens)


def _odd(rng: random.Random, protocol: str) -> str:
    side = rng.choice(("", "<"))
    flaw = rng.choice(("", "", "", "!sum", "!ttl"))
    if protocol == "udp":
        return f"{side}{rng.choice(('U', 'U+40', '='))}{flaw}"
    if protocol == "sctp":
        return f"{side}{rng.choice((*CHUNKS, '='))}{rng.choice(('', '', '~tag'))}{flaw}"
    kind = rng.choice(_FLAGS.split())
    if kind == "=":
        return side + kind
    places = ("", "", "~near", "~far", "~old", *(("~new", "~new") if kind == "S" else ()))
    return f"{side}{kind}{rng.choice(places)}{rng.choice(('', '', '', '^far', '^old'))}{flaw}"


def random_attack(rng: random.Random, protocol: str, device: str, knows: bool) -> str:
    """A connection, and up to five packets that a third party forges on this device. `knows`: it
    may know the numbers of both sides.
    """
    handshake = _HANDSHAKES[protocol].split()
    tokens = handshake[: rng.randint(0, 4)]
    if tokens == handshake:
        tokens += rng.choices(_USUAL[protocol].split(), k=rng.randint(0, 6))
    more = [PAUSE] * rng.randint(0, MOST_PAUSES)
    for _ in range(rng.randint(1, 5)):
        more.append(f"{device}:{rng.choice(('', '<'))}{_forged(rng, protocol, knows)}")
    for token in more:  # in the end, or in between
        tokens.insert(rng.choice((len(tokens), rng.randint(0, len(tokens)))), token)
    return " ".join(tokens)


def _forged(rng: random.Random, protocol: str, knows: bool) -> str:
    fits = knows and rng.random() < 0.7
    if protocol == "udp":
        return "U"
    if protocol == "sctp":
        return rng.choice(tuple(CHUNKS)) + ("" if fits else "~tag")
    kind = rng.choice([each for each in _FLAGS.split() if each != "="])
    if fits:
        return kind
    place = rng.choice(("~near", "~far", "~old", "~new" if kind == "S" else "~far"))
    return kind + place + rng.choice(("^far", "^old") if kind in ("SA", "RA") else ("", "^far", "^old"))


def genuine(script: str) -> str:
    """The script without forged packets."""
    return " ".join(token for token in script.split() if ":" not in token)


def shorter(script: str) -> Sequence[str]:
    """All scripts with one token, or one token's suffixes, less."""
    tokens = script.split()
    found = [" ".join(tokens[:i] + tokens[i + 1 :]) for i in range(len(tokens))]
    for i, token in enumerate(tokens):
        plain = token if ":" in token else re.sub(r"[+~^!]\w+", "", token)
        if plain != token:
            found.append(" ".join([*tokens[:i], plain, *tokens[i + 1 :]]))
    return [text for text in found if text]
