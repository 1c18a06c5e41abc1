# SPDX-License-Identifier: Apache-2.0
"""Finds rules that refuse packets before DNAT. Hosts protect NodePorts and VIPs with them, but the
packet path translates packets before they apply.

Checked are base chains at prerouting with a priority before dstnat and at netdev ingress, with all
chains that they jump to; for iptables-legacy PREROUTING in the tables raw and mangle. A rule
counts if it refuses packets, and if it or a rule that leads to it selects packets by source,
destination, original destination (conntrack) or a port of NodePorts and VIPs (ServedPorts).
Conditions that cannot be read (iptables extensions, named sets) count too. A rule that refuses
all packets counts, or all of a device, of TCP, to this node, or of new connections: it is the end
of a list of what is accepted. Rules for other ports or for other connection states do not. A base
chain with policy drop counts. Very many rules are not read, since the agent's event loop would wait
for them; a chain whose table is left out is reported as unreadable.
"""

import contextlib
import shlex
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.netfilter import forward_rules, iptables_legacy, nft
from kbpf.kernel.netfilter.forward_rules import Json

NF_IP_PRI_NAT_DST: Final = -100
NODE_PORTS: Final = range(30_000, 32_768)
CALICO_CHAIN_PREFIXES: Final = ("cali-fh-", "mangle-cali-fh-")
"""Calico's chains for one host endpoint; in mangle they are preDNAT policies."""
XT_MATCHES: Final = frozenset(
    ("tcp", "udp", "sctp", "multiport", "conntrack", "set", "iprange", "geoip", "recent",
     "addrtype", "bpf", "u32", "string")
)  # fmt: skip
"""iptables matches that may select by port or address, which the JSON output does not show."""
ADDRESS_FIELDS: Final = frozenset(("saddr", "daddr"))
PORT_FIELDS: Final = frozenset(("dport",))
AGENT_MAX_RULES: Final = 2_000
"""The agent reads at most this many rules: libnftables needs up to 0.3 ms for each."""
DISPATCH_KEYS: Final = frozenset(("ifname", "iface_index", "iface_type", "mark"))
NEUTRAL_STATEMENTS: Final = frozenset(
    ("counter", "log", "notrack", "mangle", "accept", "continue", "return", "jump", "goto", "drop",
     "reject")
)  # fmt: skip
"""Statements of a rule that select no packets."""
GENERAL_KEYS: Final = frozenset(("iif", "iifname", "iifgroup", "iiftype", "nfproto"))
"""Keys of `meta` that select a device or a family, whichever it is."""
Literals = frozenset[str | int]
TRANSPORTS: Final[Literals] = frozenset(("tcp", "udp", "sctp", 6, 17, 132))
"""Protocols of Services, as nft writes them."""
CT_ORIGINAL_KEYS: Final = frozenset(("daddr", "proto-dst", "ip daddr", "ip6 daddr"))


class EarlyChains(NamedTuple):
    """`chains`: base chains that refuse packets to NodePorts or VIPs, as "family table chain".
    `unreadable`: chains or tables whose rules were not read, for which this is unknown.
    """

    chains: tuple[str, ...]
    unreadable: tuple[str, ...]


class ServedPorts:
    """The default range of NodePorts, and `others`: ports of Services outside of it."""

    def __init__(self, others: Iterable[int] = ()) -> None:
        self._others = sorted(set(others))

    def has_any(self, low: int, high: int) -> bool:
        """Whether there is one between `low` and `high`, inclusive."""
        index = bisect_left(self._others, low)
        return (low < NODE_PORTS.stop and high >= NODE_PORTS.start) or (
            index < len(self._others) and self._others[index] <= high
        )


