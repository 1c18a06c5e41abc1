# SPDX-License-Identifier: Apache-2.0
"""Keeps translated connections alive when the rules that translated them are removed.

The kernel decides on the translation once, at the first packet of a connection, and keeps it in
conntrack or IPVS. But some of this state depends on the rules:

- conntrack hooks are registered only while some rule in the network namespace needs them. When the
  last such rule is removed, packets of existing connections are no longer translated and the
  connections are reset.
- IPVS drops a connection with its virtual service, and sees its packets only while the node has
  their destination address.

So the same transaction that removes such rules adds a table named TABLE: a nat chain and a rule
that matches on conntrack state, neither of which changes any packet, and a set that lists the
virtual services to keep. These get no new connections; their addresses are kept on the device
DEVICE. All of it has to stay until the last of these connections ends. All functions act on the
network namespace of the calling thread.

kube-proxy's chain KUBE-FORWARD also accepts established packets where FORWARD drops by default:
only the first packet of a connection carries its mark. When it is removed, the table gets a second
set, which is empty and only serves as a flag, and each closed FORWARD chain gets a rule of ours
after the rules that others put there on purpose (forward_rules.BaseChain). The rule is added
before kube-proxy's is removed, is repaired like the one for masqueraded packets, and is removed
with the table.
"""

import errno
import re
from collections.abc import Collection, Iterable
from contextlib import closing
from typing import Any, Final

from kbpf.errors import IgnoredErrnos, KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.net.ipvs import IpvsCommand
from kbpf.kernel.netfilter import conntrack, forward_rules, named_objects, nft, xtables
from kbpf.model.address import Addr, family_of, format_addr, parse_addr
from kbpf.model.desired import VirtualService
from kbpf.model.objects import Protocol

TABLE: Final = "kbpf-keepalive"
DEVICE: Final = "kbpf-keepalive"
VIRTUAL_SERVICE_SET: Final = "virtual"
FORWARD_SET: Final = "forward"
"""A set without elements, used as a flag: closed FORWARD chains need our rule."""
MAX_TRIES: Final = 10
"""How often adding the rule is retried when another program changes the ruleset at the same time.
"""
KUBE_PROXY_DEVICE: Final = "kube-ipvs0"
"""The device on which a kube-proxy in mode ipvs keeps the addresses of Services."""
KUBE_ROUTER_DEVICE: Final = "kube-dummy-if"
"""The same of a kube-router that is or was the Service proxy. It leaves the device when it ends."""
SERVICE_DEVICES: Final = (KUBE_PROXY_DEVICE, KUBE_ROUTER_DEVICE, DEVICE)
"""Addresses on these devices do not count as the node's own."""
NODE_PORT_SET_NAME: Final = re.compile(r"KUBE-(6-)?NODE-PORT(-LOCAL)?-(TCP|UDP|SCTP)(-HASH?)?")
"""kube-proxy's ipsets of NodePorts; one name is truncated to the 31 characters of an ipset name."""
_FAMILY_NAMES: Final = {4: "ip", 6: "ip6"}
_ADDRESS_TYPES: Final = {"ip": "ipv4_addr", "ip6": "ipv6_addr"}


def list_node_ports() -> frozenset[tuple[int, int]]:
    """(protocol, port) of each NodePort that a kube-proxy in mode ipvs left or is using."""
    matches = filter(None, map(NODE_PORT_SET_NAME.fullmatch, named_objects.list_sets()))
    return frozenset((Protocol[match[3]], port) for match in matches for port in named_objects.list_set_ports(match[0]))


# ---- the table -----------------------------------------------------------------------------------


def table_commands(family: str, with_forward_rule: bool = False) -> list[forward_rules.Json]:
    """Returns the commands that create the table; they change nothing if it exists.

    `with_forward_rule`: established packets have to pass FORWARD too; reconcile_forward_rules()
    adds the rule.
    """
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
        *hook_commands(family, TABLE, "keep"),
    ]


def hook_commands(family: str, table: str, name: str) -> list[forward_rules.Json]:
    """Returns the commands that create a chain which keeps the kernel's hooks registered: its type
    those of NAT, its match on the state those of conntrack. The rule has no verdict.
    """
    chain = {"family": family, "table": table, "name": name}
    state_match = forward_rules.match({"ct": {"key": "state"}}, ["established"], "in")
    rule = {"family": family, "table": table, "chain": name, "expr": [state_match]}
    return [
        {"add": {"chain": {**chain, "type": "nat", "hook": "postrouting", "prio": 100}}},
        {"flush": {"chain": chain}},
        {"add": {"rule": rule}},
    ]


