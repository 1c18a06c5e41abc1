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

from kbpf.kernel.net.netlink import Netlink, NetlinkRequest, pack_attribute
from kbpf.kernel.netfilter.nft import NETLINK_NETFILTER, NFPROTO

_NFNL_SUBSYS_NFTABLES: Final = 10  # NFNL_SUBSYS_NFTABLES
_NFT_MSG_NEWRULE: Final = _NFNL_SUBSYS_NFTABLES << 8 | 6
_NFT_MSG_DELRULE: Final = _NFNL_SUBSYS_NFTABLES << 8 | 8
_NFNL_MSG_BATCH_BEGIN, _NFNL_MSG_BATCH_END = 0x10, 0x11  # NFNL_MSG_BATCH_*
_NLM_F_CREATE: Final = 0x400  # NLM_F_CREATE: before POSITION, or first of the chain
_NLM_F_APPEND: Final = 0x800
_NLA_F_NESTED: Final = 0x8000
_NFNL_BATCH_GENID: Final = 1  # NFNL_BATCH_GENID
(
    _NFTA_RULE_TABLE,
    _NFTA_RULE_CHAIN,
    _NFTA_RULE_HANDLE,
    _NFTA_RULE_EXPRESSIONS,
    _NFTA_RULE_POSITION,
    _NFTA_RULE_USERDATA,
) = 1, 2, 3, 4, 6, 7  # NFTA_RULE_*
_NFTNL_UDATA_RULE_COMMENT: Final = 0  # NFTNL_UDATA_RULE_COMMENT: type, length, text
_NFGENMSG: Final = struct.Struct(">BBH")
_NF_ACCEPT: Final = struct.pack(">I", 1)  # NF_ACCEPT

_REVISION: Final = 3
_XT_CONNTRACK_MTINFO3: Final = struct.Struct("=128x8x10xHHHH8x2x")
"""struct xt_conntrack_mtinfo3: match_flags, invert_flags, state_mask, status_mask."""
_XT_CONNTRACK_STATE: Final = 1  # XT_CONNTRACK_STATE
_STATE_BIT_ESTABLISHED, _STATE_BIT_RELATED = 1 << 1, 1 << 2  # XT_CONNTRACK_STATE_BIT


def accept_established(
    chain_key: tuple[str, str, str],
    comment: str,
    next_handle: int | None,
    replaced_handles: Iterable[int],
    generation: int,
) -> None:
    """Makes the rule in this chain (its family, table and name) before the rule with that handle,
    or behind all, and removes others; one transaction. KernelError with ERESTART if the rules are
    not those of that generation any more: look at them again.
    """
    family, table, chain = chain_key
    chain_header = _NFGENMSG.pack(NFPROTO[family], 0, 0)
    chain_header += pack_attribute(_NFTA_RULE_TABLE, _encode_name(table)) + pack_attribute(
        _NFTA_RULE_CHAIN, _encode_name(chain)
    )
    comment_bytes = comment.encode() + b"\0"
    rule = chain_header + _nest(_NFTA_RULE_EXPRESSIONS, *_encode_expressions())
    rule += pack_attribute(
        _NFTA_RULE_USERDATA, bytes((_NFTNL_UDATA_RULE_COMMENT, len(comment_bytes))) + comment_bytes
    )
    if next_handle is not None:
        rule += pack_attribute(_NFTA_RULE_POSITION, _pack_be64(next_handle))
    flags = _NLM_F_CREATE | (_NLM_F_APPEND if next_handle is None else 0)
    delete_bodies = (
        chain_header + pack_attribute(_NFTA_RULE_HANDLE, _pack_be64(handle))
        for handle in replaced_handles
    )
    batch_header = _NFGENMSG.pack(0, 0, _NFNL_SUBSYS_NFTABLES)
    with Netlink(NETLINK_NETFILTER, "nf_tables") as netlink:
        netlink.send_batch(
            NetlinkRequest(
                _NFNL_MSG_BATCH_BEGIN,
                batch_header + pack_attribute(_NFNL_BATCH_GENID, struct.pack(">I", generation)),
            ),
            [
                NetlinkRequest(_NFT_MSG_NEWRULE, rule, flags),
                *(NetlinkRequest(_NFT_MSG_DELRULE, deletion) for deletion in delete_bodies),
            ],
            NetlinkRequest(_NFNL_MSG_BATCH_END, batch_header),
        )


def _encode_expressions() -> Iterable[bytes]:
    """As iptables writes ``-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT``."""
    info = _XT_CONNTRACK_MTINFO3.pack(
        _XT_CONNTRACK_STATE, 0, _STATE_BIT_ESTABLISHED | _STATE_BIT_RELATED, 0
    )
    revision = pack_attribute(2, struct.pack(">I", _REVISION))
    yield _encode_expression(
        "match", pack_attribute(1, _encode_name("conntrack")), revision, pack_attribute(3, info)
    )
    yield _encode_expression("counter", pack_attribute(1, bytes(8)), pack_attribute(2, bytes(8)))
    verdict = _nest(
        2, _nest(2, pack_attribute(1, _NF_ACCEPT))
    )  # NFTA_IMMEDIATE_DATA, NFTA_DATA_VERDICT
    yield _encode_expression("immediate", pack_attribute(1, bytes(4)), verdict)


def _encode_expression(name: str, *data: bytes) -> bytes:
    return _nest(1, pack_attribute(1, _encode_name(name)), _nest(2, *data))


def _nest(attr_type: int, *inner: bytes) -> bytes:
    return pack_attribute(attr_type | _NLA_F_NESTED, b"".join(inner))


def _encode_name(name: str) -> bytes:
    return name.encode() + b"\0"


def _pack_be64(handle: int) -> bytes:
    return struct.pack(">Q", handle)
