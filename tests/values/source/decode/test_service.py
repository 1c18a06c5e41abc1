# SPDX-License-Identifier: Apache-2.0
"""How each field of a Service is decoded, as kube-proxy does."""

from typing import Any

import pytest

from kbpf.model.address import format_addr
from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import Service, ServicePort
from kbpf.source.decode import decode
from tests.values.source.decode.objects import OF_SERVICE, a, fields, read

DAY = "2026-11-01T00:00:00Z"


def service(
    labels: dict[str, str] | None = None, status: dict[str, Any] | None = None, **spec: Any
) -> decode.DecodedObject:
    meta = {"name": "web", "namespace": "ns", "resourceVersion": "7", "labels": labels}
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec
    return read(Kind.SERVICE, {"metadata": meta, "spec": spec, "status": status})


LOCAL = "externalTrafficPolicy: Local, healthCheckNodePort: 30999"
SERVICE_FIELDS = {
    # fields of a Service's spec, and a field of the Service as shown()
    "a Service without type is a ClusterIP": ("", "type", "ClusterIP"),
    "clusterIP alone is used (before 1.20)": ("", "cluster_ips", "10.96.0.1"),
    "clusterIPs give one address per family, in order": (
        "clusterIPs: [fd00::1, 10.96.0.1]",
        "cluster_ips",
        "fd00::1 10.96.0.1",
    ),
    "leading zeros are decimal, as Kubernetes reads them": ("clusterIP: 010.096.0.01", "cluster_ips", "10.96.0.1"),
    "a port is TCP and has no name by default": ("", "ports", ":80/TCP"),
    "one number with two protocols is two ports": (
        "ports: [{name: a, port: 53, protocol: UDP}, {name: b, port: 53}, {name: c, port: 53, protocol: SCTP}]",
        "ports",
        "a:53/UDP b:53/TCP c:53/SCTP",
    ),
    "a nodePort is used with type NodePort": (
        "type: NodePort, ports: [{port: 80, nodePort: 30080}]",
        "ports",
        ":80/TCP:30080",
    ),
    "a nodePort is used with type LoadBalancer": (
        "type: LoadBalancer, ports: [{port: 80, nodePort: 30080}]",
        "ports",
        ":80/TCP:30080",
    ),
    "a nodePort is ignored with type ClusterIP": ("ports: [{port: 80, nodePort: 30080}]", "ports", ":80/TCP"),
    "nodePort 0 means none": ("type: NodePort, ports: [{port: 80, nodePort: 0}]", "ports", ":80/TCP"),
    "ports: null means none": ("ports: null", "ports", ""),
    "targetPort may be a name and is not read": ("ports: [{port: 80, targetPort: http}]", "ports", ":80/TCP"),
    "external IPs of both families are kept": (
        "externalIPs: [198.51.100.1, 2001:db8::1]",
        "external_ips",
        "198.51.100.1 2001:db8::1",
    ),
    "a source range is trimmed and loses its host bits; each once, in order": (
        "loadBalancerSourceRanges: [' 10.1.2.3/8 ', 'fd00::1/64', 10.0.0.1/32, 0.0.0.0/0, 10.0.0.0/8]",
        "source_ranges",
        "0.0.0.0/96 10.0.0.0/104 10.0.0.1/128 fd00::/64",
    ),
    "no policies mean Cluster: external": ("type: LoadBalancer", "external_local", False),
    "no policies mean Cluster: internal": ("type: LoadBalancer", "internal_local", False),
    "internalTrafficPolicy Local": ("internalTrafficPolicy: Local", "internal_local", True),
    "external Local is used with type LoadBalancer": (f"type: LoadBalancer, {LOCAL}", "external_local", True),
    "external Local is used with type NodePort": (f"type: NodePort, {LOCAL}", "external_local", True),
    "external Local is ignored for a ClusterIP without external addresses": (
        LOCAL,
        "external_local",
        False,
    ),
    "external Local is used for a ClusterIP with external IPs": (
        f"{LOCAL}, externalIPs: [198.51.100.1]",
        "external_local",
        True,
    ),
    "no affinity: 0 seconds": ("", "affinity_timeout", 0),
    "the affinity timeout is three hours by default": ("sessionAffinity: ClientIP", "affinity_timeout", 10800),
    "an affinity timeout of 20 seconds": (
        "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 20}}",
        "affinity_timeout",
        20,
    ),
    "the longest affinity timeout is a day": (
        "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86400}}",
        "affinity_timeout",
        86400,
    ),
    "the shortest affinity timeout is a second": (
        "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 1}}",
        "affinity_timeout",
        1,
    ),
    "a timeout without affinity is ignored": (
        "sessionAffinityConfig: {clientIP: {timeoutSeconds: 20}}",
        "affinity_timeout",
        0,
    ),
    "healthCheckNodePort is used with LoadBalancer and Local": (
        f"type: LoadBalancer, {LOCAL}",
        "health_check_node_port",
        30999,
    ),
    "healthCheckNodePort is ignored with Cluster": (
        "type: LoadBalancer, externalTrafficPolicy: Cluster, healthCheckNodePort: 30999",
        "health_check_node_port",
        0,
    ),
    "healthCheckNodePort is ignored with NodePort": (f"type: NodePort, {LOCAL}", "health_check_node_port", 0),
    "no mesh": ("labels: {app: web, component: web}", "mesh", ""),
    "no mesh without labels": ("", "mesh", ""),
    "Istio's control plane": ("labels: {app: istiod}", "mesh", "Istio"),
    "Istio's control plane of a revision": ("labels: {app: istiod, istio.io/rev: canary}", "mesh", "Istio"),
    "Istio's control plane elsewhere": ("labels: {app.kubernetes.io/name: istiod}", "mesh", "Istio"),
    "Linkerd's control plane": ("labels: {linkerd.io/control-plane-component: destination}", "mesh", "Linkerd"),
    "another Service of Linkerd": ("labels: {linkerd.io/control-plane-component: identity}", "mesh", ""),
    "Consul's injector": ("labels: {app: other, component: connect-injector}", "mesh", "Consul"),
    "another Service of Consul": ("labels: {app: consul, component: dns}", "mesh", ""),
}


