# SPDX-License-Identifier: Apache-2.0
"""Removes what a stopped kube-proxy leaves on a node.

kube-proxy does not remove its rules when it stops, in any mode. This module removes them and
nothing else: chains and sets that have one of kube-proxy's names, and its own jumps to those from
the kernel's chains. Chains to which rules of others jump stay, with what they need: a CNI may have
been told to use KUBE-MARK-MASQ. The chain KUBE-FIREWALL stays, because kubelet uses it too: it
protects the node's loopback addresses.

The rules in nf_tables (iptables-nft, and kube-proxy's own table in mode nftables) are removed
through libnftables in one transaction. Tables of iptables-legacy, if any exist, are changed with
its own programs. Connections that kube-proxy's rules or its IPVS translate continue, see
takeover/conntrack_keepalive.py.

All functions act on the network namespace of the calling thread.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.netfilter import conntrack, forward_rules, iptables_legacy, named_objects, nft
from kbpf.kernel.netfilter.forward_rules import Json
from kbpf.model.address import Addr
from kbpf.model.config import IPVS_DEVICE
from kbpf.model.desired import VirtualService
from kbpf.takeover import conntrack_keepalive

NFT_TABLE: Final = "kube-proxy"
KUBE_PROXY_DEVICE: Final = conntrack_keepalive.KUBE_PROXY_DEVICE
FIXED_CHAINS: Final = {
    "nat": frozenset(
        (
            "KUBE-SERVICES",
            "KUBE-NODEPORTS",
            "KUBE-POSTROUTING",
            "KUBE-MARK-MASQ",
            "KUBE-NODE-PORT",
            "KUBE-LOAD-BALANCER",
            "KUBE-PROXY-CANARY",
        )
    ),
    "filter": frozenset(
        (
            "KUBE-SERVICES",
            "KUBE-EXTERNAL-SERVICES",
            "KUBE-NODEPORTS",
            "KUBE-FORWARD",
            "KUBE-PROXY-FIREWALL",
            "KUBE-NODE-PORT",
            "KUBE-SOURCE-RANGES-FIREWALL",
            "KUBE-IPVS-FILTER",
            "KUBE-IPVS-OUT-FILTER",
            "KUBE-PROXY-CANARY",
        )
    ),
    "mangle": frozenset(("KUBE-PROXY-CANARY",)),
}
"""iptables table → kube-proxy's chains in it, in modes iptables and ipvs."""
SERVICE_CHAIN: Final = re.compile(r"KUBE-(SVC|SVL|EXT|FW|SEP|XLB)-[A-Z2-7]{16}")
"""Chains in `nat` that belong to one Service port or endpoint; XLB up to Kubernetes 1.24."""
IP_SET_NAME: Final = re.compile(
    r"KUBE-(6-)?(LOOP-BACK|CLUSTER-IP|IPVS-IPS|HEALTH-CHECK-NODE-PORT|EXTERNAL-IP(-LOCAL)?|"
    r"LOAD-BALANCER(-LOCAL|-FW|-SOURCE-IP|-SOURCE-CIDR?)?|NODE-PORT(-LOCAL)?-(TCP|UDP|SCTP-HASH?))"
)
"""Two of the IPv6 names are truncated to the 31 characters that an ipset name may have."""
NFACCT_COUNTERS: Final = ("ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts")
FAMILIES: Final = ("ip", "ip6")
KERNEL_CHAINS: Final = frozenset(("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"))
MARK_CHAIN: Final = "KUBE-MARK-MASQ"
MASQUERADE_CHAIN: Final = "KUBE-POSTROUTING"
"""It masquerades the packets that went through MARK_CHAIN."""
OWN_COMMENT: Final = re.compile("kube(rnetes|-proxy) ")
"""Comments of kube-proxy's jumps."""
LEGACY_RULE: Final = re.compile(
    r'-A (\S+)(?:((?:(?: -m conntrack --ctstate NEW)? -m comment --comment "kube(?:rnetes|-proxy) [^"]*")? -j \S+)|.*)'
)
"""A line of iptables-save; the second group matches jumps like kube-proxy's."""


