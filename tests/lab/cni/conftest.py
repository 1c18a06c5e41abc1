# SPDX-License-Identifier: Apache-2.0
"""What takes minutes is tested by `make test-cnis` only."""

import os

LONG = "KBPF_TEST_CNIS" in os.environ
collect_ignore = [] if LONG else ["test_calico_policies.py", "test_network_policies.py"]
