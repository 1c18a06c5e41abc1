# SPDX-License-Identifier: Apache-2.0
"""Building the image for arm64 in an emulator takes half an hour: `make test-image arm64=1`."""

import os

collect_ignore = [] if os.environ.get("KBPF_TEST_ARM64") else ["test_arm64.py"]