Note = Callable[[str], object]
"""Receives a line for each rule that keeps a chain."""


def is_kube_proxy_chain(table: str, name: str) -> bool:
    """Whether kube-proxy gives this name to a chain in that iptables table."""
    return name in FIXED_CHAINS.get(table, ()) or (table == "nat" and bool(SERVICE_CHAIN.fullmatch(name)))


class ListedRule(NamedTuple):
    """A rule of an iptables table. `name`: its handle in nf_tables; in legacy tables the rule itself,
    as iptables-save shows it. `target`: the chain that it jumps to, or "". `is_plain`: it has only
    matches and comments that kube-proxy gives to its jumps.
    """

    chain: str
    name: str
    target: str
    is_plain: bool
    matches_set: bool


class Removal(NamedTuple):
    """What is removed from an iptables table. `rules`: those in chains that stay. `foreign_jumps`:
    rules that are not kube-proxy's but jump to its chains, which stay for them.
    """

    chains: Sequence[str]
    rules: Sequence[ListedRule]
    foreign_jumps: Sequence[ListedRule]

    @property
    def opens_forward(self) -> bool:
        """Whether kube-proxy accepts forwarded packets by it where FORWARD drops by default."""
        return "KUBE-FORWARD" in (*self.chains, *(rule.target for rule in self.rules))

    def __str__(self) -> str:
        jump_count = sum(rule.chain in KERNEL_CHAINS for rule in self.rules)
        return f"{len(self.chains)} chains, {jump_count} jumps to them"


def plan_removal(table: str, chains: Collection[str], list_rules: Callable[[str], Iterable[ListedRule]]) -> Removal:
    """Decides what is removed from a table with these chains. `list_rules` is asked only for the
    rules of chains that stay: kube-proxy's may have 100,000.
    """
    kube_proxy_chains = [chain for chain in chains if is_kube_proxy_chain(table, chain)]
    if not kube_proxy_chains:
        return Removal((), (), ())
    others = [chain for chain in chains if not is_kube_proxy_chain(table, chain)]
    jumps = [rule for chain in others for rule in list_rules(chain) if is_kube_proxy_chain(table, rule.target)]
    foreign_jumps = [
        rule for rule in jumps if not (rule.is_plain and rule.chain in KERNEL_CHAINS and rule.target != MARK_CHAIN)
    ]
    removed, needed = [], set[str]()
    queue = [rule.target for rule in foreign_jumps]
    while queue:
        chain = queue.pop()
        if chain in needed or not is_kube_proxy_chain(table, chain):
            continue
        needed.add(chain)
        if chain == MARK_CHAIN:
            queue.append(MASQUERADE_CHAIN)
        for rule in list_rules(chain):
            # These go with the sets that they match.
            if rule.matches_set:
                removed.append(rule)
            else:
                queue.append(rule.target)
    removed += [
        rule
        for rule in jumps
        if rule not in foreign_jumps and not (rule.target == MASQUERADE_CHAIN and MARK_CHAIN in needed)
    ]
    return Removal([chain for chain in kube_proxy_chains if chain not in needed], removed, foreign_jumps)


# ---- nf_tables -----------------------------------------------------------------------------------


def nft_removal_commands(family: str, table: str, removal: Removal) -> Iterator[Json]:
    """Yields the commands that remove this from a table.

    The order is jumps, rules in the chains, chains, so that nothing is deleted while it is
    referenced.
    """
    location = {"family": family, "table": table}
    for rule in removal.rules:
        yield {"delete": {"rule": {**location, "chain": rule.chain, "handle": int(rule.name)}}}
    for verb in ("flush", "delete"):
        for chain in removal.chains:
            yield {verb: {"chain": {**location, "name": chain}}}


