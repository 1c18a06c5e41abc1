# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.runtime.clsact_agent run ...`: kbpf that behaves as on a kernel without
TCX (before 6.6), where its programs are filters on clsact.
"""

from kbpf.cli import app
from kbpf.kernel.bpf import tc
from kbpf.kernel.probe_result import Probe


def main() -> None:
    """kbpf's main() with TCX switched off."""
    tc.probe_tcx = lambda: Probe(False, "switched off by the test")
    app.main()


if __name__ == "__main__":
    main()
