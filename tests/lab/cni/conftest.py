# SPDX-License-Identifier: Apache-2.0
"""CNIs that take minutes to build are tested by `make test-cnis` only."""

import os

collect_ignore = [] if os.environ.get("KBPF_TEST_CNIS") else ["test_network_policies.py"]
