# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.runtime.hasty_agent run ...`: kbpf that looks each second which backends
keep failing and in which order programs are attached, instead of each half minute.
"""

from kbpf.agent import self_check
from kbpf.cli import app
from kbpf.dataplane.bpf.packet_path import device_thread

if __name__ == "__main__":
    self_check.FAILURES_INTERVAL_S = 1.0  # type: ignore[misc]
    device_thread.RESYNC_INTERVAL_S = 1.0  # type: ignore[misc]
    app.main()
