"""Rules that refuse packets before DNAT: where hosts guard NodePorts and VIPs against kube-proxy's
clients, and where the packet path has translated a packet already.

Base chains at prerouting with a priority before dstnat, and at netdev's ingress, with the chains
that they jump to; of iptables-legacy, PREROUTING in the tables raw and mangle. A rule counts if it
refuses, and if it, or a rule that leads to it, chooses packets by a source, a destination, an
original destination (conntrack), or a port among NodePorts; what cannot be read (extensions of
iptables, named sets) counts, too. A rule for other ports, or for connection states, does not. A
base chain that drops by policy counts.
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.netfilter import forward_rules, iptables_legacy
from kbpf.kernel.netfilter.forward_rules import Json

DSTNAT: Final = -100
NODE_PORTS: Final = range(30_000, 32_768)
OURS: Final = frozenset(("kube-proxy", "kbpf", "kbpf-handover"))
"""Tables of Service proxies: kube-proxy's own rules are not a firewall of the host."""
CALICO: Final = ("cali-fh-", "mangle-cali-fh-")
"""Calico's chains of one host endpoint: in mangle they are policies with preDNAT."""
EXTENSIONS: Final = frozenset(
    ("tcp", "udp", "sctp", "multiport", "conntrack", "set", "iprange", "geoip", "recent")
)
"""Matches of iptables that may choose by ports or addresses, and that JSON does not show."""
ADDRESSES: Final = frozenset(("saddr", "daddr"))
PORTS: Final = frozenset(("dport",))
ORIGINAL: Final = frozenset(("daddr", "proto-dst", "ip daddr", "ip6 daddr"))


def chains(listed: Iterable[Json] | None = None) -> tuple[str, ...]:
    """Base chains by which packets for NodePorts or VIPs are refused. KernelError if they cannot
    be read. `listed`: see netfilter.list_chains().
    """
    found = []
    tables: dict[tuple[str, str], dict[str, list[Rule]]] = {}
    for chain in forward_rules.list_chains() if listed is None else listed:
        where = str(chain.get("family", "")), str(chain.get("table", ""))
        if where[1] in OURS or not _is_early(chain):
            continue
        if where not in tables:
            tables[where] = _rules_of(*where)
        if chain.get("policy") == "drop" or guards(tables[where], str(chain["name"])):
            found.append(" ".join((*where, str(chain["name"]))))
    return tuple(sorted(found))


class Legacy(NamedTuple):
    """Chains of iptables-legacy that count, and tables that could not be read."""

    chains: tuple[str, ...]
    unread: tuple[str, ...]


def legacy_chains() -> Legacy:
    """The same as chains() for iptables-legacy. Its tables can be read by its own programs only,
    which our image does not have.
    """
    found, unread = [], []
    for family in iptables_legacy.NAMES:
        for table in ("mangle", "raw"):
            if table not in iptables_legacy.tables(family):
                continue
            name = f"{family} {table} (iptables-legacy)"
            try:
                saved = iptables_legacy.save(family, table).splitlines()
            except KernelError:
                unread.append(name)
                continue
            drops = any(line.startswith(":PREROUTING DROP") for line in saved)
            if drops or guards(_saved_rules(saved), "PREROUTING"):
                found.append(f"{name} PREROUTING")
    return Legacy(tuple(found), tuple(unread))


def _is_early(chain: Json) -> bool:
    hook, priority = chain.get("hook"), chain.get("prio", 0)
    if chain.get("type") != "filter":
        return False
    return hook == "ingress" or (hook == "prerouting" and int(priority) < DSTNAT)


class Rule(NamedTuple):
    """What matters of a rule. `chooses`: by address, or by a port among NodePorts. `elsewhere`: it
    is for other ports only. `targets`: chains that it leads to.
    """

    refuses: bool
    chooses: bool
    elsewhere: bool
    targets: frozenset[str]


def _rules_of(family: str, table: str) -> dict[str, list[Rule]]:
    """Of a table of nf_tables, by chain."""
    asked = {"list": {"table": {"family": family, "name": table}}}
    found: dict[str, list[Rule]] = {}
    for one in forward_rules.transaction(asked):
        if "rule" in one:
            rule = _nft_rule(one["rule"].get("expr", ()))
            found.setdefault(str(one["rule"]["chain"]), []).append(rule)
    return found


def guards(rules: Mapping[str, Collection[Rule]], base: str) -> bool:
    """Whether the chain `base`, or one that it leads to, has a rule that counts. `rules`: of the
    table, by chain.
    """
    seen, waiting = {(base, False)}, [(base, False)]
    while waiting:
        name, chosen = waiting.pop()
        if name.startswith(CALICO):
            return True
        for rule in rules.get(name, ()):
            if rule.elsewhere:
                continue
            chooses = chosen or rule.chooses
            if rule.refuses and chooses:
                return True
            new = {(target, chooses) for target in rule.targets} - seen
            seen |= new
            waiting += new
    return False


