# SPDX-License-Identifier: Apache-2.0
"""A peer that does not use the kernel's stack: it sends hand-made frames from a device and parses
the frames that arrive.

    with Wire("netns", "eth0") as wire:
        wire.send(udp("198.18.0.50:4000", "10.96.0.1:53", b"?"), to="02:00:00:00:00:01")
        answer = wire.expect(lambda p: p.source == "10.96.0.1:53")

It resolves no addresses: a test knows the MAC of the next hop, and the neighbour has an entry for
an address that the kernel of the namespace does not have.

Received packets look as a network card would send them: checksums that the sending kernel has left
to the hardware (CHECKSUM_PARTIAL, the default between veths) are completed here, so that a checksum
is wrong only if a program made it so. A GSO packet, larger than the MTU, stays one packet with
`Packet.gso` set. ARP, neighbour discovery and multicast listener reports are not recorded.

`tap=True` captures in both directions, on any device of any namespace. Incoming packets are
captured before the TC programs see them, outgoing ones after.
"""

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from kbpf.kernel.system import netns
from tests.support.packets import packets
from tests.support.packets.parse import Icmp, Packet, parse

Predicate = Callable[[Packet], bool]

_SOL_PACKET, _ADD_MEMBERSHIP, _VNET_HDR, _IGNORE_OUTGOING = 263, 1, 15, 23
_PROMISC, _ALLMULTI = 1, 2
_SO_RCVBUFFORCE = 33
_ETH_P_ALL = 3
_WITH_ETHERNET = (1, 772)
"""ARPHRD_ETHER and ARPHRD_LOOPBACK; packets of other devices (tun, PPP) have no link header."""
_OTHER_HOST = 3
_VIRTIO = struct.Struct("=BBHHHH")
"""struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
_NEEDS_CSUM = 1
_NOISE = frozenset((130, 131, 132, 133, 134, 135, 136, 137, 143))
"""ICMPv6 types of multicast listener discovery and neighbour discovery."""
_PATIENCE = 30.0
_STATISTICS = 6
"""PACKET_STATISTICS: packets received for the socket, and dropped, since the last call."""


def any_packet(_: Packet) -> bool:
    return True


def finished(frame: bytes, start: int, offset: int) -> bytes:
    """The frame with its offloaded checksum completed: computed from `start` on, stored at `start +
    offset`. SCTP, whose checksum is a CRC, is recognised by its offset.
    """
    at = start + offset
    if offset == 8:
        blank = frame[start:at] + bytes(4) + frame[at + 4 :]
        return frame[:at] + struct.pack("<I", packets.crc32c(blank)) + frame[at + 4 :]
    done = packets.internet_checksum(frame[start:]) or 0xFFFF
    return frame[:at] + struct.pack("!H", done) + frame[at + 2 :]


class Wire:
    """A peer on one device; see the module docstring."""

    def __init__(self, netns: str | None, device: str, tap: bool = False) -> None:
        self.netns = netns
        self.device = device
        self.mac = ""
        """The device's MAC once it is open; "" if its link has none."""
        self._tap = tap
        self._stack = contextlib.ExitStack()
        self._changed = threading.Condition()
        self._heard: deque[Packet] = deque()
        self._broken: list[str] = []
        self._come = self._read_so_far = 0
        """Packets that the kernel has queued for the socket, and that the thread has processed."""

    # ---- open and closed -----------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            if self.netns is None:
                self._socket = self._open()
            else:
                self._socket = netns.run_in(Path("/run/netns") / self.netns, self._open)
            stack.callback(self._socket.close)
            _, _, _, kind, mac = self._socket.getsockname()
            self._l2 = kind in _WITH_ETHERNET
            self.mac = mac.hex(":") if self._l2 else ""
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            self._thread = threading.Thread(target=self._read, args=(reading,), name=f"wire-{self.device}")
            self._thread.start()
            stack.callback(self._thread.join)
            stack.callback(os.close, writing)  # ends the thread
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> socket.socket:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            opened.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
            opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
            if not self._tap:
                opened.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
            opened.bind((self.device, _ETH_P_ALL))
            index = socket.if_nametoindex(self.device)
            member = struct.pack("=iHH8x", index, _PROMISC if self._tap else _ALLMULTI, 0)
            opened.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, member)
        except BaseException:
            opened.close()
            raise
        return opened

    # ---- sending -------------------------------------------------------------------------------

    def send(self, *sent: bytes, to: str) -> None:
        """Sends packets that begin with IP. `to`: the MAC of the next hop."""
        for packet in sent:
            self.send_frame(packets.frame(packet, to, self.mac))

    def send_frame(self, frame: bytes) -> None:
        kind = int.from_bytes(frame[12:14], "big")
        self._socket.sendto(bytes(_VIRTIO.size) + frame, (self.device, kind))

    # ---- receiving -----------------------------------------------------------------------------

    def _read(self, stop: int) -> None:
        """The thread's body; it ends when the other end of the pipe is closed."""
        ears = select.poll()
        ears.register(self._socket, select.POLLIN)
        ears.register(stop, select.POLLHUP)
        while True:
            ready = dict(ears.poll())
            if stop in ready:
                return
            try:
                raw, sender = self._socket.recvfrom(1 << 18)
            except OSError:
                continue  # the device is down; it may come up again
            try:
                if sender[2] != _OTHER_HOST or self._tap:
                    self._take(raw)
            except Exception as error:
                with self._changed:
                    self._broken.append(f"{error}: {raw[_VIRTIO.size :][:64].hex()}")
            finally:
                with self._changed:
                    self._read_so_far += 1
                    self._changed.notify_all()

    def _take(self, raw: bytes) -> None:
        flags, _, _, gso, start, offset = _VIRTIO.unpack_from(raw)
        frame = raw[_VIRTIO.size :]
        if flags & _NEEDS_CSUM:
            frame = finished(frame, start, offset)
        packet = replace(parse(frame, self._l2), gso=gso)
        if packet.ip and not self._is_noise(packet):
            with self._changed:
                self._heard.append(packet)
                self._changed.notify_all()

    @staticmethod
    def _is_noise(packet: Packet) -> bool:
        is_icmp = isinstance(packet.transport, Icmp) and packet.protocol == "icmp6"
        return is_icmp and packet.transport.type in _NOISE

    def _catch_up(self) -> None:
        """Waits, with the lock held, until the thread has read all packets that have arrived so
        far.
        """
        raw = self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 8)
        come, dropped = struct.unpack("=II", raw)  # tp_packets includes tp_drops
        self._come += come - dropped
        goal = self._come
        done = self._changed.wait_for(lambda: self._read_so_far >= goal, _PATIENCE)
        assert done, f"{self._read_so_far} of {goal} packets are read"

    @property
    def heard(self) -> tuple[Packet, ...]:
        """The packets that have arrived and that no expect() has taken yet."""
        with self._changed:
            self._catch_up()
            return tuple(self._heard)

    def forget(self, predicate: Predicate = any_packet) -> None:
        """Drops matching packets that have arrived so far."""
        with self._changed:
            self._catch_up()
            self._heard = deque(p for p in self._heard if not predicate(p))

    def soon(self, predicate: Predicate = any_packet, seconds: float = _PATIENCE) -> Packet | None:
        """Waits for the first matching packet and takes it; None if none arrives in time. Other
        packets stay.
        """
        with self._changed:
            packet = self._changed.wait_for(lambda: self._first(predicate), seconds)
            self._heard = deque(p for p in self._heard if p is not packet)
            return packet

    def expect(self, predicate: Predicate = any_packet, seconds: float = _PATIENCE) -> Packet:
        """Like soon(), but raises AssertionError with all other packets if none arrives."""
        packet = self.soon(predicate, seconds)
        assert packet is not None, f"not within {seconds} s; {self.told()}"
        return packet

    def none(self, seconds: float, predicate: Predicate = any_packet) -> None:
        """Checks that no matching packet has arrived, and that none arrives in this time."""
        with self._changed:
            self._catch_up()
            packet = self._changed.wait_for(lambda: self._first(predicate), seconds)
            assert packet is None, f"{packet} arrived; {self.told()}"

    def _first(self, predicate: Predicate) -> Packet | None:
        return next((p for p in self._heard if predicate(p)), None)

    def told(self) -> str:
        """The packets that have arrived, for the message of a failed test."""
        lines = [str(heard) for heard in self._heard] + [f"broken: {b}" for b in self._broken]
        return f"{self.device} heard " + ("; ".join(lines) or "nothing")
