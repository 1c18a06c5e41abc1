# SPDX-License-Identifier: Apache-2.0
"""How each field is decoded, as kube-proxy does (serviceport.go, endpointslicecache.go), and what
an invalid one leads to.
"""

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.errors import ObjectError
from kbpf.model.address import format_addr, parse_addr
from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import (
    Cidr,
    Endpoint,
    EndpointSlice,
    Node,
    Pod,
    Protocol,
    Service,
    ServicePort,
    SlicePort,
)
from kbpf.source.decode import decode

TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"
OF_SERVICE = "kubernetes.io/service-name"
TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"
DAY = "2026-11-01T00:00:00Z"


def read(kind: Kind, obj: dict[str, Any]) -> decode.DecodedObject:
    """Decodes JSON (as from an API server) and a mapping (as from a folder); both must agree."""
    item = decode.decode_object(kind, msgspec.json.encode(obj))
    assert decode.convert_object(kind, obj) == item
    return item


def service(
    labels: dict[str, str] | None = None, status: dict[str, Any] | None = None, **spec: Any
) -> decode.DecodedObject:
    meta = {"name": "web", "namespace": "ns", "resourceVersion": "7", "labels": labels}
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec
    return read(Kind.SERVICE, {"metadata": meta, "spec": spec, "status": status})


def an_slice(labels: dict[str, str] | None = None, **fields: Any) -> decode.DecodedObject:
    meta = {"name": "web-x", "namespace": "ns", "labels": {OF_SERVICE: "web"} | (labels or {})}
    return read(Kind.SLICE, {"metadata": meta, "addressType": "IPv4"} | fields)


def a(text: str) -> bytes:
    return parse_addr(text)


def cidr(text: str, bits: int) -> Cidr:
    return Cidr(parse_addr(text), bits)


class Field(NamedTuple):
    name: str
    given: dict[str, Any]
    field: str
    value: object


