# SPDX-License-Identifier: Apache-2.0
"""`python -m kbpf.kernel.net.dump KIND [4|6]`: what `ip` and `tc` list, as a line of JSON each, for
machines without iproute2. `kbpf sysdump` runs it as a separate process: pyroute2 takes 20 MB.
"""

import json
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from pyroute2 import IPRoute

FAMILIES: Final = {"4": socket.AF_INET, "6": socket.AF_INET6}
INGRESS, EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
"""TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS and TC_H_MIN_EGRESS)"""

Lister = Callable[[IPRoute, int], Iterable[Any]]


def _list_filters(netlink: IPRoute, _: int) -> Iterable[Any]:
    for link in netlink.get_links():
        for parent in (INGRESS, EGRESS):
            yield from netlink.get_filters(index=link["index"], parent=parent)


LISTERS: Final[dict[str, Lister]] = {
    "links": lambda netlink, family: netlink.get_links(),
    "addresses": lambda netlink, family: netlink.get_addr(),
    "rules": lambda netlink, family: netlink.get_rules(family=family),
    "routes": lambda netlink, family: netlink.get_routes(family=family),
    "neighbours": lambda netlink, family: netlink.get_neighbours(),
    "qdiscs": lambda netlink, family: netlink.get_qdiscs(),
    "filters": _list_filters,
}


def to_plain(value: Any) -> Any:
    """A message of pyroute2 as plain JSON: its attributes are pairs of name and value."""
    match value:
        case bytes():
            return value.hex()
        case dict():
            fields = {str(k): to_plain(v) for k, v in value.items() if k not in ("header", "attrs")}
            attributes = value.get("attrs") or ()
            return fields | {str(pair[0]): to_plain(pair[1]) for pair in attributes}
        case list() | tuple():
            return [to_plain(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
    return str(value)


def main(kind: str, family: str = "4") -> int:
    with IPRoute() as netlink:
        for message in LISTERS[kind](netlink, FAMILIES[family]):
            print(json.dumps(to_plain(message)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
