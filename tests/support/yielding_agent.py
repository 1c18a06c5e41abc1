"""`kbpf`, but the packet path yields to another data plane for as long as there is a file HOLD in
the folder of its state.
"""

import sys
from pathlib import Path

from kbpf.cli.app import main
from kbpf.dataplane.bpf import packet

HOLD = "hold"
_lead = packet.PacketPath.lead


def _lead_later(path: packet.PacketPath, now: float) -> float | None:
    held = Path(sys.argv[sys.argv.index("--state-dir") + 1]) / HOLD
    return now + packet.ASK_SECONDS if held.exists() else _lead(path, now)


if __name__ == "__main__":
    packet.PacketPath.lead = _lead_later  # type: ignore[method-assign]
    main()