def shown(value: Any) -> Any:
    """Addresses, ports and networks (bits of 128) as text, other values as they are."""
    if not isinstance(value, tuple):
        return value
    texts = []
    for one in value:
        if isinstance(one, ServicePort):
            texts.append(f"{one.name}:{one.port}/{one.protocol.name}" + f":{one.node_port}" * bool(one.node_port))
        else:
            texts.append(format_addr(one) if isinstance(one, bytes) else f"{format_addr(one.address)}/{one.bits}")
    return " ".join(texts)


@pytest.mark.parametrize("name", SERVICE_FIELDS)
def test_service_field(name: str):
    given, field, value = SERVICE_FIELDS[name]
    item = service(**fields(given))
    assert item.error == ""
    assert item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert item.version == "7"
    assert isinstance(item.object, Service)
    assert shown(getattr(item.object, field)) == value


@pytest.mark.parametrize(("metadata", "created"), [({}, ""), ({"creationTimestamp": DAY}, DAY)])
def test_creation_timestamp_of_a_service(metadata, created):
    """Of two Services that claim one address, the older one gets it."""
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    item = read(Kind.SERVICE, {"metadata": {"name": "web"} | metadata, "spec": spec})
    assert isinstance(item.object, Service)
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
def test_load_balancer_status_is_used_with_every_type(entry: str, kind: str):
    listed = [{"ip": "203.0.113.9"}, fields(entry)]
    item = service(status={"loadBalancer": {"ingress": listed}}, type=kind)
    assert shown(item.object.lb_vips) == f"203.0.113.9 {INGRESS[entry]}".strip()


def test_load_balancer_status_may_be_null():
    assert service(status={"loadBalancer": {"ingress": None}}).object.lb_vips == ()


