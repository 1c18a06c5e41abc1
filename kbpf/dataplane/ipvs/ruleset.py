"""The nftables table of the IPVS data plane, as libnftables' JSON.

Chains are written when the table is opened; a change of a Service changes elements of sets only.

    input        a bit before the priority `filter`, and before IPVS: who comes from outside
    output       after conntrack, before IPVS: the node's own connections
    forward      answers of backends get the mark that others' chains let pass
    postrouting  masquerading

Both of the first look at new connections only, and all lookups are by (address, protocol, port).
A packet that IPVS sends on passes `output` once more, with its real server's address: no set knows
that. Elements are those of plan.py; what is said of a family is said twice, for IPv4 and IPv6.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kbpf.dataplane.ipvs.plan import MAPS, Element, Part, SetName
from kbpf.model.address import ANY4, ANY6, Addr, family_of, format_addr, parse_addr
from kbpf.model.objects import Cidr, Protocol

Json = dict[str, Any]

INPUT_PRIORITY: Final = -2
OUTPUT_PRIORITY: Final = -110
POSTROUTING_PRIORITY: Final = 100

FAMILIES: Final = (4, 6)
L3: Final = {4: "ip", 6: "ip6"}
ADDRESS: Final = {4: "ipv4_addr", 6: "ipv6_addr"}
AT: Final = ("ADDRESS", "inet_proto", "inet_service")

TYPES: Final[Mapping[SetName, tuple[str, ...]]] = {
    SetName.VIRTUAL_IPS: ("ADDRESS",),
    SetName.LOCAL_NETWORKS: ("ADDRESS",),
    SetName.NODE_IPS: ("ADDRESS",),
    SetName.OWN_MARKS: ("mark",),
    SetName.HAIRPINS: ("ADDRESS", "ADDRESS"),
    SetName.SOURCES: ("ADDRESS", *AT),
}
"""Of the others: AT. MAPS are from AT to a mark."""
INTERVALS: Final = frozenset((SetName.SOURCES, SetName.LOCAL_NETWORKS))


class Style(NamedTuple):
    """What decides the chains: `bit` of the mark says that a packet is to be masqueraded; `local`
    names devices that pods of this node are behind ("cni0", "veth*"), if they are known by that.
    `ports`, both included, are for masqueraded connections.
    """

    table: str = "kbpf"
    bit: int = 14
    local: str = ""
    ports: tuple[int, int] = (30000, 65535)

    @property
    def mark(self) -> int:
        """As a number."""
        return 1 << self.bit


# ---- the table -----------------------------------------------------------------------------------


def table(style: Style) -> list[Json]:
    """Makes the table, or makes the chains of one that is there anew; sets stay as they are."""
    made: list[Json] = [{"add": {"table": {"family": "inet", "name": style.table}}}]
    made += [one for name in SetName for family in FAMILIES for one in _set(style, name, family)]
    made += list(_chains(style))
    return made


def no_table(style: Style) -> list[Json]:
    """Takes it away."""
    return [{"delete": {"table": {"family": "inet", "name": style.table}}}]


def listing(style: Style) -> Json:
    """Asks for all of it."""
    return {"list": {"table": {"family": "inet", "name": style.table}}}


def _set(style: Style, name: SetName, family: int) -> Iterator[Json]:
    types = [ADDRESS[family] if t == "ADDRESS" else t for t in TYPES.get(name, AT)]
    made: Json = {
        "family": "inet",
        "table": style.table,
        "name": f"{name}{family}",
        "type": types if len(types) > 1 else types[0],
    }
    if name in INTERVALS:
        made["flags"] = ["interval"]
    if name in MAPS:
        yield {"add": {"map": {**made, "map": "mark"}}}
    else:
        yield {"add": {"set": made}}


def _chains(style: Style) -> Iterator[Json]:
    hooks = {
        "input": ("filter", "input", INPUT_PRIORITY),
        "output": ("filter", "output", OUTPUT_PRIORITY),
        "forward": ("filter", "forward", INPUT_PRIORITY),
        "postrouting": ("nat", "postrouting", POSTROUTING_PRIORITY),
    }
    for name, (kind, hook, priority) in hooks.items():
        chain = {"type": kind, "hook": hook, "prio": priority, "policy": "accept"}
        yield from _chain(style, name, chain)
    for hook in ("input", "output"):
        for family in FAMILIES:
            yield from _chain(style, f"{hook}{family}", {})
            yield _rule(
                style, hook, _is_new(), _family(family), {"jump": {"target": f"{hook}{family}"}}
            )
    for family in FAMILIES:
        for hook in ("input", "output"):
            for words in _service_rules(style, hook, family):
                yield _rule(style, f"{hook}{family}", *words)
    for family in FAMILIES:
        for name in (SetName.VIRTUAL_IPS, SetName.NODE_IPS):
            yield _rule(style, "forward", *_answers(style, family, name))
    for words in _postrouting(style):
        yield _rule(style, "postrouting", *words)


def _chain(style: Style, name: str, more: Json) -> Iterator[Json]:
    where = {"family": "inet", "table": style.table, "name": name}
    yield {"add": {"chain": {**where, **more}}}
    yield {"flush": {"chain": where}}


def _rule(style: Style, chain: str, *words: Json) -> Json:
    where = {"family": "inet", "table": style.table, "chain": chain}
    return {"add": {"rule": {**where, "expr": list(words)}}}


def _service_rules(style: Style, hook: str, family: int) -> Iterator[tuple[Json, ...]]:
    """What a new connection meets, in this order."""
    at = _at(family)
    allowed = {"concat": [_payload(L3[family], "saddr"), *_at(family, CT_PROTOCOL)["concat"]]}
    yield (
        _in(at, SetName.RESTRICTED, family),
        _in(allowed, SetName.SOURCES, family, "!="),
        {"drop": None},
    )
    marked = {"map": {"key": at, "data": f"@{SetName.SHORT_CIRCUITS}{family}"}}
    for here in _from_here(style, hook, family):
        yield (*here, {"mangle": {"key": MARK, "value": marked}}, {"return": None})
    yield _in(at, SetName.DROPPED, family), {"drop": None}
    unserved = (
        _in(_payload(L3[family], "daddr"), SetName.VIRTUAL_IPS, family),
        _in(at, SetName.SERVED, family, "!="),
    )
    for which in ((_in(at, SetName.REFUSED, family),), unserved):
        yield *which, _protocols("tcp"), {"reject": {"type": "tcp reset"}}
        yield *which, _protocols("udp", "sctp"), PORT_UNREACHABLE
    yield _in(at, SetName.MASQUERADED, family), _mark({"|": [MARK, style.mark]})
    if hook == "input":
        for here in _from_here(style, hook, family):
            yield *here, {"return": None}
        yield _in(at, SetName.MASQUERADED_OUTSIDE, family), _mark({"|": [MARK, style.mark]})


def _from_here(style: Style, hook: str, family: int) -> Iterator[tuple[Json, ...]]:
    """Ways to tell the node, and pods on it."""
    if hook == "output":
        yield ()
        return
    yield (_in(_payload(L3[family], "saddr"), SetName.LOCAL_NETWORKS, family),)
    if style.local:
        yield (_match({"meta": {"key": "iifname"}}, style.local),)


def _answers(style: Style, family: int, name: SetName) -> tuple[Json, ...]:
    """Answers of backends carry the mark, so that a closed FORWARD can let them pass."""
    reply = _match({"ct": {"key": "direction"}}, "reply")
    return reply, _asked(family, name), _mark({"|": [MARK, style.mark]})


def _asked(family: int, name: SetName) -> Json:
    """Connections to these addresses, whatever has become of their packets: those of IPVS. What BPF
    has translated, and carries the same mark, was for its backend from the beginning.
    """
    return _in({"ct": {"key": f"{L3[family]} daddr", "dir": "original"}}, name, family)


def _postrouting(style: Style) -> Iterator[tuple[Json, ...]]:
    marked = _match({"&": [MARK, style.mark]}, style.mark)
    for family in FAMILIES:
        source, to = _payload(L3[family], "saddr"), _payload(L3[family], "daddr")
        to_itself = _in({"concat": [source, to]}, SetName.HAIRPINS, family)
        for name in (SetName.VIRTUAL_IPS, SetName.NODE_IPS):
            asked = _asked(family, name)
            for is_one, masquerade in _masquerade(style):
                yield is_one, marked, asked, _mark({"^": [MARK, style.mark]}), masquerade
                yield is_one, to_itself, asked, masquerade
        # Who dials an address of this machine does so from that address.
        for is_one, masquerade in _masquerade(style):
            yield is_one, _in(source, SetName.VIRTUAL_IPS, family), masquerade


def _masquerade(style: Style) -> Iterator[tuple[Json, Json]]:
    """For each protocol that has ports. They are others than those of mode bpf, whose connections
    may go on beside ours.
    """
    flags = ["random", "fully-random"]
    for protocol in ("tcp", "udp", "sctp"):
        ports = {"range": list(style.ports)}
        yield _match(L4, protocol), {"masquerade": {"port": ports, "flags": flags}}


# ---- words ---------------------------------------------------------------------------------------

MARK: Final[Json] = {"meta": {"key": "mark"}}
L4: Final[Json] = {"meta": {"key": "l4proto"}}
CT_PROTOCOL: Final[Json] = {"ct": {"key": "protocol", "dir": "original"}}
"""For a set of intervals. There libnftables (1.0.6) swaps the bytes of L4, in twos though it is one
byte, which newer kernels refuse (EOPNOTSUPP in 7.2)."""
PORT_UNREACHABLE: Final[Json] = {"reject": {"type": "icmpx", "expr": "port-unreachable"}}


def _payload(protocol: str, name: str) -> Json:
    return {"payload": {"protocol": protocol, "field": name}}


def _at(family: int, protocol: Json = L4) -> Json:
    return {"concat": [_payload(L3[family], "daddr"), protocol, _payload("th", "dport")]}


def _match(left: Json, right: Any, operator: str = "==") -> Json:
    return {"match": {"op": operator, "left": left, "right": right}}


def _in(key: Json, name: SetName, family: int, operator: str = "==") -> Json:
    return _match(key, f"@{name}{family}", operator)


def _is_new() -> Json:
    return _match({"ct": {"key": "state"}}, "new", "in")


def _family(family: int) -> Json:
    return _match({"meta": {"key": "nfproto"}}, {4: "ipv4", 6: "ipv6"}[family])


def _protocols(*names: str) -> Json:
    return _match(L4, {"set": list(names)})


def _mark(value: Json) -> Json:
    return {"mangle": {"key": MARK, "value": value}}


# ---- elements ------------------------------------------------------------------------------------


def removal(style: Style, elements: Iterable[Element]) -> list[Json]:
    """Takes elements out of their sets; all of them must be there."""
    return [{"delete": one} for one in _grouped(style, elements, keys_only=True)]


def addition(style: Style, elements: Iterable[Element]) -> list[Json]:
    """Puts elements into their sets."""
    return [{"add": one} for one in _grouped(style, elements, keys_only=False)]


def _grouped(style: Style, elements: Iterable[Element], keys_only: bool) -> list[Json]:
    found: dict[tuple[SetName, int], list[Any]] = {}
    for name, parts in elements:
        found.setdefault((name, _family_of(parts)), []).append(_written(name, parts, keys_only))
    return [
        {"element": {"family": "inet", "table": style.table, "name": f"{name}{family}",
                     "elem": found[name, family]}}
        for name, family in sorted(found)
    ]  # fmt: skip


def _family_of(parts: tuple[Part, ...]) -> int:
    first = parts[0]
    address = first.address if isinstance(first, Cidr) else first
    assert isinstance(address, bytes)
    return family_of(address)


def _written(name: SetName, parts: tuple[Part, ...], key_only: bool) -> Any:
    if name is SetName.OWN_MARKS:
        return parts[1]
    if name in MAPS:
        key = _written(SetName.SERVED, parts[:-1], True)
        return key if key_only else [key, parts[-1]]
    words = [_word(part) for part in parts]
    return {"concat": words} if len(words) > 1 else words[0]


def _word(part: Part) -> Any:
    match part:
        case Cidr(address, bits):
            length = bits - 96 if family_of(address) == 4 else bits
            whole = 32 if family_of(address) == 4 else 128
            if length == 0:
                return {"range": ["0.0.0.0", "255.255.255.255"] if whole == 32
                        else ["::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]}  # fmt: skip
            text = format_addr(address)
            return text if length == whole else {"prefix": {"addr": text, "len": length}}
        case bytes():
            return format_addr(part)
        case Protocol():
            return part.name.lower()
        case _:
            return part


def read(listed: Iterable[Json]) -> frozenset[Element]:
    """The elements in libnftables' answer to listing(); other sets count for nothing."""
    found: set[Element] = set()
    for one in listed:
        made = one.get("set") or one.get("map")
        if made is None:
            continue
        name, digit = str(made["name"])[:-1], str(made["name"])[-1:]
        if name in set(SetName) and digit in ("4", "6"):
            for text in made.get("elem", ()):
                found.add((SetName(name), _parts(SetName(name), int(digit), text)))
    return frozenset(found)


