"""Connections that somebody else's rules have translated live on when those rules go.

The kernel translates by its tables of connections, where each has what was once decided for it;
rules are asked for the first packet only. But what they depend on goes with the rules:

- conntrack's table is looked into only while some rule in the network namespace needs it. When the
  last such rule goes, packets of a connection that is half an hour old arrive with the wrong
  addresses, and it is reset.
- IPVS ends a connection with its virtual service, and sees its packets only while the node has the
  address that they are sent to.

So whoever takes such rules away puts a table of this name in their place, in the same transaction:
a chain for translation and a rule that asks conntrack, which change nothing, and a set of the
virtual services that stay. These lead nobody new; their addresses are kept on a device of the same
name. All of it has to stay until the last of these connections is over. It is about the namespace
of the calling thread.

And kube-proxy lets packets of established connections pass a FORWARD that is closed, by its chain
KUBE-FORWARD: only the first packet of a connection has its mark. Where that goes, the table has a
second set, which is empty and says so, and a rule of ours takes its place in each closed chain,
behind what others wrote there on purpose (netfilter.Chain.place): it is there before kube-proxy's
goes, is put right like the one for masqueraded packets, and goes with the table.
"""

import errno
import re
from collections.abc import Collection, Iterable
from contextlib import closing
from typing import Any, Final

from kbpf.errors import KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import IpvsCommand, VirtualServiceKey
from kbpf.kernel.netfilter import conntrack, forward_rules, ipset, nft, xtables
from kbpf.model.address import Addr, family_of, format_addr, parse_addr
from kbpf.model.objects import Protocol

TABLE: Final = "kbpf-handover"
DEVICE: Final = "kbpf-handover"
VIRTUAL_SERVICE_SET: Final = "virtual"
FORWARD_SET: Final = "forward"
"""A set without elements: there is a rule in FORWARD, where that is closed."""
MAX_TRIES: Final = 10
"""So often the rule is put when others change rules at the same moment."""
KUBE_PROXY_DEVICE: Final = "kube-ipvs0"
"""The device on which a kube-proxy in mode ipvs keeps the addresses of Services."""
SERVICE_DEVICES: Final = (KUBE_PROXY_DEVICE, DEVICE)
"""What stands on these is none of the node's own addresses."""
NODE_PORT_SET_NAME: Final = re.compile(r"KUBE-(6-)?NODE-PORT(-LOCAL)?-(TCP|UDP|SCTP)(-HASH?)?")
"""Its IP sets with the NodePorts that it has; one is cut to the 31 characters of a name."""
_FAMILY_NAMES: Final = {4: "ip", 6: "ip6"}
_ADDRESS_TYPES: Final = {"ip": "ipv4_addr", "ip6": "ipv6_addr"}


def list_node_ports() -> frozenset[tuple[int, int]]:
    """(protocol, port) of each NodePort that a kube-proxy in mode ipvs has, running or not."""
    matches = filter(None, map(NODE_PORT_SET_NAME.fullmatch, ipset.list_names()))
    return frozenset(
        (Protocol[match[3]], port) for match in matches for port in ipset.list_ports(match[0])
    )


# ---- the table -----------------------------------------------------------------------------------


def table_commands(family: str, with_forward_rule: bool = False) -> list[forward_rules.Json]:
    """The commands that make the table; nothing changes where it is already. `passing`: what is
    established is to pass FORWARD, too, which let_pass() then sees to.
    """
    chain = {"family": family, "table": TABLE, "name": "keep"}
    ct_state_match: dict[str, Any] = {
        "match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established"]}
    }
    types = ["inet_proto", _ADDRESS_TYPES[family], "inet_service"]
    sets: dict[str, Any] = {
        VIRTUAL_SERVICE_SET: types,
        **({FORWARD_SET: "mark"} if with_forward_rule else {}),
    }
    return [
        {"add": {"table": {"family": family, "name": TABLE}}},
        *(
            {"add": {"set": {"family": family, "table": TABLE, "name": name, "type": kind}}}
            for name, kind in sets.items()
        ),
        {"add": {"chain": {**chain, "type": "nat", "hook": "postrouting", "prio": 100}}},
        {"flush": {"chain": chain}},
        {
            "add": {
                "rule": {
                    "family": family,
                    "table": TABLE,
                    "chain": "keep",
                    "expr": [ct_state_match],
                }
            }
        },
    ]


