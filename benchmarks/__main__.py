# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks [NAME ...]`: runs these benchmarks, or all, and prints their results as one
JSON object by name.
"""

import importlib
import sys

from benchmarks.tools.common import emit, say

ALL = (
    "connect",
    "accounting",
    "packets",
    "scale",
    "pod",
    "change",
    "ipvs",
    "nodeport",
    "clusterip",
    "scrape",
    "tenants",
    "firewall",
)


def main(names: list[str]) -> None:
    """Runs the named benchmarks, or all."""
    unknown = set(names) - set(ALL)
    if unknown:
        raise SystemExit(f"unknown benchmark: {', '.join(sorted(unknown))}; choose from {', '.join(ALL)}")
    results = {}
    for name in names or ALL:
        say(f"== {name}")
        results[name] = importlib.import_module(f"benchmarks.{name}").run()
    emit(results)


if __name__ == "__main__":
    main(sys.argv[1:])
