# SPDX-License-Identifier: Apache-2.0
"""A small load balancer for Services of type LoadBalancer, a process in the fabric's namespace.

Each Service gets an address, which the fabric routes, with unchanged packets, to the healthy nodes:
those whose health check answers 200 (healthCheckNodePort if the policy is Local, else the proxy's
:10256/healthz). So the proxy sees the load balancer's address as the destination and the real
client as the source, and replies directly, as with a network load balancer of a cloud.

usage: python -m tests.conformance.cluster.load_balancer KUBECONFIG POOL4 POOL6
"""

import base64
import http.client
import ipaddress
import json
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.cluster.layout import Object
from tests.conformance.cluster.network import BRIDGE

FINALIZER = "service.kubernetes.io/load-balancer-cleanup"
EXCLUDED = "node.kubernetes.io/exclude-from-external-load-balancers"
PROXY_HEALTH_PORT = 10256
POLL_SECONDS = 0.4
ERRORS = (OSError, http.client.HTTPException)
FAMILIES = {"IPv4": 0, "IPv6": 1}


class Api:
    """A client of the API server with one connection."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._address = cluster["server"].removeprefix("https://")
        self._context = ssl.create_default_context(cadata=authority)
        self._headers = {
            "Authorization": f"Bearer {config['users'][0]['user']['token']}",
            "Content-Type": "application/merge-patch+json",
        }
        self._connection: http.client.HTTPSConnection | None = None

    def list(self, kind: str) -> list[Object]:
        return list(self._request("GET", f"/api/v1/{kind}?resourceVersion=0")["items"])

    def patch(self, path: str, change: Object) -> None:
        self._request("PATCH", path, json.dumps(change))

    def _request(self, method: str, path: str, body: str | None = None) -> Object:
        """A PATCH may answer with an error: the Service has changed, and is read again anyway."""
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(self._address, context=self._context, timeout=10)
        try:
            self._connection.request(method, path, body, self._headers)
            return dict(json.loads(self._connection.getresponse().read()))
        except ERRORS:
            self._connection = None
            raise


@dataclass(slots=True)
class Node:
    addresses: tuple[str, str]


@dataclass(slots=True)
class Pool:
    """The addresses of one family."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    used: set[str] = field(default_factory=set)
    last: int = 0

    def take(self) -> str:
        """The one that has been free for the longest time."""
        while True:
            self.last = self.last % 250 + 1
            address = str(self.network[self.last])
            if address not in self.used:
                self.used.add(address)
                return address


