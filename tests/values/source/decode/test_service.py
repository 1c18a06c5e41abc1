# SPDX-License-Identifier: Apache-2.0
"""How each field of a Service is decoded, as kube-proxy does."""

from typing import Any

import pytest

from kbpf.model.address import format_addr
from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import ServicePort
from kbpf.source.decode import decode
from tests.support.table import each_cells, each_pair
from tests.values.source.decode.objects import OF_SERVICE, a, fields, read

DAY = "2026-11-01T00:00:00Z"


def service(
    labels: dict[str, str] | None = None, status: dict[str, Any] | None = None, **spec: Any
) -> decode.DecodedObject:
    meta = {"name": "web", "namespace": "ns", "resourceVersion": "7", "labels": labels}
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec
    return read(Kind.SERVICE, {"metadata": meta, "spec": spec, "status": status})


LOCAL = "externalTrafficPolicy: Local, healthCheckNodePort: 30999"


def shown(value: Any) -> str:
    """Addresses, ports and networks (bits of 128) as text, other values as Python has them."""
    if not isinstance(value, tuple):
        return str(value)
    texts = []
    for one in value:
        if isinstance(one, ServicePort):
            texts.append(f"{one.name}:{one.port}/{one.protocol.name}" + f":{one.node_port}" * bool(one.node_port))
        else:
            texts.append(format_addr(one) if isinstance(one, bytes) else f"{format_addr(one.address)}/{one.bits}")
    return " ".join(texts)


@each_pair(
    "given, expected",
    """\
 → type = ClusterIP
 → cluster_ips = 10.96.0.1
clusterIPs: [fd00::1, 10.96.0.1] → cluster_ips = fd00::1 10.96.0.1
clusterIP: 010.096.0.01 → cluster_ips = 10.96.0.1
 → ports = :80/TCP
ports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53}] → ports = a:53/UDP b:53/TCP
ports: [{port: 53, protocol: SCTP}] → ports = :53/SCTP
type: NodePort, ports: [{port: 80, nodePort: 30080}] → ports = :80/TCP:30080
type: LoadBalancer, ports: [{port: 80, nodePort: 30080}] → ports = :80/TCP:30080
ports: [{port: 80, nodePort: 30080}] → ports = :80/TCP
type: NodePort, ports: [{port: 80, nodePort: 0}] → ports = :80/TCP
ports: null → ports =
ports: [{port: 80, targetPort: http}] → ports = :80/TCP
externalIPs: [198.51.100.1, 2001:db8::1] → external_ips = 198.51.100.1 2001:db8::1
loadBalancerSourceRanges: [' 10.1.2.3/8 ', 0.0.0.0/0, 10.0.0.0/8] → source_ranges = 0.0.0.0/96 10.0.0.0/104
loadBalancerSourceRanges: ['fd00::1/64', 10.0.0.1/32] → source_ranges = 10.0.0.1/128 fd00::/64
type: LoadBalancer → external_local = False
type: LoadBalancer → internal_local = False
internalTrafficPolicy: Local → internal_local = True
type: LoadBalancer, LOCAL → external_local = True
type: NodePort, LOCAL → external_local = True
LOCAL → external_local = False
LOCAL, externalIPs: [198.51.100.1] → external_local = True
 → affinity_timeout = 0
sessionAffinity: ClientIP → affinity_timeout = 10800
sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 1}} → affinity_timeout = 1
sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86400}} → affinity_timeout = 86400
sessionAffinityConfig: {clientIP: {timeoutSeconds: 20}} → affinity_timeout = 0
type: LoadBalancer, LOCAL → health_check_node_port = 30999
type: LoadBalancer, externalTrafficPolicy: Cluster, healthCheckNodePort: 30999 → health_check_node_port = 0
type: NodePort, LOCAL → health_check_node_port = 0
labels: {app: web, component: web} → mesh =
 → mesh =
labels: {app: istiod} → mesh = Istio
labels: {app: istiod, istio.io/rev: canary} → mesh = Istio
labels: {app.kubernetes.io/name: istiod} → mesh = Istio
labels: {linkerd.io/control-plane-component: destination} → mesh = Linkerd
labels: {linkerd.io/control-plane-component: identity} → mesh =
labels: {app: other, component: connect-injector} → mesh = Consul
labels: {app: consul, component: dns} → mesh =
""",
)
def test_service_field(given, expected):
    """Fields of a Service's spec (LOCAL: those of `LOCAL`; none: clusterIP 10.96.0.1 and port 80) → a field of the
    Service as shown().
    """
    item = service(**fields(given.replace("LOCAL", LOCAL)))
    field, _, value = expected.partition(" =")
    assert item.error == ""
    assert item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert item.version == "7"
    assert shown(getattr(item.object, field)) == value.strip()


