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
from kbpf.kernel.netfilter.nft import NETLINK_NETFILTER
from kbpf.kernel.probe_result import Probe

COMMENT: Final = "kbpf: masqueraded"
"""How the comment of a rule of ours begins; the mark follows."""
HANDOVER: Final = "kbpf-handover: connections of kube-proxy"
"""The comment of the rule for those that a kube-proxy has left."""
TABLES: Final = (("ip", "filter"), ("ip6", "filter"))
LEGACY: Final = {
    "ip": Path("/proc/thread-self/net/ip_tables_names"),
    "ip6": Path("/proc/thread-self/net/ip6_tables_names"),
}
UNKNOWN: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT))
"""How a kernel without nf_tables answers."""
HINT: Final = "run as root, or let somebody else accept packets with the mark in FORWARD"

_HEADER: Final = struct.Struct("=IHHII")
_GET_GENERATION: Final = 10 << 8 | 16  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETGEN
_NEW_GENERATION: Final = 10 << 8 | 15
_GENERATION_ID: Final = 1  # NFTA_GEN_ID, __be32
_PATIENCE: Final = 2.0

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the chain. `refuses_all`: it drops or rejects whatever gets to it."""

    handle: int
    comment: str = ""
    refuses_all: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether kbpf has put it there for what it masquerades."""
        return self.comment.startswith(COMMENT)

    @property
    def is_handover(self) -> bool:
        """Whether kbpf has put it there for what a kube-proxy has begun."""
        return self.comment == HANDOVER

    @property
    def is_others(self) -> bool:
        """Whether kbpf has nothing to do with it."""
        return not (self.is_ours or self.is_handover)


@dataclass(frozen=True, slots=True)
class Chain:
    """A base chain at the forward hook, with its rules in order."""

    family: str
    table: str
    name: str
    drops: bool
    rules: tuple[Rule, ...] = ()

    @property
    def is_closed(self) -> bool:
        """Whether what no rule of others speaks of is refused."""
        return self.drops or any(rule.refuses_all for rule in self.rules)

    @property
    def others(self) -> tuple[Rule, ...]:
        """The rules that are not ours."""
        return tuple(rule for rule in self.rules if rule.is_others)

    @property
    def ours(self) -> tuple[Rule, ...]:
        """The rules of ours for what kbpf masquerades."""
        return tuple(rule for rule in self.rules if rule.is_ours)

    @property
    def handovers(self) -> tuple[Rule, ...]:
        """The rules of ours for what a kube-proxy has begun."""
        return tuple(rule for rule in self.rules if rule.is_handover)

    @property
    def place(self) -> int:
        """How many rules of others come before ours: all that do not refuse everything."""
        refusing = (i for i, rule in enumerate(self.others) if rule.refuses_all)
        return next(refusing, len(self.others))

    @property
    def before(self) -> int | None:
        """The handle of the rule that comes behind ours; None if no rule of others does."""
        return self.others[self.place].handle if self.place < len(self.others) else None

    def holds(self, mark: int) -> bool:
        """Whether exactly one rule of ours is there, in its place, for this mark."""
        return self._in_place(self.ours) and self.ours[0].comment == comment_of(mark)

    @property
    def hands_over(self) -> bool:
        """Whether exactly one rule is there for what a kube-proxy has begun, in its place."""
        return self._in_place(self.handovers)

    def _in_place(self, ours: Sequence[Rule]) -> bool:
        """Whether it is one, and as many rules of others come before it as have to."""
        if len(ours) != 1:
            return False
        before = self.rules[: self.rules.index(ours[0])]
        return sum(rule.is_others for rule in before) == self.place

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


def comment_of(mark: int) -> str:
    """What our rule says of itself."""
    return f"{COMMENT}, mark {mark:#x}"


# ---- looking -------------------------------------------------------------------------------------


def available() -> Probe:
    """Whether nf_tables can be spoken to: the library and the kernel."""
    try:
        import nftables

        nftables.Nftables()
    except (ImportError, OSError) as error:
        return Probe(None, f"python3-nftables is missing: {error}")
    try:
        generation()
    except KernelError as error:
        return Probe(None, f"this kernel has no nf_tables: {errno.errorcode.get(error.errno)}")
    return Probe(True)


def legacy_tables() -> tuple[str, ...]:
    """Families that have a filter table of the old iptables, which nobody can look at from here."""
    found = []
    for family, path in LEGACY.items():
        try:
            names = path.read_text().split()
        except OSError:
            continue  # not loaded
        if "filter" in names:
            found.append(family)
    return tuple(found)


def generation() -> int:
    """A number that changes with every change of any nf_tables ruleset of this namespace.

    KernelError where the kernel has no nf_tables, or does not let us look.
    """
    body = struct.pack("=BBH", socket.AF_UNSPEC, 0, 0)
    asked = _HEADER.pack(_HEADER.size + len(body), _GET_GENERATION, 1, 1, 0) + body
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as netlink:  # NETLINK_NETFILTER
            netlink.settimeout(_PATIENCE)
            netlink.send(asked)
            answer = netlink.recv(1 << 12)
    except OSError as error:
        raise KernelError(
            "cannot ask nf_tables for its generation", "netlink", HINT, error.errno or 0
        ) from error
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _NEW_GENERATION:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        raise KernelError("cannot ask nf_tables for its generation", "netlink", HINT, -code)
    rest = answer[_HEADER.size + len(body) :]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if kind == _GENERATION_ID:
            return int.from_bytes(rest[4:8], "big")
        rest = rest[max(4, length + 3 & ~3) :]
    return 0


