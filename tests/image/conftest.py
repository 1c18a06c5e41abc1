"""The image for another architecture takes an emulator half an hour: `make test-image arm64=1`."""

import os

collect_ignore = [] if os.environ.get("KBPF_TEST_ARM64") else ["test_arm64.py"]
