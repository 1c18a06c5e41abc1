# SPDX-License-Identifier: Apache-2.0
"""A naive model of what kube-proxy does with Services, to compare the policy with.

It shares no code with kbpf and imports nothing of it: it reads the attributes of the objects that
it is given, works on text and plain containers, and computes everything from scratch. It follows
kube-proxy's rules (pkg/proxy in Kubernetes) and is written to be read, not to be fast.
"""

import hashlib
import ipaddress
import math
from typing import Any, NamedTuple

Place = tuple[str, int]
"""Address and port as text and number."""


class Choice(NamedTuple):
    """The backends that serve, for each policy."""

    cluster: frozenset[Place]
    local: frozenset[Place]
    serving: frozenset[Place]
    any_endpoints: bool
    mode: str
    cluster_weights: frozenset[tuple[Place, int]]
    local_weights: frozenset[tuple[Place, int]]


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


def reachable(service: Any, port: Any, fam: int) -> bool:
    """Whether the port has any address besides its ClusterIP."""
    outside = [a for a in (*service.external_ips, *service.lb_vips) if family(a) == fam]
    return port.node_port != 0 or any(text(a) not in ("0.0.0.0", "::") for a in outside)


def external_policy_is_local(service: Any, port: Any, fam: int) -> bool:
    """Whether the external policy is Local and the port has an external address it applies to."""
    if service.type == "ClusterIP" and not service.external_ips:
        return False
    return bool(service.external_local) and reachable(service, port, fam)


def _ends(slices: Any, port: Any, fam: int, node: Any) -> dict[Place, dict[str, Any]]:
    """All endpoints by address and port: of several copies the last one that does not terminate,
    else the first.
    """
    found: dict[Place, dict[str, Any]] = {}
    for piece in sorted(slices, key=lambda piece: piece.name):
        if piece.family != fam:
            continue
        for entry in piece.ports:
            if (entry.name, int(entry.protocol)) != (port.name, int(port.protocol)):
                continue
            if entry.port == 0:
                continue
            for e, pod in zip(piece.endpoints, piece.pods, strict=True):
                at = (text(e.address), entry.port)
                if at not in found or not e.terminating:
                    found[at] = {
                        "local": node.name != "" and e.node == node.name,
                        "ready": e.ready,
                        "serving": e.serving,
                        "terminating": e.terminating,
                        "nodes": tuple(e.node_hints or ()),
                        "zones": tuple(e.zone_hints or ()),
                        "names": (e.node, e.zone, pod),
                    }
    return found


def choice(slices: Any, port: Any, service: Any, node: Any, fam: int) -> Choice:
    ends = _ends(slices, port, fam, node)
    ready = {at for at, e in ends.items() if e["ready"]}
    draining = {at for at, e in ends.items() if e["serving"] and e["terminating"]}
    here = {at for at, e in ends.items() if e["local"]}
    outside = reachable(service, port, fam)
    mode, cluster, local = "", set(), set()
    if not service.internal_local or outside:
        cluster = set(ready)
        if ready and all(ends[at]["nodes"] for at in ready):
            hinted = {at for at in ready if node.name and node.name in ends[at]["nodes"]}
            if hinted:
                mode, cluster = "PreferSameNode", hinted
        if ready and mode == "" and all(ends[at]["zones"] for at in ready):
            hinted = {at for at in ready if node.zone and node.zone in ends[at]["zones"]}
            if hinted:
                mode, cluster = "PreferSameZone", hinted
        if not ready:
            cluster = draining
    if service.internal_local or external_policy_is_local(service, port, fam):
        local = (ready & here) if ready & here else (draining & here)
    serving = {at for at, e in ends.items() if e["serving"] or e["ready"]}
    some = bool(ready) or bool(draining)
    cluster_weights = weighed(cluster, ends, service.weights)
    local_weights = weighed(local, ends, service.weights)
    return Choice(
        frozenset(cluster_weights),
        frozenset(local_weights),
        frozenset(serving),
        some,
        mode,
        frozenset(cluster_weights.items()),
        frozenset(local_weights.items()),
    )


def weighed(some: set[Place], ends: dict[Place, dict[str, Any]], rules: Any) -> dict[Place, int]:
    """The backends of a set that get connections, with their shares in lowest terms."""
    each = {}
    for at in some:
        node, zone, pod = ends[at]["names"]
        each[at] = weight(rules, at[0], pod, node, zone)
    if not any(each.values()):
        return dict.fromkeys(some, 1)
    return {at: w // math.gcd(*each.values()) for at, w in each.items() if w}


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


def state(services: Any, slices: Any, node: Any, config: Any) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The whole state: (namespace, name, port name, protocol, family) → its frontends and sets."""
    claims, found = [], {}
    cluster_ips = {text(a) for service in services for a in service.cluster_ips}
    order = {"ClusterIP": 0, "LoadBalancer": 1, "ExternalIP": 2, "NodePort": 3}
    for service in services:
        mine = [s for s in slices if (s.namespace, s.service) == (service.namespace, service.name)]
        for fam in (4, 6):
            for port in service.ports:
                asked = asked_for(service, port, fam, cluster_ips)
                if not asked:
                    continue
                key = (service.namespace, service.name, port.name, int(port.protocol), fam)
                chosen = choice(mine, port, service, node, fam)
                found[key] = {
                    **chosen._asdict(),
                    "internal_local": service.internal_local,
                    "external_local": external_policy_is_local(service, port, fam),
                    "affinity_timeout": service.affinity_timeout,
                    "algorithm": str(service.algorithm or config.algorithm),
                    "asked": asked,
                }
                age = service.creation_timestamp or "~ after every date"
                claims += [(at, (order[kind], age, *key), key) for at, (kind, _) in asked.items()]
    for key, entry in found.items():
        asked = entry.pop("asked")
        winner = {at: min(c for c in claims if c[0] == at)[2] for at in asked}
        entry["frontends"] = {(at, *asked[at]) for at in asked if winner[at] == key}
        entry["lost"] = {(at, winner[at][:2]) for at in asked if winner[at] != key}
        del entry["mode"]
    return found


# ---- weights -----------------------------------------------------------------------------------


def weight(rules: Any, address: str, pod: str, node: str, zone: str) -> int:
    """The weight of one endpoint by a Service's rules; `rules` may be None."""
    if rules is None:
        return 1
    answers = [w for name, w in rules.addresses if text(name) == address]
    answers += [w for name, w in rules.pods if name == pod]
    answers += [w for name, w in rules.nodes if name == node]
    answers += [w for name, w in rules.zones if name == zone]
    return int([*answers, rules.default][0])


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