def list_nft_rules(family: str, table: str, chain: str) -> Iterator[ListedRule]:
    """Lists the rules of a chain of nf_tables."""
    for rule in nft.list_rules(family, table, chain):
        names = {part.name for part in rule.expressions if not part.is_neutral}
        comment = rule.comment or next((part.comment for part in rule.expressions if part.comment), "")
        is_own = bool(OWN_COMMENT.match(comment))
        is_plain = names <= ({"immediate", "match conntrack"} if is_own else {"immediate"}) and (is_own or not comment)
        target = next((part.jumps_to for part in rule.expressions if part.jumps_to), "")
        yield ListedRule(chain, str(rule.handle), target, is_plain, "match set" in names)


def _remove_nft(dry_run: bool = False, note: Note = str) -> Iterator[str]:
    if not forward_rules.probe_nf_tables().works:
        return
    chains: dict[tuple[str, str], list[str]] = {}
    for chain in nft.list_chains():
        if chain["family"] in FAMILIES:
            chains.setdefault((chain["family"], chain["table"]), []).append(chain["name"])
    removals = {
        location: plan_removal(location[1], names, functools.partial(list_nft_rules, *location))
        for location, names in sorted(chains.items())
    }
    tables = [family for family in FAMILIES if _has_table(family)]
    commands = [
        *(command for location, removal in removals.items() for command in nft_removal_commands(*location, removal)),
        *({"delete": {"table": {"family": family, "name": NFT_TABLE}}} for family in tables),
    ]
    for (family, table), removal in removals.items():
        for rule in removal.foreign_jumps:
            place = f"{family} {table} {rule.chain}"
            note(f"{rule.target} stays: a rule in {place} jumps to it: {forward_rules.show_rule(place, rule.name)}")
    if not commands:
        return
    _commit_nft_removal(removals, tables, commands, dry_run)
    for (family, table), removal in removals.items():
        if removal.chains or removal.rules:
            yield f"{family} {table}: {removal}"
    yield from (f"table {family} {NFT_TABLE}" for family in tables)


def _commit_nft_removal(
    removals: Mapping[tuple[str, str], Removal], tables: Sequence[str], commands: Sequence[Json], dry_run: bool
) -> None:
    """Runs `commands`, which remove these chains and rules, and kube-proxy's own table in the
    families `tables`, so that connections which they translate continue. With `dry_run` the kernel
    only checks the commands.
    """
    touched = {family for (family, _), removal in removals.items() if removal.chains or removal.rules} | set(tables)
    translated_families = [
        family for family in FAMILIES if family in touched and conntrack.has_dnat_connections(family)
    ]
    # In the same transaction as the removal: conntrack's hooks must not be unregistered in between.
    keepalive_commands = [
        command for family in translated_families for command in conntrack_keepalive.table_commands(family)
    ]
    if not dry_run:
        _accept_established(
            {*translated_families, *conntrack_keepalive.list_families()}
            & {family for (family, _), removal in removals.items() if removal.opens_forward}
        )
    forward_rules.run_transaction(
        *keepalive_commands, *commands, hint="remove the rule that jumps to a KUBE-* chain", dry_run=dry_run
    )


def _accept_established(families: Collection[str]) -> None:
    """If kube-proxy's rules accept established packets in FORWARD, adds a rule that does the same
    before they are removed, so that no packet is dropped in between.
    """
    if families:
        commands = (
            command for family in sorted(families) for command in conntrack_keepalive.table_commands(family, True)
        )
        forward_rules.run_transaction(*commands)
        conntrack_keepalive.reconcile_forward_rules(forward_rules.list_forward_chains())


def _has_table(family: str) -> bool:
    return nft.has_table(family, NFT_TABLE)


# ---- iptables-legacy -----------------------------------------------------------------------------