def find_chains(max_rules: int, ports: ServedPorts) -> EarlyChains:
    """Finds the base chains of nf_tables. At most `max_rules` rules are read, of small tables
    first. Raises KernelError if nf_tables cannot be read.
    """
    names, unreadable = [], []
    chains = [chain for chain in forward_rules.list_chains() if _is_relevant(chain)]
    tables = _read_tables({(chain["family"], chain["table"]) for chain in chains}, max_rules, ports)
    for chain in chains:
        table = chain["family"], chain["table"]
        name = " ".join((*table, chain["name"]))
        rules = tables[table]
        if chain["policy"] == "drop" or (
            not isinstance(rules, str) and has_guarding_rule(rules, chain["name"])
        ):
            names.append(name)
        elif isinstance(rules, str):
            unreadable.append(f"{name} ({rules})")
    return EarlyChains(tuple(sorted(names)), tuple(sorted(unreadable)))


def _is_relevant(chain: Json) -> bool:
    is_foreign = chain["table"] not in forward_rules.SERVICE_PROXY_TABLES
    return chain["family"] in nft.NFPROTO and is_foreign and _is_early(chain)


Rules = Mapping[str, Collection["EarlyRule"]]
"""The rules of a table, by chain."""


def _read_tables(
    tables: Iterable[tuple[str, str]], max_rules: int, ports: ServedPorts
) -> dict[tuple[str, str], Rules | str]:
    """The rules of each table, or why they were not read."""
    left = max_rules
    counts = sorted((nft.count_rules(*table, max_rules + 1), table) for table in tables)
    results: dict[tuple[str, str], Rules | str] = {}
    for count, table in counts:
        if count > left:
            results[table] = f"more rules than the {max_rules:,} that are read in all"
            continue
        left -= count
        try:
            results[table] = _read_rules(*table, ports)
        except KernelError as error:
            results[table] = error.what
    return results


def find_legacy_chains(max_rules: int, ports: ServedPorts) -> EarlyChains:
    """find_chains() for iptables-legacy, whose tables can be read only by its own programs. Our
    image does not have these.
    """
    names, unreadable = [], []
    for family in iptables_legacy.FAMILIES:
        for table in ("mangle", "raw"):
            if table not in iptables_legacy.list_tables(family):
                continue
            name = f"{family} {table} (iptables-legacy)"
            try:
                lines = iptables_legacy.save(family, table).split("\n")
            except KernelError:
                unreadable.append(name)
                continue
            if any(line.startswith(":PREROUTING DROP") for line in lines):
                names.append(f"{name} PREROUTING")
            elif len(lines) > max_rules:
                unreadable.append(f"{name} (more than {max_rules:,} lines)")
            elif has_guarding_rule(_parse_saved_rules(lines, ports), "PREROUTING"):
                names.append(f"{name} PREROUTING")
    return EarlyChains(tuple(names), tuple(unreadable))


def _is_early(chain: Json) -> bool:
    hook, priority = chain.get("hook"), chain.get("prio", 0)
    if chain.get("type") != "filter":
        return False
    return hook == "ingress" or (hook == "prerouting" and int(priority) < NF_IP_PRI_NAT_DST)


class EarlyRule(NamedTuple):
    """What matters about a rule. `is_selective`: it selects by address or by a port of
    Services. `is_other_ports`: it applies only to other ports. `is_general`: it applies to all new
    connections, or to all of a device or a protocol. `targets`: chains that it jumps to.
    """

    refuses: bool
    is_selective: bool
    is_other_ports: bool
    is_general: bool
    targets: frozenset[str]


def _read_rules(family: str, table: str, ports: ServedPorts) -> dict[str, list[EarlyRule]]:
    """Reads the rules of an nf_tables table, by chain."""
    command = {"list": {"table": {"family": family, "name": table}}}
    # A named set counts whatever it contains, so its elements are not read: there may be millions.
    items = forward_rules.run_transaction(command, terse=True)
    dispatch_maps = {
        f"@{item['map']['name']}": _read_map(family, table, item["map"]["name"])
        for item in items
        if _is_dispatch_map(item.get("map", {}))
    }
    rules: dict[str, list[EarlyRule]] = {}
    for item in items:
        if "rule" in item:
            rule = _parse_nft_rule(item["rule"].get("expr", ()), dispatch_maps, ports)
            rules.setdefault(str(item["rule"]["chain"]), []).append(rule)
    return rules


