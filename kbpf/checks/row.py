# SPDX-License-Identifier: Apache-2.0
"""A row of `kbpf check`: the result of one probe of the kernel or the node."""

import msgspec

from kbpf.kernel.probe_result import Probe


class CheckRow(msgspec.Struct, frozen=True):
    """The result of one check.

    `result` is "yes", "no" or "unknown". `needed`: mode bpf does not work without it. `packets`:
    the packet path does not work without it. `ipvs`: mode ipvs does not work without it. `detail`
    is what was found and what it means; `advice` is what to do about it, "" if nothing.
    """

    name: str
    result: str
    needed: bool
    detail: str
    advice: str
    packets: bool = False
    ipvs: bool = False


def make_row(
    name: str, probe: Probe, advice: str, needed: bool = True, detail: str = ""
) -> CheckRow:
    """Makes a row from a probe. An unknown result shows the probe's reason and no advice."""
    result = {True: "yes", False: "no", None: "unknown"}[probe.works]
    shown_advice = advice if probe.works is False else ""
    return CheckRow(name, result, needed, probe.reason or detail, shown_advice)
