# SPDX-License-Identifier: Apache-2.0
"""The nftables table of the IPVS data plane, as libnftables JSON (libnftables-json(5)).

Chains are written when the table is opened; a change of a Service changes elements of sets only.

    input        connections from outside; just before the priority `filter`, and before IPVS
    output       connections of the node itself; after conntrack, before IPVS
    forward      sets the mark on replies of backends, which our rules in other chains let pass
    postrouting  masquerading

`input` and `output` match new connections only, and look up (address, protocol, port) in sets. A
packet that IPVS forwards passes `output` a second time, with the real server's address, which no
set contains. Sets and rules exist once for IPv4 and once for IPv6. See plan.py for the elements.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kbpf.dataplane.ipvs.plan import MAP_SETS, Element, ElementField, SetName
from kbpf.kernel.netfilter.forward_rules import Json, match
from kbpf.model.address import ANY, Addr, family_of, format_addr, parse_addr
from kbpf.model.objects import Cidr, Protocol

# IPVS hooks LOCAL_IN at 98 and 99 and LOCAL_OUT at -99 and -98 (net/netfilter/ipvs/ip_vs_core.c).
# Conntrack, whose state the rules match, is at -200.
INPUT_PRIORITY: Final = -2
OUTPUT_PRIORITY: Final = -110
POSTROUTING_PRIORITY: Final = 100

FAMILIES: Final = (4, 6)
NETWORK_PROTOCOL: Final = {4: "ip", 6: "ip6"}
ADDRESS_TYPE: Final = {4: "ipv4_addr", 6: "ipv6_addr"}
FRONTEND_KEY_TYPES: Final = ("ADDRESS", "inet_proto", "inet_service")

SET_TYPES: Final[Mapping[SetName, tuple[str, ...]]] = {
    SetName.VIRTUAL_IPS: ("ADDRESS",),
    SetName.LOCAL_NETWORKS: ("ADDRESS",),
    SetName.NODE_IPS: ("ADDRESS",),
    SetName.OWN_FWMARKS: ("mark",),
    SetName.HAIRPINS: ("ADDRESS", "ADDRESS"),
    SetName.SOURCES: ("ADDRESS", *FRONTEND_KEY_TYPES),
}
"""Types of the sets' elements; all other sets have FRONTEND_KEY_TYPES. MAP_SETS map them to a
mark."""
INTERVAL_SETS: Final = frozenset((SetName.SOURCES, SetName.LOCAL_NETWORKS))


TABLE: Final = "kbpf"


class RulesetOptions(NamedTuple):
    """The settings that the chains depend on.

    - `table`: its name, in the family inet; not TABLE if the commands are only checked.
    - `masquerade_bit`: the bit of the mark that marks packets for masquerading.
    - `local_interfaces`: the devices of this node's pods ("cni0", "veth*"), if pods are recognized
      by device; otherwise "".
    - `masquerade_ports`: source ports of masqueraded connections, both ends included.
    """

    table: str = TABLE
    masquerade_bit: int = 14
    local_interfaces: str = ""
    masquerade_ports: tuple[int, int] = (30000, 65535)

    @property
    def masquerade_mark(self) -> int:
        """The mark with only `masquerade_bit` set."""
        return 1 << self.masquerade_bit


# ---- the table -----------------------------------------------------------------------------------


def create_table(options: RulesetOptions) -> list[Json]:
    """The commands that create the table. If it exists, its rules are written again and missing
    chains and sets are created; the elements of existing sets are kept.
    """
    commands: list[Json] = [{"add": {"table": {"family": "inet", "name": options.table}}}]
    commands += [command for name in SetName for family in FAMILIES for command in _create_set(options, name, family)]
    commands += list(_create_chains(options))
    return commands


DELETE_TABLE: Final[Json] = {"delete": {"table": {"family": "inet", "name": TABLE}}}
LIST_TABLE: Final[Json] = {"list": {"table": {"family": "inet", "name": TABLE}}}
"""Lists the table with all its elements."""


def _create_set(options: RulesetOptions, name: SetName, family: int) -> Iterator[Json]:
    types = [ADDRESS_TYPE[family] if type_ == "ADDRESS" else type_ for type_ in SET_TYPES.get(name, FRONTEND_KEY_TYPES)]
    definition: Json = {
        "family": "inet",
        "table": options.table,
        "name": f"{name}{family}",
        "type": types if len(types) > 1 else types[0],
    }
    if name in INTERVAL_SETS:
        definition["flags"] = ["interval"]
    if name in MAP_SETS:
        yield {"add": {"map": {**definition, "map": "mark"}}}
    else:
        yield {"add": {"set": definition}}


def _create_chains(options: RulesetOptions) -> Iterator[Json]:
    hooks = {
        "input": ("filter", "input", INPUT_PRIORITY),
        "output": ("filter", "output", OUTPUT_PRIORITY),
        "forward": ("filter", "forward", INPUT_PRIORITY),
        "postrouting": ("nat", "postrouting", POSTROUTING_PRIORITY),
    }
    for name, (chain_type, hook, priority) in hooks.items():
        chain = {"type": chain_type, "hook": hook, "prio": priority, "policy": "accept"}
        yield from _create_chain(options, name, chain)
    for hook in ("input", "output"):
        for family in FAMILIES:
            yield from _create_chain(options, f"{hook}{family}", {})
            yield _add_rule(options, hook, _match_new(), _match_family(family), {"jump": {"target": f"{hook}{family}"}})
    for family in FAMILIES:
        for hook in ("input", "output"):
            for expressions in _service_rules(options, hook, family):
                yield _add_rule(options, f"{hook}{family}", *expressions)
    for family in FAMILIES:
        for name in (SetName.VIRTUAL_IPS, SetName.NODE_IPS):
            yield _add_rule(options, "forward", *_reply_rule(options, family, name))
    for expressions in _postrouting_rules(options):
        yield _add_rule(options, "postrouting", *expressions)


def _create_chain(options: RulesetOptions, name: str, properties: Json) -> Iterator[Json]:
    chain = {"family": "inet", "table": options.table, "name": name}
    yield {"add": {"chain": {**chain, **properties}}}
    yield {"flush": {"chain": chain}}


def _add_rule(options: RulesetOptions, chain: str, *expressions: Json) -> Json:
    chain_ref = {"family": "inet", "table": options.table, "chain": chain}
    return {"add": {"rule": {**chain_ref, "expr": list(expressions)}}}


def _service_rules(options: RulesetOptions, hook: str, family: int) -> Iterator[tuple[Json, ...]]:
    """The rules for a new connection, in order: source ranges, short circuit, drop, refuse,
    masquerade.
    """
    frontend_key = _frontend_key(family)
    source_key = {
        "concat": [
            _payload_expression(NETWORK_PROTOCOL[family], "saddr"),
            *_frontend_key(family, CT_PROTOCOL)["concat"],
        ]
    }
    yield (
        _match_set(frontend_key, SetName.RESTRICTED, family),
        _match_set(source_key, SetName.SOURCES, family, "!="),
        {"drop": None},
    )
    fwmark_map = {"map": {"key": frontend_key, "data": f"@{SetName.SHORT_CIRCUITS}{family}"}}
    # A map without an element for the packet ends the rule, so only short circuits return.
    for local_match in _local_matches(options, hook, family):
        yield (*local_match, {"mangle": {"key": META_MARK, "value": fwmark_map}}, {"return": None})
    yield _match_set(frontend_key, SetName.DROPPED, family), {"drop": None}
    # Ports of a virtual address that no Service serves. The address is the node's own as well, so
    # they would otherwise reach the node's sockets.
    unserved = (
        _match_set(_payload_expression(NETWORK_PROTOCOL[family], "daddr"), SetName.VIRTUAL_IPS, family),
        _match_set(frontend_key, SetName.SERVED, family, "!="),
    )
    for matches in ((_match_set(frontend_key, SetName.REFUSED, family),), unserved):
        yield *matches, _match_protocols("tcp"), {"reject": {"type": "tcp reset"}}
        yield *matches, _match_protocols("udp", "sctp"), PORT_UNREACHABLE
    yield (
        _match_set(frontend_key, SetName.MASQUERADED, family),
        _set_mark({"|": [META_MARK, options.masquerade_mark]}),
    )
    if hook == "input":
        for local_match in _local_matches(options, hook, family):
            yield *local_match, {"return": None}
        yield (
            _match_set(frontend_key, SetName.MASQUERADED_OUTSIDE, family),
            _set_mark({"|": [META_MARK, options.masquerade_mark]}),
        )


def _local_matches(options: RulesetOptions, hook: str, family: int) -> Iterator[tuple[Json, ...]]:
    """Yields expressions that match clients on this node: the node itself in `output`, its pods in
    `input`. Several expressions are alternatives.
    """
    if hook == "output":
        yield ()
        return
    yield (_match_set(_payload_expression(NETWORK_PROTOCOL[family], "saddr"), SetName.LOCAL_NETWORKS, family),)
    if options.local_interfaces:
        yield (match({"meta": {"key": "iifname"}}, options.local_interfaces),)


def _reply_rule(options: RulesetOptions, family: int, name: SetName) -> tuple[Json, ...]:
    """Sets the mark on replies of backends, so that our rule in a closed FORWARD lets them pass."""
    is_reply = match({"ct": {"key": "direction"}}, "reply")
    return (is_reply, _match_original_destination(family, name), _set_mark({"|": [META_MARK, options.masquerade_mark]}))


def _match_original_destination(family: int, name: SetName) -> Json:
    """Matches connections whose original destination, before any translation, is in a set: these
    are IPVS connections. Connections that BPF has translated carry the same mark, but conntrack has
    seen them only with the backend as destination.
    """
    return _match_set({"ct": {"key": f"{NETWORK_PROTOCOL[family]} daddr", "dir": "original"}}, name, family)


def _postrouting_rules(options: RulesetOptions) -> Iterator[tuple[Json, ...]]:
    is_marked = match({"&": [META_MARK, options.masquerade_mark]}, options.masquerade_mark)
    for family in FAMILIES:
        source, destination = (
            _payload_expression(NETWORK_PROTOCOL[family], "saddr"),
            _payload_expression(NETWORK_PROTOCOL[family], "daddr"),
        )
        is_hairpin = _match_set({"concat": [source, destination]}, SetName.HAIRPINS, family)
        for name in (SetName.VIRTUAL_IPS, SetName.NODE_IPS):
            is_ipvs = _match_original_destination(family, name)
            for is_protocol, masquerade in _masquerade_expressions(options):
                # The bit is cleared, as in kube-proxy: a tunnel may send the packet through
                # postrouting a second time.
                yield (
                    is_protocol,
                    is_marked,
                    is_ipvs,
                    _set_mark({"^": [META_MARK, options.masquerade_mark]}),
                    masquerade,
                )
                # The client is its own backend: without masquerading it would reply to itself
                # directly, and IPVS would never see the reply.
                yield is_protocol, is_hairpin, is_ipvs, masquerade
        # The node connects to an address of its dummy device from that same address, to which a
        # backend elsewhere cannot reply.
        for is_protocol, masquerade in _masquerade_expressions(options):
            yield is_protocol, _match_set(source, SetName.VIRTUAL_IPS, family), masquerade


def _masquerade_expressions(options: RulesetOptions) -> Iterator[tuple[Json, Json]]:
    """Yields (match, statement) for each protocol that has ports. The port range differs from that
    of mode bpf, whose connections may still exist.
    """
    flags = ["random", "fully-random"]
    for protocol in ("tcp", "udp", "sctp"):
        ports = {"range": list(options.masquerade_ports)}
        yield match(META_L4PROTO, protocol), {"masquerade": {"port": ports, "flags": flags}}


# ---- expressions ---------------------------------------------------------------------------------

META_MARK: Final[Json] = {"meta": {"key": "mark"}}
META_L4PROTO: Final[Json] = {"meta": {"key": "l4proto"}}
CT_PROTOCOL: Final[Json] = {"ct": {"key": "protocol", "dir": "original"}}
"""The protocol, for keys of interval sets. With `meta l4proto` there, libnftables 1.0.6 emits a
byte swap of 2 bytes for the 1-byte field, which newer kernels refuse (EOPNOTSUPP in 7.2)."""
PORT_UNREACHABLE: Final[Json] = {"reject": {"type": "icmpx", "expr": "port-unreachable"}}


def _payload_expression(protocol: str, name: str) -> Json:
    return {"payload": {"protocol": protocol, "field": name}}


def _frontend_key(family: int, protocol: Json = META_L4PROTO) -> Json:
    return {
        "concat": [_payload_expression(NETWORK_PROTOCOL[family], "daddr"), protocol, _payload_expression("th", "dport")]
    }


def _match_set(key: Json, name: SetName, family: int, operator: str = "==") -> Json:
    return match(key, f"@{name}{family}", operator)


def _match_new() -> Json:
    return match({"ct": {"key": "state"}}, "new", "in")


def _match_family(family: int) -> Json:
    return match({"meta": {"key": "nfproto"}}, {4: "ipv4", 6: "ipv6"}[family])


def _match_protocols(*names: str) -> Json:
    return match(META_L4PROTO, {"set": list(names)})


def _set_mark(value: Json) -> Json:
    return {"mangle": {"key": META_MARK, "value": value}}


# ---- elements ------------------------------------------------------------------------------------


def delete_elements(elements: Iterable[Element]) -> list[Json]:
    """The commands that delete elements. The transaction fails if one of them does not exist."""
    return [{"delete": group} for group in _group_by_set(elements, keys_only=True)]


def add_elements(elements: Iterable[Element]) -> list[Json]:
    """The commands that add elements. Existing ones are not an error."""
    return [{"add": group} for group in _group_by_set(elements, keys_only=False)]


def _group_by_set(elements: Iterable[Element], keys_only: bool) -> list[Json]:
    by_set: dict[tuple[SetName, int], list[Any]] = {}
    for name, parts in elements:
        by_set.setdefault((name, _family_of(parts)), []).append(_encode_element(name, parts, keys_only))
    return [
        {"element": {"family": "inet", "table": TABLE, "name": f"{name}{family}", "elem": by_set[name, family]}}
        for name, family in sorted(by_set)
    ]


def _family_of(parts: tuple[ElementField, ...]) -> int:
    first = parts[0]
    address = first.address if isinstance(first, Cidr) else first
    assert isinstance(address, bytes)
    return family_of(address)


def _encode_element(name: SetName, parts: tuple[ElementField, ...], key_only: bool) -> Any:
    if name is SetName.OWN_FWMARKS:
        return parts[1]
    if name in MAP_SETS:
        key = _encode_element(SetName.SERVED, parts[:-1], True)
        return key if key_only else [key, parts[-1]]
    fields = [_encode_field(part) for part in parts]
    return {"concat": fields} if len(fields) > 1 else fields[0]


def _encode_field(field: ElementField) -> Any:
    match field:
        case Cidr(address, bits):
            length = bits - 96 if family_of(address) == 4 else bits
            max_length = 32 if family_of(address) == 4 else 128
            if length == 0:  # libnftables 1.0.6 silently adds nothing for a prefix of length 0
                return {
                    "range": ["0.0.0.0", "255.255.255.255"]
                    if max_length == 32
                    else ["::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]
                }
            text = format_addr(address)
            return text if length == max_length else {"prefix": {"addr": text, "len": length}}
        case bytes():
            return format_addr(field)
        case Protocol():
            return field.name.lower()
        case _:
            return field


def parse_elements(items: Iterable[Json]) -> frozenset[Element]:
    """Parses libnftables' answer to LIST_TABLE. Sets with other names are ignored."""
    elements: set[Element] = set()
    for item in items:
        set_ = item.get("set") or item.get("map")
        if set_ is None:
            continue
        name, digit = str(set_["name"])[:-1], str(set_["name"])[-1:]
        if name in set(SetName) and digit in ("4", "6"):
            for value in set_.get("elem", ()):
                elements.add((SetName(name), _parse_fields(SetName(name), int(digit), value)))
    return frozenset(elements)


