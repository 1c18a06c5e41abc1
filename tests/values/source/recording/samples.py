# SPDX-License-Identifier: Apache-2.0
"""Objects and recordings to test with."""

import json
from pathlib import Path
from typing import Any

Object = dict[str, Any]
HEADER: Object = {
    "apiVersion": "kbpf.io/v1alpha1", "kind": "Recording", "version": "0.1.0", "node": "n1",
    "startedAt": "2026-01-01T00:00:00Z", "masked": False,
}  # fmt: skip


def service(name: str, address: str = "10.96.0.1", **spec: object) -> Object:
    return {
        "kind": "Service",
        "metadata": {
            "name": name, "namespace": "shop", "creationTimestamp": "2024-01-01T00:00:00Z",
        },
        "spec": {"clusterIP": address, "ports": [{"name": "http", "port": 80}]} | spec,
    }  # fmt: skip


def slice_of(name: str, *addresses: str) -> Object:
    return {
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{name}-1", "namespace": "shop",
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address]} for address in addresses],
        "ports": [{"name": "http", "port": 8080}],
    }  # fmt: skip


def added(obj: Object, t: float = 0.0) -> Object:
    return {"t": t, "type": "ADDED", "object": obj}


def synced(kind: str, t: float = 0.0) -> Object:
    return {"t": t, "type": "SYNCED", "kind": kind}


SYNCED = tuple(synced(kind) for kind in ("Service", "EndpointSlice", "Node"))
END: Object = {"t": 9.0, "type": "END", "complete": True}


def encode(*lines: Object | bytes) -> bytes:
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def write(path: Path, *lines: Object | bytes) -> Path:
    path.write_bytes(encode(*lines))
    return path
