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
IPVS_DEVICE: Final = conntrack_keepalive.KUBE_PROXY_DEVICE
FIXED_CHAINS: Final = {
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
SERVICE_CHAIN: Final = re.compile(r"KUBE-(SVC|SVL|EXT|FW|SEP|XLB)-[A-Z2-7]{16}")
"""Chains in `nat` for one Service port or endpoint; XLB until Kubernetes 1.24."""
IP_SET_NAME: Final = re.compile(
    r"KUBE-(6-)?(LOOP-BACK|CLUSTER-IP|IPVS-IPS|HEALTH-CHECK-NODE-PORT|EXTERNAL-IP(-LOCAL)?|"
    r"LOAD-BALANCER(-LOCAL|-FW|-SOURCE-IP|-SOURCE-CIDR?)?|NODE-PORT(-LOCAL)?-(TCP|UDP|SCTP-HASH?))"
)
"""Two of those for IPv6 are cut to the 31 characters that a name may have."""
NFACCT_COUNTERS: Final = ("ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts")
FAMILIES: Final = ("ip", "ip6")


def is_kube_proxy_chain(table: str, name: str) -> bool:
    """Whether kube-proxy gives this name to a chain of that table of iptables."""
    return name in FIXED_CHAINS.get(table, ()) or (
        table == "nat" and bool(SERVICE_CHAIN.fullmatch(name))
    )


class ListedChain(NamedTuple):
    """A chain of nf_tables. `base`: packets come to it by a hook."""

    family: str
    table: str
    name: str
    base: bool = False

    @property
    def is_from_kube_proxy(self) -> bool:
        """Whether kube-proxy has made it."""
        return self.family in FAMILIES and is_kube_proxy_chain(self.table, self.name)

    @property
    def accepts_forwarded(self) -> bool:
        """Whether kube-proxy has it for what is to pass a closed FORWARD."""
        return (self.table, self.name) == ("filter", "KUBE-FORWARD")


class Jump(NamedTuple):
    """A rule of a chain of others, whose target is a chain of kube-proxy."""

    chain: ListedChain
    handle: int


# ---- nf_tables -----------------------------------------------------------------------------------


def nft_removal_commands(chains: Sequence[ListedChain], jumps: Iterable[Jump]) -> Iterator[Json]:
    """What removes kube-proxy's own of these chains, and these jumps to them, in this order: jumps,
    what is in the chains, chains. Nothing then is in the way of anything.
    """
    kube_proxy_chains = [chain for chain in chains if chain.is_from_kube_proxy]
    for chain, handle in jumps:
        location = {"family": chain.family, "table": chain.table, "chain": chain.name}
        yield {"delete": {"rule": {**location, "handle": handle}}}
    for verb in ("flush", "delete"):
        for family, table, name, _ in kube_proxy_chains:
            yield {verb: {"chain": {"family": family, "table": table, "name": name}}}


def find_jumps(chain: ListedChain, listing: Iterable[Json]) -> Iterator[Jump]:
    """The rules among these that jump to a chain of kube-proxy."""
    for rule in (entry["rule"] for entry in listing if "rule" in entry):
        targets = (
            expression[verb]["target"]
            for expression in rule.get("expr", ())
            for verb in ("jump", "goto")
            if verb in expression
        )
        if any(is_kube_proxy_chain(chain.table, target) for target in targets):
            yield Jump(chain, int(rule["handle"]))


def _remove_nft() -> Iterator[str]:
    if not forward_rules.probe_nf_tables().works:
        return
    chains = list(_list_chains())
    kube_proxy_chains = [chain for chain in chains if chain.is_from_kube_proxy]
    used_tables = {(chain.family, chain.table) for chain in kube_proxy_chains}
    jumps = [jump for chain in chains if chain.base and (chain.family, chain.table) in used_tables
             for jump in find_jumps(chain, _list_rules(chain))]  # fmt: skip
    tables = [family for family in FAMILIES if _has_table(family)]
    commands = [
        *nft_removal_commands(chains, jumps),
        *({"delete": {"table": {"family": family, "name": NFT_TABLE}}} for family in tables),
    ]
    if not commands:
        return
    touched = {family for family, _ in used_tables} | set(tables)
    translated_families = [
        family
        for family in FAMILIES
        if family in touched and conntrack.has_dnat_connections(family)
    ]
    handover_commands = [
        command
        for family in translated_families
        for command in conntrack_keepalive.table_commands(family)
    ]
    _accept_established(
        {*translated_families, *conntrack_keepalive.list_families()}
        & {chain.family for chain in kube_proxy_chains if chain.accepts_forwarded}
    )
    forward_rules.run_transaction(
        *handover_commands, *commands, hint="does a chain of others jump to KUBE-* chains?"
    )
    for family, table in sorted(used_tables):
        location = (family, table)
        chain_count = sum((chain.family, chain.table) == location for chain in kube_proxy_chains)
        jump_count = sum((jump.chain.family, jump.chain.table) == location for jump in jumps)
        yield f"{family} {table}: {chain_count} chains, {jump_count} jumps to them"
    yield from (f"table {family} {NFT_TABLE}" for family in tables)


def _accept_established(families: Collection[str]) -> None:
    """Where kube-proxy's rules let what is established pass FORWARD, a rule of ours does before
    they go: not a packet is lost between.
    """
    if families:
        commands = (
            command
            for family in sorted(families)
            for command in conntrack_keepalive.table_commands(family, True)
        )
        forward_rules.run_transaction(*commands)
        conntrack_keepalive.reconcile_forward_rules(forward_rules.list_forward_chains())


def _list_chains() -> Iterator[ListedChain]:
    for entry in forward_rules.run_transaction({"list": {"chains": None}}):
        if chain := entry.get("chain"):
            yield ListedChain(chain["family"], chain["table"], chain["name"], "hook" in chain)


def _list_rules(chain: ListedChain) -> list[Json]:
    spec = {"family": chain.family, "table": chain.table, "name": chain.name}
    return forward_rules.run_transaction({"list": {"chain": spec}})


def _has_table(family: str) -> bool:
    return nft.has_table(family, NFT_TABLE)


# ---- iptables-legacy -----------------------------------------------------------------------------


def legacy_restore_input(table: str, save_output: str) -> tuple[str, int, int]:
    """What iptables-restore has to be told to remove kube-proxy's chains from a table as
    iptables-save shows it, how many chains and how many jumps to them; "" if there is nothing.
    """
    lines = save_output.splitlines()
    chain_names = [
        fields[0][1:] for fields in map(str.split, lines) if fields and fields[0][0] == ":"
    ]
    chains = [name for name in chain_names if is_kube_proxy_chain(table, name)]
    jumps = [line for line in lines if _is_jump(line, table)]
    if not chains:
        return "", 0, 0
    script = [
        f"*{table}",
        *(f":{name} - [0:0]" for name in chains),
        *(line.replace("-A", "-D", 1) for line in jumps),
        *(f"-X {name}" for name in chains),
        "COMMIT\n",
    ]
    return "\n".join(script), len(chains), len(jumps)


def _is_jump(line: str, table: str) -> bool:
    """Whether this is a rule of a chain of others that jumps to one of kube-proxy."""
    fields = line.split()
    if fields[:1] != ["-A"] or is_kube_proxy_chain(table, fields[1]):
        return False
    index = next((i for i, field in enumerate(fields) if field in ("-j", "-g")), len(fields))
    return is_kube_proxy_chain(table, "".join(fields[index + 1 : index + 2]))


def _remove_legacy() -> Iterator[str]:
    for family in FAMILIES:
        for table in (name for name in iptables_legacy.list_tables(family) if name in FIXED_CHAINS):
            script, chains, jumps = legacy_restore_input(table, iptables_legacy.save(family, table))
            if script:
                if conntrack.has_dnat_connections(family) and forward_rules.probe_nf_tables().works:
                    forward_rules.run_transaction(*conntrack_keepalive.table_commands(family))
                iptables_legacy.restore(family, script)
                yield f"{family} {table}, legacy: {chains} chains, {jumps} jumps to them"


# ---- IPVS ----------------------------------------------------------------------------------------


def is_kube_proxy_service(
    service: ipvs.VirtualServiceKey, addresses: frozenset[Addr], ports: frozenset[tuple[int, int]]
) -> bool:
    """Whether kube-proxy has made it: at one of the addresses that it keeps on kube-ipvs0, or for a
    NodePort, `ports` being (protocol, port). Others' have neither.
    """
    return not service.fwmark and (
        service.address in addresses or (service.protocol, service.port) in ports
    )


def kube_proxy_services(
    client: ipvs.IpvsClient, own_device: str, own_services: Collection[ipvs.VirtualServiceKey] = ()
) -> list[ipvs.VirtualServiceKey]:
    """Those of kube-proxy, as its device tells. Where kbpf itself keeps addresses on its device
    `own`, virtual services at them are its own by now, and so are those of NodePorts, and what is
    `noted` in its table in any case.
    """
    addresses = dummy.addresses_of(IPVS_DEVICE) - dummy.addresses_of(own_device)
    ports = (
        frozenset()
        if dummy.get_ifindex_or_zero(own_device)
        else conntrack_keepalive.list_node_ports()
    )
    all_services = (service for service, _ in client.list_services())
    return [
        service
        for service in all_services
        if service not in own_services and is_kube_proxy_service(service, addresses, ports)
    ]


@contextlib.contextmanager
def _ipvs_session(
    own_device: str, own_services: Collection[ipvs.VirtualServiceKey] = ()
) -> Iterator[tuple[ipvs.IpvsClient, list[ipvs.VirtualServiceKey]] | None]:
    """A conversation with IPVS, and kube-proxy's virtual services; None without its device, or
    without IPVS.
    """
    try:
        client = ipvs.IpvsClient() if dummy.get_ifindex_or_zero(IPVS_DEVICE) else None
    except KernelError:
        client = None
    if client is None:
        yield None
        return
    with contextlib.closing(client):
        yield client, kube_proxy_services(client, own_device, own_services)


def count_connections(own_device: str = "") -> int:
    """How many connections kube-proxy's IPVS has, also after its leftovers were removed; `own`: the
    device of kbpf's mode ipvs.
    """
    with _ipvs_session(own_device) as session:
        count = sum(map(session[0].count_connections, session[1])) if session is not None else 0
    return count + (
        conntrack_keepalive.count_connections() if forward_rules.probe_nf_tables().works else 0
    )


def _retain_busy_services(
    own_device: str, own_services: Collection[ipvs.VirtualServiceKey]
) -> list[ipvs.VirtualServiceKey]:
    """Those of kube-proxy's virtual services that still have connections, which stay for these: not
    without nf_tables, where nobody could tell afterwards whose they are.
    """
    with _ipvs_session(own_device, own_services) as session:
        if session is None or not forward_rules.probe_nf_tables().works:
            return []
        client, services = session
        busy = [service for service in services if client.count_connections(service)]
        if busy:
            conntrack_keepalive.quiesce(
                client, busy
            )  # first, by which an agent sees that they are kept
            conntrack_keepalive.keep_services(
                busy, dummy.addresses_of(IPVS_DEVICE) & {service.address for service in busy}
            )
        return busy


def _remove_ipvs(
    own_device: str,
    retained: Collection[ipvs.VirtualServiceKey],
    own_services: Collection[ipvs.VirtualServiceKey] = (),
) -> Iterator[str]:
    """All virtual services but those that are `kept`. The device tells that kube-proxy was here in
    this mode; it goes last.
    """
    with _ipvs_session(own_device, own_services) as session:
        if session is not None:
            client, services = session
            deleted = [service for service in services if service not in retained]
            client.apply(
                [
                    ipvs.IpvsRequest(ipvs.IpvsCommand.IPVS_CMD_DEL_SERVICE, service)
                    for service in deleted
                ]
            )
            if deleted:
                yield f"{len(deleted)} virtual services of IPVS"
    if dummy.remove(IPVS_DEVICE):
        yield f"device {IPVS_DEVICE}"


def _remove_sets() -> Iterator[str]:
    """After the rules that ask them."""
    destroyed = ipset.destroy(name for name in ipset.list_names() if IP_SET_NAME.fullmatch(name))
    if destroyed:
        yield f"{len(destroyed)} ip sets"


# ---- all of it -----------------------------------------------------------------------------------


def remove(
    own_device: str = "", own_services: Collection[ipvs.VirtualServiceKey] = ()
) -> Iterator[str]:
    """Removes it all; what was there, in words. Nothing there is nothing said. `own`: the device of
    kbpf's mode ipvs; `noted`: the virtual services that its table says are its own.
    """
    retained = _retain_busy_services(own_device, own_services)
    yield from _remove_nft()
    yield from _remove_legacy()
    yield from _remove_ipvs(own_device, retained, own_services)
    yield from _remove_sets()
    yield from (f"counter {name}" for name in nfacct.delete(NFACCT_COUNTERS))
    if forward_rules.probe_nf_tables().works:
        yield from (
            f"table {family} {conntrack_keepalive.TABLE}"
            for family in conntrack_keepalive.remove_unneeded()
        )


def has_rules() -> bool:
    """Whether rules of a kube-proxy lead connections here."""
    if forward_rules.probe_nf_tables().works:
        if any(map(_has_table, FAMILIES)):
            return True
        if any(
            chain.is_from_kube_proxy and chain.name == "KUBE-SERVICES" for chain in _list_chains()
        ):
            return True
    return any(
        ":KUBE-SERVICES " in iptables_legacy.save(family, "nat")
        for family in FAMILIES
        if "nat" in iptables_legacy.list_tables(family)
    )
