"""What kbpf writes into somebody else's table: masqueraded packets pass a closed FORWARD.

iptables (by nf_tables) and many CNIs keep `table ip filter` and `table ip6 filter` with a base
chain at the forward hook. Where that chain drops or rejects what nobody in it let pass, packets
that the packet path has translated and marked would be lost. kube-proxy puts a jump at the head of
the chain. Ours stands behind everything that somebody wrote there on purpose, so that it takes the
place of the final refusal and overrules no one: a policy that rejects packets to one pod rejects
ours too, whoever came first. (So does a second rule, for as long as connections of a kube-proxy go
on that has left: takeover/conntrack_keepalive.py.)

Spoken by libnftables in JSON; the chain stays readable for iptables. Rules are known as ours by
their comment, and each change is one transaction. All of it is about the network namespace of the
calling thread.
"""

import errno
import socket
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import Netlink
from kbpf.kernel.net.uapi import (
    NETLINK_NETFILTER,
    NLM_F_REQUEST,
)
from kbpf.kernel.netfilter.uapi import (
    NFNL_SUBSYS_NFTABLES,
    NFT_MSG_GETGEN,
    NFT_MSG_NEWGEN,
    NFTA_GEN_ID,
)
from kbpf.kernel.probe_result import Probe

MASQUERADE_COMMENT: Final = "kbpf: masqueraded"
"""How the comment of a rule of ours begins; the mark follows."""
HANDOVER_COMMENT: Final = "kbpf-handover: connections of kube-proxy"
"""The comment of the rule for those that a kube-proxy has left."""
FILTER_TABLES: Final = (("ip", "filter"), ("ip6", "filter"))
LEGACY_TABLE_NAMES: Final = {
    "ip": Path("/proc/thread-self/net/ip_tables_names"),
    "ip6": Path("/proc/thread-self/net/ip6_tables_names"),
}
UNSUPPORTED_ERRNOS: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))
"""How a kernel without nf_tables answers."""
HINT: Final = "run as root, or let somebody else accept packets with the mark in FORWARD"

_NLMSGHDR: Final = struct.Struct("=IHHII")
_GET_GENERATION: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN
_NEW_GENERATION: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWGEN
_TIMEOUT_S: Final = 2.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChainRule:
    """A rule of the chain. `refuses_all`: it drops or rejects whatever gets to it."""

    handle: int
    comment: str = ""
    refuses_all: bool = False

    @property
    def is_masquerade(self) -> bool:
        """Whether kbpf has put it there for what it masquerades."""
        return self.comment.startswith(MASQUERADE_COMMENT)

    @property
    def is_handover(self) -> bool:
        """Whether kbpf has put it there for what a kube-proxy has begun."""
        return self.comment == HANDOVER_COMMENT

    @property
    def is_foreign(self) -> bool:
        """Whether kbpf has nothing to do with it."""
        return not (self.is_masquerade or self.is_handover)


