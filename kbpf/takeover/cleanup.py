"""What a kube-proxy leaves on a node when it ends, and how it goes.

kube-proxy keeps its rules when it stops, in whatever mode it ran. Here they are taken away, and
nothing else is: chains and sets by the names that kube-proxy gives them, rules of others' chains
only where they jump to those. What it shares with kubelet stays: the chain KUBE-FIREWALL, which
guards the loopback addresses of the node.

nf_tables (iptables' own tables there, and kube-proxy's of mode nftables) is spoken to by
libnftables, all in one transaction; the tables of iptables-legacy by its own programs, if there are
any such tables. Connections that kube-proxy's rules and its IPVS have translated go on, see
takeover/conntrack_keepalive.py.

All of it is about the network namespace of the calling thread.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.netfilter import conntrack, forward_rules, ipset, iptables_legacy, nfacct, nft
from kbpf.kernel.netfilter.forward_rules import Json
from kbpf.model.address import Addr
from kbpf.takeover import conntrack_keepalive

NFT_TABLE: Final = "kube-proxy"
DEVICE: Final = conntrack_keepalive.KUBE_PROXYS
CHAINS: Final = {
    "nat": frozenset(
        ("KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ",
         "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-PROXY-CANARY")
    ),
    "filter": frozenset(
        ("KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-FORWARD",
         "KUBE-PROXY-FIREWALL", "KUBE-NODE-PORT", "KUBE-SOURCE-RANGES-FIREWALL",
         "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER", "KUBE-PROXY-CANARY")
    ),
    "mangle": frozenset(("KUBE-PROXY-CANARY",)),
}  # fmt: skip
"""Table of iptables → chains of kube-proxy in it, in modes iptables and ipvs."""
OF_SERVICES: Final = re.compile(r"KUBE-(SVC|SVL|EXT|FW|SEP|XLB)-[A-Z2-7]{16}")
"""Chains in `nat` for one Service port or endpoint; XLB until Kubernetes 1.24."""
SETS: Final = re.compile(
    r"KUBE-(6-)?(LOOP-BACK|CLUSTER-IP|IPVS-IPS|HEALTH-CHECK-NODE-PORT|EXTERNAL-IP(-LOCAL)?|"
    r"LOAD-BALANCER(-LOCAL|-FW|-SOURCE-IP|-SOURCE-CIDR?)?|NODE-PORT(-LOCAL)?-(TCP|UDP|SCTP-HASH?))"
)
"""Two of those for IPv6 are cut to the 31 characters that a name may have."""
COUNTERS: Final = ("ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts")
FAMILIES: Final = ("ip", "ip6")


def is_chain(table: str, name: str) -> bool:
    """Whether kube-proxy gives this name to a chain of that table of iptables."""
    return name in CHAINS.get(table, ()) or (table == "nat" and bool(OF_SERVICES.fullmatch(name)))


class Chain(NamedTuple):
    """A chain of nf_tables. `base`: packets come to it by a hook."""

    family: str
    table: str
    name: str
    base: bool = False

    @property
    def is_kube_proxys(self) -> bool:
        """Whether kube-proxy has made it."""
        return self.family in FAMILIES and is_chain(self.table, self.name)

    @property
    def accepts(self) -> bool:
        """Whether kube-proxy has it for what is to pass a closed FORWARD."""
        return (self.table, self.name) == ("filter", "KUBE-FORWARD")


class Jump(NamedTuple):
    """A rule of a chain of others, whose target is a chain of kube-proxy."""

    chain: Chain
    handle: int


# ---- nf_tables -----------------------------------------------------------------------------------


def nft_commands(chains: Sequence[Chain], jumps: Iterable[Jump]) -> Iterator[Json]:
    """What removes kube-proxy's own of these chains, and these jumps to them, in this order: jumps,
    what is in the chains, chains. Nothing then is in the way of anything.
    """
    ours = [chain for chain in chains if chain.is_kube_proxys]
    for chain, handle in jumps:
        where = {"family": chain.family, "table": chain.table, "chain": chain.name}
        yield {"delete": {"rule": {**where, "handle": handle}}}
    for what in ("flush", "delete"):
        for family, table, name, _ in ours:
            yield {what: {"chain": {"family": family, "table": table, "name": name}}}


def jumps_in(chain: Chain, listed: Iterable[Json]) -> Iterator[Jump]:
    """The rules among these that jump to a chain of kube-proxy."""
    for rule in (one["rule"] for one in listed if "rule" in one):
        targets = (
            expression[verb]["target"]
            for expression in rule.get("expr", ())
            for verb in ("jump", "goto")
            if verb in expression
        )
        if any(is_chain(chain.table, target) for target in targets):
            yield Jump(chain, int(rule["handle"]))


def _remove_nft() -> Iterator[str]:
    if not forward_rules.available().works:
        return
    chains = list(_chains())
    ours = [chain for chain in chains if chain.is_kube_proxys]
    used = {(chain.family, chain.table) for chain in ours}
    jumps = [jump for chain in chains if chain.base and (chain.family, chain.table) in used
             for jump in jumps_in(chain, _rules(chain))]  # fmt: skip
    tables = [family for family in FAMILIES if _has_table(family)]
    commands = [
        *nft_commands(chains, jumps),
        *({"delete": {"table": {"family": family, "name": NFT_TABLE}}} for family in tables),
    ]
    if not commands:
        return
    touched = {family for family, _ in used} | set(tables)
    kept = [family for family in FAMILIES if family in touched and conntrack.translated(family)]
    first = [command for family in kept for command in conntrack_keepalive.begin(family)]
    _let_established_pass(
        {*kept, *conntrack_keepalive.there()} & {one.family for one in ours if one.accepts}
    )
    forward_rules.transaction(
        *first, *commands, hint="does a chain of others jump to KUBE-* chains?"
    )
    for family, table in sorted(used):
        here = (family, table)
        count = sum((chain.family, chain.table) == here for chain in ours)
        led = sum((jump.chain.family, jump.chain.table) == here for jump in jumps)
        yield f"{family} {table}: {count} chains, {led} jumps to them"
    yield from (f"table {family} {NFT_TABLE}" for family in tables)


def _let_established_pass(families: Collection[str]) -> None:
    """Where kube-proxy's rules let what is established pass FORWARD, a rule of ours does before
    they go: not a packet is lost between.
    """
    if families:
        begun = (
            command
            for each in sorted(families)
            for command in conntrack_keepalive.begin(each, True)
        )
        forward_rules.transaction(*begun)
        conntrack_keepalive.let_pass(forward_rules.forward_chains())


def _chains() -> Iterator[Chain]:
    for one in forward_rules.transaction({"list": {"chains": None}}):
        if chain := one.get("chain"):
            yield Chain(chain["family"], chain["table"], chain["name"], "hook" in chain)


def _rules(chain: Chain) -> list[Json]:
    where = {"family": chain.family, "table": chain.table, "name": chain.name}
    return forward_rules.transaction({"list": {"chain": where}})


def _has_table(family: str) -> bool:
    return nft.has_table(family, NFT_TABLE)


# ---- iptables-legacy -----------------------------------------------------------------------------


def legacy_removal(table: str, saved: str) -> tuple[str, int, int]:
    """What iptables-restore has to be told to remove kube-proxy's chains from a table as
    iptables-save shows it, how many chains and how many jumps to them; "" if there is nothing.
    """
    lines = saved.splitlines()
    found = [words[0][1:] for words in map(str.split, lines) if words and words[0][0] == ":"]
    chains = [name for name in found if is_chain(table, name)]
    jumps = [line for line in lines if _jumps_in(line, table)]
    if not chains:
        return "", 0, 0
    told = [
        f"*{table}",
        *(f":{name} - [0:0]" for name in chains),
        *(line.replace("-A", "-D", 1) for line in jumps),
        *(f"-X {name}" for name in chains),
        "COMMIT\n",
    ]
    return "\n".join(told), len(chains), len(jumps)


def _jumps_in(line: str, table: str) -> bool:
    """Whether this is a rule of a chain of others that jumps to one of kube-proxy."""
    words = line.split()
    if words[:1] != ["-A"] or is_chain(table, words[1]):
        return False
    at = next((i for i, word in enumerate(words) if word in ("-j", "-g")), len(words))
    return is_chain(table, "".join(words[at + 1 : at + 2]))


def _remove_legacy() -> Iterator[str]:
    for family in FAMILIES:
        for table in (name for name in iptables_legacy.tables(family) if name in CHAINS):
            told, chains, jumps = legacy_removal(table, iptables_legacy.save(family, table))
            if told:
                if conntrack.translated(family) and forward_rules.available().works:
                    forward_rules.transaction(*conntrack_keepalive.begin(family))
                iptables_legacy.restore(family, told)
                yield f"{family} {table}, legacy: {chains} chains, {jumps} jumps to them"


# ---- IPVS ----------------------------------------------------------------------------------------


def is_virtual_service(
    service: ipvs.Service, addresses: frozenset[Addr], ports: frozenset[tuple[int, int]]
) -> bool:
    """Whether kube-proxy has made it: at one of the addresses that it keeps on kube-ipvs0, or for a
    NodePort, `ports` being (protocol, port). Others' have neither.
    """
    return not service.mark and (
        service.address in addresses or (service.protocol, service.port) in ports
    )


def virtual_services(
    face: ipvs.Ipvs, own: str, noted: Collection[ipvs.Service] = ()
) -> list[ipvs.Service]:
    """Those of kube-proxy, as its device tells. Where kbpf itself keeps addresses on its device
    `own`, virtual services at them are its own by now, and so are those of NodePorts, and what is
    `noted` in its table in any case.
    """
    addresses = dummy.addresses_of(DEVICE) - dummy.addresses_of(own)
    ports = frozenset() if dummy.index_or_zero(own) else conntrack_keepalive.node_ports()
    there = (service for service, _ in face.services())
    return [one for one in there if one not in noted and is_virtual_service(one, addresses, ports)]


@contextlib.contextmanager
def _serving(
    own: str, noted: Collection[ipvs.Service] = ()
) -> Iterator[tuple[ipvs.Ipvs, list[ipvs.Service]] | None]:
    """A conversation with IPVS, and kube-proxy's virtual services; None without its device, or
    without IPVS.
    """
    try:
        face = ipvs.Ipvs() if dummy.index_or_zero(DEVICE) else None
    except KernelError:
        face = None
    if face is None:
        yield None
        return
    with contextlib.closing(face):
        yield face, virtual_services(face, own, noted)


def connections(own: str = "") -> int:
    """How many connections kube-proxy's IPVS has, also after its leftovers were removed; `own`: the
    device of kbpf's mode ipvs.
    """
    with _serving(own) as found:
        here = sum(map(found[0].connections, found[1])) if found is not None else 0
    return here + (conntrack_keepalive.connections() if forward_rules.available().works else 0)


def _keep_busy(own: str, noted: Collection[ipvs.Service]) -> list[ipvs.Service]:
    """Those of kube-proxy's virtual services that still have connections, which stay for these: not
    without nf_tables, where nobody could tell afterwards whose they are.
    """
    with _serving(own, noted) as found:
        if found is None or not forward_rules.available().works:
            return []
        face, services = found
        busy = [service for service in services if face.connections(service)]
        if busy:
            conntrack_keepalive.lead_nobody(
                face, busy
            )  # first, by which an agent sees that they are kept
            conntrack_keepalive.keep(
                busy, dummy.addresses_of(DEVICE) & {one.address for one in busy}
            )
        return busy


def _remove_ipvs(
    own: str, kept: Collection[ipvs.Service], noted: Collection[ipvs.Service] = ()
) -> Iterator[str]:
    """All virtual services but those that are `kept`. The device tells that kube-proxy was here in
    this mode; it goes last.
    """
    with _serving(own, noted) as found:
        if found is not None:
            face, services = found
            gone = [one for one in services if one not in kept]
            face.change([ipvs.Change(ipvs.Command.DEL_SERVICE, one) for one in gone])
            if gone:
                yield f"{len(gone)} virtual services of IPVS"
    if dummy.remove(DEVICE):
        yield f"device {DEVICE}"


def _remove_sets() -> Iterator[str]:
    """After the rules that ask them."""
    gone = ipset.destroy(name for name in ipset.names() if SETS.fullmatch(name))
    if gone:
        yield f"{len(gone)} ip sets"


# ---- all of it -----------------------------------------------------------------------------------


def remove(own: str = "", noted: Collection[ipvs.Service] = ()) -> Iterator[str]:
    """Removes it all; what was there, in words. Nothing there is nothing said. `own`: the device of
    kbpf's mode ipvs; `noted`: the virtual services that its table says are its own.
    """
    kept = _keep_busy(own, noted)
    yield from _remove_nft()
    yield from _remove_legacy()
    yield from _remove_ipvs(own, kept, noted)
    yield from _remove_sets()
    yield from (f"counter {name}" for name in nfacct.delete(COUNTERS))
    if forward_rules.available().works:
        yield from (
            f"table {family} {conntrack_keepalive.TABLE}" for family in conntrack_keepalive.end()
        )


def has_rules() -> bool:
    """Whether rules of a kube-proxy lead connections here."""
    if forward_rules.available().works:
        if any(map(_has_table, FAMILIES)):
            return True
        if any(chain.is_kube_proxys and chain.name == "KUBE-SERVICES" for chain in _chains()):
            return True
    return any(
        ":KUBE-SERVICES " in iptables_legacy.save(family, "nat")
        for family in FAMILIES
        if "nat" in iptables_legacy.tables(family)
    )
