# SPDX-License-Identifier: Apache-2.0
"""Rules that kbpf adds to tables of other programs, so that masqueraded packets pass FORWARD.

iptables-nft and many CNIs have `table ip filter` and `table ip6 filter` with a base chain at the
forward hook. If that chain drops or rejects by default, packets that the packet path translated
and marked would be lost. kube-proxy inserts a jump at the head of the chain. Our rule comes after
all specific rules and just before the final refusal, so it replaces only the default: a policy
that rejects packets to one pod also rejects ours, no matter which rule was added first. (The same
holds for a second rule that accepts connections of a kube-proxy that has been removed, see
takeover/conntrack_keepalive.py.)

Rules are added through libnftables in JSON; the chain stays readable for iptables. Our rules are
recognized by their comment, and each change is one transaction. All functions act on the network
namespace of the calling thread.
"""

import errno
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kbpf.errors import KernelError
from kbpf.kernel.net.netlink import parse_attributes
from kbpf.kernel.netfilter import iptables_legacy, nft
from kbpf.kernel.netfilter.uapi import NFNL_SUBSYS_NFTABLES, NFT_MSG_GETGEN, NFTA_GEN_ID
from kbpf.kernel.probe_result import Probe

MASQUERADE_COMMENT: Final = "kbpf: masqueraded"
"""Prefix of the comment of our rule for masqueraded packets; the mark follows."""
KEEPALIVE_COMMENT: Final = "kbpf-keepalive: connections of kube-proxy"
"""The comment of our rule for connections of a removed kube-proxy."""
FILTER_TABLES: Final = (("ip", "filter"), ("ip6", "filter"))
SERVICE_PROXY_TABLES: Final = frozenset(("kube-proxy", "kbpf", "kbpf-keepalive", "kbpf-nat"))
"""Tables of Service proxies: their own rules are not a firewall of the host."""
UNSUPPORTED_ERRNOS: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))
"""How a kernel without nf_tables replies."""
HINT: Final = "run as root, or accept packets with the mark in FORWARD by other means"

_GET_GENERATION: Final = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN
_TIMEOUT_S: Final = 2.0
_library_lock: Final = threading.Lock()

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChainRule:
    """A rule of a chain. `refuses_all`: it unconditionally drops or rejects."""

    handle: int
    comment: str = ""
    refuses_all: bool = False

    @property
    def is_masquerade(self) -> bool:
        """Whether it is our rule for masqueraded packets."""
        return self.comment.startswith(MASQUERADE_COMMENT)

    @property
    def is_keepalive(self) -> bool:
        """Whether it is our rule for connections of a removed kube-proxy."""
        return self.comment == KEEPALIVE_COMMENT

    @property
    def is_foreign(self) -> bool:
        """Whether it is not ours."""
        return not (self.is_masquerade or self.is_keepalive)


