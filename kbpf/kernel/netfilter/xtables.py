"""A rule of nf_tables in iptables' own words: it accepts what conntrack calls established.

iptables reads its chains in nf_tables only as long as it can say every rule of them itself: with
one `ct state` of nft's, iptables-save and whoever uses it (kube-proxy, most CNIs) give up on the
whole table. What it writes itself is its match `conntrack`, by the kernel's nft_compat, and that
libnftables shows, but does not write. So this one rule is spoken by netlink.

About the network namespace of the calling thread.
"""

import struct
from collections.abc import Iterable
from typing import Final

from kbpf.kernel.net.netlink import Netlink, Request, attribute
from kbpf.kernel.netfilter.nft import FAMILIES, NETLINK_NETFILTER

_SUBSYSTEM: Final = 10  # NFNL_SUBSYS_NFTABLES
_NEW_RULE: Final = _SUBSYSTEM << 8 | 6
_DELETE_RULE: Final = _SUBSYSTEM << 8 | 8
_BEGIN, _END = 0x10, 0x11  # NFNL_MSG_BATCH_*
_CREATE: Final = 0x400  # NLM_F_CREATE: before POSITION, or first of the chain
_APPEND: Final = 0x800
_NESTED: Final = 0x8000
_GENERATION: Final = 1  # NFNL_BATCH_GENID
_TABLE, _CHAIN, _HANDLE, _EXPRESSIONS, _POSITION, _USERDATA = 1, 2, 3, 4, 6, 7  # NFTA_RULE_*
_COMMENT: Final = 0  # NFTNL_UDATA_RULE_COMMENT: type, length, text
_HEADER: Final = struct.Struct(">BBH")
_ACCEPT: Final = struct.pack(">I", 1)  # NF_ACCEPT

_REVISION: Final = 3
_CONNTRACK: Final = struct.Struct("=128x8x10xHHHH8x2x")
"""struct xt_conntrack_mtinfo3: match_flags, invert_flags, state_mask, status_mask."""
_STATE: Final = 1  # XT_CONNTRACK_STATE
_ESTABLISHED, _RELATED = 1 << 1, 1 << 2  # XT_CONNTRACK_STATE_BIT


def accept_established(
    where: tuple[str, str, str],
    comment: str,
    before: int | None,
    instead_of: Iterable[int],
    generation: int,
) -> None:
    """Makes the rule in this chain (its family, table and name) before the rule with that handle,
    or behind all, and removes others; one transaction. KernelError with ERESTART if the rules are
    not those of that generation any more: look at them again.
    """
    family, table, chain = where
    here = _HEADER.pack(FAMILIES[family], 0, 0)
    here += attribute(_TABLE, _name(table)) + attribute(_CHAIN, _name(chain))
    note = comment.encode() + b"\0"
    made = here + _nest(_EXPRESSIONS, *_expressions())
    made += attribute(_USERDATA, bytes((_COMMENT, len(note))) + note)
    if before is not None:
        made += attribute(_POSITION, _wide(before))
    flags = _CREATE | (_APPEND if before is None else 0)
    deletions = (here + attribute(_HANDLE, _wide(handle)) for handle in instead_of)
    edge = _HEADER.pack(0, 0, _SUBSYSTEM)
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        netlink.batch(
            Request(_BEGIN, edge + attribute(_GENERATION, struct.pack(">I", generation))),
            [Request(_NEW_RULE, made, flags), *(Request(_DELETE_RULE, one) for one in deletions)],
            Request(_END, edge),
        )


def _expressions() -> Iterable[bytes]:
    """As iptables writes ``-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT``."""
    info = _CONNTRACK.pack(_STATE, 0, _ESTABLISHED | _RELATED, 0)
    revision = attribute(2, struct.pack(">I", _REVISION))
    yield _expression("match", attribute(1, _name("conntrack")), revision, attribute(3, info))
    yield _expression("counter", attribute(1, bytes(8)), attribute(2, bytes(8)))
    verdict = _nest(2, _nest(2, attribute(1, _ACCEPT)))  # NFTA_IMMEDIATE_DATA, NFTA_DATA_VERDICT
    yield _expression("immediate", attribute(1, bytes(4)), verdict)


def _expression(name: str, *data: bytes) -> bytes:
    return _nest(1, attribute(1, _name(name)), _nest(2, *data))


def _nest(kind: int, *inner: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(inner))


def _name(word: str) -> bytes:
    return word.encode() + b"\0"


def _wide(handle: int) -> bytes:
    return struct.pack(">Q", handle)
