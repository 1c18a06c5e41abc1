# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.runtime.small_maps_agent run ...`: kbpf whose maps start with 128
entries, so that a few hundred Services make them grow.
"""

from kbpf.cli import app
from kbpf.dataplane.bpf.maps.layout import MapSpec
from kbpf.model.config import MapSizes

ROOM = 128
_start = MapSpec.initial_entries


def small(spec: MapSpec, sizes: MapSizes, packet_path: bool = True) -> int:
    """Replaces MapSpec.initial_entries(): a smaller size for maps that can grow."""
    usual = _start(spec, sizes, packet_path)
    return min(ROOM, usual) if spec.grows else usual


if __name__ == "__main__":
    MapSpec.initial_entries = small  # type: ignore[method-assign]
    app.main()
