# SPDX-License-Identifier: Apache-2.0
"""The nftables table of `--forwarding netfilter`, in which conntrack translates packets.

The kernel tracks connections only while some rule matches on conntrack, and translates their
packets only while a chain of type nat exists. The chain `nat` provides both, for IPv4 and IPv6, and
changes no packet. The packet programs write the translations (bpf/tc/conntrack.h). The chain `missed`
drops SYNs that they have left to conntrack, but that it does not translate.

Where FORWARD may refuse packets, two other chains give those of masqueraded connections our mark
while they are in FORWARD, where a rule of ours matches it (kernel/netfilter/forward_rules.py). With
`--forwarding stack` the programs do that. Elsewhere nothing looks at the mark, and the chains would
cost each packet as much as the packet programs do.
"""

import contextlib
from typing import Any, Final

from kbpf.errors import KernelError
from kbpf.kernel.bpf import kfuncs
from kbpf.kernel.netfilter import conntrack, forward_rules, nft
from kbpf.takeover import conntrack_keepalive

TABLE: Final = "kbpf-nat"
_MASQUERADED: Final = conntrack.ConntrackStatus.IPS_SRC_NAT | conntrack.ConntrackStatus.IPS_DST_NAT
_TRACKED: Final = "6b62:1"
"""PRIORITY_OF_TRACKED in bpf/tc/conntrack.h, as nftables writes it."""

_AFTER_DNAT = -99
"""A priority in PREROUTING behind the chains of DNAT."""

_BEFORE, _AFTER = -300, 300
"""Priorities around those of the chains that filter."""


class NatTable:
    """Keeps the table as it should be. `mark`: of masqueraded packets."""

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._marks = True
        self._summary: nft.TableSummary | None = None

    def require(self) -> None:
        """Creates the table, which also loads the kernel's modules. If conntrack cannot translate
        for programs on this node, removes it and raises KernelError.
        """
        try:
            self.ensure()
            next(conntrack.iterate_translated_udp("ip"), None)
            with kfuncs.open_conntrack():
                pass
        except KernelError:
            with contextlib.suppress(KernelError):
                retire()
            raise

    def set_marks(self, marks: bool) -> None:
        """Whether packets get the mark, as FORWARD may refuse them."""
        if marks != self._marks:
            self._marks, self._summary = marks, None
            self.ensure()

    def ensure(self) -> bool:
        """Writes the table if another program has changed or deleted it, or an earlier agent left
        it. Returns whether it did.
        """
        if self._summary is not None and self._summary == nft.read_table("inet", TABLE):
            return False
        forward_rules.run_transaction(
            *_delete_commands(),
            *_create_commands(self._mark if self._marks else 0),
            hint="nf_tables has to be available",
        )
        self._summary = nft.read_table("inet", TABLE)
        return True


def exists() -> bool:
    return nft.has_table("inet", TABLE)


def retire() -> bool:
    """Removes the table. Connections that conntrack translates continue as long as they last: the
    table of conntrack_keepalive.py takes over. Returns whether there was a table.
    """
    if not exists():
        return False
    keepalive = [
        command
        for family in conntrack.FAMILIES
        if conntrack.has_dnat_connections(family)
        for command in conntrack_keepalive.table_commands(family)
    ]
    forward_rules.run_transaction(*keepalive, {"delete": {"table": _table()}})
    return True


def _table() -> forward_rules.Json:
    return {"family": "inet", "name": TABLE}


def _delete_commands() -> list[forward_rules.Json]:
    # deletes the table whether it exists or not
    return [{"add": {"table": _table()}}, {"delete": {"table": _table()}}]


def _create_commands(mark: int) -> list[forward_rules.Json]:
    """`mark`: 0 if packets get none."""
    status: dict[str, Any] = {"&": [{"ct": {"key": "status"}}, int(_MASQUERADED)]}
    is_masqueraded = forward_rules.match(status, int(_MASQUERADED))
    current = {"meta": {"key": "mark"}}
    set_mark = {"mangle": {"key": current, "value": {"|": [current, mark]}}}
    clear_mark = {"mangle": {"key": current, "value": {"&": [current, ~mark & 0xFFFFFFFF]}}}
    commands = [
        {"add": {"table": _table()}},
        *conntrack_keepalive.hook_commands("inet", TABLE, "nat"),
        *_chain_commands(
            "missed",
            "prerouting",
            _AFTER_DNAT,
            [forward_rules.match({"meta": {"key": "priority"}}, _TRACKED), {"counter": None}, {"drop": None}],
            type_="nat",
        ),
    ]
    if not mark:
        return commands
    return [
        *commands,
        *_chain_commands("before_forward", "forward", _BEFORE, [is_masqueraded, set_mark]),
        *_chain_commands("after_forward", "forward", _AFTER, [is_masqueraded, clear_mark]),
    ]


def _chain_commands(
    name: str, hook: str, priority: int, expressions: list[forward_rules.Json], type_: str = "filter"
) -> list[forward_rules.Json]:
    chain = {"family": "inet", "table": TABLE, "name": name}
    rule = {"family": "inet", "table": TABLE, "chain": name, "expr": expressions}
    return [
        {"add": {"chain": {**chain, "type": type_, "hook": hook, "prio": priority}}},
        {"add": {"rule": rule}},
    ]