LOCAL = {"externalTrafficPolicy": "Local", "healthCheckNodePort": 30999}
LB = {"type": "LoadBalancer"}
SERVICE_FIELDS = [
    Field("a Service without type is a ClusterIP", {}, "type", "ClusterIP"),
    Field("clusterIP alone is used (before 1.20)", {}, "cluster_ips", (a("10.96.0.1"),)),
    Field(
        "clusterIPs give one address per family, in order",
        {"clusterIPs": ["fd00::1", "10.96.0.1"]},
        "cluster_ips",
        (a("fd00::1"), a("10.96.0.1")),
    ),
    Field(
        "leading zeros are decimal, as Kubernetes reads them",
        {"clusterIP": "010.096.0.01"},
        "cluster_ips",
        (a("10.96.0.1"),),
    ),
    Field(
        "a port is TCP and has no name by default",
        {},
        "ports",
        (ServicePort("", TCP, 80),),
    ),
    Field(
        "one number with two protocols is two ports",
        {
            "ports": [
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
                {"name": "sig", "port": 53, "protocol": "SCTP"},
            ]
        },
        "ports",
        (
            ServicePort("dns", UDP, 53),
            ServicePort("dns-tcp", TCP, 53),
            ServicePort("sig", SCTP, 53),
        ),
    ),
    Field(
        "a nodePort is used with type NodePort",
        {"type": "NodePort", "ports": [{"port": 80, "nodePort": 30080}]},
        "ports",
        (ServicePort("", TCP, 80, 30080),),
    ),
    Field(
        "a nodePort is used with type LoadBalancer",
        {**LB, "ports": [{"port": 80, "nodePort": 30080}]},
        "ports",
        (ServicePort("", TCP, 80, 30080),),
    ),
    Field(
        "a nodePort is ignored with type ClusterIP",
        {"ports": [{"port": 80, "nodePort": 30080}]},
        "ports",
        (ServicePort("", TCP, 80),),
    ),
    Field(
        "nodePort 0 means none",
        {"type": "NodePort", "ports": [{"port": 80, "nodePort": 0}]},
        "ports",
        (ServicePort("", TCP, 80),),
    ),
    Field("ports: null means none", {"ports": None}, "ports", ()),
    Field(
        "targetPort may be a name and is not read",
        {"ports": [{"port": 80, "targetPort": "http"}]},
        "ports",
        (ServicePort("", TCP, 80),),
    ),
    Field(
        "external IPs of both families are kept",
        {"externalIPs": ["198.51.100.1", "2001:db8::1"]},
        "external_ips",
        (a("198.51.100.1"), a("2001:db8::1")),
    ),
    Field(
        "a source range is trimmed and loses its host bits; each once, in order",
        {
            "loadBalancerSourceRanges": [
                " 10.1.2.3/8 ",
                "fd00::1/64",
                "10.0.0.1/32",
                "0.0.0.0/0",
                "10.0.0.0/8",
            ]
        },
        "source_ranges",
        (
            cidr("0.0.0.0", 96),
            cidr("10.0.0.0", 104),
            cidr("10.0.0.1", 128),
            cidr("fd00::", 64),
        ),
    ),
    Field("no policies mean Cluster: external", LB, "external_local", False),
    Field("no policies mean Cluster: internal", LB, "internal_local", False),
    Field(
        "internalTrafficPolicy Local",
        {"internalTrafficPolicy": "Local"},
        "internal_local",
        True,
    ),
    Field("external Local is used with type LoadBalancer", LB | LOCAL, "external_local", True),
    Field(
        "external Local is used with type NodePort",
        {"type": "NodePort"} | LOCAL,
        "external_local",
        True,
    ),
    Field(
        "external Local is ignored for a ClusterIP without external addresses",
        LOCAL,
        "external_local",
        False,
    ),
    Field(
        "external Local is used for a ClusterIP with external IPs",
        LOCAL | {"externalIPs": ["198.51.100.1"]},
        "external_local",
        True,
    ),
    Field("no affinity: 0 seconds", {}, "affinity_timeout", 0),
    Field(
        "the affinity timeout is three hours by default",
        {"sessionAffinity": "ClientIP"},
        "affinity_timeout",
        10800,
    ),
    Field(
        "an affinity timeout of 20 seconds",
        {
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 20}},
        },
        "affinity_timeout",
        20,
    ),
    Field(
        "the longest affinity timeout is a day",
        {
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86400}},
        },
        "affinity_timeout",
        86400,
    ),
    Field(
        "the shortest affinity timeout is a second",
        {
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 1}},
        },
        "affinity_timeout",
        1,
    ),
    Field(
        "a timeout without affinity is ignored",
        {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 20}}},
        "affinity_timeout",
        0,
    ),
    Field(
        "healthCheckNodePort is used with LoadBalancer and Local",
        LB | LOCAL,
        "health_check_node_port",
        30999,
    ),
    Field(
        "healthCheckNodePort is ignored with Cluster",
        LB | LOCAL | {"externalTrafficPolicy": "Cluster"},
        "health_check_node_port",
        0,
    ),
    Field(
        "healthCheckNodePort is ignored with NodePort",
        {"type": "NodePort"} | LOCAL,
        "health_check_node_port",
        0,
    ),
]


@pytest.mark.parametrize("row", SERVICE_FIELDS, ids=lambda row: row.name)
def test_service_field(row: Field):
    item = service(**row.given)
    assert item.error == ""
    assert item.key == ObjectKey(Kind.SERVICE, "ns", "web")
    assert item.version == "7"
    assert isinstance(item.object, Service)
    assert getattr(item.object, row.field) == row.value


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
]


