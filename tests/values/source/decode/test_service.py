# SPDX-License-Identifier: Apache-2.0
"""How each field of a Service is decoded, as kube-proxy does."""

from typing import Any

import pytest

from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import Service, ServicePort
from kbpf.source.decode import decode
from tests.values.source.decode.objects import HEADLESS, OF_SERVICE, SCTP, TCP, UDP, a, cidr, read

PROXY_NAME = "service.kubernetes.io/service-proxy-name"

DAY = "2026-11-01T00:00:00Z"


def service(
    labels: dict[str, str] | None = None, status: dict[str, Any] | None = None, **spec: Any
) -> decode.DecodedObject:
    meta = {"name": "web", "namespace": "ns", "resourceVersion": "7", "labels": labels}
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec
    return read(Kind.SERVICE, {"metadata": meta, "spec": spec, "status": status})


def client_ip(seconds: int) -> dict[str, Any]:
    config = {"clientIP": {"timeoutSeconds": seconds}}
    return {"sessionAffinity": "ClientIP", "sessionAffinityConfig": config}


LOCAL = {"externalTrafficPolicy": "Local", "healthCheckNodePort": 30999}
LB = {"type": "LoadBalancer"}
SERVICE_FIELDS = {
    "a Service without type is a ClusterIP": ({}, "type", "ClusterIP"),
    "clusterIP alone is used (before 1.20)": ({}, "cluster_ips", (a("10.96.0.1"),)),
    "clusterIPs give one address per family, in order": (
        {"clusterIPs": ["fd00::1", "10.96.0.1"]},
        "cluster_ips",
        (a("fd00::1"), a("10.96.0.1")),
    ),
    "leading zeros are decimal, as Kubernetes reads them": (
        {"clusterIP": "010.096.0.01"},
        "cluster_ips",
        (a("10.96.0.1"),),
    ),
    "a port is TCP and has no name by default": ({}, "ports", (ServicePort("", TCP, 80),)),
    "one number with two protocols is two ports": (
        {
            "ports": [
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
                {"name": "sig", "port": 53, "protocol": "SCTP"},
            ]
        },
        "ports",
        (ServicePort("dns", UDP, 53), ServicePort("dns-tcp", TCP, 53), ServicePort("sig", SCTP, 53)),
    ),
    "a nodePort is used with type NodePort": (
        {"type": "NodePort", "ports": [{"port": 80, "nodePort": 30080}]},
        "ports",
        (ServicePort("", TCP, 80, 30080),),
    ),
    "a nodePort is used with type LoadBalancer": (
        {**LB, "ports": [{"port": 80, "nodePort": 30080}]},
        "ports",
        (ServicePort("", TCP, 80, 30080),),
    ),
    "a nodePort is ignored with type ClusterIP": (
        {"ports": [{"port": 80, "nodePort": 30080}]},
        "ports",
        (ServicePort("", TCP, 80),),
    ),
    "nodePort 0 means none": (
        {"type": "NodePort", "ports": [{"port": 80, "nodePort": 0}]},
        "ports",
        (ServicePort("", TCP, 80),),
    ),
    "ports: null means none": ({"ports": None}, "ports", ()),
    "targetPort may be a name and is not read": (
        {"ports": [{"port": 80, "targetPort": "http"}]},
        "ports",
        (ServicePort("", TCP, 80),),
    ),
    "external IPs of both families are kept": (
        {"externalIPs": ["198.51.100.1", "2001:db8::1"]},
        "external_ips",
        (a("198.51.100.1"), a("2001:db8::1")),
    ),
    "a source range is trimmed and loses its host bits; each once, in order": (
        {"loadBalancerSourceRanges": [" 10.1.2.3/8 ", "fd00::1/64", "10.0.0.1/32", "0.0.0.0/0", "10.0.0.0/8"]},
        "source_ranges",
        (cidr("0.0.0.0", 96), cidr("10.0.0.0", 104), cidr("10.0.0.1", 128), cidr("fd00::", 64)),
    ),
    "no policies mean Cluster: external": (LB, "external_local", False),
    "no policies mean Cluster: internal": (LB, "internal_local", False),
    "internalTrafficPolicy Local": ({"internalTrafficPolicy": "Local"}, "internal_local", True),
    "external Local is used with type LoadBalancer": (LB | LOCAL, "external_local", True),
    "external Local is used with type NodePort": ({"type": "NodePort"} | LOCAL, "external_local", True),
    "external Local is ignored for a ClusterIP without external addresses": (LOCAL, "external_local", False),
    "external Local is used for a ClusterIP with external IPs": (
        LOCAL | {"externalIPs": ["198.51.100.1"]},
        "external_local",
        True,
    ),
    "no affinity: 0 seconds": ({}, "affinity_timeout", 0),
    "the affinity timeout is three hours by default": ({"sessionAffinity": "ClientIP"}, "affinity_timeout", 10800),
    "an affinity timeout of 20 seconds": (client_ip(20), "affinity_timeout", 20),
    "the longest affinity timeout is a day": (client_ip(86400), "affinity_timeout", 86400),
    "the shortest affinity timeout is a second": (client_ip(1), "affinity_timeout", 1),
    "a timeout without affinity is ignored": (
        {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 20}}},
        "affinity_timeout",
        0,
    ),
    "healthCheckNodePort is used with LoadBalancer and Local": (LB | LOCAL, "health_check_node_port", 30999),
    "healthCheckNodePort is ignored with Cluster": (
        LB | LOCAL | {"externalTrafficPolicy": "Cluster"},
        "health_check_node_port",
        0,
    ),
    "healthCheckNodePort is ignored with NodePort": ({"type": "NodePort"} | LOCAL, "health_check_node_port", 0),
    "no mesh": ({"labels": {"app": "web", "component": "web"}}, "mesh", ""),
    "no mesh without labels": ({}, "mesh", ""),
    "Istio's control plane": ({"labels": {"app": "istiod"}}, "mesh", "Istio"),
    "Istio's control plane of a revision": ({"labels": {"app": "istiod", "istio.io/rev": "canary"}}, "mesh", "Istio"),
    "Istio's control plane elsewhere": ({"labels": {"app.kubernetes.io/name": "istiod"}}, "mesh", "Istio"),
    "Linkerd's control plane": ({"labels": {"linkerd.io/control-plane-component": "destination"}}, "mesh", "Linkerd"),
    "another Service of Linkerd": ({"labels": {"linkerd.io/control-plane-component": "identity"}}, "mesh", ""),
    "Consul's injector": ({"labels": {"app": "other", "component": "connect-injector"}}, "mesh", "Consul"),
    "another Service of Consul": ({"labels": {"app": "consul", "component": "dns"}}, "mesh", ""),
}


