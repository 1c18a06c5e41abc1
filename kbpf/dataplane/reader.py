# SPDX-License-Identifier: Apache-2.0
"""Reads the data plane of this node, in whichever mode, into the values of model/inspection.py.

While one mode replaces the other, both may have left state behind. The one whose agent wrote its
status last is shown.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from kbpf.dataplane.bpf.inspect import snapshot
from kbpf.dataplane.ipvs import ipvs_inspect as ipvs
from kbpf.errors import KbpfError, NotFoundError
from kbpf.model.config import IPVS_DEVICE
from kbpf.model.inspection import Inspection, Part
from kbpf.takeover import detect


@dataclass(frozen=True, slots=True)
class Locations:
    """The agent's folders: `pin_dir` in mode bpf, `state_dir` in mode ipvs."""

    pin_dir: Path
    state_dir: Path

    @classmethod
    def of_settings(cls, pin_dir: Path, state_dir: Path) -> "Locations":
        """`state_dir`: as set with --state-dir."""
        return cls(pin_dir, state_dir / IPVS_DEVICE)


def is_ipvs(locations: Locations) -> bool:
    """Whether the agent that wrote its status last is in mode ipvs."""
    ipvs_status = ipvs.read_status(locations.state_dir)
    if ipvs_status is None:
        return False
    try:
        bpf_status = snapshot.read(locations.pin_dir, Part.STATUS).status
    except KbpfError:  # nothing is pinned, or another version pinned it
        return True
    return bpf_status is None or ipvs_status.heartbeat >= bpf_status.heartbeat


def read(locations: Locations, parts: Part, bpf_only: bool = False) -> Inspection:
    """Reads what is programmed. Raises NotFoundError if no agent has run on this node, or if
    `bpf_only` and the node is in mode ipvs.
    """
    is_mode_ipvs = is_ipvs(locations)
    if is_mode_ipvs and bpf_only:
        raise NotFoundError(
            "the agent of this node is in mode ipvs, which does not have this",
            str(locations.state_dir),
            "use `kbpf inspect services`, `connections` or `status`",
        )
    inspection = ipvs.read(locations.state_dir) if is_mode_ipvs else snapshot.read(locations.pin_dir, parts)
    if Part.KUBE_PROXY in parts:
        line, _ = detect.describe(detect.find_kube_proxy())
        inspection = replace(inspection, kube_proxy=line)
    return inspection