def list_families() -> tuple[str, ...]:
    """The families ("ip", "ip6") that have the table."""
    return tuple(family for family in conntrack.FAMILIES if nft.has_table(family, TABLE))


def remove_unneeded(force: bool = False) -> tuple[str, ...]:
    """Removes the tables that no connection needs any more, after deleting the kept virtual
    services that have no connections left; all of them with `force`. Returns the families of the
    removed tables.
    """
    with IgnoredErrnos(errno.ENOENT):
        return _remove_unneeded_once(force)
    # The agent and `kbpf cleanup` may remove a table at the same time. The kernel refuses the
    # second transaction as a whole; this time what is gone is not listed.
    return _remove_unneeded_once(force)


def _remove_unneeded_once(force: bool) -> tuple[str, ...]:
    families = list_families()
    if not families:
        return ()
    needed = {family_name(service) for service in _remove_idle_services(families, force)}
    removable = tuple(
        family for family in families if force or not (family in needed or conntrack.has_dnat_connections(family))
    )
    if removable:
        forward_rules.run_transaction(
            *_rule_deletions(removable),
            *({"delete": {"table": {"family": family, "name": TABLE}}} for family in removable),
        )
    return removable


# ---- the rule in FORWARD -------------------------------------------------------------------------


def reconcile_forward_rules(chains: Iterable[forward_rules.BaseChain]) -> tuple[str, ...]:
    """Ensures that each FORWARD chain that needs the rule has it exactly once, and no other chain
    has it. Returns a line for each change. `chains`: a recent listing.

    Raises KernelError (ERESTART) if other programs change the ruleset during each of MAX_TRIES
    tries.
    """
    actions: list[str] = []
    for _ in range(MAX_TRIES):
        if not any(map(_is_wrong, chains)):
            return tuple(actions)
        # Read before the listing, so that a later change makes our transaction fail.
        generation = forward_rules.read_generation()
        chains = forward_rules.list_forward_chains()
        chain = next(filter(_is_wrong, chains), None)
        if chain is None:
            continue
        with IgnoredErrnos(errno.ERESTART, errno.ENOENT):
            actions.append(_repair(chain, generation))
    raise KernelError("other programs keep changing the ruleset", "nf_tables", "", errno.ERESTART)


def chains_with_rule(families: Collection[str]) -> tuple[forward_rules.BaseChain, ...]:
    """The FORWARD chains of these families that have the rule."""
    chains = forward_rules.list_forward_chains()
    return tuple(chain for chain in chains if chain.family in families and chain.keepalive_rules)


def _needs_rule(chain: forward_rules.BaseChain) -> bool:
    return chain.is_closed and nft.has_set(chain.family, TABLE, FORWARD_SET)


def _is_wrong(chain: forward_rules.BaseChain) -> bool:
    return not chain.has_keepalive_rule if _needs_rule(chain) else bool(chain.keepalive_rules)


def _repair(chain: forward_rules.BaseChain, generation: int) -> str:
    if not _needs_rule(chain):
        forward_rules.run_transaction(*forward_rules.delete_commands(chain, chain.keepalive_rules))
        return f"removed the rule for kube-proxy's connections from {chain}"
    chain_key = chain.family, chain.table, chain.name
    old_handles = [rule.handle for rule in chain.keepalive_rules]
    xtables.accept_established(chain_key, forward_rules.KEEPALIVE_COMMENT, chain.next_handle, old_handles, generation)
    return f"added a rule to {chain}: accept kube-proxy's established connections"


def _rule_deletions(families: Collection[str]) -> list[forward_rules.Json]:
    if not any(nft.has_set(family, TABLE, FORWARD_SET) for family in families):
        return []
    return [
        command
        for chain in chains_with_rule(families)
        for command in forward_rules.delete_commands(chain, chain.keepalive_rules)
    ]


# ---- virtual services of IPVS --------------------------------------------------------------------


def family_name(service: VirtualService) -> str:
    """ "ip" or "ip6"."""
    return _FAMILY_NAMES[family_of(service.address)]


