# SPDX-License-Identifier: Apache-2.0
"""What an agent of mode ipvs and its node have: Services, the kernel's servers and connections."""

import yaml

from kbpf.dataplane.ipvs import ipvs_inspect as ipvs
from kbpf.dataplane.ipvs.plan import fwmark_service
from kbpf.dataplane.ipvs.statefile import ProgrammedPort
from kbpf.kernel.net.ipvs import RealServerStatus, parse_connections
from kbpf.model.address import parse_addr
from kbpf.model.desired import RealServer, VirtualService
from kbpf.model.events import Kind
from kbpf.model.metrics import ConnectionStats
from kbpf.model.objects import Algorithm, Protocol
from kbpf.source.decode.decode import convert_object
from tests.support.plane import service

TCP, UDP = Protocol.TCP, Protocol.UDP
A, B, C = "10.244.1.2:8080", "10.244.1.3:8080", "10.244.2.2:8080"
NODE = "198.18.0.1"


def end(text: str) -> RealServer:
    host, _, port = text.rpartition(":")
    return RealServer(parse_addr(host), int(port))


def virtual(text: str, protocol: Protocol = TCP) -> VirtualService:
    return VirtualService(protocol, *end(text))


def loads(text: str) -> list[RealServerStatus]:
    """``10.0.0.1:80 10.0.0.2:80*3+2+1+9``: real servers with their weights, active and inactive
    connections, and all connections there have been, each of 100 bytes from clients and 1,000 to
    them.
    """
    rows = []
    for word in text.split():
        server, *counts = word.split("+")
        at, _, weight = server.partition("*")
        active, inactive, total = map(int, counts or (0, 0, 0))
        stats = ConnectionStats(total, bytes_in=100 * total, bytes_out=1_000 * total)
        rows.append(RealServerStatus(end(at), int(weight or 1), active, inactive, stats))
    return rows


SLICE = """
metadata: {name: web-x, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: '', port: 8080}]
endpoints:
- {addresses: [10.244.1.2], nodeName: node-1, zone: zone-a, targetRef: {kind: Pod, name: web-0}}
- addresses: [10.244.1.3]
  conditions: {ready: false, terminating: true}
  nodeName: node-2
  targetRef: {kind: Pod, name: web-1}
- {addresses: [10.244.2.2], conditions: {ready: false, serving: false}, targetRef: {kind: Pod, name: web-2}}
"""
WEB_SLICE = convert_object(Kind.SLICE, yaml.safe_load(SLICE)).object
STATES = (
    service("web", "10.96.0.1:80 NodePort=0.0.0.0:30080", f"{A} {B}", slices=(WEB_SLICE,)),
    service(
        "local",
        "10.96.0.2:80 LoadBalancer=192.0.2.2:80 NodePort=0.0.0.0:30081",
        f"{A} {C}",
        external_local=True,
        local=A,
        ranges="10.0.0.0/8",
    ),
    service("sticky", "10.96.0.3:53", A, protocol=UDP, affinity_timeout=100, algorithm=Algorithm.MAGLEV),
    service("none", "10.96.0.4:80", ""),
)
FWMARK = 0x6B620001
PORTS = tuple(ProgrammedPort(state, FWMARK if state.external_local else 0) for state in STATES)
HELD: ipvs.ServersByService = {
    virtual("10.96.0.1:80"): loads(f"{A}*3+2+1+9 {B}"),
    virtual(f"{NODE}:30080"): loads(f"{A}*3+1+0+1 {B}+0+4+4"),
    virtual("10.96.0.2:80"): loads(f"{A} {C}"),
    virtual("192.0.2.2:80"): loads(f"{A}+1+0+2"),
    virtual(f"{NODE}:30081"): loads(A),
    fwmark_service(4, FWMARK): loads(f"{A}+1+0+3 {C}"),
    virtual("10.96.0.3:53", UDP): loads(f"{A}+0+7+20 {B}*0"),  # drained
    virtual("10.96.0.4:80"): [],
    virtual("203.0.113.1:80"): loads("10.0.0.1:80"),  # not created by kbpf
}
PROC = """\
Pro FromIP   FPrt ToIP     TPrt DestIP   DPrt State       Expires PEName PEData
TCP C61200FE 9C40 C6120001 7580 0AF40102 1F90 ESTABLISHED     899
TCP C61200FE 0000 0A600001 0050 0AF40102 1F90 NONE             97
UDP 0AF40103 9C41 0A600003 0035 0AF40102 1F90 UDP             299
TCP fd00:0198:0018:0000:0000:0000:0000:00fe 9C42 fd00:0096:0000:0000:0000:0000:0000:0001 0050 \
fd00:0010:0244:0001:0000:0000:0000:0002 1F90 TIME_WAIT   3
TCP C61200FE 9C43 CB007101 0050 0A000001 0050 SYN_RECV         59
IP  C61200FE 0000 00000000 0000 0AF40102 1F90 NONE             97
"""
CONNECTIONS = tuple(parse_connections(PROC))