@pytest.mark.parametrize(("text", "why"), SPECIAL)
def test_special_address_is_left_out_and_the_others_are_kept(text: str, why: str):
    """In every mode: the Service's other addresses are still served."""
    listed = ["198.51.100.1", text]
    status = {"loadBalancer": {"ingress": [{"ip": ip} for ip in ("203.0.113.1", text)]}}
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
    (
        {"ports": [{"port": 80, "protocol": "tcp"}]},
        "spec.ports[0].protocol: 'tcp' is not one of TCP, UDP, SCTP",
    ),
    (
        {"type": "NodePort", "ports": [{"port": 80, "nodePort": 99999}]},
        "spec.ports[0].nodePort: 99999 is not a port",
    ),
    ({"ports": [PORT, {"port": 81}]}, "spec.ports[1].name: '' is used twice"),
    ({"ports": [PORT, {"name": "b", "port": 80}]}, "spec.ports[1].port: 80/TCP is used twice"),
    ({"clusterIP": "10.96.0.300"}, "spec.clusterIP: '10.96.0.300' is not an IP address"),
    ({"clusterIP": "0.0.0.0"}, "spec.clusterIP: 0.0.0.0 is the unspecified address"),
    (
        {"clusterIPs": ["10.96.0.1", "10.96.0.2"]},
        "spec.clusterIPs: more than one address of a family",
    ),
    ({"externalIPs": ["x"]}, "spec.externalIPs[0]: 'x' is not an IP address"),
    ({"externalIPs": ["9" * 5000 + ".1.1.1"]}, "is not an IP address"),
    (
        {"loadBalancerSourceRanges": ["10.0.0.0/8", "10.0.0.0/33"]},
        "spec.loadBalancerSourceRanges[1]: '10.0.0.0/33' is not a network in CIDR form",
    ),
    (
        {"loadBalancerSourceRanges": ["10.0.0.0"]},
        "spec.loadBalancerSourceRanges[0]: '10.0.0.0' is not a network in CIDR form",
    ),
    (
        {"externalTrafficPolicy": "local"},
        "spec.externalTrafficPolicy: 'local' is not one of Cluster, Local",
    ),
    (
        {"internalTrafficPolicy": "Node"},
        "spec.internalTrafficPolicy: 'Node' is not one of Cluster, Local",
    ),
    (
        {"sessionAffinity": "Cookie"},
        "spec.sessionAffinity: 'Cookie' is not one of None, ClientIP",
    ),
    (
        {
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}},
        },
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not between 1 and 86400",
    ),
    (
        {
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86401}},
        },
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not between 1 and 86400",
    ),
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


class Name(NamedTuple):
    """A kind, metadata, and the (path, value as shown) of the expected error, or None if valid."""

    kind: Kind
    meta: dict[str, Any]
    refused: tuple[str, str] | None


MOST = 63 * "a"
NAMES = [
    Name(Kind.SERVICE, {"name": MOST, "namespace": MOST}, None),
    Name(Kind.SERVICE, {"name": "1-a"}, None),
    Name(Kind.SERVICE, {"name": MOST + "é"}, ("metadata.name", f"'{MOST}é'")),
    Name(Kind.SERVICE, {"name": MOST + "a"}, ("metadata.name", f"'{MOST}a'")),
    Name(Kind.SERVICE, {"name": "we\nb"}, ("metadata.name", r"'we\nb'")),
    Name(Kind.SERVICE, {"name": "web\n"}, ("metadata.name", r"'web\n'")),
    Name(Kind.SERVICE, {"name": "Web"}, ("metadata.name", "'Web'")),
    Name(Kind.SERVICE, {"name": "a.b"}, ("metadata.name", "'a.b'")),
    Name(Kind.SERVICE, {"name": "-a"}, ("metadata.name", "'-a'")),
    Name(Kind.SERVICE, {"name": "web", "namespace": "n/s"}, ("metadata.namespace", "'n/s'")),
    Name(Kind.SLICE, {"name": "web.x-1"}, None),
    Name(Kind.SLICE, {"name": f"{MOST}.{MOST}.{MOST}.{MOST[2:]}"}, None),
    Name(Kind.SLICE, {"name": f"{MOST}.{MOST}.{MOST}.{MOST[1:]}"}, ("metadata.name", f"'{MOST}.")),
    Name(Kind.SLICE, {"name": "a..b"}, ("metadata.name", "'a..b'")),
    Name(Kind.SLICE, {"name": "x", "namespace": "a.b"}, ("metadata.namespace", "'a.b'")),
    Name(Kind.SLICE, {"name": "x", "labels": {OF_SERVICE: "we\tb"}},
         ("metadata.labels[kubernetes.io/service-name]", r"'we\tb'")),
    Name(Kind.NODE, {"name": "node-1.example.org"}, None),
    Name(Kind.NODE, {"name": "node_1"}, ("metadata.name", "'node_1'")),
]  # fmt: skip


