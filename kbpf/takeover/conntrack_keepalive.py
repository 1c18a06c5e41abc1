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
from kbpf.kernel.net.ipvs import Command, Service
from kbpf.kernel.netfilter import conntrack, forward_rules, ipset, nft, xtables
from kbpf.model.address import Addr, family_of, format_addr, parse_addr
from kbpf.model.objects import Protocol

TABLE: Final = "kbpf-handover"
DEVICE: Final = "kbpf-handover"
SET: Final = "virtual"
PASSING: Final = "forward"
"""A set without elements: there is a rule in FORWARD, where that is closed."""
TRIES: Final = 10
"""So often the rule is put when others change rules at the same moment."""
KUBE_PROXYS: Final = "kube-ipvs0"
"""The device on which a kube-proxy in mode ipvs keeps the addresses of Services."""
DEVICES: Final = (KUBE_PROXYS, DEVICE)
"""What stands on these is none of the node's own addresses."""
PORT_SETS: Final = re.compile(r"KUBE-(6-)?NODE-PORT(-LOCAL)?-(TCP|UDP|SCTP)(-HASH?)?")
"""Its IP sets with the NodePorts that it has; one is cut to the 31 characters of a name."""
_FAMILY: Final = {4: "ip", 6: "ip6"}
_ADDRESS: Final = {"ip": "ipv4_addr", "ip6": "ipv6_addr"}


def node_ports() -> frozenset[tuple[int, int]]:
    """(protocol, port) of each NodePort that a kube-proxy in mode ipvs has, running or not."""
    found = filter(None, map(PORT_SETS.fullmatch, ipset.names()))
    return frozenset((Protocol[one[3]], port) for one in found for port in ipset.ports(one[0]))


# ---- the table -----------------------------------------------------------------------------------


def begin(family: str, passing: bool = False) -> list[forward_rules.Json]:
    """The commands that make the table; nothing changes where it is already. `passing`: what is
    established is to pass FORWARD, too, which let_pass() then sees to.
    """
    chain = {"family": family, "table": TABLE, "name": "keep"}
    state: dict[str, Any] = {
        "match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established"]}
    }
    types = ["inet_proto", _ADDRESS[family], "inet_service"]
    sets: dict[str, Any] = {SET: types, **({PASSING: "mark"} if passing else {})}
    return [
        {"add": {"table": {"family": family, "name": TABLE}}},
        *({"add": {"set": {"family": family, "table": TABLE, "name": name, "type": kind}}}
          for name, kind in sets.items()),
        {"add": {"chain": {**chain, "type": "nat", "hook": "postrouting", "prio": 100}}},
        {"flush": {"chain": chain}},
        {"add": {"rule": {"family": family, "table": TABLE, "chain": "keep", "expr": [state]}}},
    ]  # fmt: skip


def there() -> tuple[str, ...]:
    """The families that have the table."""
    return tuple(family for family in conntrack.FAMILIES if nft.has_table(family, TABLE))


def end(force: bool = False) -> tuple[str, ...]:
    """Removes the tables that nobody needs any more, and before them the virtual services that have
    no connections left; with `force` all. The families.
    """
    found = there()
    if not found:
        return ()
    needed = {family_name(service) for service in _end_virtual(found, force)}
    gone = tuple(
        family
        for family in found
        if force or not (family in needed or conntrack.translated(family))
    )
    if gone:
        forward_rules.transaction(
            *_rules(gone),
            *({"delete": {"table": {"family": family, "name": TABLE}}} for family in gone),
        )
    return gone


# ---- the rule in FORWARD -------------------------------------------------------------------------


def let_pass(chains: Iterable[forward_rules.Chain]) -> tuple[str, ...]:
    """Sees to it that the rule is in those FORWARD chains where it has to be, once, and in no
    other; what was done, in words. `chains`: as they are now, or were a moment ago.
    """
    done: list[str] = []
    for _ in range(TRIES):
        if not any(map(_is_wrong, chains)):
            return tuple(done)
        generation = forward_rules.generation()  # of before the look: what changes since is noticed
        chains = forward_rules.forward_chains()
        wrong = next(filter(_is_wrong, chains), None)
        if wrong is None:
            continue
        try:
            done.append(_put_right(wrong, generation))
        except KernelError as error:
            if error.errno not in (errno.ERESTART, errno.ENOENT):
                raise
    raise KernelError("others change all rules again and again", "nf_tables", "", errno.ERESTART)


def passing(families: Collection[str]) -> tuple[forward_rules.Chain, ...]:
    """The chains of these families that have the rule."""
    chains = forward_rules.forward_chains()
    return tuple(chain for chain in chains if chain.family in families and chain.handovers)


def _is_wanted(chain: forward_rules.Chain) -> bool:
    return chain.is_closed and nft.has_set(chain.family, TABLE, PASSING)


