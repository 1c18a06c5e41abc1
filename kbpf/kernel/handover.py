"""Connections that somebody's rules have translated live on when those rules go.

The kernel translates by its table of connections (conntrack), where each has what was once decided
for it; rules are asked for the first packet only. But it looks into that table only while some rule
in the network namespace needs it. When the last such rule goes, packets of a connection that is
half an hour old arrive with the wrong addresses, and it is reset.

So whoever takes such rules away puts a table of this name in their place, in the same transaction:
a chain for translation and a rule that asks conntrack, which change nothing. It has to stay until
the last of these connections is over. All of it is about the namespace of the calling thread.
"""

from typing import Any, Final

from kbpf.kernel import conntrack, netfilter

TABLE: Final = "kbpf-handover"


def begin(family: str) -> list[netfilter.Json]:
    """The commands that make the table; nothing changes where it is already."""
    chain = {"family": family, "table": TABLE, "name": "keep"}
    state: dict[str, Any] = {
        "match": {"op": "in", "left": {"ct": {"key": "state"}}, "right": ["established"]}
    }
    return [
        {"add": {"table": {"family": family, "name": TABLE}}},
        {"add": {"chain": {**chain, "type": "nat", "hook": "postrouting", "prio": 100}}},
        {"flush": {"chain": chain}},
        {"add": {"rule": {"family": family, "table": TABLE, "chain": "keep", "expr": [state]}}},
    ]


def there() -> tuple[str, ...]:
    """The families that have the table."""
    listed = [one.get("table", {}) for one in netfilter.transaction({"list": {"tables": None}})]
    ours = {table["family"] for table in listed if table.get("name") == TABLE}
    return tuple(family for family in conntrack.FAMILIES if family in ours)


def end(force: bool = False) -> tuple[str, ...]:
    """Removes the tables that nobody needs any more; with `force` all. The families."""
    gone = tuple(family for family in there() if force or not conntrack.translated(family))
    if gone:
        netfilter.transaction(
            *({"delete": {"table": {"family": family, "name": TABLE}}} for family in gone)
        )
    return gone