@pytest.mark.parametrize("row", NAMES, ids=lambda row: f"{row.kind} {str(row.meta)[-40:]!r}")
def test_names_that_an_api_server_would_refuse_are_errors(row: Name):
    meta = {"namespace": "ns", "labels": {OF_SERVICE: "web"}} | row.meta
    body = {"spec": {"clusterIP": "10.96.0.1"}, "addressType": "IPv4"}
    item = read(row.kind, {"metadata": meta} | body)
    if row.refused is None:
        assert (item.object is None, item.error) == (False, "")
        return
    path, value = row.refused
    assert item.object is None
    assert item.error.startswith(f"{path}: {value}")
    assert "is not a DNS" in item.error
    assert "\n" not in f"{item.key}: {item.error}"


@pytest.mark.parametrize("name", ["Http", "a.b", MOST + "a", "a\nb"])
def test_invalid_port_name_rejects_the_service(name):
    item = service(ports=[{"port": 80, "name": name}])
    assert item.object is None
    assert item.error.startswith(f"spec.ports[0].name: {name!r} is not a DNS label (")


def test_bad_load_balancer_address_is_an_error_that_names_the_field():
    item = service(status={"loadBalancer": {"ingress": [{"ip": "1.2.3"}]}})
    assert item.error == "status.loadBalancer.ingress[0].ip: '1.2.3' is not an IP address"


@pytest.mark.parametrize(
    ("name", "given", "endpoint"),
    [
        ("no conditions: ready and serving", {}, {}),
        ("conditions null", {"conditions": None}, {}),
        ("all unset: ready and serving", {"conditions": {}}, {}),
        ("ready null is true", {"conditions": {"ready": None}}, {}),
        (
            "serving unset is true, as in kube-proxy",
            {"conditions": {"ready": False}},
            {"ready": False},
        ),
        (
            "serving while terminating",
            {"conditions": {"ready": False, "serving": True, "terminating": True}},
            {"ready": False, "terminating": True},
        ),
        (
            "not serving though ready",
            {"conditions": {"ready": True, "serving": False}},
            {"serving": False},
        ),
        ("node and zone", {"nodeName": "n1", "zone": "z1"}, {"node": "n1", "zone": "z1"}),
        ("node and zone null", {"nodeName": None, "zone": None}, {}),
        (
            "hints for zones",
            {"hints": {"forZones": [{"name": "z1"}, {"name": "z2"}]}},
            {"zone_hints": ("z1", "z2")},
        ),
        ("hints for nodes", {"hints": {"forNodes": [{"name": "n1"}]}}, {"node_hints": ("n1",)}),
        ("hints null", {"hints": None}, {}),
        ("empty hints mean none", {"hints": {"forZones": [], "forNodes": None}}, {}),
        ("only the first address is used", {"addresses": ["10.1.0.1", "10.1.0.2"]}, {}),
    ],
)
def test_endpoint(name, given, endpoint):
    item = an_slice(endpoints=[{"addresses": ["10.1.0.1"]} | given])
    assert isinstance(item.object, EndpointSlice), name
    assert item.object.endpoints == (Endpoint(a("10.1.0.1"), **endpoint),)
    assert item.object.skipped == ()