@pytest.mark.parametrize("name", SERVICE_FIELDS)
def test_service_field(name: str):
    given, field, value = SERVICE_FIELDS[name]
    item = service(**given)
    assert item.error == ""
    assert item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert item.version == "7"
    assert isinstance(item.object, Service)
    assert getattr(item.object, field) == value


@pytest.mark.parametrize(("metadata", "created"), [({}, ""), ({"creationTimestamp": DAY}, DAY)])
def test_creation_timestamp_of_a_service(metadata, created):
    """Of two Services that claim one address, the older one gets it."""
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    item = read(Kind.SERVICE, {"metadata": {"name": "web"} | metadata, "spec": spec})
    assert isinstance(item.object, Service)
    assert item.object.creation_timestamp == created


@pytest.mark.parametrize(
    ("name", "ingress", "vips"),
    [
        ("no mode: a VIP", [{"ip": "203.0.113.1"}], ("203.0.113.1",)),
        ("mode VIP", [{"ip": "203.0.113.1", "ipMode": "VIP"}], ("203.0.113.1",)),
        ("mode Proxy: the balancer's own address", [{"ip": "203.0.113.1", "ipMode": "Proxy"}], ()),
        ("a hostname has no address", [{"hostname": "lb.example"}], ()),
        ("both families", [{"ip": "203.0.113.1"}, {"ip": "fd00::9"}], ("203.0.113.1", "fd00::9")),
        ("null", None, ()),
    ],
)
def test_load_balancer_status(name, ingress, vips):
    item = service(status={"loadBalancer": {"ingress": ingress}})
    assert isinstance(item.object, Service), name
    assert item.object.lb_vips == tuple(map(a, vips))


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


