# SPDX-License-Identifier: Apache-2.0
"""Desired states of a Service port as short texts."""

from typing import Any

from kbpf.model.desired import ServicePortKey, ServiceState
from kbpf.model.objects import Algorithm, Protocol
from tests.support.plane import service

CLUSTER_IP = "10.96.0.1:80"
FRONTENDS = {
    "ClusterIP": CLUSTER_IP,
    "NodePort": "NodePort=0.0.0.0:30080",
    "VIP": "LoadBalancer=192.0.2.1:80",
    "ExternalIP": "ExternalIP=192.0.2.2:80",
}
A, B, C = "10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"
BACKENDS = {"A": A, "B": B, "C": C, "A2": "10.0.0.1:81", "B2": "10.0.0.2:81"}
OPTIONS = {"local", "serving", "at", "weights", "local-weights", "affinity", "ranges", "name"}
FLAGS = {"internal-local", "external-local", "restricted"}
PROTOCOLS = {"UDP", "SCTP"}


def state(text: str, **more: Any) -> ServiceState:
    """A TCP port of Service web from the names of its backends and any of ``local=A,B``, ``serving=A,B``,
    ``weights=1,2``, ``local-weights=1,2``, ``affinity=9``, ``at=NodePort,VIP`` (by default its ClusterIP),
    ``ranges=10.0.0.0/8,fd00::/8``, ``name=dns``, ``UDP``, ``SCTP``, ``maglev``, ``internal-local``,
    ``external-local`` and ``restricted``.
    """
    words = text.split()
    given = dict(word.split("=") for word in words if "=" in word)
    flags = [word for word in words if "=" not in word and word not in BACKENDS]
    assert given.keys() <= OPTIONS, text
    assert set(flags) <= FLAGS | PROTOCOLS | {"maglev"}, text

    def listed(key: str, of: dict[str, str] = BACKENDS) -> str:
        return " ".join(of[word] for word in given[key].split(",") if word)

    for key in ("weights", "local-weights"):
        if key in given:
            field = "local_weights" if key == "local-weights" else "cluster_weights"
            more[field] = tuple(map(int, given[key].split(",")))
    if "maglev" in flags:
        more["algorithm"] = Algorithm.MAGLEV
    (protocol,) = PROTOCOLS.intersection(flags) or {"TCP"}
    return service(
        given.get("name", "web"),
        listed("at", FRONTENDS) if "at" in given else CLUSTER_IP,
        " ".join(BACKENDS[word] for word in words if word in BACKENDS),
        Protocol[protocol],
        local=listed("local") if "local" in given else "",
        serving=listed("serving") if "serving" in given else None,
        affinity_timeout=int(given.get("affinity", 0)),
        ranges=given.get("ranges", "").replace(",", " "),
        **{flag.replace("-", "_"): True for flag in FLAGS.intersection(flags)},
        **more,
    )


def changed(before: str, after: str) -> tuple[ServiceState | None, ServiceState | None, ServicePortKey]:
    """Both states of a row ("-": no Service port), and their key."""
    old, new = (None if text == "-" else state(text) for text in (before, after))
    return old, new, (old or new).key