SPECIAL = [
    ("127.0.0.1", "a loopback address"),
    ("::1", "a loopback address"),
    ("0.0.0.0", "the unspecified address"),
    ("::", "the unspecified address"),
    ("169.254.169.254", "a link-local address"),
    ("fe80::1", "a link-local address"),
    ("224.0.0.1", "not a unicast address"),
    ("239.1.2.3", "not a unicast address"),
    ("255.255.255.255", "not a unicast address"),
    ("ff02::1", "not a unicast address"),
    ("ff0e::1", "not a unicast address"),
    ("'127.1'", "not an IP address"),
    ("'1.2.3.4/32'", "not an IP address"),
    ("'::ffff:1.2.3'", "not an IP address"),
    (f"'{'9' * 64}'", "not an IP address"),
]


@pytest.mark.parametrize(("text", "why"), SPECIAL)
def test_special_address_is_left_out_and_the_others_are_kept(text: str, why: str):
    """In every mode: the Service's other addresses are still served."""
    word = text.strip("'") + "9" * 999 * (len(text) > 64)
    listed = ["198.51.100.1", word]
    status = {"loadBalancer": {"ingress": [{"ip": ip} for ip in ("203.0.113.1", word)]}}
    made = service(externalIPs=listed, status=status).object
    assert isinstance(made, Service)
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
    assert isinstance(made, Service)
    first = tuple(map(a, listed[: decode.MAX_ADDRESSES]))
    assert (made.external_ips, made.lb_vips) == (first, first)
    paths = ("spec.externalIPs[1024]", "status.loadBalancer.ingress[1024].ip")
    assert made.skipped == tuple(
        f"{path}: this and all further addresses are left out: the limit is 1024" for path in paths
    )


IGNORED = {
    "headless": "clusterIP: None",
    "headless in clusterIPs": "clusterIP: null, clusterIPs: [None]",
    "no cluster IP yet": "clusterIP: ''",
    "no cluster IP at all": "clusterIP: null",
    "ExternalName, even with an address": "type: ExternalName",
    "for another proxy": "labels: {service.kubernetes.io/service-proxy-name: other}",
    "for another proxy with an empty name": "labels: {service.kubernetes.io/service-proxy-name: ''}",
    "labelled headless": "labels: {service.kubernetes.io/headless: ''}",
}


@pytest.mark.parametrize("name", IGNORED)
def test_service_that_kube_proxy_skips_is_ignored(name: str):
    item = service(**fields(IGNORED[name]))
    assert (item.object, item.error) == (None, "")


BAD_SERVICES = [
    # fields of a Service's spec, and the error
    ("ports: [{port: 70000}]", "spec.ports[0].port: 70000 is not a port"),
    ("ports: [{port: 80}, {name: x, port: 0}]", "spec.ports[1].port: 0 is not a port"),
    ("ports: [{name: x}]", "spec.ports[0].port: missing"),
    ("ports: [{port: '80'}]", "spec.ports[0].port: expected an integer, got a string"),
    ("ports: [{port: 80, protocol: tcp}]", "spec.ports[0].protocol: 'tcp' is not one of TCP, UDP, SCTP"),
    ("type: NodePort, ports: [{port: 80, nodePort: 99999}]", "spec.ports[0].nodePort: 99999 is not a port"),
    ("ports: [{port: 80}, {port: 81}]", "spec.ports[1].name: '' is used twice"),
    ("ports: [{port: 80}, {name: b, port: 80}]", "spec.ports[1].port: 80/TCP is used twice"),
    ("clusterIP: 10.96.0.300", "spec.clusterIP: '10.96.0.300' is not an IP address"),
    ("clusterIP: 0.0.0.0", "spec.clusterIP: 0.0.0.0 is the unspecified address"),
    ("clusterIPs: [10.96.0.1, 10.96.0.2]", "spec.clusterIPs: more than one address of a family"),
    (
        "loadBalancerSourceRanges: [10.0.0.0/8, 10.0.0.0/33]",
        "spec.loadBalancerSourceRanges[1]: '10.0.0.0/33' is not a network in CIDR form",
    ),
    (
        "loadBalancerSourceRanges: [10.0.0.0]",
        "spec.loadBalancerSourceRanges[0]: '10.0.0.0' is not a network in CIDR form",
    ),
    ("externalTrafficPolicy: local", "spec.externalTrafficPolicy: 'local' is not one of Cluster, Local"),
    ("internalTrafficPolicy: Node", "spec.internalTrafficPolicy: 'Node' is not one of Cluster, Local"),
    ("sessionAffinity: Cookie", "spec.sessionAffinity: 'Cookie' is not one of None, ClientIP"),
    (
        "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}",
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not between 1 and 86400",
    ),
    (
        "sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}",
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not between 1 and 86400",
    ),
    ("type: Loadbalancer", "spec.type: 'Loadbalancer' is not one of ClusterIP, NodePort, LoadBalancer, ExternalName"),
]