@pytest.mark.parametrize(("metadata", "created"), [({}, ""), ({"creationTimestamp": DAY}, DAY)])
def test_creation_timestamp_of_a_service(metadata, created):
    """Of two Services that claim one address, the older one gets it."""
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    item = read(Kind.SERVICE, {"metadata": {"name": "web"} | metadata, "spec": spec})
    assert item.object.creation_timestamp == created


INGRESS = {
    "ip: 203.0.113.1": "203.0.113.1",
    "ip: 203.0.113.1, ipMode: VIP": "203.0.113.1",
    "ip: 203.0.113.1, ipMode: Proxy": "",
    "hostname: lb.example": "",
    "ip: fd00::9": "fd00::9",
}
"""An entry of a load balancer's status, and the VIP that it adds."""


@pytest.mark.parametrize("entry", INGRESS)
@pytest.mark.parametrize("kind", ["ClusterIP", "NodePort", "LoadBalancer"])
def test_load_balancer_status_is_used_with_every_type(entry, kind):
    listed = [{"ip": "203.0.113.9"}, fields(entry)]
    item = service(status={"loadBalancer": {"ingress": listed}}, type=kind)
    assert shown(item.object.lb_vips) == f"203.0.113.9 {INGRESS[entry]}".strip()


def test_load_balancer_status_may_be_null():
    assert service(status={"loadBalancer": {"ingress": None}}).object.lb_vips == ()


@each_pair(
    "text, why",
    """\
127.0.0.1 → a loopback address
::1 → a loopback address
0.0.0.0 → the unspecified address
:: → the unspecified address
169.254.169.254 → a link-local address
fe80::1 → a link-local address
224.0.0.1 → not a unicast address
239.1.2.3 → not a unicast address
255.255.255.255 → not a unicast address
ff02::1 → not a unicast address
ff0e::1 → not a unicast address
'127.1' → not an IP address
'1.2.3.4/32' → not an IP address
'::ffff:1.2.3' → not an IP address
""",
)
def test_special_address_is_left_out_and_the_others_are_kept(text, why):
    """In every mode: the Service's other addresses are still served."""
    word = text.strip("'")
    listed = ["198.51.100.1", word]
    status = {"loadBalancer": {"ingress": [{"ip": ip} for ip in ("203.0.113.1", word)]}}
    made = service(externalIPs=listed, status=status).object
    # Link-local addresses are kept here: policy refuses them and sends an Event.
    skipped = "link-local" not in why
    external, vips = a("198.51.100.1"), a("203.0.113.1")
    kept = () if skipped else (a(text),)
    assert (made.external_ips, made.lb_vips) == ((external, *kept), (vips, *kept))
    paths = ("spec.externalIPs[1]", "status.loadBalancer.ingress[1].ip")
    assert made.skipped == tuple(f"{path}: {text} is {why}" for path in paths if skipped)


def test_addresses_of_a_service_beyond_the_limit_are_left_out():
    """The limit holds for each kind. Addresses beyond it are left out."""
    listed = [f"198.51.{i // 200}.{i % 200 + 1}" for i in range(decode.MAX_ADDRESSES + 3)]
    status = {"loadBalancer": {"ingress": [{"ip": ip} for ip in listed]}}
    made = service(externalIPs=listed, status=status).object
    first = tuple(map(a, listed[: decode.MAX_ADDRESSES]))
    assert (made.external_ips, made.lb_vips) == (first, first)
    paths = ("spec.externalIPs[1024]", "status.loadBalancer.ingress[1024].ip")
    assert made.skipped == tuple(
        f"{path}: this and all further addresses are left out: the limit is 1024" for path in paths
    )


@each_cells(
    "given",
    """\
headless | clusterIP: None
headless in clusterIPs | clusterIP: null, clusterIPs: [None]
no cluster IP yet | clusterIP: ''
no cluster IP at all | clusterIP: null
ExternalName, even with an address | type: ExternalName
for another proxy | labels: {service.kubernetes.io/service-proxy-name: other}
for another proxy with an empty name | labels: {service.kubernetes.io/service-proxy-name: ''}
labelled headless | labels: {service.kubernetes.io/headless: ''}
""",
)
def test_service_that_kube_proxy_skips_is_ignored(given):
    item = service(**fields(given))
    assert (item.object, item.error) == (None, "")