def plan_legacy_removal(table: str, save_output: str) -> Removal:
    """plan_removal() for the output of iptables-save."""
    lines = save_output.split("\n")
    chains = [line.split()[0][1:] for line in lines if line.startswith(":")]
    rules: dict[str, list[ListedRule]] = {}
    for line in lines:
        if match := LEGACY_RULE.fullmatch(line):
            bare = iptables_legacy.COMMENT.sub("", line)
            target = re.search(" -[jg] (\\S+)", bare)
            rules.setdefault(match[1], []).append(
                ListedRule(match[1], line, target[1] if target else "", bool(match[2]), " --match-set " in bare)
            )
    return plan_removal(table, chains, lambda chain: rules.get(chain, ()))


def legacy_restore_input(table: str, removal: Removal) -> str:
    """Returns the input for iptables-restore that removes this from a table; "" if it is nothing."""
    if not (removal.chains or removal.rules):
        return ""
    script = [
        f"*{table}",
        *(f":{name} - [0:0]" for name in removal.chains),
        # With --noflush, ":NAME" flushes only this chain, so that -X can delete it.
        *(rule.name.replace("-A", "-D", 1) for rule in removal.rules),
        *(f"-X {name}" for name in removal.chains),
        "COMMIT\n",
    ]
    return "\n".join(script)


def _remove_legacy(dry_run: bool, note: Note) -> Iterator[str]:
    for family in FAMILIES:
        for table in (name for name in iptables_legacy.list_tables(family) if name in FIXED_CHAINS):
            removal = plan_legacy_removal(table, iptables_legacy.save(family, table))
            for rule in removal.foreign_jumps:
                note(f"{rule.target} stays: a rule in {family} {table}, legacy, jumps to it: {rule.name}")
            if script := legacy_restore_input(table, removal):
                if not dry_run:
                    _commit_legacy_removal(family, script)
                yield f"{family} {table}, legacy: {removal}"


def _commit_legacy_removal(family: str, script: str) -> None:
    if conntrack.has_dnat_connections(family) and forward_rules.probe_nf_tables().works:
        forward_rules.run_transaction(*conntrack_keepalive.table_commands(family))
    iptables_legacy.restore(family, script)


# ---- IPVS ----------------------------------------------------------------------------------------


def is_kube_proxy_service(
    service: VirtualService, addresses: frozenset[Addr], ports: frozenset[tuple[int, int]]
) -> bool:
    """Whether kube-proxy created this virtual service: its address is in `addresses` (those on
    kube-ipvs0), or its (protocol, port) is a NodePort in `ports`. Virtual services of other
    programs have neither.
    """
    return not service.fwmark and (service.address in addresses or (service.protocol, service.port) in ports)


@contextlib.contextmanager
def _ipvs_session(
    own_services: Collection[VirtualService] = (),
) -> Iterator[tuple[ipvs.IpvsClient, list[VirtualService]] | None]:
    """An IPVS client and kube-proxy's virtual services, identified by the addresses on its device;
    None without that device or without IPVS.

    Addresses on the device of our mode ipvs are excluded: kbpf has taken over the virtual services
    at them. So are NodePorts if our device exists, and in any case `own_services`, which are in
    kbpf's own table.
    """
    try:
        client = ipvs.IpvsClient() if dummy.get_ifindex_or_zero(KUBE_PROXY_DEVICE) else None
    except KernelError:
        client = None
    if client is None:
        yield None
        return
    with contextlib.closing(client):
        addresses = dummy.addresses_of(KUBE_PROXY_DEVICE) - dummy.addresses_of(IPVS_DEVICE)
        is_ours_there = bool(dummy.get_ifindex_or_zero(IPVS_DEVICE))
        ports = frozenset() if is_ours_there else conntrack_keepalive.list_node_ports()
        services = [
            service
            for service, _ in client.list_services()
            if service not in own_services and is_kube_proxy_service(service, addresses, ports)
        ]
        yield client, services


def count_connections() -> int:
    """How many connections kube-proxy's IPVS still has, including virtual services that were kept
    after its other state was removed.
    """
    with _ipvs_session() as session:
        count = sum(map(session[0].count_connections, session[1])) if session is not None else 0
    return count + (conntrack_keepalive.count_connections() if forward_rules.probe_nf_tables().works else 0)


