# SPDX-License-Identifier: Apache-2.0
"""A real kube-proxy and its API server in a network namespace, with the Services of floods.py."""

import contextlib
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.packets.node import BACK_PORT, FRONT_PORT, POD, ROUTED_BY, VIP
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Object
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port
from tests.support.cluster.kube_proxy import KubeProxy
from tests.support.lab.lab import inside, until

FRONT: Final = VIP["masked"]
SECOND_POD: Final = "10.244.1.3"
SILENT: Final = 81
NODE_PORT: Final = 30_053
NODE_NAME: Final = "node-1"


def objects() -> Iterator[Object]:
    """The node, and the Services of floods.py as objects for kube-proxy."""
    yield node(NODE_NAME, *ROUTED_BY.values())
    udp = partial(port, protocol="UDP")
    front = service(
        "front",
        port(FRONT_PORT, "tcp", target=BACK_PORT),
        udp(FRONT_PORT, "udp", target=BACK_PORT),
        udp(SILENT, "silent", target=8081),
        type="LoadBalancer",
        families=("IPv4", "IPv6"),
    )
    yield front
    yield service("dns", udp(53, target=BACK_PORT, node_port=NODE_PORT), type="NodePort")
    ports = [slice_port(BACK_PORT, "tcp"), slice_port(BACK_PORT, "udp", "UDP"), slice_port(8081, "silent", "UDP")]
    for family in (4, 6):
        pod = endpoint(POD["b0"][family], node=NODE_NAME)
        yield endpoint_slice("front", pod, ports=ports, family=f"IPv{family}")
    two = [endpoint(address, node=NODE_NAME) for address in (POD["b0"][4], SECOND_POD)]
    yield endpoint_slice("dns", *two, ports=[slice_port(BACK_PORT, protocol="UDP")])


def serve_by_kube_proxy(stack: contextlib.ExitStack, name: str, folder: Path) -> None:
    """Starts an API server and a kube-proxy in this network namespace; returns when the rules have
    all of objects().
    """
    server = stack.enter_context(ApiServer(netns=name))
    with server.kube() as kube:
        for each in objects():
            kube.create(each)
        kube.set_load_balancer("front", list(FRONT.values()))
    config = server.kubeconfig(folder / "kubeconfig")
    place = KubeProxyNode(NODE_NAME, name)
    proxy = stack.enter_context(KubeProxy(place, "nftables", config))
    until("kube-proxy has programmed everything", lambda: programmed(name))
    assert proxy.is_running, proxy.tail()


class KubeProxyNode(NamedTuple):
    """The node's name, and the network namespace kube-proxy runs in."""

    name: str
    netns: str


def programmed(name: str) -> bool:
    """Whether the rules in this network namespace have an entry for each port of objects()."""
    tables = {}
    for family in (4, 6):
        table = ("ip6" if family == 6 else "ip", "kube-proxy")
        command = inside(name, None, "nft", "list", "table", *table)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        tables[family] = done.stdout
    wanted = [(4, f"udp . {NODE_PORT} : goto")]
    for family, address in FRONT.items():
        for protocol, number in (("tcp", FRONT_PORT), ("udp", FRONT_PORT), ("udp", SILENT)):
            wanted.append((family, f"{address} . {protocol} . {number} : goto"))
    return all(rule in tables[family] for family, rule in wanted)