@each_pair(
    "given, error",
    """\
ports: [{port: 70000}] → spec.ports[0].port: 70000 is not a port
ports: [{port: 80}, {name: x, port: 0}] → spec.ports[1].port: 0 is not a port
ports: [{name: x}] → spec.ports[0].port: missing
ports: [{port: '80'}] → spec.ports[0].port: expected an integer, got a string
ports: [{port: 80, protocol: tcp}] → spec.ports[0].protocol: 'tcp' is not one of TCP, UDP, SCTP
ports: [{port: 80, name: Http}] → spec.ports[0].name: 'Http' is not a DNS label (
type: NodePort, ports: [{port: 80, nodePort: 99999}] → spec.ports[0].nodePort: 99999 is not a port
ports: [{port: 80}, {port: 81}] → spec.ports[1].name: '' is used twice
ports: [{port: 80}, {name: b, port: 80}] → spec.ports[1].port: 80/TCP is used twice
clusterIP: 10.96.0.300 → spec.clusterIP: '10.96.0.300' is not an IP address
clusterIP: 0.0.0.0 → spec.clusterIP: 0.0.0.0 is the unspecified address
clusterIPs: [10.96.0.1, 10.96.0.2] → spec.clusterIPs: more than one address of a family
loadBalancerSourceRanges: [1.0.0.0/8, 1.0.0.0/33] → spec.loadBalancerSourceRanges[1]: '1.0.0.0/33' is not a network
loadBalancerSourceRanges: [1.0.0.0] → spec.loadBalancerSourceRanges[0]: '1.0.0.0' is not a network in CIDR form
externalTrafficPolicy: local → spec.externalTrafficPolicy: 'local' is not one of Cluster, Local
internalTrafficPolicy: Node → spec.internalTrafficPolicy: 'Node' is not one of Cluster, Local
sessionAffinity: Cookie → spec.sessionAffinity: 'Cookie' is not one of None, ClientIP
AFFINITY {timeoutSeconds: 0}} → spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not between 1 and 86400
AFFINITY {timeoutSeconds: 86401}} → spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not between 1 and 86400
type: Loadbalancer → spec.type: 'Loadbalancer' is not one of ClusterIP, NodePort, LoadBalancer, ExternalName
""",
)
def test_a_malformed_service_is_one_error_that_names_the_field(given, error):
    item = service(**fields(given.replace("AFFINITY", "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP:")))
    assert item.object is None
    assert error in item.error
    assert "\n" not in item.error
    assert item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert item.version == "7"


MOST = 63 * "a"
VALID = [
    f"Service name {MOST}",
    f"Service namespace {MOST}",
    "Service name 1-a",
    "EndpointSlice name web.x-1",
    f"EndpointSlice name {MOST}.{MOST}.{MOST}.{MOST[2:]}",
    "Node name node-1.example.org",
]
INVALID = [
    f"Service name {MOST}é",
    f"Service name {MOST}a",
    "Service name we\nb",
    "Service name web\n",
    "Service name Web",
    "Service name a.b",
    "Service name -a",
    "Service namespace n/s",
    f"EndpointSlice name {MOST}.{MOST}.{MOST}.{MOST[1:]}",
    "EndpointSlice name a..b",
    "EndpointSlice namespace a.b",
    f"EndpointSlice labels[{OF_SERVICE}] we\tb",
    "Node name node_1",
]
"""A kind, a field of its metadata, and its value."""


def named(text: str) -> decode.DecodedObject:
    kind, field, value = text.split(" ", 2)
    meta: dict[str, Any] = {"name": "x", "namespace": "ns", "labels": {OF_SERVICE: "web"}}
    meta |= {"labels": {OF_SERVICE: value}} if field.startswith("labels") else {field: value}
    return read(Kind(kind), {"metadata": meta, "spec": {"clusterIP": "10.96.0.1"}, "addressType": "IPv4"})


@pytest.mark.parametrize("text", VALID, ids=lambda text: text[-40:])
def test_names_that_an_api_server_accepts(text):
    item = named(text)
    assert (item.object is None, item.error) == (False, "")


@pytest.mark.parametrize("text", INVALID, ids=lambda text: repr(text[-40:]))
def test_names_that_an_api_server_would_refuse_are_errors(text):
    item, (_, field, value) = named(text), text.split(" ", 2)
    assert item.object is None
    assert item.error.startswith(f"metadata.{field}: {value!r}"[:90])
    assert "is not a DNS" in item.error
    assert "\n" not in f"{item.key}: {item.error}"
