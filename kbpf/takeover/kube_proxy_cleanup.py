# SPDX-License-Identifier: Apache-2.0
"""Removes what a stopped kube-proxy leaves on a node.

kube-proxy does not remove its rules when it stops, in any mode. This module removes them and
nothing else: chains and sets that have one of kube-proxy's names, and rules in other chains only
if they jump to those. The chain KUBE-FIREWALL stays, because kubelet uses it too: it protects the
node's loopback addresses.

The rules in nf_tables (iptables-nft, and kube-proxy's own table in mode nftables) are removed
through libnftables in one transaction. Tables of iptables-legacy, if any exist, are changed with
its own programs. Connections that kube-proxy's rules or its IPVS translate continue, see
takeover/conntrack_keepalive.py.

All functions act on the network namespace of the calling thread.
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
from kbpf.model.config import IPVS_DEVICE
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


def is_kube_proxy_chain(table: str, name: str) -> bool:
    """Whether kube-proxy gives this name to a chain in that iptables table."""
    return name in FIXED_CHAINS.get(table, ()) or (table == "nat" and bool(SERVICE_CHAIN.fullmatch(name)))


class ListedChain(NamedTuple):
    """A chain of nf_tables. `base`: it is attached to a hook."""

    family: str
    table: str
    name: str
    base: bool = False

    @property
    def is_from_kube_proxy(self) -> bool:
        """Whether kube-proxy created it."""
        return self.family in FAMILIES and is_kube_proxy_chain(self.table, self.name)

    @property
    def accepts_forwarded(self) -> bool:
        """Whether kube-proxy accepts forwarded packets in it where FORWARD drops by default."""
        return (self.table, self.name) == ("filter", "KUBE-FORWARD")


class Jump(NamedTuple):
    """A rule in a chain that is not kube-proxy's, with one of kube-proxy's chains as its target."""

    chain: ListedChain
    handle: int


# ---- nf_tables -----------------------------------------------------------------------------------


def nft_removal_commands(chains: Sequence[ListedChain], jumps: Iterable[Jump]) -> Iterator[Json]:
    """Yields the commands that remove kube-proxy's chains among `chains`, and `jumps` to them.

    The order is jumps, rules in the chains, chains, so that nothing is deleted while it is
    referenced.
    """
    kube_proxy_chains = [chain for chain in chains if chain.is_from_kube_proxy]
    for chain, handle in jumps:
        location = {"family": chain.family, "table": chain.table, "chain": chain.name}
        yield {"delete": {"rule": {**location, "handle": handle}}}
    for verb in ("flush", "delete"):
        for family, table, name, _ in kube_proxy_chains:
            yield {verb: {"chain": {"family": family, "table": table, "name": name}}}


def find_jumps(chain: ListedChain, listing: Iterable[Json]) -> Iterator[Jump]:
    """Yields the rules in this listing of a chain that jump to one of kube-proxy's chains."""
    for rule in (entry["rule"] for entry in listing if "rule" in entry):
        targets = (
            expression[verb]["target"]
            for expression in rule.get("expr", ())
            for verb in ("jump", "goto")
            if verb in expression
        )
        if any(is_kube_proxy_chain(chain.table, target) for target in targets):
            yield Jump(chain, int(rule["handle"]))


def _remove_nft(dry_run: bool = False) -> Iterator[str]:
    if not forward_rules.probe_nf_tables().works:
        return
    chains = list(_list_chains())
    kube_proxy_chains = [chain for chain in chains if chain.is_from_kube_proxy]
    used_tables = {(chain.family, chain.table) for chain in kube_proxy_chains}
    # kube-proxy adds jumps to base chains only (INPUT, FORWARD, ...).
    jumps = [
        jump
        for chain in chains
        if chain.base and (chain.family, chain.table) in used_tables
        for jump in find_jumps(chain, _list_rules(chain))
    ]
    tables = [family for family in FAMILIES if _has_table(family)]
    commands = [
        *nft_removal_commands(chains, jumps),
        *({"delete": {"table": {"family": family, "name": NFT_TABLE}}} for family in tables),
    ]
    if not commands:
        return
    if not dry_run:
        _commit_nft_removal(kube_proxy_chains, tables, commands)
    for family, table in sorted(used_tables):
        location = (family, table)
        chain_count = sum((chain.family, chain.table) == location for chain in kube_proxy_chains)
        jump_count = sum((jump.chain.family, jump.chain.table) == location for jump in jumps)
        yield f"{family} {table}: {chain_count} chains, {jump_count} jumps to them"
    yield from (f"table {family} {NFT_TABLE}" for family in tables)


def _commit_nft_removal(
    kube_proxy_chains: Sequence[ListedChain], tables: Sequence[str], commands: Sequence[Json]
) -> None:
    """Runs `commands`, which remove these chains and kube-proxy's own table in the families
    `tables`, so that connections which they translate continue.
    """
    touched = {chain.family for chain in kube_proxy_chains} | set(tables)
    translated_families = [
        family for family in FAMILIES if family in touched and conntrack.has_dnat_connections(family)
    ]
    # In the same transaction as the removal: conntrack's hooks must not be unregistered in between.
    keepalive_commands = [
        command for family in translated_families for command in conntrack_keepalive.table_commands(family)
    ]
    _accept_established(
        {*translated_families, *conntrack_keepalive.list_families()}
        & {chain.family for chain in kube_proxy_chains if chain.accepts_forwarded}
    )
    forward_rules.run_transaction(*keepalive_commands, *commands, hint="remove the rule that jumps to a KUBE-* chain")


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