@dataclass(frozen=True, slots=True)
class BaseChain:
    """A base chain at the forward hook, with its rules in order."""

    family: str
    table: str
    name: str
    policy_drops: bool
    rules: tuple[ChainRule, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether what no rule of others speaks of is refused."""
        return self.policy_drops or any(rule.refuses_all for rule in self.rules)

    @property
    def foreign_rules(self) -> tuple[ChainRule, ...]:
        """The rules that are not ours."""
        return tuple(rule for rule in self.rules if rule.is_foreign)

    @property
    def masquerade_rules(self) -> tuple[ChainRule, ...]:
        """The rules of ours for what kbpf masquerades."""
        return tuple(rule for rule in self.rules if rule.is_masquerade)

    @property
    def handover_rules(self) -> tuple[ChainRule, ...]:
        """The rules of ours for what a kube-proxy has begun."""
        return tuple(rule for rule in self.rules if rule.is_handover)

    @property
    def insert_position(self) -> int:
        """How many rules of others come before ours: all that do not refuse everything."""
        refusing = (i for i, rule in enumerate(self.foreign_rules) if rule.refuses_all)
        return next(refusing, len(self.foreign_rules))

    @property
    def next_handle(self) -> int | None:
        """The handle of the rule that comes behind ours; None if no rule of others does."""
        return (
            self.foreign_rules[self.insert_position].handle
            if self.insert_position < len(self.foreign_rules)
            else None
        )

    def has_masquerade_rule(self, mark: int) -> bool:
        """Whether exactly one rule of ours is there, in its place, for this mark."""
        return self._is_in_place(self.masquerade_rules) and self.masquerade_rules[
            0
        ].comment == masquerade_comment(mark)

    @property
    def has_handover_rule(self) -> bool:
        """Whether exactly one rule is there for what a kube-proxy has begun, in its place."""
        return self._is_in_place(self.handover_rules)

    def _is_in_place(self, rules: Sequence[ChainRule]) -> bool:
        """Whether it is one, and as many rules of others come before it as have to."""
        if len(rules) != 1:
            return False
        before = self.rules[: self.rules.index(rules[0])]
        return sum(rule.is_foreign for rule in before) == self.insert_position

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


def masquerade_comment(mark: int) -> str:
    """What our rule says of itself."""
    return f"{MASQUERADE_COMMENT}, mark {mark:#x}"


# ---- looking -------------------------------------------------------------------------------------


def probe_nf_tables() -> Probe:
    """Whether nf_tables can be spoken to: the library and the kernel."""
    try:
        import nftables

        nftables.Nftables()
    except (ImportError, OSError) as error:
        return Probe(None, f"python3-nftables is missing: {error}")
    try:
        read_generation()
    except KernelError as error:
        return Probe(None, f"this kernel has no nf_tables: {errno.errorcode.get(error.errno)}")
    return Probe(True)


def list_legacy_families() -> tuple[str, ...]:
    """Families that have a filter table of the old iptables, which nobody can look at from here."""
    families = []
    for family, path in LEGACY_TABLE_NAMES.items():
        try:
            names = path.read_text().split()
        except OSError:
            continue  # not loaded
        if "filter" in names:
            families.append(family)
    return tuple(families)


def read_generation() -> int:
    """A number that changes with every change of any nf_tables ruleset of this namespace.

    KernelError where the kernel has no nf_tables, or does not let us look.
    """
    body = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)
    request = (
        _NLMSGHDR.pack(_NLMSGHDR.size + len(body), _GET_GENERATION, NLM_F_REQUEST, 1, 0) + body
    )
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            netlink.send(request)
            reply = netlink.recv(1 << 12)
    except OSError as error:
        raise KernelError(
            "cannot ask nf_tables for its generation", "netlink", HINT, error.errno or 0
        ) from error
    _, type_, *_ = _NLMSGHDR.unpack_from(reply)
    if type_ != _NEW_GENERATION:
        (code,) = struct.unpack_from("=i", reply, _NLMSGHDR.size)
        raise KernelError("cannot ask nf_tables for its generation", "netlink", HINT, -code)
    attrs = reply[_NLMSGHDR.size + len(body) :]
    while len(attrs) >= 4:
        length, type_ = struct.unpack_from("=HH", attrs)
        if type_ == NFTA_GEN_ID:
            return int.from_bytes(attrs[4:8], "big")
        attrs = attrs[max(4, length + 3 & ~3) :]
    return 0


def list_chains() -> list[Json]:
    """All chains, without their rules: what the following look at, if they are not given it."""
    return [
        item["chain"] for item in run_transaction({"list": {"chains": None}}) if "chain" in item
    ]


def list_forward_chains(listing: Iterable[Json] | None = None) -> tuple[BaseChain, ...]:
    """The base chains at the forward hook in the tables that iptables and CNIs share."""
    chains = []
    for chain in list_chains() if listing is None else listing:
        table = chain.get("family", ""), chain.get("table", "")
        if table in FILTER_TABLES and (chain.get("hook"), chain.get("type")) == (
            "forward",
            "filter",
        ):
            name = str(chain["name"])
            rules = _read_rules(*table, name)
            chains.append(BaseChain(*table, name, chain.get("policy") == "drop", rules))
    return tuple(sorted(chains, key=str))


def list_other_drop_chains(listing: Iterable[Json] | None = None) -> tuple[str, ...]:
    """Base chains at the forward hook, in other tables than those, that drop by their policy."""
    names = []
    for chain in list_chains() if listing is None else listing:
        table = chain.get("family", ""), chain.get("table", "")
        if table not in FILTER_TABLES and (chain.get("hook"), chain.get("policy")) == (
            "forward",
            "drop",
        ):
            names.append(" ".join((*table, str(chain["name"]))))
    return tuple(sorted(names))


def list_closed_input_chains(
    listing: Iterable[Json] | None = None, own_table: str = ""
) -> tuple[str, ...]:
    """Base chains at the input hook, in any table, that refuse what nobody in them let in. Rules
    of our own table, `but`, are not read.
    """
    names = []
    for chain in list_chains() if listing is None else listing:
        if (chain["family"], chain["table"]) == ("inet", own_table):
            continue
        if (chain.get("hook"), chain.get("type")) == ("input", "filter"):
            location = chain["family"], chain["table"], str(chain["name"])
            if BaseChain(
                *location, chain.get("policy") == "drop", _read_rules(*location)
            ).is_closed:
                names.append(" ".join(location))
    return tuple(sorted(names))


def _read_rules(family: str, table: str, name: str) -> tuple[ChainRule, ...]:
    items = run_transaction({"list": {"chain": {"family": family, "table": table, "name": name}}})
    return tuple(
        ChainRule(
            int(rule["handle"]), str(rule.get("comment", "")), refuses_all(rule.get("expr", ()))
        )
        for rule in (item["rule"] for item in items if "rule" in item)
    )


def refuses_all(expressions: Collection[Json]) -> bool:
    """Whether a rule of these expressions is nothing but a refusal."""
    effective = [expression for expression in expressions if not _is_neutral(expression)]
    return len(effective) == 1 and _refuses(effective[0])


def _is_neutral(expression: Json) -> bool:
    """Counters, logs and comments: they choose no packets."""
    is_comment = expression.get("xt") == {"type": "match", "name": "comment"}
    return is_comment or bool(expression.keys() & {"counter", "log"})


def _refuses(expression: Json) -> bool:
    target = expression.get("xt", {})
    rejects = (target.get("type"), target.get("name")) == ("target", "REJECT")
    return rejects or bool(expression.keys() & {"drop", "reject"})


# ---- changing ------------------------------------------------------------------------------------


def accept_marked(chain: BaseChain, mark: int) -> None:
    """Makes one rule of ours, for this mark, in its place; older ones go with the same step.

    KernelError with ENOENT when the chain has changed meanwhile: look at it again.
    """
    rule: Json = {
        "family": chain.family,
        "table": chain.table,
        "chain": chain.name,
        "comment": masquerade_comment(mark),
        "expr": [
            {
                "match": {
                    "op": "==",
                    "left": {"&": [{"meta": {"key": "mark"}}, mark]},
                    "right": mark,
                }
            },
            {"counter": None},
            {"accept": None},
        ],
    }
    if chain.next_handle is not None:
        command = {"insert": {"rule": {**rule, "handle": chain.next_handle}}}
    else:
        command = {"add": {"rule": rule}}
    run_transaction(command, *delete_commands(chain, chain.masquerade_rules))


def reconcile_masquerade_rule(chain: BaseChain, mark: int) -> str:
    """Sees to it that packets with this mark pass the chain, by a rule if it is closed and by none
    if it is open; what had to be done, in words, or "".
    """
    if not chain.is_closed:
        return "FORWARD is open again: rule removed" if remove_masquerade_rules(chain) else ""
    if chain.has_masquerade_rule(mark):
        return ""
    accept_marked(chain, mark)
    return "FORWARD is closed: masqueraded packets are let pass"


def remove_masquerade_rules(chain: BaseChain) -> int:
    """Takes our rules out of the chain; how many there were."""
    if chain.masquerade_rules:
        run_transaction(*delete_commands(chain, chain.masquerade_rules))
    return len(chain.masquerade_rules)


def delete_commands(chain: BaseChain, rules: Iterable[ChainRule]) -> list[Json]:
    """The commands that take these rules out of the chain."""
    chain_ref = {"family": chain.family, "table": chain.table, "chain": chain.name}
    return [{"delete": {"rule": {**chain_ref, "handle": rule.handle}}} for rule in rules]


def run_transaction(*commands: Json, hint: str = HINT, dry_run: bool = False) -> list[Json]:
    """What libnftables answers to these commands, which are one transaction. KernelError, with
    ENOENT if something that they name is not there. `dry`: the kernel only looks at them.

    libnftables ends the process, with exit status 3, if it cannot open its netlink socket. So one
    is opened before: when no descriptor is left, for example, the caller gets the error.
    """
    with Netlink(NETLINK_NETFILTER, "nf_tables"):
        pass
    try:
        import nftables

        library = nftables.Nftables()
    except (ImportError, OSError) as error:
        raise KernelError(
            f"libnftables cannot be loaded: {error}", "", "install python3-nftables"
        ) from error
    library.set_handle_output(True)
    library.set_dry_run(dry_run)
    code, reply, error_text = library.json_cmd({"nftables": list(commands)})
    if code:
        lines = str(error_text).strip().splitlines()
        first = lines[0].removeprefix("internal:0:0-0: Error: ") if lines else "no reason given"
        is_missing = "No such file" in str(error_text)
        raise KernelError(
            f"nf_tables refuses: {first}", "", hint, errno.ENOENT if is_missing else 0
        )
    return list(reply["nftables"]) if reply else []