@pytest.mark.parametrize(
    ("family", "addresses", "why"),
    [
        (4, ["10.1.0.300"], "'10.1.0.300' is not an IP address"),
        (4, ["pod.example"], "'pod.example' is not an IP address"),
        (4, ["9" * 5000 + ".0.0.1"], f"'{'9' * 64}' is not an IP address"),
        (4, [], "no address"),
        (4, None, "no address"),
        (4, ["fd00::1"], "fd00::1 is not IPv4"),
        (6, ["10.1.0.1"], "10.1.0.1 is not IPv6"),
        (6, ["::ffff:10.1.0.1"], "::ffff:10.1.0.1 is not IPv6"),
        (4, ["0.0.0.0"], "0.0.0.0 is the unspecified address"),
        (6, ["::"], ":: is the unspecified address"),
        (4, ["127.0.0.1"], "127.0.0.1 is a loopback address"),
        (6, ["::1"], "::1 is a loopback address"),
        (4, ["169.254.169.254"], "169.254.169.254 is a link-local address"),
        (6, ["fe80::1"], "fe80::1 is a link-local address"),
        (6, ["febf::1"], "febf::1 is a link-local address"),
        (4, ["224.0.0.1"], "224.0.0.1 is not a unicast address"),
        (4, ["239.1.1.1"], "239.1.1.1 is not a unicast address"),
        (4, ["255.255.255.255"], "255.255.255.255 is not a unicast address"),
        (6, ["ff02::1"], "ff02::1 is not a unicast address"),
    ],
    ids=lambda it: str(it)[:30],
)
def test_bad_endpoint_is_left_out_with_a_reason(family, addresses, why):
    good = ["10.1.0.1", "10.1.0.2"] if family == 4 else ["fd00::1", "fd00::2"]
    item = an_slice(
        addressType=f"IPv{family}",
        endpoints=[{"addresses": [good[0]]}, {"addresses": addresses}, {"addresses": [good[1]]}],
    )
    assert isinstance(item.object, EndpointSlice)
    assert [end.address for end in item.object.endpoints] == [a(text) for text in good]
    (line,) = item.object.skipped
    assert line.startswith("endpoints[1].addresses: ")
    assert why in line


@pytest.mark.parametrize(("bad", "lines"), [(99, 99), (100, 100), (101, 101), (103, 101)])
def test_at_most_100_bad_endpoints_have_a_line(bad: int, lines: int):
    item = an_slice(endpoints=[{"addresses": ["nonsense"]}] * bad)
    assert isinstance(item.object, EndpointSlice)
    assert len(item.object.skipped) == lines
    named = [line for line in item.object.skipped if "further ones are left out" not in line]
    assert len(named) == min(bad, 100)


@pytest.mark.parametrize(
    "address", ["10.0.0.0", "100.64.0.1", "169.253.0.1", "223.255.255.255", "240.0.0.1"]
)
def test_unusual_unicast_addresses_are_endpoints(address):
    item = an_slice(endpoints=[{"addresses": [address]}])
    assert isinstance(item.object, EndpointSlice)
    assert item.object.skipped == ()


@pytest.mark.parametrize("address", ["::2", "1::", "fec0::1", "fbff::1", "64:ff9b::a00:1"])
def test_unusual_v6_unicast_addresses_are_endpoints(address):
    item = an_slice(addressType="IPv6", endpoints=[{"addresses": [address]}])
    assert isinstance(item.object, EndpointSlice)
    assert item.object.skipped == ()


@pytest.mark.parametrize(
    ("name", "ports", "expected", "skipped"),
    [
        ("null", None, (), ()),
        ("TCP by default", [{"name": "a", "port": 1}], (SlicePort("a", TCP, 1),), ()),
        ('"" is a name', [{"name": "", "port": 1}], (SlicePort("", TCP, 1),), ()),
        ("a port without a name is ignored", [{"port": 1}, {"name": None, "port": 1}], (), ()),
        ("a port without a number is ignored", [{"name": "a"}, {"name": "b", "port": 0}], (), ()),
        (
            "UDP and SCTP",
            [{"name": "", "port": 1, "protocol": p} for p in ("UDP", "SCTP")],
            (SlicePort("", UDP, 1), SlicePort("", SCTP, 1)),
            (),
        ),
        (
            "an unknown protocol is left out",
            [{"name": "a", "port": 1, "protocol": "ICMP"}, {"name": "b", "port": 2}],
            (SlicePort("b", TCP, 2),),
            ("ports[0].protocol: 'ICMP' is not TCP, UDP or SCTP",),
        ),
        (
            "a name that is not a DNS label is left out",
            [{"name": "Http", "port": 1}, {"name": "b", "port": 2}],
            (SlicePort("b", TCP, 2),),
            ("ports[0].name: 'Http' is not a DNS label",),
        ),
        (
            "a port number out of range is left out",
            [{"name": "a", "port": 65536}],
            (),
            ("ports[0].port: 65536 is not a port",),
        ),
    ],
)
def test_slice_ports(name, ports, expected, skipped):
    item = an_slice(ports=ports)
    assert isinstance(item.object, EndpointSlice), name
    assert item.object.ports == expected
    assert tuple(line.partition(" (")[0] for line in item.object.skipped) == skipped