def _retain_busy_services(own_services: Collection[VirtualService], dry_run: bool) -> list[VirtualService]:
    """Quiesces (unless `dry_run`) kube-proxy's virtual services that still have connections, and
    returns them; they stay until these connections end. Returns none without nf_tables, because the
    record of which ones were kept is a set in nf_tables.
    """
    with _ipvs_session(own_services) as session:
        if session is None or not forward_rules.probe_nf_tables().works:
            return []
        client, services = session
        busy = [service for service in services if client.count_connections(service)]
        if busy and not dry_run:
            # First, because an agent recognizes kept virtual services by weight 0.
            conntrack_keepalive.quiesce(client, busy)
            conntrack_keepalive.keep_services(
                busy, dummy.addresses_of(KUBE_PROXY_DEVICE) & {service.address for service in busy}
            )
        return busy


def _remove_ipvs(
    retained: Collection[VirtualService],
    own_services: Collection[VirtualService] = (),
    dry_run: bool = False,
) -> Iterator[str]:
    """Deletes kube-proxy's virtual services except those in `retained`, then its device. The
    device goes last because it is how we recognize that kube-proxy ran in mode ipvs.
    """
    with _ipvs_session(own_services) as session:
        if session is not None:
            client, services = session
            deleted = [service for service in services if service not in retained]
            command = ipvs.IpvsCommand.IPVS_CMD_DEL_SERVICE
            if not dry_run:
                client.apply([ipvs.IpvsRequest(command, service) for service in deleted])
            if deleted:
                yield f"{len(deleted)} virtual services of IPVS"
    if dummy.get_ifindex_or_zero(KUBE_PROXY_DEVICE) and (dry_run or dummy.remove(KUBE_PROXY_DEVICE)):
        yield f"device {KUBE_PROXY_DEVICE}"


def _remove_sets(dry_run: bool) -> Iterator[str]:
    names = tuple(name for name in named_objects.list_sets() if IP_SET_NAME.fullmatch(name))
    # Sets can only be destroyed once no rule refers to them.
    destroyed = names if dry_run else named_objects.destroy_sets(names)
    if destroyed:
        yield f"{len(destroyed)} ip sets"


# ---- all of it -----------------------------------------------------------------------------------


def remove(own_services: Collection[VirtualService] = (), dry_run: bool = False, note: Note = str) -> Iterator[str]:
    """Removes everything that kube-proxy left, and yields a line for each thing that was removed;
    with `dry_run` for each thing that would be. That leaves out the table of
    conntrack_keepalive.py, which is ours.

    `own_services`: virtual services that kbpf's own table lists as its own.
    """
    retained = _retain_busy_services(own_services, dry_run)
    yield from _remove_nft(dry_run, note)
    yield from _remove_legacy(dry_run, note)
    yield from _remove_ipvs(retained, own_services, dry_run)
    yield from _remove_sets(dry_run)
    remove_counters = named_objects.find_counters if dry_run else named_objects.delete_counters
    yield from (f"counter {name}" for name in remove_counters(NFACCT_COUNTERS))
    if not dry_run and forward_rules.probe_nf_tables().works:
        yield from (f"table {family} {conntrack_keepalive.TABLE}" for family in conntrack_keepalive.remove_unneeded())


def has_rules() -> bool:
    """Whether rules of a kube-proxy translate connections in this network namespace."""
    if forward_rules.probe_nf_tables().works:
        if any(map(_has_table, FAMILIES)):
            return True
        if any(
            chain["name"] == "KUBE-SERVICES"
            and chain["family"] in FAMILIES
            and is_kube_proxy_chain(chain["table"], chain["name"])
            for chain in nft.list_chains()
        ):
            return True
    return any(
        ":KUBE-SERVICES " in iptables_legacy.save(family, "nat")
        for family in FAMILIES
        if "nat" in iptables_legacy.list_tables(family)
    )
