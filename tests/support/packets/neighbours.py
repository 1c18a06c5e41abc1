# SPDX-License-Identifier: Apache-2.0
"""ARP and neighbour discovery for the addresses of a Wire."""

import threading
import time
from collections.abc import Callable
from ipaddress import ip_address, ip_interface

from tests.support.packets import packets
from tests.support.packets.parse import Icmp, Packet

_RETRY_SECONDS = 0.2
_PATIENCE = 30.0


class Neighbours:
    """Resolves next hops, and answers requests for `addresses`, by frames that `send` sends."""

    def __init__(
        self,
        device: str,
        addresses: tuple[str, ...],
        gateways: tuple[str, ...],
        send: Callable[[bytes], None],
    ) -> None:
        self.mac = ""
        """Our MAC."""
        self._device = device
        self._interfaces = [ip_interface(address) for address in addresses]
        self._own = {str(interface.ip) for interface in self._interfaces}
        self._gateways = {ip_address(gateway).version: gateway for gateway in gateways}
        self._send = send
        self._changed = threading.Condition()
        self._macs: dict[str, str] = {}

    def next_hop(self, packet: bytes) -> str:
        """The MAC of the next hop of a packet that begins with IP."""
        version = packet[0] >> 4
        source, to = (packet[8:24], packet[24:40]) if version == 6 else (packet[12:16], packet[16:])
        target = ip_address(to[: len(source)])
        if target.is_multicast and version == 4:
            return (b"\1\0\x5e" + bytes([target.packed[1] & 0x7F]) + target.packed[2:]).hex(":")
        if target.is_multicast:
            return "33:33:" + target.packed[-4:].hex(":")
        near = any(target in interface.network for interface in self._interfaces)
        hop = str(target) if near else self._gateways.get(version)
        if hop is None:
            raise AssertionError(f"no route to {target}: not on-link, and no gateway")
        own = [str(interface.ip) for interface in self._interfaces if interface.version == version]
        asking = str(ip_address(source))
        return self.resolve(hop, asking if asking in own or not own else own[0])

    def resolve(self, address: str, asking: str, seconds: float = _PATIENCE) -> str:
        """Resolves the MAC of an address on this link; `asking` is our address that asks."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while address not in self._macs:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{address} is not on the link of {self._device}")
                self._ask_for(address, asking)
                self._changed.wait_for(lambda: address in self._macs, _RETRY_SECONDS)
            return self._macs[address]

    def _ask_for(self, address: str, asking: str) -> None:
        if ":" in address:
            request = packets.neighbour_solicitation(self.mac, asking, address)
            to = packets.solicited(address)[1]
        else:
            request = packets.arp(1, self.mac, asking, "00:00:00:00:00:00", address)
            to = packets.BROADCAST
        self._send(packets.frame(request, to, self.mac))

    def receive(self, packet: Packet) -> None:
        """Learns neighbours' MACs, and answers requests for our addresses."""
        if packet.ethernet is None:
            return
        sender = packet.ethernet.source
        if arp := packet.arp:
            self._learn(arp.source, arp.source_mac)
            if arp.operation == 1 and arp.destination in self._own:
                answer = packets.arp(2, self.mac, arp.destination, arp.source_mac, arp.source)
                self._send(packets.frame(answer, arp.source_mac, self.mac))
        elif isinstance(packet.transport, Icmp) and packet.transport.type in (135, 136):
            target = str(ip_address(packet.payload[:16]))
            if packet.transport.type == 136:
                self._learn(target, sender)
            elif target in self._own and packet.ip and packet.ip.source != "::":
                self._learn(packet.ip.source, sender)
                answer = packets.neighbour_advertisement(self.mac, target, packet.ip.source)
                self._send(packets.frame(answer, sender, self.mac))

    def _learn(self, address: str, mac: str) -> None:
        with self._changed:
            self._macs[address] = mac
            self._changed.notify_all()