@pytest.mark.parametrize(("given", "error"), BAD_SERVICES)
def test_a_malformed_service_is_one_error_that_names_the_field(given: str, error: str):
    item = service(**fields(given))
    assert item.object is None
    assert error in item.error
    assert "\n" not in item.error
    assert item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert item.version == "7"


MOST = 63 * "a"
NAMES = [
    # a kind, a field of its metadata, a value, and whether it is valid
    (Kind.SERVICE, "name", MOST, True),
    (Kind.SERVICE, "namespace", MOST, True),
    (Kind.SERVICE, "name", "1-a", True),
    (Kind.SERVICE, "name", MOST + "é", False),
    (Kind.SERVICE, "name", MOST + "a", False),
    (Kind.SERVICE, "name", "we\nb", False),
    (Kind.SERVICE, "name", "web\n", False),
    (Kind.SERVICE, "name", "Web", False),
    (Kind.SERVICE, "name", "a.b", False),
    (Kind.SERVICE, "name", "-a", False),
    (Kind.SERVICE, "namespace", "n/s", False),
    (Kind.SLICE, "name", "web.x-1", True),
    (Kind.SLICE, "name", f"{MOST}.{MOST}.{MOST}.{MOST[2:]}", True),
    (Kind.SLICE, "name", f"{MOST}.{MOST}.{MOST}.{MOST[1:]}", False),
    (Kind.SLICE, "name", "a..b", False),
    (Kind.SLICE, "namespace", "a.b", False),
    (Kind.SLICE, f"labels[{OF_SERVICE}]", "we\tb", False),
    (Kind.NODE, "name", "node-1.example.org", True),
    (Kind.NODE, "name", "node_1", False),
]


@pytest.mark.parametrize(("kind", "field", "value", "is_valid"), NAMES, ids=lambda it: repr(str(it)[-40:]))
def test_names_that_an_api_server_would_refuse_are_errors(kind: Kind, field: str, value: str, is_valid: bool):
    meta: dict[str, Any] = {"name": "x", "namespace": "ns", "labels": {OF_SERVICE: "web"}}
    meta |= {"labels": {OF_SERVICE: value}} if field.startswith("labels") else {field: value}
    item = read(kind, {"metadata": meta, "spec": {"clusterIP": "10.96.0.1"}, "addressType": "IPv4"})
    if is_valid:
        assert (item.object is None, item.error) == (False, "")
        return
    assert item.object is None
    assert item.error.startswith(f"metadata.{field}: {value!r}"[:90])
    assert "is not a DNS" in item.error
    assert "\n" not in f"{item.key}: {item.error}"


@pytest.mark.parametrize("name", ["Http", "a.b", MOST + "a", "a\nb"])
def test_invalid_port_name_rejects_the_service(name):
    item = service(ports=[{"port": 80, "name": name}])
    assert item.object is None
    assert item.error.startswith(f"spec.ports[0].name: {name!r} is not a DNS label (")