def _is_dispatch_map(nft_map: Json) -> bool:
    """Whether this is a verdict map by device (as Calico's), which has few elements."""
    return nft_map.get("map") == "verdict" and nft_map.get("type") in DISPATCH_KEYS


def _read_map(family: str, table: str, name: str) -> list[Json]:
    """Reads the verdicts of a map."""
    command = {"list": {"map": {"family": family, "table": table, "name": name}}}
    items = forward_rules.run_transaction(command)
    elements = next((item["map"].get("elem", ()) for item in items if "map" in item), ())
    return [verdict for _, verdict in elements if isinstance(verdict, dict)]


def has_guarding_rule(rules: Rules, base_chain: str) -> bool:
    """Whether the base chain, or a chain reachable from it, has a rule that counts. `rules`: all
    rules of the table.
    """
    # A chain may be reached in several ways: by a jump that selects, by a general one and by
    # another one. The queue has each of them: chain, selective, general.
    start = (base_chain, False, True)
    visited, queue = {start}, [start]
    while queue:
        name, selective, general = queue.pop()
        if name.startswith(CALICO_CHAIN_PREFIXES):
            return True
        for rule in rules.get(name, ()):
            if rule.is_other_ports:
                continue
            selects = selective or rule.is_selective
            is_general = general and rule.is_general
            if rule.refuses and (selects or is_general):
                return True
            new = {(target, selects, is_general) for target in rule.targets} - visited
            visited |= new
            queue += new
    return False


# ---- nf_tables -----------------------------------------------------------------------------------


def _parse_nft_rule(
    expressions: Collection[Json], dispatch_maps: Mapping[str, list[Json]], ports: ServedPorts
) -> EarlyRule:
    """`dispatch_maps`: the verdicts of named maps, by "@name"."""
    port_matches = [
        match
        for expression in expressions
        if (match := _selects_ports(expression, ports)) is not None
    ]
    verdicts = [
        verdict for expression in expressions for verdict in _verdicts(expression, dispatch_maps)
    ]
    return EarlyRule(
        any(_refuses(expression) for expression in expressions)
        or any("drop" in verdict for verdict in verdicts),
        any(port_matches) or any(_selects_by_address(expression) for expression in expressions),
        bool(port_matches) and not any(port_matches),
        all(map(_is_general, expressions)),
        frozenset(_targets((*expressions, *verdicts))),
    )


def _refuses(expression: Json) -> bool:
    if expression.keys() & {"drop", "reject"}:
        return True
    target = expression.get("xt") or {}
    return (target.get("type"), target.get("name")) == ("target", "REJECT")


def _selects_ports(expression: Json, ports: ServedPorts) -> bool | None:
    """Whether it selects ports of Services; None if it does not select by port."""
    match: Json = expression.get("match") or expression.get("vmap") or {}
    operand: Json = match.get("left") or match.get("key") or {}
    if operand.get("payload", {}).get("field") not in PORT_FIELDS:
        return None
    # With another operator, or in a verdict map, they may be among the ports.
    is_literal = "right" in match and match.get("op", "==") in ("==", "in")
    return _contains_port(match["right"], ports) if is_literal else True


def _contains_port(value: Any, ports: ServedPorts) -> bool:
    if isinstance(value, int):
        return ports.has_any(value, value)
    if isinstance(value, dict) and "range" in value:
        low, high = value["range"]
        return ports.has_any(int(low), int(high))
    if isinstance(value, dict) and "set" in value:
        return any(_contains_port(element, ports) for element in value["set"])
    return True  # a named set or a port name: unknown