def _parse_fields(name: SetName, family: int, value: Any) -> tuple[ElementField, ...]:
    if name is SetName.OWN_FWMARKS:
        return (ANY[family], int(value))
    if name in MAP_SETS:
        return (*_parse_fields(SetName.SERVED, family, value[0]), int(value[1]))
    values = value["concat"] if isinstance(value, dict) and "concat" in value else [value]
    types = SET_TYPES.get(name, FRONTEND_KEY_TYPES)
    parts: list[ElementField] = []
    for index, (field, type_name) in enumerate(zip(values, types, strict=True)):
        if name in INTERVAL_SETS and index == 0:
            parts.append(_parse_network(field, family))
        elif type_name == "ADDRESS":
            parts.append(parse_addr(str(field)))
        elif type_name == "inet_proto":
            parts.append(Protocol(field) if isinstance(field, int) else Protocol[str(field).upper()])
        else:
            parts.append(int(field))
    return tuple(parts)


def _parse_network(value: Any, family: int) -> Cidr:
    if isinstance(value, str):
        return Cidr(parse_addr(value), 128)
    if "range" in value:
        return Cidr(ANY[family], 96 if family == 4 else 0)
    prefix = value["prefix"]
    offset = 96 if family == 4 else 0
    return Cidr(Addr(parse_addr(prefix["addr"])), int(prefix["len"]) + offset)