def test_load_balancer_status_is_used_with_every_type():
    item = service(status={"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}}, type="NodePort")
    assert isinstance(item.object, Service)
    assert item.object.lb_vips == (a("203.0.113.1"),)


@pytest.mark.parametrize(
    ("name", "labels", "spec"),
    [
        ("headless", None, {"clusterIP": "None"}),
        ("headless in clusterIPs", None, {"clusterIP": None, "clusterIPs": ["None"]}),
        ("no cluster IP yet", None, {"clusterIP": ""}),
        ("no cluster IP at all", None, {"clusterIP": None}),
        ("ExternalName, even with an address", None, {"type": "ExternalName"}),
        ("for another proxy", {PROXY_NAME: "other"}, {}),
        ("for another proxy with an empty name", {PROXY_NAME: ""}, {}),
        ("labelled headless", {HEADLESS: ""}, {}),
    ],
)
def test_service_that_kube_proxy_skips_is_ignored(name, labels, spec):
    item = service(labels, **spec)
    assert (item.object, item.error) == (None, ""), name


PORT = {"port": 80}
BAD_SERVICES = [
    ({"ports": [{"port": 70000}]}, "spec.ports[0].port: 70000 is not a port"),
    ({"ports": [PORT, {"name": "x", "port": 0}]}, "spec.ports[1].port: 0 is not a port"),
    ({"ports": [{"name": "x"}]}, "spec.ports[0].port: missing"),
    ({"ports": [{"port": "80"}]}, "spec.ports[0].port: expected an integer, got a string"),
    ({"ports": [{"port": 80, "protocol": "tcp"}]}, "spec.ports[0].protocol: 'tcp' is not one of TCP, UDP, SCTP"),
    ({"type": "NodePort", "ports": [{"port": 80, "nodePort": 99999}]}, "spec.ports[0].nodePort: 99999 is not a port"),
    ({"ports": [PORT, {"port": 81}]}, "spec.ports[1].name: '' is used twice"),
    ({"ports": [PORT, {"name": "b", "port": 80}]}, "spec.ports[1].port: 80/TCP is used twice"),
    ({"clusterIP": "10.96.0.300"}, "spec.clusterIP: '10.96.0.300' is not an IP address"),
    ({"clusterIP": "0.0.0.0"}, "spec.clusterIP: 0.0.0.0 is the unspecified address"),
    ({"clusterIPs": ["10.96.0.1", "10.96.0.2"]}, "spec.clusterIPs: more than one address of a family"),
    (
        {"loadBalancerSourceRanges": ["10.0.0.0/8", "10.0.0.0/33"]},
        "spec.loadBalancerSourceRanges[1]: '10.0.0.0/33' is not a network in CIDR form",
    ),
    (
        {"loadBalancerSourceRanges": ["10.0.0.0"]},
        "spec.loadBalancerSourceRanges[0]: '10.0.0.0' is not a network in CIDR form",
    ),
    ({"externalTrafficPolicy": "local"}, "spec.externalTrafficPolicy: 'local' is not one of Cluster, Local"),
    ({"internalTrafficPolicy": "Node"}, "spec.internalTrafficPolicy: 'Node' is not one of Cluster, Local"),
    ({"sessionAffinity": "Cookie"}, "spec.sessionAffinity: 'Cookie' is not one of None, ClientIP"),
    (client_ip(0), "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not between 1 and 86400"),
    (client_ip(86401), "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not between 1 and 86400"),
    (
        {"type": "Loadbalancer"},
        "spec.type: 'Loadbalancer' is not one of ClusterIP, NodePort, LoadBalancer, ExternalName",
    ),
]


@pytest.mark.parametrize(("spec", "error"), BAD_SERVICES, ids=lambda it: str(it)[:60])
def test_a_malformed_service_is_one_error_that_names_the_field(spec, error):
    item = service(**spec)
    assert item.object is None
    assert error in item.error
    assert "\n" not in item.error
    assert item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert item.version == "7"


MOST = 63 * "a"
NAMES = [
    (Kind.SERVICE, {"name": MOST, "namespace": MOST}, None),
    (Kind.SERVICE, {"name": "1-a"}, None),
    (Kind.SERVICE, {"name": MOST + "é"}, ("metadata.name", f"'{MOST}é'")),
    (Kind.SERVICE, {"name": MOST + "a"}, ("metadata.name", f"'{MOST}a'")),
    (Kind.SERVICE, {"name": "we\nb"}, ("metadata.name", r"'we\nb'")),
    (Kind.SERVICE, {"name": "web\n"}, ("metadata.name", r"'web\n'")),
    (Kind.SERVICE, {"name": "Web"}, ("metadata.name", "'Web'")),
    (Kind.SERVICE, {"name": "a.b"}, ("metadata.name", "'a.b'")),
    (Kind.SERVICE, {"name": "-a"}, ("metadata.name", "'-a'")),
    (Kind.SERVICE, {"name": "web", "namespace": "n/s"}, ("metadata.namespace", "'n/s'")),
    (Kind.SLICE, {"name": "web.x-1"}, None),
    (Kind.SLICE, {"name": f"{MOST}.{MOST}.{MOST}.{MOST[2:]}"}, None),
    (Kind.SLICE, {"name": f"{MOST}.{MOST}.{MOST}.{MOST[1:]}"}, ("metadata.name", f"'{MOST}.")),
    (Kind.SLICE, {"name": "a..b"}, ("metadata.name", "'a..b'")),
    (Kind.SLICE, {"name": "x", "namespace": "a.b"}, ("metadata.namespace", "'a.b'")),
    (
        Kind.SLICE,
        {"name": "x", "labels": {OF_SERVICE: "we\tb"}},
        ("metadata.labels[kubernetes.io/service-name]", r"'we\tb'"),
    ),
    (Kind.NODE, {"name": "node-1.example.org"}, None),
    (Kind.NODE, {"name": "node_1"}, ("metadata.name", "'node_1'")),
]
"""A kind, metadata, and the (path, value as shown) of the expected error, or None if valid."""


@pytest.mark.parametrize("row", NAMES, ids=lambda row: f"{row[0]} {str(row[1])[-40:]!r}")
def test_names_that_an_api_server_would_refuse_are_errors(row: tuple):
    kind, metadata, refused = row
    meta = {"namespace": "ns", "labels": {OF_SERVICE: "web"}} | metadata
    body = {"spec": {"clusterIP": "10.96.0.1"}, "addressType": "IPv4"}
    item = read(kind, {"metadata": meta} | body)
    if refused is None:
        assert (item.object is None, item.error) == (False, "")
        return
    path, value = refused
    assert item.object is None
    assert item.error.startswith(f"{path}: {value}")
    assert "is not a DNS" in item.error
    assert "\n" not in f"{item.key}: {item.error}"


@pytest.mark.parametrize("name", ["Http", "a.b", MOST + "a", "a\nb"])
def test_invalid_port_name_rejects_the_service(name):
    item = service(ports=[{"port": 80, "name": name}])
    assert item.object is None
    assert item.error.startswith(f"spec.ports[0].name: {name!r} is not a DNS label (")