def _selects_by_address(expression: Json) -> bool:
    if "xt" in expression:
        extension = expression["xt"]  # null before nftables 1.0.6
        return not extension or (
            extension.get("type") == "match" and extension.get("name") in XT_MATCHES
        )
    match: Json = expression.get("match") or expression.get("vmap") or {}
    operand: Json = match.get("left") or match.get("key") or {}
    parts = operand.get("concat", [operand]) if isinstance(operand, dict) else []
    return any(_is_address(part) for part in parts if isinstance(part, dict))


def _is_address(part: Json) -> bool:
    if part.get("payload", {}).get("field") in ADDRESS_FIELDS | PORT_FIELDS:
        return True
    if "prefix" in part or "&" in part:
        inner = part.get("&", [{}])[0] if "&" in part else part["prefix"].get("addr", {})
        return isinstance(inner, dict) and _is_address(inner)
    return part.get("ct", {}).get("key") in CT_ORIGINAL_KEYS


def _is_general(expression: Json) -> bool:
    """Whether it lets new connections of Services through to the rest of the rule, if it does not
    look at their addresses and ports.
    """
    match: Json = expression.get("match") or expression.get("vmap") or {}
    if not match:
        extension = expression.get("xt") or {}
        is_neutral = extension.get("type") == "target" or extension.get("name") == "comment"
        return is_neutral or not expression.keys() - NEUTRAL_STATEMENTS
    operand: Json = match.get("left") or match.get("key") or {}
    if operand.get("meta", {}).get("key") in GENERAL_KEYS:
        return True
    values = _values_of_services(operand)
    return bool(values) and _may_match(match, values)


def _values_of_services(operand: Json) -> Literals:
    """The values that new connections of Services have in this field; none if that is unknown."""
    meta, payload = operand.get("meta", {}).get("key"), operand.get("payload", {})
    fib = operand.get("fib", {})
    if meta == "l4proto" or payload.get("field") in ("protocol", "nexthdr"):
        return TRANSPORTS
    if meta == "protocol" or (payload.get("protocol"), payload.get("field")) == ("ether", "type"):
        return frozenset(("ip", "ip6"))
    if operand.get("ct", {}).get("key") == "state":
        return frozenset(("new",))
    if fib.get("result") == "type" and "daddr" in fib.get("flags", ()):
        return frozenset(("local",))
    return frozenset()


def _may_match(match: Json, values: Literals) -> bool:
    """Whether a packet with one of these values may match, or get a verdict other than accept from
    a verdict map.
    """
    literals = _literals_of(match)
    if not all(isinstance(literal, str | int) for literal in literals):
        return True  # a range, a named set or a named map: unknown
    is_negated = match.get("op") == "!="
    return bool(values - set(literals) if is_negated else values & set(literals))


def _literals_of(match: Json) -> Collection[Any]:
    """What a match compares with, or the keys of a verdict map that do not accept."""
    if "data" in match:
        pairs = match["data"].get("set", ()) if isinstance(match["data"], dict) else ()
        keys = [key for key, verdict in filter(_is_pair, pairs) if "accept" not in verdict]
        return keys if pairs else [None]
    right = match.get("right")
    literals = right.get("set", [right]) if isinstance(right, dict) else right
    return literals if isinstance(literals, list) else [literals]


def _verdicts(expression: Json, dispatch_maps: Mapping[str, list[Json]]) -> Iterator[Json]:
    data = expression.get("vmap", {}).get("data", {})
    if isinstance(data, str):
        # Named maps by address or port are not read, and may have any verdict.
        yield from dispatch_maps.get(data, [{"drop": None}])
        return
    pairs = data.get("set", ()) if isinstance(data, dict) else ()
    yield from (verdict for _, verdict in filter(_is_pair, pairs))


def _is_pair(element: Any) -> bool:
    """Whether this is a key of a map with its verdict."""
    return isinstance(element, list) and len(element) == 2 and isinstance(element[1], dict)


