# SPDX-License-Identifier: Apache-2.0
"""Naive models: who gets which address of the Services, and the lookup table of the Maglev paper.

They share no code with kbpf and import nothing of it: they read the attributes of the objects that
they are given, work on text and plain containers, and compute everything from scratch. They are
written to be read, not to be fast. Which endpoints serve is judged by kube-proxy's own functions
(tests/fuzz/test_judge.py).
"""

import hashlib
import ipaddress
from typing import Any


def text(addr: bytes) -> str:
    """16 bytes as an address's text; IPv4-mapped ones as IPv4."""
    v6 = ipaddress.IPv6Address(addr)
    return str(v6.ipv4_mapped or v6)


def family(addr: bytes) -> int:
    """4 or 6."""
    return ipaddress.ip_address(text(addr)).version


def network(cidr: Any) -> Any:
    """The ipaddress network of a (16 bytes, length in 128 bits)."""
    ip = ipaddress.ip_address(text(cidr.address))
    return ipaddress.ip_network(f"{ip}/{cidr.bits - 96 if ip.version == 4 else cidr.bits}")


def asked_for(service: Any, port: Any, fam: int, cluster_ips: set[str]) -> dict[tuple[str, int, int], tuple[str, bool]]:
    """(address, port, protocol) → (kind, restricted), before conflicts between Services. Weaker
    kinds are entered first, so that a stronger one replaces them. `cluster_ips` of all Services are
    not available as ExternalIPs.
    """
    own = [text(a) for a in service.cluster_ips if family(a) == fam]
    own = [ip for ip in own if ip not in ("0.0.0.0", "::")]
    if not own:
        return {}
    protocol, anywhere = int(port.protocol), "0.0.0.0" if fam == 4 else "::"
    found = {}
    if port.node_port:
        found[anywhere, port.node_port, protocol] = ("NodePort", False)
    ranges = [network(c) for c in service.source_ranges if network(c).version == fam]
    limited = bool(ranges) and all(net.prefixlen > 0 for net in ranges)
    lists = [(service.external_ips, "ExternalIP", False), (service.lb_vips, "LoadBalancer", limited)]
    for addresses, kind, guard in lists:
        for a in addresses:
            taken = kind == "ExternalIP" and text(a) in cluster_ips
            if family(a) == fam and text(a) not in ("0.0.0.0", "::") and not taken:
                found[text(a), port.port, protocol] = (kind, guard)
    found[own[0], port.port, protocol] = ("ClusterIP", False)
    return found


def frontends(services: Any) -> dict[tuple[Any, ...], tuple[set[Any], set[Any]]]:
    """(namespace, name, port name, protocol, family) → its frontends, and those that other Services won."""
    claims, asked = [], {}
    cluster_ips = {text(a) for service in services for a in service.cluster_ips}
    order = {"ClusterIP": 0, "LoadBalancer": 1, "ExternalIP": 2, "NodePort": 3}
    for service in services:
        for fam in (4, 6):
            for port in service.ports:
                wanted = asked_for(service, port, fam, cluster_ips)
                if not wanted:
                    continue
                key = (service.namespace, service.name, port.name, int(port.protocol), fam)
                asked[key] = wanted
                age = service.creation_timestamp or "~ after every date"
                claims += [(at, (order[kind], age, *key), key) for at, (kind, _) in wanted.items()]
    winner = {at: min(c for c in claims if c[0] == at)[2] for at, _, _ in claims}
    return {
        key: (
            {(at, *wanted[at]) for at in wanted if winner[at] == key},
            {(at, winner[at][:2]) for at in wanted if winner[at] != key},
        )
        for key, wanted in asked.items()
    }


def maglev(backends: Any, weights: Any, size: int) -> list[int]:
    """The lookup table of the Maglev paper, with every permutation written out. `backends` are (16
    bytes, port, protocol); a weight is how often a backend has its turn, relative to the largest.
    """
    lists = {}
    addresses = [address for address, _, _ in sorted(backends)]
    for at, (address, port, protocol) in enumerate(sorted(backends)):
        key = address + addresses[:at].count(address).to_bytes(2, "big")
        digest = hashlib.blake2b(key, digest_size=16, person=b"kbpf maglev").digest()
        offset = int.from_bytes(digest[:8], "big") % size
        skip = int.from_bytes(digest[8:], "big") % (size - 1) + 1
        lists[address, port, protocol] = [(offset + j * skip) % size for j in range(size)]
    weights = list(weights) or [1] * len(backends)
    turns = dict.fromkeys(backends, 0)
    table: dict[int, int] = {}
    round_ = 0
    while True:
        for one in sorted(backends):
            mine = weights[backends.index(one)]
            if turns[one] * max(weights) > round_ * mine:
                continue
            turns[one] += 1
            table[next(slot for slot in lists[one] if slot not in table)] = backends.index(one)
            if len(table) == size:
                return [table[slot] for slot in range(size)]
        round_ += 1
