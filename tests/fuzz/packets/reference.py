# SPDX-License-Identifier: Apache-2.0
"""The state that docs/design/datapath.md gives for a sequence of packets, without kbpf or Linux.

This is the chapter "Connection states" as a program: which resets and FINs count, what proves a
connection, and when UDP is a stream. differences.py compares kbpf with it state by state, and its
rows take their conditions from it. It is written from the document, not from flow.h.
"""

from dataclasses import dataclass, field
from typing import Final

from tests.fuzz.packets.segments import IDLE_SECONDS, PAUSE, Speaker, parse_token

FIN_DISTANCE: Final = 4 << 20
"""How far the numbers of a FIN, and the number of a reset with an ACK, may be off, in bytes."""
RESET_DISTANCE: Final = 32 << 10
"""How far the ACK of a reset, or the ACK that answers a SYN-ACK, may be off, in bytes."""
STREAM_SECONDS: Final = 2
NO_PROOF: Final = frozenset({"INIT", "INITACK", "ABORT", "SHUTDONE"})
"""SCTP chunks that a peer without an association sends as well."""


Ends = tuple[int, int]
"""The sequence number after a segment, and its ACK."""


def _near(a: int, b: int, distance: int) -> bool:
    return (a - b + distance) % (1 << 32) < 2 * distance


def _fits(this: Ends, other: Ends, ack_distance: int) -> bool:
    """Whether a segment's numbers are near what the other side has acknowledged and sent."""
    return _near(this[0], other[1], FIN_DISTANCE) and _near(this[1], other[0], ack_distance)


@dataclass
class Reading:
    """The state at the end of a script, and what led to it."""

    script: str = ""
    state: str = "none"
    believed_end: bool = False
    """A side has sent a reset or a FIN whose numbers its receiver would accept."""
    unbelieved_end: bool = False
    """There was a reset or a FIN with other numbers."""
    again: bool = False
    """A SYN came after the backend's SYN-ACK, or after the end, and its numbers are remembered."""
    unseen: bool = False
    """The node did not forward a packet of the backend, which kbpf would only see at egress."""
    flawed: bool = False
    """A packet may have counted although its checksum is wrong, or although it was not
    forwarded.
    """
    began: float = 0.0
    closed: set[bool] = field(default_factory=set)
    """The sides that have sent a FIN that counts; True: the backend."""
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    """End and ACK of the last segment that each entry of the flow has seen, except resets."""

    def tcp(self, seen_by: str, flags: str, end: int, ack: int) -> None:
        """Processes a segment found by this entry: "client", "backend", or "leaving" for segments
        of the backend that the stack forwards to a masqueraded client.
        """
        back, before = seen_by != "client", self.state
        is_first = flags == "S" and not back and (self.state == "none" or len(self.closed) == 2)
        if is_first:
            self._begin("NEW")
            self.ends.clear()
        elif self.state == "none":
            return
        else:
            self._follow(seen_by, flags, end, ack)
        if "S" in flags and before not in ("none", "NEW"):
            is_other = back and self.ends.get(seen_by, (end, ack)) != (end, ack)
            self.again |= is_other or self.state != before
        if set(flags) & {"S", "A"} and "R" not in flags:
            self.ends[seen_by] = end, ack

    def _begin(self, state: str) -> None:
        self.state = state
        self.closed.clear()

    def _follow(self, seen_by: str, flags: str, end: int, ack: int) -> None:
        back = seen_by != "client"
        own = self.ends.get(seen_by, (0, 0))
        other = self.ends.get("client" if back else "backend", (0, 0))
        if "R" in flags:
            self._reset(back, flags, own, other, (end, ack))
        elif "S" in flags:
            if not back and flags == "S" and self.state == "CLOSED":
                self._begin("NEW")
            if (
                back
                and "A" in flags
                and (self.state == "NEW" or ((ack, 0) == other and end != own[0]))
            ):
                self._begin("ANSWERED")
        elif "A" in flags and self.state != "NEW":
            self._segment(back, "F" in flags, own, other, (end, ack))
        else:
            self.unbelieved_end |= "F" in flags

    def _reset(self, back: bool, flags: str, own: Ends, other: Ends, this: Ends) -> None:
        is_exact = this[0] == other[1] or (back and this[0] == own[0])
        fits = "A" in flags and _fits(this, other, RESET_DISTANCE)
        if any(other) and (is_exact or fits):
            self.state, self.believed_end = "CLOSED", True
        else:
            self.unbelieved_end = True

    def _segment(self, back: bool, is_fin: bool, own: Ends, other: Ends, this: Ends) -> None:
        fits = _fits(this, other, FIN_DISTANCE)
        if is_fin and fits:
            self.closed.add(back)
            self.believed_end = True
        self.unbelieved_end |= is_fin and not fits
        if len(self.closed) == 2:
            self.state = "CLOSED"
        elif self.state == "CLOSED":  # by a reset
            self.state = "CLOSING" if fits and not is_fin else "CLOSED"
        elif self.closed:
            self.state = "CLOSING"
        elif self.state == "ANSWERED" and not back:
            if _fits(this, other, RESET_DISTANCE):
                self.state = "UNPROVEN"
        elif self.state in ("ANSWERED", "UNPROVEN") and back and own[0] and this != own:
            self.state = "ESTABLISHED"

    def udp(self, back: bool, now: float) -> None:
        if self.state == "none":
            if not back:
                self.state, self.began = "NEW", now
        elif self.state == "NEW":
            self.state = "ANSWERED" if back else "NEW"
        elif now - self.began > STREAM_SECONDS:
            self.state = "ESTABLISHED"

    def sctp(self, back: bool, kind: str) -> None:
        """Processes the next packet, by its first chunk."""
        if self.state == "none":
            self.state = "NEW" if kind == "INIT" and not back else "none"
        elif self.state == "NEW":
            self.state = "ANSWERED" if back else "NEW"
        elif back and kind not in NO_PROOF:
            self.state = "ESTABLISHED"


def read(protocol: str, script: str, variant: str) -> Reading:
    """The result of this script in a connection of this variant (node.py)."""
    speaker, reading, now = Speaker(protocol, 0), Reading(script), 0.0
    last: dict[bool, str] = {}
    for text in script.split():
        if text == PAUSE:
            now += IDLE_SECONDS
            continue
        token = parse_token(text)
        fields = speaker.fields(text)
        if fields is None:
            continue
        kind = last[token.back] if token.kind == "=" else token.kind
        last[token.back] = kind
        is_forwarded = fields["ttl"] > 1
        if token.back and not is_forwarded and variant == "kept":
            reading.flawed = reading.unseen = True
            continue
        before = reading.state
        if protocol == "udp":
            reading.udp(token.back, now)
        elif protocol == "sctp":
            reading.sctp(token.back, kind)
        else:
            flags = fields["flags"]
            end = fields["seq"] + len(fields["payload"]) + ("S" in flags) + ("F" in flags)
            for each in _seen_by(token.back, is_forwarded, variant):
                reading.tcp(each, flags, end % (1 << 32), fields["ack"])
        reading.flawed |= reading.state != before and not (
            is_forwarded and fields["checksum"] == "right"
        )
    return reading


def _seen_by(back: bool, is_forwarded: bool, variant: str) -> tuple[str, ...]:
    """The entries that a packet is found by, in order."""
    if not back:
        return ("client",)
    return ("backend", "leaving") if variant == "masked" and is_forwarded else ("backend",)
