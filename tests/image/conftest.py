"""Not a part of `make test`: the first build takes minutes. `make test-image` asks for it."""

import os

collect_ignore_glob = [] if os.environ.get("KBPF_TEST_IMAGE") else ["test_*.py"]