def list_families() -> tuple[str, ...]:
    """The families that have the table."""
    return tuple(family for family in conntrack.FAMILIES if nft.has_table(family, TABLE))


def remove_unneeded(force: bool = False) -> tuple[str, ...]:
    """Removes the tables that nobody needs any more, and before them the virtual services that have
    no connections left; with `force` all. The families.
    """
    families = list_families()
    if not families:
        return ()
    needed = {family_name(service) for service in _remove_idle_services(families, force)}
    removable = tuple(
        family
        for family in families
        if force or not (family in needed or conntrack.has_dnat_connections(family))
    )
    if removable:
        forward_rules.run_transaction(
            *_rule_deletions(removable),
            *({"delete": {"table": {"family": family, "name": TABLE}}} for family in removable),
        )
    return removable


# ---- the rule in FORWARD -------------------------------------------------------------------------


def reconcile_forward_rules(chains: Iterable[forward_rules.BaseChain]) -> tuple[str, ...]:
    """Sees to it that the rule is in those FORWARD chains where it has to be, once, and in no
    other; what was done, in words. `chains`: as they are now, or were a moment ago.
    """
    actions: list[str] = []
    for _ in range(MAX_TRIES):
        if not any(map(_is_wrong, chains)):
            return tuple(actions)
        generation = (
            forward_rules.read_generation()
        )  # of before the look: what changes since is noticed
        chains = forward_rules.list_forward_chains()
        chain = next(filter(_is_wrong, chains), None)
        if chain is None:
            continue
        try:
            actions.append(_repair(chain, generation))
        except KernelError as error:
            if error.errno not in (errno.ERESTART, errno.ENOENT):
                raise
    raise KernelError("others change all rules again and again", "nf_tables", "", errno.ERESTART)


def chains_with_rule(families: Collection[str]) -> tuple[forward_rules.BaseChain, ...]:
    """The chains of these families that have the rule."""
    chains = forward_rules.list_forward_chains()
    return tuple(chain for chain in chains if chain.family in families and chain.handover_rules)


def _needs_rule(chain: forward_rules.BaseChain) -> bool:
    return chain.is_closed and nft.has_set(chain.family, TABLE, FORWARD_SET)


def _is_wrong(chain: forward_rules.BaseChain) -> bool:
    return not chain.has_handover_rule if _needs_rule(chain) else bool(chain.handover_rules)


def _repair(chain: forward_rules.BaseChain, generation: int) -> str:
    if not _needs_rule(chain):
        forward_rules.run_transaction(*forward_rules.delete_commands(chain, chain.handover_rules))
        return f"connections of kube-proxy need no rule any more in {chain}"
    chain_key = chain.family, chain.table, chain.name
    old_handles = [rule.handle for rule in chain.handover_rules]
    xtables.accept_established(
        chain_key, forward_rules.HANDOVER_COMMENT, chain.next_handle, old_handles, generation
    )
    return f"established connections of kube-proxy are let pass in {chain}"


def _rule_deletions(families: Collection[str]) -> list[forward_rules.Json]:
    """The commands that remove the rule from the chains of these families."""
    if not any(nft.has_set(family, TABLE, FORWARD_SET) for family in families):
        return []
    return [
        command
        for chain in chains_with_rule(families)
        for command in forward_rules.delete_commands(chain, chain.handover_rules)
    ]


# ---- virtual services of IPVS --------------------------------------------------------------------


def family_name(service: VirtualServiceKey) -> str:
    """ "ip" or "ip6"."""
    return _FAMILY_NAMES[family_of(service.address)]


def keep_services(services: Collection[VirtualServiceKey], addresses: Collection[Addr]) -> None:
    """These virtual services stay for their connections, and the node keeps these addresses. Who
    has made them may go afterwards.
    """
    families = sorted({family_name(service) for service in services})
    tables = [command for family in families for command in table_commands(family)]
    forward_rules.run_transaction(*tables, *_element_commands("add", services))
    for error in dummy.add_addresses(dummy.ensure(DEVICE), addresses).values():
        raise error