def _parts(name: SetName, family: int, text: Any) -> tuple[Part, ...]:
    if name is SetName.OWN_MARKS:
        return (ANY4 if family == 4 else ANY6, int(text))
    if name in MAPS:
        return (*_parts(SetName.SERVED, family, text[0]), int(text[1]))
    words = text["concat"] if isinstance(text, dict) and "concat" in text else [text]
    types = TYPES.get(name, AT)
    parts: list[Part] = []
    for index, (word, kind) in enumerate(zip(words, types, strict=True)):
        if name in INTERVALS and index == 0:
            parts.append(_network(word, family))
        elif kind == "ADDRESS":
            parts.append(parse_addr(str(word)))
        elif kind == "inet_proto":
            parts.append(Protocol(word) if isinstance(word, int) else Protocol[str(word).upper()])
        else:
            parts.append(int(word))
    return tuple(parts)


def _network(word: Any, family: int) -> Cidr:
    if isinstance(word, str):
        return Cidr(parse_addr(word), 128)
    if "range" in word:
        return Cidr(ANY4 if family == 4 else ANY6, 96 if family == 4 else 0)
    prefix = word["prefix"]
    more = 96 if family == 4 else 0
    return Cidr(Addr(parse_addr(prefix["addr"])), int(prefix["len"]) + more)
