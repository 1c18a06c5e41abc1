# SPDX-License-Identifier: Apache-2.0
"""`python -m kbpf`."""

import os
import sys

if __name__ == "__main__":
    # -m puts the working directory first in sys.path. It goes before anything is imported that a
    # file there could stand in for, unless kbpf itself was found there.
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[0] != package:
        del sys.path[0]
    from kbpf.cli.app import main

    main()
