# SPDX-License-Identifier: Apache-2.0
"""Adds a rule in iptables' own encoding that accepts established connections.

iptables can show its chains in nf_tables only if it understands every rule in them. A single `ct
state` expression of nft makes iptables-save, and what uses it (kube-proxy, most CNIs), give up on
the whole table. iptables itself encodes such a rule with its match `conntrack`, through
nft_compat; libnftables can display that but not create it. So this rule is encoded as netlink
messages here.

All functions act on the network namespace of the calling thread.
"""

import struct
from collections.abc import Iterable
from typing import Final

from kbpf.kernel.net.netlink import (
    NetlinkRequest,
    pack_attribute,
    pack_nested,
    pack_string,
)
from kbpf.kernel.net.uapi import NLM_F_APPEND, NLM_F_CREATE
from kbpf.kernel.netfilter import uapi
from kbpf.kernel.netfilter.nft import NFPROTO, NfTables

_NEW_RULE: Final = uapi.NFNL_SUBSYS_NFTABLES << 8 | uapi.NFT_MSG_NEWRULE
_DEL_RULE: Final = uapi.NFNL_SUBSYS_NFTABLES << 8 | uapi.NFT_MSG_DELRULE
_NFGENMSG: Final = struct.Struct(">BBH")  # the last field, the subsystem, is in network order

_REVISION: Final = 3
_XT_CONNTRACK_MTINFO3: Final = struct.Struct("=128x8x10xHHHH8x2x")
"""struct xt_conntrack_mtinfo3: match_flags, invert_flags, state_mask, status_mask."""


def accept_established(
    chain_key: tuple[str, str, str],
    comment: str,
    next_handle: int | None,
    replaced_handles: Iterable[int],
    generation: int,
) -> None:
    """Adds the rule to this chain (family, table, name), before the rule with `next_handle` or at
    the end, and deletes `replaced_handles`, in one transaction.

    Raises KernelError with ERESTART if the ruleset is no longer of this generation: read it again.
    """
    family, table, chain = chain_key
    chain_header = _NFGENMSG.pack(NFPROTO[family], 0, 0)
    chain_header += pack_string(uapi.NFTA_RULE_TABLE, table) + pack_string(uapi.NFTA_RULE_CHAIN, chain)
    comment_bytes = comment.encode() + b"\0"
    rule = chain_header + pack_nested(uapi.NFTA_RULE_EXPRESSIONS, *_encode_expressions())
    rule += pack_attribute(
        uapi.NFTA_RULE_USERDATA,
        bytes((uapi.NFTNL_UDATA_RULE_COMMENT, len(comment_bytes))) + comment_bytes,
    )
    if next_handle is not None:
        rule += pack_attribute(uapi.NFTA_RULE_POSITION, _pack_be64(next_handle))
    # NLM_F_CREATE alone inserts before POSITION, or at the head of the chain.
    flags = NLM_F_CREATE | (NLM_F_APPEND if next_handle is None else 0)
    delete_bodies = (
        chain_header + pack_attribute(uapi.NFTA_RULE_HANDLE, _pack_be64(handle)) for handle in replaced_handles
    )
    batch_header = _NFGENMSG.pack(0, 0, uapi.NFNL_SUBSYS_NFTABLES)
    with NfTables() as netlink:
        netlink.send_batch(
            NetlinkRequest(
                uapi.NFNL_MSG_BATCH_BEGIN,
                batch_header + pack_attribute(uapi.NFNL_BATCH_GENID, struct.pack(">I", generation)),
            ),
            [
                NetlinkRequest(_NEW_RULE, rule, flags),
                *(NetlinkRequest(_DEL_RULE, deletion) for deletion in delete_bodies),
            ],
            NetlinkRequest(uapi.NFNL_MSG_BATCH_END, batch_header),
        )


def _encode_expressions() -> Iterable[bytes]:
    """Encodes ``-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`` as iptables does."""
    # Structs of xtables are in host order, attributes of nf_tables in network order.
    info = _XT_CONNTRACK_MTINFO3.pack(
        uapi.XT_CONNTRACK_STATE,
        0,
        uapi.XT_CONNTRACK_STATE_BIT_ESTABLISHED | uapi.XT_CONNTRACK_STATE_BIT_RELATED,
        0,
    )
    yield _encode_expression(
        "match",
        pack_string(uapi.NFTA_MATCH_NAME, "conntrack"),
        pack_attribute(uapi.NFTA_MATCH_REV, struct.pack(">I", _REVISION)),
        pack_attribute(uapi.NFTA_MATCH_INFO, info),
    )
    yield _encode_expression(
        "counter",
        pack_attribute(uapi.NFTA_COUNTER_BYTES, bytes(8)),
        pack_attribute(uapi.NFTA_COUNTER_PACKETS, bytes(8)),
    )
    code = pack_attribute(uapi.NFTA_VERDICT_CODE, struct.pack(">I", uapi.NF_ACCEPT))
    yield _encode_expression(
        "immediate",
        pack_attribute(uapi.NFTA_IMMEDIATE_DREG, struct.pack(">I", uapi.NFT_REG_VERDICT)),
        pack_nested(uapi.NFTA_IMMEDIATE_DATA, pack_nested(uapi.NFTA_DATA_VERDICT, code)),
    )


def _encode_expression(name: str, *data: bytes) -> bytes:
    return pack_nested(
        uapi.NFTA_LIST_ELEM,
        pack_string(uapi.NFTA_EXPR_NAME, name),
        pack_nested(uapi.NFTA_EXPR_DATA, *data),
    )


def _pack_be64(handle: int) -> bytes:
    return struct.pack(">Q", handle)