def quiesce(client: ipvs.IpvsClient, services: Iterable[VirtualServiceKey]) -> None:
    """No new connection gets through these virtual services; those that are there go on."""
    client.apply(
        [
            ipvs.IpvsRequest(IpvsCommand.IPVS_CMD_SET_DEST, service, server=entry.server)
            for service in services
            for entry in client.list_servers(service)
            if entry.weight
        ],
        (errno.ESRCH, errno.ENOENT),
    )


def list_kept_services(families: Iterable[str]) -> tuple[VirtualServiceKey, ...]:
    """The virtual services that stay, of these families, which have the table."""
    sets = (
        item["set"]
        for family in families
        for item in forward_rules.run_transaction(
            {"list": {"table": {"family": family, "name": TABLE}}}
        )
        if item.get("set", {}).get("name") == VIRTUAL_SERVICE_SET
    )
    return tuple(
        sorted(_parse_element(element) for set_ in sets for element in set_.get("elem", ()))
    )


def count_connections() -> int:
    """How many connections go on by virtual services that stay."""
    services = list_kept_services(list_families())
    if not services:
        return 0
    with closing(ipvs.IpvsClient()) as client:
        return sum(client.count_connections(service) for service in services)


def _remove_idle_services(families: Collection[str], force: bool) -> tuple[VirtualServiceKey, ...]:
    """Removes those without connections; the others. Those that a kube-proxy leads by, which is
    back, are its own, and forgotten here. Its device alone tells nothing: whoever takes its
    leftovers away may be at work just now.
    """
    services = list_kept_services(families)
    if not services:
        return ()
    with closing(ipvs.IpvsClient()) as client:
        kube_proxy_ifindex = dummy.get_ifindex_or_zero(KUBE_PROXY_DEVICE)
        kube_proxy_services = {
            service
            for service in services
            if kube_proxy_ifindex and _accepts_connections(client, service)
        }
        own_services = [service for service in services if service not in kube_proxy_services]
        busy_services = (
            ()
            if force
            else tuple(
                service
                for service in own_services
                if kube_proxy_ifindex or client.count_connections(service)
            )
        )
        idle_services = (
            []
            if kube_proxy_ifindex
            else [service for service in own_services if service not in busy_services]
        )
        client.apply(
            [
                ipvs.IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, service)
                for service in idle_services
            ],
            (errno.ESRCH,),
        )
    removed = [service for service in services if service not in busy_services]
    if removed:
        forward_rules.run_transaction(*_element_commands("delete", removed))
    if busy_services:
        unused = {service.address for service in removed} - {
            service.address for service in busy_services
        }
        dummy.delete_addresses(dummy.ensure(DEVICE), unused)
    else:
        dummy.remove(DEVICE)
    return busy_services


def _accepts_connections(client: ipvs.IpvsClient, service: VirtualServiceKey) -> bool:
    """Whether new connections get through."""
    return any(entry.weight for entry in client.list_servers(service))


def _element_commands(verb: str, services: Iterable[VirtualServiceKey]) -> list[forward_rules.Json]:
    """Puts them into their sets ("add"), or takes them out ("delete")."""
    by_family: dict[str, list[Any]] = {}
    for service in sorted(services):
        key = [Protocol(service.protocol).name.lower(), format_addr(service.address), service.port]
        by_family.setdefault(family_name(service), []).append({"concat": key})
    return [
        {
            verb: {
                "element": {
                    "family": family,
                    "table": TABLE,
                    "name": VIRTUAL_SERVICE_SET,
                    "elem": elements,
                }
            }
        }
        for family, elements in by_family.items()
    ]


def _parse_element(element: forward_rules.Json) -> VirtualServiceKey:
    protocol_name, address, port = element["concat"]
    protocol = (
        Protocol(protocol_name)
        if isinstance(protocol_name, int)
        else Protocol[str(protocol_name).upper()]
    )
    return VirtualServiceKey(protocol, parse_addr(str(address)), int(port))