def _targets(statements: Iterable[Json]) -> Iterator[str]:
    for statement in statements:
        for jump in ("jump", "goto"):
            if isinstance(statement.get(jump), dict):
                yield str(statement[jump]["target"])


# ---- iptables-legacy -----------------------------------------------------------------------------

REFUSING_TARGETS: Final = frozenset(("DROP", "REJECT"))
SAVED_PORTS: Final = frozenset(("--dport", "--dports", "--ports", "--ctorigdstport"))
SAVED_ADDRESSES: Final = frozenset(
    ("-s", "-d", "--ctorigdst", "--ctorigsrc", "--src-range", "--dst-range", "--match-set")
)
SAVED_GENERAL_OPTIONS: Final = frozenset(
    ("-i", "-m", "-j", "-g", "-p", "--ctstate", "--state", "--dst-type", "--comment",
     "--reject-with")
)  # fmt: skip
SAVED_MATCHES: Final = frozenset(("geoip", "recent", "bpf", "u32", "string"))
"""Matches that may select by address or port, whatever their options are."""


def _parse_saved_rules(lines: Iterable[str], ports: ServedPorts) -> dict[str, list[EarlyRule]]:
    """Parses the output of iptables-save, by chain."""
    rules: dict[str, list[EarlyRule]] = {}
    for args in _split_saved_rules(lines):
        _, chain, *options = args
        rules.setdefault(chain, []).append(_parse_saved_rule(options, ports))
    return rules


MAX_SAVED_RULE: Final = 4096
"""Characters; of comments, the only part with line breaks, xtables keeps 255."""


def _split_saved_rules(lines: Iterable[str]) -> Iterator[list[str]]:
    """The words of each rule. A line break in a comment is not escaped."""
    text = ""
    for line in lines:
        text = f"{text}\n{line}" if text else line
        if text.startswith("-A ") and len(text) <= MAX_SAVED_RULE:
            with contextlib.suppress(ValueError):  # an open quotation: the rule continues
                yield shlex.split(text)
                text = ""
        else:
            text = ""


def _parse_saved_rule(args: list[str], ports: ServedPorts) -> EarlyRule:
    # Each argument with its neighbours: before it may be a "!", after it is its value.
    options = list(zip(["", *args], args, [*args[1:], ""], strict=False))
    port_matches = [
        before == "!" or _has_port(value, ports)  # "not port 22" includes NodePorts
        for before, option, value in options
        if option in SAVED_PORTS
    ]
    selects = any(
        option in SAVED_ADDRESSES or (option == "-m" and value in SAVED_MATCHES)
        for _, option, value in options
    )
    targets = frozenset(value for _, option, value in options if option in ("-j", "-g"))
    return EarlyRule(
        bool(targets & REFUSING_TARGETS),
        any(port_matches) or selects,
        bool(port_matches) and not any(port_matches),
        all(_is_general_option(*option) for option in options),
        targets,
    )


def _is_general_option(before: str, option: str, value: str) -> bool:
    """_is_general() for an option of iptables; `before`: "!" if it is negated."""
    if not option.startswith("-"):
        return True  # the value of another one
    if option not in SAVED_GENERAL_OPTIONS:
        return False
    values = {
        "-p": frozenset(("tcp", "udp", "sctp", "all")),
        "-m": frozenset(("addrtype", "comment", "conntrack", "state", "tcp", "udp", "sctp")),
        "--ctstate": frozenset(("NEW",)),
        "--state": frozenset(("NEW",)),
        "--dst-type": frozenset(("LOCAL",)),
    }.get(option)
    if values is None:
        return True
    literals = frozenset(value.split(","))
    return bool(values - literals if before == "!" else values & literals)


def _has_port(text: str, ports: ServedPorts) -> bool:
    """Whether `30080`, `30000:32767` or a list of these has a port of Services."""
    for part in text.split(","):
        low, _, high = part.partition(":")
        if ports.has_any(int(low or 0), int(high or low)):
            return True
    return False
