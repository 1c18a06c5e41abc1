# SPDX-License-Identifier: Apache-2.0
"""`kbpf` whose packet path stays passive while its state folder contains a file HOLD. With a file
CLSACT there it behaves as on a kernel without TCX.
"""

import sys
from pathlib import Path

from kbpf.cli.app import main
from kbpf.dataplane.bpf.packet_path import packet_path
from kbpf.kernel.bpf import tc
from kbpf.kernel.probe_result import Probe

HOLD, CLSACT = "hold", "clsact"
_lead = packet_path.PacketPath.activate


def _has(name: str) -> bool:
    return (Path(sys.argv[sys.argv.index("--state-dir") + 1]) / name).exists()


def _lead_later(path: packet_path.PacketPath, now: float) -> float | None:
    return now + packet_path.ACTIVATE_POLL_INTERVAL_S if _has(HOLD) else _lead(path, now)


if __name__ == "__main__":
    if _has(CLSACT):
        tc.probe_tcx = lambda: Probe(False, "switched off by the test")
    packet_path.PacketPath.activate = _lead_later  # type: ignore[method-assign]
    main()
