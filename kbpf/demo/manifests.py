# SPDX-License-Identifier: Apache-2.0
"""The demo's Kubernetes objects, as a folder of YAML would have them. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

NODE: Final = "demo-node"
NODE_ADDRESS: Final = "192.0.2.1"
POD_GATEWAY: Final = "10.244.0.1"
SERVICE_ADDRESS: Final = "10.96.0.10"
HTTP_PORT: Final = 80
DNS_PORT: Final = 53
POD_HTTP_PORT: Final = 8080
POD_DNS_PORT: Final = 5353
CLIENT: Final = "client"
CLIENT_ADDRESS: Final = "10.244.0.100"
NODE_PORT: Final = 30080
OUTSIDE_ADDRESS: Final = "192.0.2.100"


@dataclass(frozen=True, slots=True)
class BackendPod:
    """One backend, as an endpoint of the Service. `refuses`: no process listens there, although the
    endpoint is ready, as in the seconds after a crash.
    """

    number: int
    terminating: bool = False
    refuses: bool = False

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
            "type": "NodePort",
            "clusterIP": SERVICE_ADDRESS,
            "clusterIPs": [SERVICE_ADDRESS],
            "ipFamilies": ["IPv4"],
            "ports": [
                {
                    "name": "http", "protocol": "TCP", "port": HTTP_PORT,
                    "targetPort": POD_HTTP_PORT, "nodePort": NODE_PORT,
                },
                {"name": "dns", "protocol": "UDP", "port": DNS_PORT, "targetPort": POD_DNS_PORT},
            ],
        },
    }  # fmt: skip


def endpoint_slices(pods: Iterable[BackendPod]) -> dict[str, dict[str, Any]]:
    """The endpoints of the Service, by the name of their slice. Pods that refuse have only the TCP
    port, so they have a slice of their own.
    """
    pods = tuple(pods)
    return {
        "demo-1": _endpoint_slice("demo-1", [pod for pod in pods if not pod.refuses], _PORTS),
        "demo-2": _endpoint_slice("demo-2", [pod for pod in pods if pod.refuses], _PORTS[:1]),
    }


_PORTS: Final = (
    {"name": "http", "protocol": "TCP", "port": POD_HTTP_PORT},
    {"name": "dns", "protocol": "UDP", "port": POD_DNS_PORT},
)


def _endpoint_slice(
    name: str, pods: Iterable[BackendPod], ports: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """Terminating pods are still serving, so they get connections as long as no pod is ready."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": "demo"},
        },
        "addressType": "IPv4",
        "ports": list(ports),
        "endpoints": [
            {
                "addresses": [pod.address],
                "nodeName": NODE,
                "targetRef": {"kind": "Pod", "namespace": "default", "name": pod.name},
                "conditions": {
                    "ready": not pod.terminating,
                    "serving": True,
                    "terminating": pod.terminating,
                },
            }
            for pod in pods
        ],
    }