def test_a_slice_names_its_service_and_family():
    item = an_slice(addressType="IPv6", endpoints=None)
    assert item.object == EndpointSlice("ns", "web-x", "web", 6, (), ())


@pytest.mark.parametrize(
    ("name", "labels", "fields"),
    [
        ("no Service", {OF_SERVICE: ""}, {}),
        ("labelled headless", {HEADLESS: ""}, {}),
        ("names instead of addresses", {}, {"addressType": "FQDN"}),
    ],
)
def test_slice_that_kube_proxy_skips_is_ignored(name, labels, fields):
    item = an_slice(labels, **fields)
    assert (item.object, item.error) == (None, ""), name


def test_slice_without_labels_is_ignored():
    item = read(Kind.SLICE, {"metadata": {"name": "x"}, "addressType": "IPv4"})
    assert (item.object, item.error) == (None, "")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"addressType": "IPv5"}, "addressType: 'IPv5' is not one of IPv4, IPv6, FQDN"),
        ({"addressType": None}, "addressType: '' is not one of IPv4, IPv6, FQDN"),
        (
            {"ports": [{"name": "a", "port": "80"}]},
            "ports[0].port: expected an integer, got a string",
        ),
        (
            {"endpoints": [{"addresses": [1]}]},
            "endpoints[0].addresses[0]: expected a string, got an integer",
        ),
        ({"endpoints": {}}, "endpoints: expected a list, got an object"),
    ],
    ids=lambda it: str(it)[:50],
)
def test_a_malformed_slice_is_one_error_that_names_the_field(fields, error):
    item = an_slice(**fields)
    assert (item.object, item.error) == (None, error)
    assert item.key == ObjectKey(Kind.SLICE, "ns", "web-x")


