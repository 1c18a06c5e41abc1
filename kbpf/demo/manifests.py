# SPDX-License-Identifier: Apache-2.0
"""The demo's Kubernetes objects, as YAML for the agent's folder. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

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

SERVICE: Final = f"""\
apiVersion: v1
kind: Node
metadata: {{name: {NODE}}}
status:
  addresses:
  - {{type: InternalIP, address: {NODE_ADDRESS}}}
---
apiVersion: v1
kind: Service
metadata: {{name: demo, namespace: default}}
spec:
  type: NodePort
  clusterIP: {SERVICE_ADDRESS}
  clusterIPs: [{SERVICE_ADDRESS}]
  ipFamilies: [IPv4]
  ports:
  - name: http
    protocol: TCP
    port: {HTTP_PORT}
    targetPort: {POD_HTTP_PORT}
    nodePort: {NODE_PORT}
  - {{name: dns, protocol: UDP, port: {DNS_PORT}, targetPort: {POD_DNS_PORT}}}
"""

SLICE: Final = f"""\
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: demo-%d
  namespace: default
  labels: {{kubernetes.io/service-name: demo}}
addressType: IPv4
ports:
- {{name: http, protocol: TCP, port: {POD_HTTP_PORT}}}
%s
endpoints:
"""
DNS: Final = f"- {{name: dns, protocol: UDP, port: {POD_DNS_PORT}}}"

ENDPOINT: Final = f"""\
- addresses: [%s]
  nodeName: {NODE}
  targetRef: {{kind: Pod, namespace: default, name: %s}}
  conditions: {{ready: true, serving: true, terminating: false}}
"""


@dataclass(frozen=True, slots=True)
class BackendPod:
    """One backend, as an endpoint of the Service. `refuses`: no process listens there, although the
    endpoint is ready, as in the seconds after a crash.
    """

    number: int
    refuses: bool = False

    @property
    def name(self) -> str:
        return f"backend-{self.number}"

    @property
    def address(self) -> str:
        return f"10.244.0.{10 + self.number}"


def endpoint_slices(pods: Iterable[BackendPod]) -> str:
    """The endpoints of the Service. Pods that refuse have only the TCP port, so they have a slice
    of their own.
    """
    slices = {False: SLICE % (1, DNS), True: SLICE % (2, "")}
    for pod in pods:
        slices[pod.refuses] += ENDPOINT % (pod.address, pod.name)
    return "".join(slices.values())