@dataclass(frozen=True, slots=True)
class BaseChain:
    """A base chain at the forward or input hook, with its rules in order."""

    family: str
    table: str
    name: str
    policy_drops: bool
    rules: tuple[ChainRule, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether it refuses packets by default: by its policy or by an unconditional rule."""
        return self.policy_drops or any(rule.refuses_all for rule in self.rules)

    @property
    def foreign_rules(self) -> tuple[ChainRule, ...]:
        return tuple(rule for rule in self.rules if rule.is_foreign)  # in the chain's order

    @property
    def masquerade_rules(self) -> tuple[ChainRule, ...]:
        """Our rules for masqueraded packets."""
        return tuple(rule for rule in self.rules if rule.is_masquerade)

    @property
    def keepalive_rules(self) -> tuple[ChainRule, ...]:
        """Our rules for connections of a removed kube-proxy."""
        return tuple(rule for rule in self.rules if rule.is_keepalive)

    @property
    def insert_position(self) -> int:
        """How many foreign rules come before ours: all up to the first unconditional refusal."""
        refusing = (i for i, rule in enumerate(self.foreign_rules) if rule.refuses_all)
        return next(refusing, len(self.foreign_rules))

    @property
    def next_handle(self) -> int | None:
        """The handle of the foreign rule that follows ours; None if ours is last."""
        following = self.foreign_rules[self.insert_position :]
        return following[0].handle if following else None

    def has_masquerade_rule(self, mark: int) -> bool:
        """Whether there is exactly one rule of ours for masqueraded packets, at the right position
        and for this mark.
        """
        return self._is_in_place(self.masquerade_rules) and self.masquerade_rules[0].comment == masquerade_comment(mark)

    @property
    def has_keepalive_rule(self) -> bool:
        """Whether there is exactly one rule for connections of a removed kube-proxy, at the right
        position.
        """
        return self._is_in_place(self.keepalive_rules)

    def _is_in_place(self, rules: Sequence[ChainRule]) -> bool:
        """Whether this is one rule with `insert_position` foreign rules before it."""
        if len(rules) != 1:
            return False
        before = self.rules[: self.rules.index(rules[0])]
        return sum(rule.is_foreign for rule in before) == self.insert_position

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


def masquerade_comment(mark: int) -> str:
    """The comment of our rule for this mark."""
    return f"{MASQUERADE_COMMENT}, mark {mark:#x}"


# ---- reading -------------------------------------------------------------------------------------


def probe_nf_tables() -> Probe:
    """Whether nf_tables is usable: the library and the kernel."""
    # The kernel first: without nfnetlink, libnftables would end this process (see run_transaction).
    try:
        read_generation()
    except KernelError as error:
        return Probe(None, f"this kernel has no nf_tables: {errno.errorcode.get(error.errno)}")
    try:
        import nftables

        nftables.Nftables()
    except (ImportError, OSError) as error:
        return Probe(None, f"python3-nftables is missing: {error}")
    return Probe(True)


def list_legacy_families() -> tuple[str, ...]:
    """The families that have a filter table of iptables-legacy, which cannot be read from here."""
    families = iptables_legacy.FAMILIES
    return tuple(family for family in families if "filter" in iptables_legacy.list_tables(family))


def read_generation() -> int:
    """Reads the generation, a number that changes with every change of any ruleset in this
    namespace.

    Raises KernelError if the kernel has no nf_tables, or without permission.
    """
    # struct nfgenmsg: family, version, res_id
    body = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)
    try:
        with nft.NfTables() as netlink:
            netlink.socket.settimeout(_TIMEOUT_S)
            (reply,) = netlink.request(_GET_GENERATION, body)
    except KernelError as error:
        problem = "cannot read the generation of nf_tables"
        raise KernelError(problem, "netlink", HINT, error.errno) from error
    # Headers are in host byte order, values of nf_tables in network byte order.
    return int.from_bytes(parse_attributes(reply.body[len(body) :])[NFTA_GEN_ID], "big")


def list_forward_chains(listing: Iterable[Json] | None = None) -> tuple[BaseChain, ...]:
    """The base chains at the forward hook in the tables that iptables and CNIs share."""
    chains = []
    for chain in nft.list_chains() if listing is None else listing:
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
    """The base chains at the forward hook in all other tables that refuse packets by default."""
    # A packet passes the base chains of all tables, and a drop in one is final: a rule of ours in
    # another table could not help, and these tables belong to other programs.
    names = []
    for chain in nft.list_chains() if listing is None else listing:
        location = chain.get("family", ""), chain.get("table", ""), str(chain["name"])
        if location[:2] in FILTER_TABLES or chain.get("hook") != "forward":
            continue
        policy_drops = chain.get("policy") == "drop"
        # firewalld's chain ends in a rule that rejects
        needs_rules = not policy_drops and location[1] not in SERVICE_PROXY_TABLES
        rules = _read_rules(*location) if needs_rules else ()
        if BaseChain(*location, policy_drops, rules).is_closed:
            names.append(" ".join(location))
    return tuple(sorted(names))


def list_closed_input_chains(listing: Iterable[Json] | None = None, own_table: str = "") -> tuple[str, ...]:
    """The base chains at the input hook, in any table, that refuse packets by default.
    `own_table`: our own table, which is skipped.
    """
    names = []
    for chain in nft.list_chains() if listing is None else listing:
        if (chain["family"], chain["table"]) == ("inet", own_table):
            continue
        if (chain.get("hook"), chain.get("type")) == ("input", "filter"):
            location = chain["family"], chain["table"], str(chain["name"])
            if BaseChain(*location, chain.get("policy") == "drop", _read_rules(*location)).is_closed:
                names.append(" ".join(location))
    return tuple(sorted(names))


def _read_rules(family: str, table: str, name: str) -> tuple[ChainRule, ...]:
    return tuple(
        ChainRule(rule.handle, rule.comment, refuses_all(rule.expressions))
        for rule in nft.list_rules(family, table, name)
    )


def refuses_all(expressions: Iterable[nft.Expression]) -> bool:
    """Whether a rule with these expressions refuses all packets."""
    effective = [expression for expression in expressions if not expression.is_neutral]
    return len(effective) == 1 and effective[0].refuses


# ---- changing ------------------------------------------------------------------------------------


def match(operand: Json, value: Any, operator: str = "==") -> Json:
    """The expression that compares these, for a rule of libnftables."""
    return {"match": {"op": operator, "left": operand, "right": value}}


def accept_marked(chain: BaseChain, mark: int) -> None:
    """Adds our rule for this mark at the right position and deletes older ones, in one
    transaction.

    Raises KernelError with ENOENT if the chain has changed meanwhile: read it again.
    """
    rule: Json = {
        "family": chain.family,
        "table": chain.table,
        "chain": chain.name,
        "comment": masquerade_comment(mark),
        "expr": [
            # only our bit: others may have set other bits of the mark
            match({"&": [{"meta": {"key": "mark"}}, mark]}, mark),
            {"counter": None},
            {"accept": None},
        ],
    }
    # "insert" with a handle puts the rule before that rule; "add" without a handle puts it last.
    if chain.next_handle is not None:
        command = {"insert": {"rule": {**rule, "handle": chain.next_handle}}}
    else:
        command = {"add": {"rule": rule}}
    run_transaction(command, *delete_commands(chain, chain.masquerade_rules))


def reconcile_masquerade_rule(chain: BaseChain, mark: int) -> str:
    """Adds or removes our rule, depending on whether the chain refuses by default, and returns a
    line about the change, or "".
    """
    if not chain.is_closed:
        return (
            "FORWARD accepts by default again: removed the rule for masqueraded packets"
            if remove_masquerade_rules(chain)
            else ""
        )
    if chain.has_masquerade_rule(mark):
        return ""
    accept_marked(chain, mark)
    return "FORWARD drops by default: added a rule that accepts masqueraded packets"


def remove_masquerade_rules(chain: BaseChain) -> int:
    """Deletes our rules for masqueraded packets; returns how many there were."""
    if chain.masquerade_rules:
        run_transaction(*delete_commands(chain, chain.masquerade_rules))
    return len(chain.masquerade_rules)


def delete_commands(chain: BaseChain, rules: Iterable[ChainRule]) -> list[Json]:
    """Returns the commands that delete these rules."""
    chain_ref = {"family": chain.family, "table": chain.table, "chain": chain.name}
    return [{"delete": {"rule": {**chain_ref, "handle": rule.handle}}} for rule in rules]


def run_transaction(*commands: Json, hint: str = HINT, dry_run: bool = False) -> list[Json]:
    """Runs commands as one transaction; returns the output of libnftables. With `dry_run` the
    kernel only checks them. Raises KernelError, with ENOENT if an object named in them does not
    exist.

    libnftables exits the process with status 3 if it cannot open its netlink socket. So we open
    one first: if no descriptor is left, for example, the caller gets an error.

    Any thread may call, but they wait for each other: libnftables caches names of devices and
    extensions in global variables.
    """
    with nft.NfTables():
        pass
    try:
        import nftables

        library = nftables.Nftables()
    except (ImportError, OSError) as error:
        raise KernelError(f"libnftables cannot be loaded: {error}", "", "install python3-nftables") from error
    library.set_handle_output(True)  # rules are deleted by their handles
    library.set_dry_run(dry_run)
    with _library_lock:
        code, reply, error_text = library.json_cmd({"nftables": list(commands)})
    if code:
        lines = str(error_text).strip().splitlines()
        first = lines[0].removeprefix("internal:0:0-0: Error: ") if lines else "no reason given"
        is_missing = "No such file" in str(error_text)  # libnftables returns no errno
        raise KernelError(
            f"nftables refused the transaction: {first}",
            "",
            hint,
            errno.ENOENT if is_missing else 0,
        )
    return list(reply["nftables"]) if reply else []


def show_rule(location: str, handle: str) -> str:
    """A rule of a chain ("ip nat PREROUTING") as `nft -a -s` shows it; "" if it cannot be shown."""
    import nftables

    library = nftables.Nftables()
    library.set_handle_output(True)
    library.set_stateless_output(True)
    with _library_lock:
        _, listing, _ = library.cmd(f"list chain {location}")
    return next((line.strip() for line in listing.splitlines() if line.endswith(f"# handle {handle}")), "")
