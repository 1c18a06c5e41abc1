# SPDX-License-Identifier: Apache-2.0
"""Four watches of one API server in a separate process, whose memory can be measured:

    python -m tests.fuzz.inputs.reflector_child URL

prints a JSON line every 0.2 s: the peak of its memory, and each watch's status.
"""

import json
import re
import sys
import time
from pathlib import Path

from kbpf.model.events import Delete, Event, Upsert
from kbpf.source.api.credentials import Cluster
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.reflector import Reflector
from kbpf.source.api.resource import SERVICES, SLICES, exempt_pod_resource, own_node_resource


def main(url: str) -> None:
    known: set[str] = set()

    def put(event: Event) -> None:
        match event:
            case Upsert():
                known.add(str(event.key))
            case Delete():
                known.discard(str(event.key))

    cluster = Cluster(Access(url, "the test"))
    watched = (
        SERVICES,
        SLICES,
        own_node_resource("good"),
        exempt_pod_resource("good", with_meshes=True),
    )
    reflectors = [Reflector(cluster, resource, put) for resource in watched]
    for reflector in reflectors:
        reflector.start()
    while True:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        sources = [
            {name: getattr(status, name) for name in ("name", "state", "synced", "error", "problems")}
            for status in (reflector.status() for reflector in reflectors)
        ]
        report = {"peak_mb": int(found[1]) / 1024, "known": len(known), "sources": sources}
        print(json.dumps(report, default=str), flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
