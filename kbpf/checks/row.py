"""A row of `kbpf check`: something that a data plane needs of this kernel and machine, tried."""

import msgspec

from kbpf.kernel.probe_result import Probe


class CheckRow(msgspec.Struct, frozen=True):
    """`result` is yes, no or unknown; `needed`: without it mode bpf does not work. `packets`:
    without it the packet path does not work. `ipvs`: without it mode ipvs does not work.

    `detail` is what was found and what it means, `advice` what to do, "" when nothing is.
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
    """A row out of a probe. What could not be found out has a reason, and no advice of its own."""
    result = {True: "yes", False: "no", None: "unknown"}[probe.works]
    shown_advice = advice if probe.works is False else ""
    return CheckRow(name, result, needed, probe.reason or detail, shown_advice)
