# SPDX-License-Identifier: Apache-2.0
"""The rows of test_documents.py."""

from typing import NamedTuple

from tests.values.source.folder.folder import service

UNUSED_KINDS = ("Deployment", "ServiceCIDR", "ServiceAccount", "ServiceMonitor", "PodGroup", "Role",
               "NodePool", "ConfigMap", "Ingress")


MISTAKES = [
    ("  name: web\n", "  name: old\n  name: web\n", "name occurs twice; the last one is used"
     " (a.yaml:5)"),
    ("spec:\n", "spec:\n  clusterIP: 10.96.0.9\n",
     "clusterIP occurs twice; the last one is used (a.yaml:8)"),
    ("  name: web\n", "  name: web\n  annotations: {kbpf.io/wieghts: '*=2'}\n",
     "Service default/web: metadata.annotations[kbpf.io/wieghts] is not an annotation of kbpf"
     " (a.yaml:5); is kbpf.io/weights meant?"),
    ("  name: web\n", "  name: web\n  annotations: {kbpf.io/color: red, mine/x: y}\n",
     "Service default/web: metadata.annotations[kbpf.io/color] is not an annotation of kbpf"
     " (a.yaml:5); it is ignored"),
    ("  name: web\n", "  name: web\n  annotations: {kbpf.io/weights: '*=2'}\n", ""),
    ("  - name: http\n", "  - &port {name: http}\n  - <<: *port\n", ""),
]


# --- the age of a Service ---


class Conflict(NamedTuple):
    """Two Services that claim one address: the files' mtimes and texts, and the winner's name."""

    story: str
    files: dict[str, int]
    texts: dict[str, str]
    wins: str


DATED = "2024-01-01T00:00:00Z"
CONFLICTS = [
    Conflict("the older file", {"a": 200, "z": 100}, {"a": service("a"), "z": service("z")}, "z"),
    Conflict("one ns older", {"a": 101, "z": 100}, {"a": service("a"), "z": service("z")}, "z"),
    Conflict("equally old: by name", {"a": 1, "z": 1}, {"a": service("a"), "z": service("z")}, "a"),
    Conflict("creationTimestamp takes precedence", {"a": 100, "z": 200 * 10**18},
             {"a": service("a", creationTimestamp="2025-01-01T00:00:00Z"),
              "z": service("z", creationTimestamp=DATED)}, "z"),
    Conflict("creationTimestamp and mtime", {"a": 100, "z": 200},
             {"a": service("a"), "z": service("z", creationTimestamp=DATED)}, "a"),
]