# ---- nf_tables -----------------------------------------------------------------------------------


def _nft_rule(expressions: Collection[Json]) -> Rule:
    ports = [answer for one in expressions if (answer := _by_port(one)) is not None]
    return Rule(
        any(_refuses(one) for one in expressions),
        any(ports) or any(_by_address(one) for one in expressions),
        bool(ports) and not any(ports),
        frozenset(_targets(expressions)),
    )


def _refuses(expression: Json) -> bool:
    if expression.keys() & {"drop", "reject"}:
        return True
    target = expression.get("xt", {})
    if (target.get("type"), target.get("name")) == ("target", "REJECT"):
        return True
    return any("drop" in verdict for verdict in _verdicts(expression))


def _by_port(expression: Json) -> bool | None:
    """Whether it chooses ports of NodePorts; None if it does not choose by port."""
    match: Json = expression.get("match") or expression.get("vmap") or {}
    left: Json = match.get("left") or match.get("key") or {}
    if left.get("payload", {}).get("field") not in PORTS:
        return None
    known = "right" in match and match.get("op", "==") in ("==", "in")
    return _holds_node_port(match["right"]) if known else True


def _holds_node_port(value: Any) -> bool:
    if isinstance(value, int):
        return value in NODE_PORTS
    if isinstance(value, dict) and "range" in value:
        low, high = value["range"]
        return int(low) < NODE_PORTS.stop and int(high) >= NODE_PORTS.start
    if isinstance(value, dict) and "set" in value:
        return any(map(_holds_node_port, value["set"]))
    return True  # a named set, a name of a service: not known


def _by_address(expression: Json) -> bool:
    extension = expression.get("xt", {})
    if extension.get("type") == "match" and extension.get("name") in EXTENSIONS:
        return True
    match: Json = expression.get("match") or expression.get("vmap") or {}
    left: Json = match.get("left") or match.get("key") or {}
    parts = left.get("concat", [left]) if isinstance(left, dict) else []
    return any(_is_address(part) for part in parts if isinstance(part, dict))


def _is_address(part: Json) -> bool:
    if part.get("payload", {}).get("field") in ADDRESSES | PORTS:
        return True
    if "prefix" in part or "&" in part:
        inner = part.get("&", [{}])[0] if "&" in part else part["prefix"].get("addr", {})
        return isinstance(inner, dict) and _is_address(inner)
    return part.get("ct", {}).get("key") in ORIGINAL


def _verdicts(expression: Json) -> Iterator[Json]:
    data = expression.get("vmap", {}).get("data", {})
    pairs = data.get("set", ()) if isinstance(data, dict) else ()
    for pair in pairs:
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], dict):
            yield pair[1]


def _targets(expressions: Iterable[Json]) -> Iterator[str]:
    for expression in expressions:
        for verdict in (expression, *_verdicts(expression)):
            for word in ("jump", "goto"):
                if isinstance(verdict.get(word), dict):
                    yield str(verdict[word]["target"])


# ---- iptables-legacy -----------------------------------------------------------------------------

REFUSING: Final = frozenset(("DROP", "REJECT"))
SAVED_PORTS: Final = frozenset(("--dport", "--dports", "--ports", "--ctorigdstport"))
SAVED_ADDRESSES: Final = frozenset(
    ("-s", "-d", "--ctorigdst", "--ctorigsrc", "--src-range", "--dst-range", "--match-set")
)
SAVED_MATCHES: Final = frozenset(("geoip", "recent", "bpf", "u32", "string"))
"""Matches that may choose by address or port, whatever their options are."""


def _saved_rules(lines: Iterable[str]) -> dict[str, list[Rule]]:
    """Of what iptables-save printed, by chain."""
    found: dict[str, list[Rule]] = {}
    for line in lines:
        if line.startswith("-A "):
            _, chain, *words = shlex.split(line)
            found.setdefault(chain, []).append(_saved_rule(words))
    return found


def _saved_rule(words: list[str]) -> Rule:
    options = list(zip(["", *words], words, [*words[1:], ""], strict=False))
    ports = [
        before == "!" or _has_node_port(value)
        for before, option, value in options
        if option in SAVED_PORTS
    ]
    chooses = any(
        option in SAVED_ADDRESSES or (option == "-m" and value in SAVED_MATCHES)
        for _, option, value in options
    )
    targets = frozenset(value for _, option, value in options if option in ("-j", "-g"))
    return Rule(bool(targets & REFUSING), any(ports) or chooses, bool(ports) and not any(ports),
                targets)  # fmt: skip


def _has_node_port(text: str) -> bool:
    """Of `30080`, `30000:32767` and lists of both."""
    for part in text.split(","):
        low, _, high = part.partition(":")
        if int(low or 0) < NODE_PORTS.stop and int(high or low) >= NODE_PORTS.start:
            return True
    return False