class LoadBalancer:
    """Keeps addresses and routes in step with the Services."""

    def __init__(self, api: Api, pools: tuple[Pool, Pool]) -> None:
        self._api, self._pools = api, pools
        self._addresses: dict[str, dict[int, str]] = {}  # uid of a Service → address by family
        self._routes: dict[str, tuple[str, ...]] = {}
        self._checks = ThreadPoolExecutor(16)

    def step(self) -> None:
        nodes = [_node(each) for each in self._api.list("nodes") if not _is_excluded(each)]
        services = self._api.list("services")
        balanced = []
        for service in services:
            metadata = service["metadata"]
            if _is_balanced(service):
                balanced.append(service)
                self._claim(service)
            elif metadata["uid"] in self._addresses or FINALIZER in metadata.get("finalizers", ()):
                self._give_up(service)
        for uid in self._addresses.keys() - {each["metadata"]["uid"] for each in services}:
            self._release(uid)
        targets = {(node.addresses[0], _health_port(each)) for each in balanced for node in nodes}
        healthy = dict(zip(targets, self._checks.map(_is_healthy, targets), strict=True))
        for service in balanced:
            self._route(service, nodes, healthy)
            self._publish(service)

    def _claim(self, service: Object) -> None:
        metadata, spec = service["metadata"], service["spec"]
        finalizers = metadata.get("finalizers", [])
        if FINALIZER not in finalizers:
            changed = {"metadata": {"finalizers": [*finalizers, FINALIZER]}}
            self._api.patch(_path(service), changed)
        addresses = self._addresses.setdefault(metadata["uid"], {})
        for name in spec["ipFamilies"]:
            family = FAMILIES[name]
            if family not in addresses:
                addresses[family] = self._pools[family].take()

    def _give_up(self, service: Object) -> None:
        """The Service is being deleted, or has another type now."""
        metadata = service["metadata"]
        self._release(metadata["uid"])
        is_deleted = "deletionTimestamp" in metadata
        if not is_deleted and service.get("status", {}).get("loadBalancer"):
            status = {"status": {"loadBalancer": {"ingress": None}}}
            self._api.patch(f"{_path(service)}/status", status)
        finalizers = metadata.get("finalizers", [])
        if FINALIZER in finalizers:
            remaining = [each for each in finalizers if each != FINALIZER]
            self._api.patch(_path(service), {"metadata": {"finalizers": remaining or None}})

    def _release(self, uid: str) -> None:
        for family, address in self._addresses.pop(uid, {}).items():
            self._set_route(address, ())
            self._routes.pop(address, None)
            self._pools[family].used.discard(address)

    def _route(self, service: Object, nodes: list[Node], healthy: dict[tuple[str, int], bool]) -> None:
        port = _health_port(service)
        targets = [node for node in nodes if healthy[node.addresses[0], port]]
        if not targets and port == PROXY_HEALTH_PORT:
            targets = nodes
        if service["spec"].get("sessionAffinity") == "ClientIP":
            targets = targets[:1]
        for family, address in self._addresses[service["metadata"]["uid"]].items():
            hops = (node.addresses[family] for node in targets)
            self._set_route(address, tuple(filter(None, hops)))

    def _set_route(self, address: str, hops: tuple[str, ...]) -> None:
        """One hop for each connection, by its hash."""
        if self._routes.get(address) == hops:
            return
        if address in self._routes and (":" in address or not hops):
            _ip("route", "del", address)  # an IPv6 replace adds to the hops that exist
        if hops:
            words = [word for hop in hops for word in ("nexthop", "via", hop, "dev", BRIDGE)]
            _ip("route", "replace", address, *words)
            self._routes[address] = hops
        else:
            self._routes.pop(address, None)
        print(time.strftime("%H:%M:%S"), address, "->", " ".join(hops) or "no node", flush=True)

    def _publish(self, service: Object) -> None:
        addresses = self._addresses[service["metadata"]["uid"]].values()
        status = service.get("status", {}).get("loadBalancer", {}).get("ingress") or []
        if [each.get("ip") for each in status] != list(addresses):
            ingress = [{"ip": address, "ipMode": "VIP"} for address in addresses]
            change = {"status": {"loadBalancer": {"ingress": ingress}}}
            self._api.patch(f"{_path(service)}/status", change)


def _path(service: Object) -> str:
    metadata = service["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/services/{metadata['name']}"


def _is_balanced(service: Object) -> bool:
    spec = service["spec"]
    return (
        spec["type"] == "LoadBalancer"
        and "loadBalancerClass" not in spec
        and "deletionTimestamp" not in service["metadata"]
    )


def _health_port(service: Object) -> int:
    if service["spec"].get("externalTrafficPolicy") == "Local":
        return int(service["spec"].get("healthCheckNodePort") or PROXY_HEALTH_PORT)
    return PROXY_HEALTH_PORT


def _is_excluded(node: Object) -> bool:
    return EXCLUDED in node["metadata"].get("labels", {})


def _node(node: Object) -> Node:
    addresses = [each["address"] for each in node["status"].get("addresses", ()) if each["type"] == "InternalIP"]
    ipv4 = [each for each in addresses if ":" not in each]
    ipv6 = [each for each in addresses if ":" in each]
    return Node((ipv4[0] if ipv4 else "", ipv6[0] if ipv6 else ""))


def _is_healthy(target: tuple[str, int]) -> bool:
    connection = http.client.HTTPConnection(*target, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except ERRORS:
        return False
    finally:
        connection.close()


def _ip(*arguments: str) -> None:
    family = ["-6"] if any(":" in word for word in arguments) else []
    done = subprocess.run(["ip", *family, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        print("ip", *arguments, "->", done.stderr.strip(), flush=True)


def main() -> None:
    kubeconfig, *networks = sys.argv[1:]
    ipv4, ipv6 = (Pool(ipaddress.ip_network(network)) for network in networks)
    balancer = LoadBalancer(Api(Path(kubeconfig)), (ipv4, ipv6))
    while True:
        time.sleep(POLL_SECONDS)
        try:
            balancer.step()
        except (*ERRORS, KeyError, ValueError) as error:  # the API server may be starting
            print(time.strftime("%H:%M:%S"), type(error).__name__, error, flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()
