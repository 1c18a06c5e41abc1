# SPDX-License-Identifier: Apache-2.0
"""The verdict of `kbpf check`: what follows from its rows."""

from collections.abc import Sequence
from typing import Final

import msgspec

from kbpf.checks.row import Check, CheckRow

REFUSALS: Final = frozenset((Check.BALANCERS, Check.OTHER_KBPF))
"""If one of these rules out mode bpf, `--mode auto` does not start: IPVS would not help."""


class CheckVerdict(msgspec.Struct, frozen=True):
    """What follows from all rows.

    `mode`: what `--mode auto` would select: "bpf", "ipvs" or "none". `missing` and `ipvs_missing`:
    the rows that rule out mode bpf and mode ipvs. `packet_path`: whether the packet path can be
    switched on; `packets_missing`: the rows that rule it out. `attached`: whether the hooks passed
    their test; None without --attached.
    """

    usable: bool
    mode: str
    attached: bool | None
    missing: tuple[str, ...]
    ipvs_missing: tuple[str, ...]
    packet_path: bool
    packets_missing: tuple[str, ...]


class CheckItem(msgspec.Struct, frozen=True):
    """A row as JSON and YAML show it.

    `name`: what was checked. `result` is ``yes``, ``no`` or ``unknown``, `detail` what was found
    and what it means, and `advice` what to do about it, "" if nothing. Whether something does not
    work without it: `needed`: mode bpf; `packets`: the packet path; `ipvs`: mode ipvs.
    """

    name: str
    result: str
    needed: bool
    detail: str
    advice: str
    packets: bool
    ipvs: bool


def compute_verdict(check_rows: Sequence[CheckRow], proof: Sequence[CheckRow] | None = None) -> CheckVerdict:
    """Computes the verdict. "unknown" counts as missing for mode bpf, but not for mode ipvs: its
    kernel modules may be available even if that cannot be tested from here.
    """
    missing = tuple(row.name for row in check_rows if row.needed and row.result != "yes")
    attached = None if proof is None else all(row.result == "yes" for row in proof)
    packets_missing = tuple(row.name for row in check_rows if row.packets and row.result != "yes")
    ipvs = [row for row in check_rows if row.ipvs]
    ipvs_missing = tuple(row.name for row in ipvs if row.result == "no")
    fallback_mode = "ipvs" if ipvs and not ipvs_missing else "none"
    is_refused = any(row.check in REFUSALS and row.needed and row.result == "no" for row in check_rows)
    mode = "none" if is_refused else fallback_mode if missing else "bpf"
    return CheckVerdict(
        usable=mode != "none",
        mode=mode,
        attached=attached,
        missing=missing,
        ipvs_missing=ipvs_missing,
        packet_path=not missing and not packets_missing,
        packets_missing=packets_missing,
    )


def build_item(row: CheckRow) -> CheckItem:
    """The row with the name of its check."""
    return CheckItem(row.name, row.result, row.needed, row.detail, row.advice, row.packets, row.ipvs)