def test_node_has_internal_addresses_first_zone_and_pod_networks():
    meta = {"name": "n1", "labels": {"topology.kubernetes.io/zone": "z1"}, "resourceVersion": "3"}
    rows = [
        {"type": "Hostname", "address": "n1"},
        {"type": "ExternalIP", "address": "198.51.100.1"},
        {"type": "InternalIP", "address": "10.0.0.1"},
        {"type": "InternalIP", "address": "not-an-address"},
        {"type": "InternalIP", "address": "fd00::1"},
    ]
    spec = {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:1::/64", "x"]}
    item = read(Kind.NODE, {"metadata": meta, "spec": spec, "status": {"addresses": rows}})
    assert item.key == ObjectKey(Kind.NODE, "", "n1")
    assert item.object == Node(
        name="n1",
        addresses=(a("10.0.0.1"), a("fd00::1"), a("198.51.100.1")),
        zone="z1",
        pod_cidrs=(cidr("10.1.0.0", 120), cidr("fd00:1::", 64)),
        skipped=(
            "status.addresses[3]: not an IP address: 'not-an-address'",
            "spec.podCIDRs[2]: 'x' is not a network in CIDR form",
        ),
    )


def test_node_without_spec_and_status_has_defaults():
    assert read(Kind.NODE, {"metadata": {"name": "n1"}}).object == Node("n1")


AUTOSCALER_TAINT = "ToBeDeletedByClusterAutoscaler"
BEING_DELETED = [
    ("deletion requested", {"deletionTimestamp": "2026-01-01T00:00:00Z"}, {}, True),
    ("tainted by the autoscaler", {}, {"taints": [{"key": "a"}, {"key": AUTOSCALER_TAINT}]}, True),
    ("another taint", {}, {"taints": [{"key": "node.kubernetes.io/unschedulable"}]}, False),
    ("a taint without a key", {}, {"taints": [{"effect": "NoSchedule"}]}, False),
    ("cordoned", {}, {"unschedulable": True}, False),
]


@pytest.mark.parametrize(
    ("name", "meta", "spec", "leaving"), BEING_DELETED, ids=[r[0] for r in BEING_DELETED]
)
def test_node_being_deleted(name, meta, spec, leaving):
    item = read(Kind.NODE, {"metadata": {"name": "n1"} | meta, "spec": spec})
    assert item.object == Node("n1", being_deleted=leaving)


@pytest.mark.parametrize(
    ("annotations", "triggered"),
    [
        (None, ""),
        ({"a": "b"}, ""),
        ({TRIGGER: "2026-11-21T22:31:37Z"}, "2026-11-21T22:31:37Z"),
    ],
)
def test_trigger_time_of_a_slice(annotations, triggered):
    meta = {"name": "a", "namespace": "ns", "labels": {OF_SERVICE: "web"}}
    body = {"metadata": meta | {"annotations": annotations}, "addressType": "IPv4"}
    item = read(Kind.SLICE, body)
    assert item.trigger_time == triggered
    assert item.object == read(Kind.SLICE, {"metadata": meta, "addressType": "IPv4"}).object


def test_podcidr_is_used_without_podcidrs():
    item = read(Kind.NODE, {"metadata": {"name": "n1"}, "spec": {"podCIDR": "10.1.0.0/24"}})
    assert isinstance(item.object, Node)
    assert item.object.pod_cidrs == (cidr("10.1.0.0", 120),)


class PodRow(NamedTuple):
    """metadata and spec of a Pod, and the result: a Pod, None if ignored, or words of the error."""

    name: str
    meta: dict[str, Any]
    spec: dict[str, Any]
    made: Pod | str | None


UID = "0f4b1c5e-7d2a-4a8e-9d3f-1a2b3c4d5e6f"
OFF = {"kbpf.io/socket-lb": "off"}
PODS = [
    PodRow("off", {"labels": OFF, "uid": UID}, {"nodeName": "n1"}, Pod("ns", "x", UID, "n1")),
    PodRow("on no node yet", {"labels": OFF, "uid": UID}, {}, Pod("ns", "x", UID)),
    PodRow("a uid not a UUID", {"labels": OFF, "uid": "abc1"}, {}, Pod("ns", "x", "abc1")),
    PodRow("no labels", {"uid": UID}, {}, None),
    PodRow("other labels", {"labels": {"app": "x"}, "uid": UID}, {}, None),
    PodRow("on", {"labels": {"kbpf.io/socket-lb": "on"}, "uid": UID}, {}, None),
    PodRow("an unknown value", {"labels": {"kbpf.io/socket-lb": "OFF"}, "uid": UID}, {}, None),
    PodRow("no uid", {"labels": OFF}, {}, "metadata.uid: missing"),
    PodRow("a uid that is a path", {"labels": OFF, "uid": "../.."}, {}, "metadata.uid: '../..'"),
    PodRow("a uid that is a pattern", {"labels": OFF, "uid": "*"}, {}, "metadata.uid: '*'"),
    PodRow("a uid of a wrong type", {"labels": OFF, "uid": 5}, {}, "metadata.uid"),
]  # fmt: skip


@pytest.mark.parametrize("row", PODS, ids=lambda row: row.name)
def test_pod_is_used_if_its_label_is_off(row: PodRow):
    meta = {"name": "x", "namespace": "ns", **row.meta}
    item = read(Kind.POD, {"metadata": meta, "spec": {**row.spec, "containers": [{"name": 5}]}})
    if isinstance(row.made, str):
        assert item.object is None
        assert row.made in item.error
    else:
        assert (item.object, item.error) == (row.made, "")
    assert item.key == ObjectKey(Kind.POD, "ns", "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"metadata":{}}',
        b'{"metadata":{"name":5}}',
        b"\xff",
        b"[" * 9999,
    ],
    ids=lambda data: repr(data[:30]),
)
@pytest.mark.parametrize("kind", list(Kind))
def test_an_object_without_a_readable_name_raises(kind, data):
    with pytest.raises(ObjectError):
        decode.decode_object(kind, data)


