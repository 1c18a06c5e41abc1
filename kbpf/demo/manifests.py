# SPDX-License-Identifier: Apache-2.0
"""The demo's Kubernetes objects, as a folder of YAML would have them. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

NODE: Final = "demo-node"
NODE_ADDRESS: Final = "10.244.0.1"
SERVICE_ADDRESS: Final = "10.96.0.10"
HTTP_PORT: Final = 80
DNS_PORT: Final = 53
POD_HTTP_PORT: Final = 8080
POD_DNS_PORT: Final = 5353
CLIENT_ADDRESS: Final = "10.244.0.100"


@dataclass(frozen=True, slots=True)
class BackendPod:
    """One backend, as an endpoint of the EndpointSlice."""

    number: int
    terminating: bool = False

    @property
    def name(self) -> str:
        """``backend-1``."""
        return f"backend-{self.number}"

    @property
    def address(self) -> str:
        """The pod's own address."""
        return f"10.244.0.{10 + self.number}"


def node() -> dict[str, Any]:
    """The Node that the agent runs on."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE},
        "status": {"addresses": [{"type": "InternalIP", "address": NODE_ADDRESS}]},
    }


def service() -> dict[str, Any]:
    """One Service with a TCP and a UDP port."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": SERVICE_ADDRESS,
            "clusterIPs": [SERVICE_ADDRESS],
            "ipFamilies": ["IPv4"],
            "ports": [
                {"name": "http", "protocol": "TCP", "port": HTTP_PORT, "targetPort": POD_HTTP_PORT},
                {"name": "dns", "protocol": "UDP", "port": DNS_PORT, "targetPort": POD_DNS_PORT},
            ],
        },
    }


def endpoint_slice(pods: Iterable[BackendPod]) -> dict[str, Any]:
    """The endpoints of the Service. Terminating pods are still serving, so they get connections as
    long as no pod is ready.
    """
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "demo-1",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "demo"},
        },
        "addressType": "IPv4",
        "ports": [
            {"name": "http", "protocol": "TCP", "port": POD_HTTP_PORT},
            {"name": "dns", "protocol": "UDP", "port": POD_DNS_PORT},
        ],
        "endpoints": [
            {
                "addresses": [pod.address],
                "nodeName": NODE,
                "conditions": {
                    "ready": not pod.terminating,
                    "serving": True,
                    "terminating": pod.terminating,
                },
            }
            for pod in pods
        ],
    }