def list_chains() -> list[Json]:
    """All chains, without their rules: what the following look at, if they are not given it."""
    return [one["chain"] for one in transaction({"list": {"chains": None}}) if "chain" in one]


def forward_chains(listed: Iterable[Json] | None = None) -> tuple[Chain, ...]:
    """The base chains at the forward hook in the tables that iptables and CNIs share."""
    found = []
    for chain in list_chains() if listed is None else listed:
        where = chain.get("family", ""), chain.get("table", "")
        if where in TABLES and (chain.get("hook"), chain.get("type")) == ("forward", "filter"):
            name = str(chain["name"])
            rules = _rules(*where, name)
            found.append(Chain(*where, name, chain.get("policy") == "drop", rules))
    return tuple(sorted(found, key=str))


def other_drops(listed: Iterable[Json] | None = None) -> tuple[str, ...]:
    """Base chains at the forward hook, in other tables than those, that drop by their policy."""
    found = []
    for chain in list_chains() if listed is None else listed:
        where = chain.get("family", ""), chain.get("table", "")
        if where not in TABLES and (chain.get("hook"), chain.get("policy")) == ("forward", "drop"):
            found.append(" ".join((*where, str(chain["name"]))))
    return tuple(sorted(found))


def closed_inputs(listed: Iterable[Json] | None = None, but: str = "") -> tuple[str, ...]:
    """Base chains at the input hook, in any table, that refuse what nobody in them let in. Rules
    of our own table, `but`, are not read.
    """
    found = []
    for chain in list_chains() if listed is None else listed:
        if (chain["family"], chain["table"]) == ("inet", but):
            continue
        if (chain.get("hook"), chain.get("type")) == ("input", "filter"):
            where = chain["family"], chain["table"], str(chain["name"])
            if Chain(*where, chain.get("policy") == "drop", _rules(*where)).is_closed:
                found.append(" ".join(where))
    return tuple(sorted(found))


def _rules(family: str, table: str, name: str) -> tuple[Rule, ...]:
    listed = transaction({"list": {"chain": {"family": family, "table": table, "name": name}}})
    return tuple(
        Rule(int(rule["handle"]), str(rule.get("comment", "")), refuses_all(rule.get("expr", ())))
        for rule in (one["rule"] for one in listed if "rule" in one)
    )


def refuses_all(expressions: Collection[Json]) -> bool:
    """Whether a rule of these expressions is nothing but a refusal."""
    left = [one for one in expressions if not _says_nothing(one)]
    return len(left) == 1 and _refuses(left[0])


def _says_nothing(expression: Json) -> bool:
    """Counters, logs and comments: they choose no packets."""
    note = expression.get("xt") == {"type": "match", "name": "comment"}
    return note or bool(expression.keys() & {"counter", "log"})


def _refuses(expression: Json) -> bool:
    target = expression.get("xt", {})
    rejects = (target.get("type"), target.get("name")) == ("target", "REJECT")
    return rejects or bool(expression.keys() & {"drop", "reject"})


# ---- changing ------------------------------------------------------------------------------------


def accept_marked(chain: Chain, mark: int) -> None:
    """Makes one rule of ours, for this mark, in its place; older ones go with the same step.

    KernelError with ENOENT when the chain has changed meanwhile: look at it again.
    """
    rule: Json = {
        "family": chain.family,
        "table": chain.table,
        "chain": chain.name,
        "comment": comment_of(mark),
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
    if chain.before is not None:
        made = {"insert": {"rule": {**rule, "handle": chain.before}}}
    else:
        made = {"add": {"rule": rule}}
    transaction(made, *deletions(chain, chain.ours))


def let_pass(chain: Chain, mark: int) -> str:
    """Sees to it that packets with this mark pass the chain, by a rule if it is closed and by none
    if it is open; what had to be done, in words, or "".
    """
    if not chain.is_closed:
        return "FORWARD is open again: rule removed" if remove_ours(chain) else ""
    if chain.holds(mark):
        return ""
    accept_marked(chain, mark)
    return "FORWARD is closed: masqueraded packets are let pass"


def remove_ours(chain: Chain) -> int:
    """Takes our rules out of the chain; how many there were."""
    if chain.ours:
        transaction(*deletions(chain, chain.ours))
    return len(chain.ours)


def deletions(chain: Chain, rules: Iterable[Rule]) -> list[Json]:
    """The commands that take these rules out of the chain."""
    where = {"family": chain.family, "table": chain.table, "chain": chain.name}
    return [{"delete": {"rule": {**where, "handle": rule.handle}}} for rule in rules]


def transaction(*commands: Json, hint: str = HINT, dry: bool = False) -> list[Json]:
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
    library.set_dry_run(dry)
    code, answer, problem = library.json_cmd({"nftables": list(commands)})
    if code:
        said = str(problem).strip().splitlines()
        first = said[0].removeprefix("internal:0:0-0: Error: ") if said else "no reason given"
        gone = "No such file" in str(problem)
        raise KernelError(f"nf_tables refuses: {first}", "", hint, errno.ENOENT if gone else 0)
    return list(answer["nftables"]) if answer else []