def test_repeated_strings_are_interned():
    ends = [
        {"addresses": [f"10.1.0.{i}"], "nodeName": "node-a", "zone": "zone-a",
         "hints": {"forZones": [{"name": "zone-a"}]}} for i in (1, 2)
    ]  # fmt: skip
    one, two = (an_slice(endpoints=ends, ports=[{"name": "http", "port": 80}]).object for _ in "12")
    assert isinstance(one, EndpointSlice)
    assert isinstance(two, EndpointSlice)
    assert one.namespace is two.namespace
    assert one.ports[0].name is two.ports[0].name
    first, second = one.endpoints[0], two.endpoints[1]
    assert first.node is second.node
    assert first.zone is second.zone
    assert first.zone_hints is second.zone_hints


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["spec", "status", "ports", "port", "endpoints", "addresses", "clusterIP", "clusterIPs",
             "type", "addressType", "conditions", "hints", "forZones", "name", "loadBalancer"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(kind=st.sampled_from(list(Kind)), body=JSON)
@settings(max_examples=200)
def test_decoding_random_objects_raises_no_exception(kind, body):
    obj = {**body} if isinstance(body, dict) else {"spec": body}
    obj["metadata"] = {"name": "x", "labels": {OF_SERVICE: "web"}}
    item = decode.decode_object(kind, msgspec.json.encode(obj))
    assert item.key.name == "x"
    assert "\n" not in item.error


ODD_ADDRESSES = [
    ({"clusterIP": "010.096.1.1"},
     "spec.clusterIP: '010.096.1.1' has leading zeros; it is read as 10.96.1.1"),
    ({"externalIPs": ["192.0.2.01"]},
     "spec.externalIPs[0]: '192.0.2.01' has leading zeros; it is read as 192.0.2.1"),
    ({"clusterIP": "10.0.0.100"}, ""),
    ({"clusterIP": "0fd0::10"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "line"), ODD_ADDRESSES)
def test_leading_zeros_are_reported(spec, line):
    item = decode.convert_object(
        Kind.SERVICE,
        {"metadata": {"name": "x", "namespace": "n"},
         "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | spec},
    )  # fmt: skip
    assert item.object.skipped == ((line,) if line else ())


ODD_ENDPOINTS = [
    (["10.1.0.1"], ()),
    (["10.1.0.01"], ("endpoints[0].addresses: '10.1.0.01' has leading zeros; it is read as "
                     "10.1.0.1",)),
    (["10.1.0.1", "10.1.0.2"], ()),
    (["10.1.0.1", "nonsense"], ("endpoints[0].addresses[1]: 'nonsense' is not an IP address",)),
]  # fmt: skip


@pytest.mark.parametrize(("addresses", "lines"), ODD_ENDPOINTS)
def test_odd_endpoint_addresses_are_reported_and_the_first_is_used(addresses, lines):
    item = decode.convert_object(
        Kind.SLICE,
        {"metadata": {"name": "x-1", "namespace": "n",
                      "labels": {"kubernetes.io/service-name": "x"}},
         "addressType": "IPv4", "endpoints": [{"addresses": addresses}],
         "ports": [{"name": "", "port": 80}]},
    )  # fmt: skip
    assert [format_addr(end.address) for end in item.object.endpoints] == ["10.1.0.1"]
    assert item.object.skipped == lines


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_object_over_6_mib_is_refused(more: int, fits: bool):
    raw = b'{"metadata": {"name": "a", "namespace": "b"}}'
    raw += b" " * (decode.MAX_OBJECT_BYTES + more - len(raw))
    if fits:
        assert decode.decode_object(Kind.NODE, raw).key.name == "a"
    else:
        with pytest.raises(ObjectError, match="not a Node: larger than 6 MiB"):
            decode.decode_object(Kind.NODE, raw)