def _list_chains() -> Iterator[ListedChain]:
    for chain in forward_rules.list_chains():
        yield ListedChain(chain["family"], chain["table"], chain["name"], "hook" in chain)


def _list_rules(chain: ListedChain) -> list[Json]:
    spec = {"family": chain.family, "table": chain.table, "name": chain.name}
    return forward_rules.run_transaction({"list": {"chain": spec}})


def _has_table(family: str) -> bool:
    return nft.has_table(family, NFT_TABLE)


# ---- iptables-legacy -----------------------------------------------------------------------------


def legacy_restore_input(table: str, save_output: str) -> tuple[str, int, int]:
    """Returns (input for iptables-restore, number of chains, number of jumps) that removes
    kube-proxy's chains from a table, given the output of iptables-save; the input is "" if there
    are none.
    """
    lines = save_output.splitlines()
    chain_names = [fields[0][1:] for fields in map(str.split, lines) if fields and fields[0][0] == ":"]
    chains = [name for name in chain_names if is_kube_proxy_chain(table, name)]
    jumps = [line for line in lines if _is_jump(line, table)]
    if not chains:
        return "", 0, 0
    script = [
        f"*{table}",
        *(f":{name} - [0:0]" for name in chains),
        # With --noflush, ":NAME" flushes only this chain, so that -X can delete it.
        *(line.replace("-A", "-D", 1) for line in jumps),
        *(f"-X {name}" for name in chains),
        "COMMIT\n",
    ]
    return "\n".join(script), len(chains), len(jumps)


def _is_jump(line: str, table: str) -> bool:
    """Whether this line appends a rule to another chain that jumps to one of kube-proxy's."""
    fields = line.split()
    if fields[:1] != ["-A"] or is_kube_proxy_chain(table, fields[1]):
        return False
    index = next((i for i, field in enumerate(fields) if field in ("-j", "-g")), len(fields))
    return is_kube_proxy_chain(table, "".join(fields[index + 1 : index + 2]))


def _remove_legacy(dry_run: bool = False) -> Iterator[str]:
    for family in FAMILIES:
        for table in (name for name in iptables_legacy.list_tables(family) if name in FIXED_CHAINS):
            script, chains, jumps = legacy_restore_input(table, iptables_legacy.save(family, table))
            if script:
                if not dry_run:
                    _commit_legacy_removal(family, script)
                yield f"{family} {table}, legacy: {chains} chains, {jumps} jumps to them"


def _commit_legacy_removal(family: str, script: str) -> None:
    if conntrack.has_dnat_connections(family) and forward_rules.probe_nf_tables().works:
        forward_rules.run_transaction(*conntrack_keepalive.table_commands(family))
    iptables_legacy.restore(family, script)


# ---- IPVS ----------------------------------------------------------------------------------------


def is_kube_proxy_service(
    service: ipvs.VirtualServiceKey, addresses: frozenset[Addr], ports: frozenset[tuple[int, int]]
) -> bool:
    """Whether kube-proxy created this virtual service: its address is in `addresses` (those on
    kube-ipvs0), or its (protocol, port) is a NodePort in `ports`. Virtual services of other
    programs have neither.
    """
    return not service.fwmark and (service.address in addresses or (service.protocol, service.port) in ports)


@contextlib.contextmanager
def _ipvs_session(
    own_services: Collection[ipvs.VirtualServiceKey] = (),
) -> Iterator[tuple[ipvs.IpvsClient, list[ipvs.VirtualServiceKey]] | None]:
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


def _retain_busy_services(
    own_services: Collection[ipvs.VirtualServiceKey], dry_run: bool = False
) -> list[ipvs.VirtualServiceKey]:
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
    retained: Collection[ipvs.VirtualServiceKey],
    own_services: Collection[ipvs.VirtualServiceKey] = (),
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


def _remove_sets(dry_run: bool = False) -> Iterator[str]:
    names = tuple(name for name in ipset.list_names() if IP_SET_NAME.fullmatch(name))
    # Sets can only be destroyed once no rule refers to them.
    destroyed = names if dry_run else ipset.destroy(names)
    if destroyed:
        yield f"{len(destroyed)} ip sets"


# ---- all of it -----------------------------------------------------------------------------------


def remove(own_services: Collection[ipvs.VirtualServiceKey] = (), dry_run: bool = False) -> Iterator[str]:
    """Removes everything that kube-proxy left, and yields a line for each thing that was removed;
    with `dry_run` for each thing that would be. That leaves out the table of
    conntrack_keepalive.py, which is ours.

    `own_services`: virtual services that kbpf's own table lists as its own.
    """
    retained = _retain_busy_services(own_services, dry_run)
    yield from _remove_nft(dry_run)
    yield from _remove_legacy(dry_run)
    yield from _remove_ipvs(retained, own_services, dry_run)
    yield from _remove_sets(dry_run)
    remove_counters = nfacct.find if dry_run else nfacct.delete
    yield from (f"counter {name}" for name in remove_counters(NFACCT_COUNTERS))
    if not dry_run and forward_rules.probe_nf_tables().works:
        yield from (f"table {family} {conntrack_keepalive.TABLE}" for family in conntrack_keepalive.remove_unneeded())


def has_rules() -> bool:
    """Whether rules of a kube-proxy translate connections in this network namespace."""
    if forward_rules.probe_nf_tables().works:
        if any(map(_has_table, FAMILIES)):
            return True
        if any(chain.is_from_kube_proxy and chain.name == "KUBE-SERVICES" for chain in _list_chains()):
            return True
    return any(
        ":KUBE-SERVICES " in iptables_legacy.save(family, "nat")
        for family in FAMILIES
        if "nat" in iptables_legacy.list_tables(family)
    )