def _is_wrong(chain: forward_rules.Chain) -> bool:
    return not chain.hands_over if _is_wanted(chain) else bool(chain.handovers)


def _put_right(chain: forward_rules.Chain, generation: int) -> str:
    if not _is_wanted(chain):
        forward_rules.transaction(*forward_rules.deletions(chain, chain.handovers))
        return f"connections of kube-proxy need no rule any more in {chain}"
    where = chain.family, chain.table, chain.name
    old = [rule.handle for rule in chain.handovers]
    xtables.accept_established(where, forward_rules.HANDOVER, chain.before, old, generation)
    return f"established connections of kube-proxy are let pass in {chain}"


def _rules(families: Collection[str]) -> list[forward_rules.Json]:
    """The commands that remove the rule from the chains of these families."""
    if not any(nft.has_set(family, TABLE, PASSING) for family in families):
        return []
    return [
        command
        for chain in passing(families)
        for command in forward_rules.deletions(chain, chain.handovers)
    ]


# ---- virtual services of IPVS --------------------------------------------------------------------


def family_name(service: Service) -> str:
    """ "ip" or "ip6"."""
    return _FAMILY[family_of(service.address)]


def keep(services: Collection[Service], addresses: Collection[Addr]) -> None:
    """These virtual services stay for their connections, and the node keeps these addresses. Who
    has made them may go afterwards.
    """
    families = sorted({family_name(service) for service in services})
    tables = [command for family in families for command in begin(family)]
    forward_rules.transaction(*tables, *_elements("add", services))
    for refused in dummy.add(dummy.ensure(DEVICE), addresses).values():
        raise refused


def lead_nobody(face: ipvs.Ipvs, services: Iterable[Service]) -> None:
    """No new connection gets through these virtual services; those that are there go on."""
    face.change(
        [
            ipvs.Change(Command.SET_SERVER, service, server=load.server)
            for service in services
            for load in face.servers(service)
            if load.weight
        ],
        (errno.ESRCH, errno.ENOENT),
    )


def kept(families: Iterable[str]) -> tuple[Service, ...]:
    """The virtual services that stay, of these families, which have the table."""
    listed = (
        one["set"]
        for family in families
        for one in forward_rules.transaction({"list": {"table": {"family": family, "name": TABLE}}})
        if one.get("set", {}).get("name") == SET
    )
    return tuple(sorted(_read(element) for made in listed for element in made.get("elem", ())))


def connections() -> int:
    """How many connections go on by virtual services that stay."""
    services = kept(there())
    if not services:
        return 0
    with closing(ipvs.Ipvs()) as face:
        return sum(face.connections(service) for service in services)


def _end_virtual(families: Collection[str], force: bool) -> tuple[Service, ...]:
    """Removes those without connections; the others. Those that a kube-proxy leads by, which is
    back, are its own, and forgotten here. Its device alone tells nothing: whoever takes its
    leftovers away may be at work just now.
    """
    services = kept(families)
    if not services:
        return ()
    with closing(ipvs.Ipvs()) as face:
        back = dummy.index_or_zero(KUBE_PROXYS)
        theirs = {one for one in services if back and _leads(face, one)}
        ours = [one for one in services if one not in theirs]
        busy = () if force else tuple(one for one in ours if back or face.connections(one))
        ended = [] if back else [one for one in ours if one not in busy]
        face.change([ipvs.Change(Command.DEL_SERVICE, one) for one in ended], (errno.ESRCH,))
    gone = [one for one in services if one not in busy]
    if gone:
        forward_rules.transaction(*_elements("delete", gone))
    if busy:
        unused = {one.address for one in gone} - {one.address for one in busy}
        dummy.drop(dummy.ensure(DEVICE), unused)
    else:
        dummy.remove(DEVICE)
    return busy


def _leads(face: ipvs.Ipvs, service: Service) -> bool:
    """Whether new connections get through."""
    return any(load.weight for load in face.servers(service))


def _elements(verb: str, services: Iterable[Service]) -> list[forward_rules.Json]:
    """Puts them into their sets ("add"), or takes them out ("delete")."""
    by_family: dict[str, list[Any]] = {}
    for one in sorted(services):
        words = [Protocol(one.protocol).name.lower(), format_addr(one.address), one.port]
        by_family.setdefault(family_name(one), []).append({"concat": words})
    return [
        {verb: {"element": {"family": family, "table": TABLE, "name": SET, "elem": elements}}}
        for family, elements in by_family.items()
    ]


def _read(element: forward_rules.Json) -> Service:
    kind, address, port = element["concat"]
    protocol = Protocol(kind) if isinstance(kind, int) else Protocol[str(kind).upper()]
    return Service(protocol, parse_addr(str(address)), int(port))
