# SPDX-License-Identifier: Apache-2.0
"""Desired states of a Service port as short texts."""

from typing import Any

from msgspec.structs import replace

from kbpf.model.desired import ServicePortKey, ServiceState
from tests.support.plane import services

CLUSTER_IP = "10.96.0.1:80"
FRONTENDS = {
    "ClusterIP": CLUSTER_IP,
    "NodePort": "NodePort=0.0.0.0:30080",
    "VIP": "LoadBalancer=192.0.2.1:80",
    "ExternalIP": "ExternalIP=192.0.2.2:80",
}
A, B, C = "10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"
BACKENDS = {"A": A, "B": B, "C": C, "A2": "10.0.0.1:81", "B2": "10.0.0.2:81"}
WORDS = {
    "internal-local": "internal=Local",
    "external-local": "external=Local",
    "maglev": "algorithm=MAGLEV",
    "restricted": "restricted=yes",
}


def state(text: str, **more: Any) -> ServiceState:
    """A TCP port of Service web from the names of its backends and any of ``local=A,B``, ``serving=A,B``,
    ``weights=1,2``, ``local-weights=1,2``, ``affinity=9``, ``at=NodePort,VIP`` (by default its ClusterIP),
    ``ranges=10.0.0.0/8,fd00::/8``, ``name=dns``, ``UDP``, ``SCTP``, ``maglev``, ``internal-local``,
    ``external-local`` and ``restricted``. `more`: fields.
    """
    name, at, protocol, rest = "web", "ClusterIP", "TCP", []
    for word in text.split():
        key, _, value = word.partition("=")
        match key:
            case "name":
                name = value
            case "at":
                at = value
            case "UDP" | "SCTP":
                protocol = word
            case "weights" | "local-weights":
                rest.append(f"{'local' if 'local' in key else 'cluster'}_weights={value}")
            case _:
                rest.append(WORDS.get(word, word))
    frontends = " ".join(FRONTENDS[kind] for kind in at.split(","))
    (made,) = services(f"{name}:{protocol} {frontends} -> {' '.join(rest)}", BACKENDS)
    return replace(made, **more)


def changed(before: str, after: str) -> tuple[ServiceState | None, ServiceState | None, ServicePortKey]:
    """Both states of a row ("-": no Service port), and their key."""
    old, new = (None if text == "-" else state(text) for text in (before, after))
    return old, new, (old or new).key