def keep_services(services: Collection[VirtualService], addresses: Collection[Addr]) -> None:
    """Records these virtual services as kept and adds their addresses to DEVICE. Their creator may
    then remove its own device.
    """
    families = sorted({family_name(service) for service in services})
    tables = [command for family in families for command in table_commands(family)]
    forward_rules.run_transaction(*tables, *_element_commands("add", services))
    for error in dummy.add_addresses(dummy.ensure(DEVICE), addresses).values():
        raise error


def quiesce(client: ipvs.IpvsClient, services: Iterable[VirtualService]) -> None:
    """Sets all weights of these virtual services to 0: existing connections continue, new ones are
    not accepted.
    """
    client.apply(
        [
            ipvs.IpvsRequest(IpvsCommand.IPVS_CMD_SET_DEST, service, entry.server)
            for service in services
            for entry in client.list_servers(service)
            if entry.weight
        ],
        (errno.ESRCH, errno.ENOENT),
    )


def list_kept_services(families: Iterable[str]) -> tuple[VirtualService, ...]:
    """The kept virtual services of these families; a family without the table has none."""
    elements = (element for family in families for element in _list_elements(family))
    return tuple(sorted(map(_parse_element, elements)))


def _list_elements(family: str) -> list[forward_rules.Json]:
    listing = {"list": {"table": {"family": family, "name": TABLE}}}
    with IgnoredErrnos(errno.ENOENT):
        sets = [item.get("set", {}) for item in forward_rules.run_transaction(listing)]
        return [e for set_ in sets if set_.get("name") == VIRTUAL_SERVICE_SET for e in set_.get("elem", ())]
    return []


def count_connections() -> int:
    """How many connections the kept virtual services still have."""
    services = list_kept_services(list_families())
    if not services:
        return 0
    with closing(ipvs.IpvsClient()) as client:
        return sum(client.count_connections(service) for service in services)


def _remove_idle_services(families: Collection[str], force: bool) -> tuple[VirtualService, ...]:
    """Deletes kept virtual services without connections and returns those that remain.

    If kube-proxy came back and uses some of them again (a nonzero weight), these are its own and
    only removed from the set. Its device alone proves nothing: a cleanup of its state may be in
    progress.
    """
    services = list_kept_services(families)
    if not services:
        return ()
    with closing(ipvs.IpvsClient()) as client:
        # While kube-proxy's device exists, our removal of its state may still be running: nothing
        # is deleted then, and all services that are not kube-proxy's count as busy.
        kube_proxy_ifindex = dummy.get_ifindex_or_zero(KUBE_PROXY_DEVICE)
        kube_proxy_services = {
            service for service in services if kube_proxy_ifindex and _accepts_connections(client, service)
        }
        own_services = [service for service in services if service not in kube_proxy_services]
        busy_services = (
            ()
            if force
            else tuple(service for service in own_services if kube_proxy_ifindex or client.count_connections(service))
        )
        idle_services = (
            [] if kube_proxy_ifindex else [service for service in own_services if service not in busy_services]
        )
        client.apply(
            [ipvs.IpvsRequest(IpvsCommand.IPVS_CMD_DEL_SERVICE, service) for service in idle_services],
            (errno.ESRCH,),
        )
    removed = [service for service in services if service not in busy_services]
    if removed:
        forward_rules.run_transaction(*_element_commands("delete", removed))
    if busy_services:
        unused = {service.address for service in removed} - {service.address for service in busy_services}
        dummy.delete_addresses(dummy.ensure(DEVICE), unused)
    else:
        dummy.remove(DEVICE)
    return busy_services


def _accepts_connections(client: ipvs.IpvsClient, service: VirtualService) -> bool:
    return any(entry.weight for entry in client.list_servers(service))


def _element_commands(verb: str, services: Iterable[VirtualService]) -> list[forward_rules.Json]:
    """Returns commands that "add" virtual services to their sets, or "delete" them."""
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


def _parse_element(element: forward_rules.Json) -> VirtualService:
    protocol_name, address, port = element["concat"]
    protocol = Protocol(protocol_name) if isinstance(protocol_name, int) else Protocol[str(protocol_name).upper()]
    return VirtualService(protocol, parse_addr(str(address)), int(port))
