# SPDX-License-Identifier: Apache-2.0
"""How EndpointSlices are decoded, as kube-proxy does."""

from typing import Any

import pytest

from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import Endpoint, EndpointSlice
from kbpf.source.decode import decode
from tests.support.table import each_line, each_pair, pairs
from tests.values.source.decode.objects import OF_SERVICE, a, fields, read

TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"


def an_slice(labels: dict[str, str] | None = None, **given: Any) -> decode.DecodedObject:
    meta = {"name": "web-x", "namespace": "ns", "labels": labels or {OF_SERVICE: "web"}}
    return read(Kind.SLICE, {"metadata": meta, "addressType": "IPv4"} | given)


ENDPOINTS = pairs(f"""\
 →
conditions: null →
conditions: {{}} →
conditions: {{ready: null}} →
conditions: {{ready: false}} → ready: false
conditions: {{ready: false, serving: true, terminating: true}} → ready: false, terminating: true
conditions: {{ready: true, serving: false}} → serving: false
nodeName: n1, zone: z1 → node: n1, zone: z1
nodeName: null, zone: null →
zone: {"z" * 700_000} → zone: {"z" * 253}...
hints: {{forZones: [{{name: z1}}, {{name: z2}}]}} → zone_hints: [z1, z2]
hints: {{forNodes: [{{name: n1}}]}} → node_hints: [n1]
hints: null →
hints: {{forZones: [], forNodes: null}} →
addresses: [10.1.0.1, 10.1.0.2] →
""")
"""Fields of an endpoint → those of the Endpoint that differ; serving unset is true, as in kube-proxy."""


@pytest.mark.parametrize(("given", "expected"), ENDPOINTS, ids=lambda text: text[:60])
def test_endpoint(given, expected):
    item = an_slice(endpoints=[{"addresses": ["10.1.0.1"]} | fields(given)])
    differs = {name: tuple(value) if isinstance(value, list) else value for name, value in fields(expected).items()}
    assert item.object.endpoints == (Endpoint(a("10.1.0.1"), **differs),)
    assert item.object.skipped == ()


def test_pods_of_endpoints():
    """Each endpoint keeps its Pod's name when another is left out, has no Pod or an invalid name."""
    names = {"web-0": "web-0", "w" * 253: "w" * 253, "w" * 254: "", "a\nb": "", None: "", "web-5": "web-5"}
    refs = [{"kind": "Pod", "name": name} for name in names] + [None, {}, {"kind": "Node", "name": "web-0"}]
    ends = [{"addresses": [f"10.0.0.{n}"], "targetRef": ref} for n, ref in enumerate(refs)]
    ends.insert(1, {"addresses": ["bad"], "targetRef": {"kind": "Pod", "name": "left-out"}})
    item = an_slice(endpoints=ends)
    assert item.object.pods == (*names.values(), "", "", "")
    assert [end.address[-1] for end in item.object.endpoints] == list(range(9))


BAD_ENDPOINTS = pairs("""\
[10.1.0.300] → '10.1.0.300' is not an IP address
[pod.example] → 'pod.example' is not an IP address
[] → no address
null → no address
['fd00::1'] → fd00::1 is not IPv4
[0.0.0.0] → 0.0.0.0 is the unspecified address
[127.0.0.1] → 127.0.0.1 is a loopback address
[169.254.169.254] → 169.254.169.254 is a link-local address
[224.0.0.1] → 224.0.0.1 is not a unicast address
[239.1.1.1] → 239.1.1.1 is not a unicast address
[255.255.255.255] → 255.255.255.255 is not a unicast address
IPv6 [10.1.0.1] → 10.1.0.1 is not IPv6
IPv6 ['::ffff:10.1.0.1'] → ::ffff:10.1.0.1 is not IPv6
IPv6 ['::'] → :: is the unspecified address
IPv6 ['::1'] → ::1 is a loopback address
IPv6 ['fe80::1'] → fe80::1 is a link-local address
IPv6 ['febf::1'] → febf::1 is a link-local address
IPv6 ['ff02::1'] → ff02::1 is not a unicast address
""")
BAD_ENDPOINTS.append((f"[{'9' * 5000}.0.0.1]", f"'{'9' * 64}' is not an IP address"))


@pytest.mark.parametrize(("given", "why"), BAD_ENDPOINTS, ids=lambda text: text[:30])
def test_bad_endpoint_is_left_out_with_a_reason(given, why):
    family = 6 if given.startswith("IPv6 ") else 4
    good = ["10.1.0.1", "10.1.0.2"] if family == 4 else ["fd00::1", "fd00::2"]
    listed = [{"addresses": [good[0]]}, fields(f"addresses: {given.removeprefix('IPv6 ')}"), {"addresses": [good[1]]}]
    item = an_slice(addressType=f"IPv{family}", endpoints=listed)
    assert [end.address for end in item.object.endpoints] == [a(text) for text in good]
    (line,) = item.object.skipped
    assert line.startswith("endpoints[1].addresses: ")
    assert why in line


@pytest.mark.parametrize(("bad", "lines"), [(99, 99), (100, 100), (101, 101), (103, 101)])
def test_at_most_100_bad_endpoints_have_a_line(bad, lines):
    item = an_slice(endpoints=[{"addresses": ["nonsense"]}] * bad)
    assert len(item.object.skipped) == lines
    named = [line for line in item.object.skipped if "further ones are left out" not in line]
    assert len(named) == min(bad, 100)


UNUSUAL = "10.0.0.0 100.64.0.1 169.253.0.1 223.255.255.255 240.0.0.1 ::2 1:: fec0::1 fbff::1 64:ff9b::a00:1"


@pytest.mark.parametrize("address", UNUSUAL.split())
def test_unusual_unicast_addresses_are_endpoints(address):
    item = an_slice(addressType="IPv6" if ":" in address else "IPv4", endpoints=[{"addresses": [address]}])
    assert [end.address for end in item.object.endpoints] == [a(address)]
    assert item.object.skipped == ()


@each_line(
    "given, used, skipped",
    """
null
[{name: a, port: 1}] | a 1/TCP
[{name: '', port: 1}] | 1/TCP
[{port: 1}, {name: null, port: 1}]
[{name: a}, {name: b, port: 0}]
[{name: u, port: 1, protocol: UDP}, {name: s, port: 1, protocol: SCTP}] | u 1/UDP, s 1/SCTP
[{name: a, port: 1, protocol: ICMP}, {name: b, port: 2}] | b 2/TCP | ports[0].protocol: 'ICMP' is not TCP, UDP or SCTP
[{name: Http, port: 1}, {name: b, port: 2}] | b 2/TCP | ports[0].name: 'Http' is not a DNS label
[{name: a, port: 65536}] |  | ports[0].port: 65536 is not a port
""",
)
def test_slice_ports(given, used, skipped):
    """The ports of a slice, those that are used, and the lines about others. A port without a name or a number serves
    nobody.
    """
    item = an_slice(**fields(f"ports: {given}"))
    words = [f"{port.name} {port.port}/{port.protocol.name}".strip() for port in item.object.ports]
    assert ", ".join(words) == used
    assert " ".join(line.partition(" (")[0] for line in item.object.skipped) == skipped


def test_a_slice_names_its_service_and_family():
    item = an_slice(addressType="IPv6", endpoints=None)
    assert item.object == EndpointSlice("ns", "web-x", "web", 6, (), ())


@pytest.mark.parametrize(
    "given",
    [
        f"labels: {{{OF_SERVICE}: ''}}",
        f"labels: {{{OF_SERVICE}: web, service.kubernetes.io/headless: ''}}",
        "addressType: FQDN",
    ],
)
def test_slice_that_kube_proxy_skips_is_ignored(given):
    item = an_slice(**fields(given))
    assert (item.object, item.error) == (None, "")


def test_slice_without_labels_is_ignored():
    item = read(Kind.SLICE, {"metadata": {"name": "x"}, "addressType": "IPv4"})
    assert (item.object, item.error) == (None, "")


@each_pair(
    "given, error",
    """\
addressType: IPv5 → addressType: 'IPv5' is not one of IPv4, IPv6, FQDN
addressType: null → addressType: '' is not one of IPv4, IPv6, FQDN
ports: [{name: a, port: '80'}] → ports[0].port: expected an integer, got a string
endpoints: [{addresses: [1]}] → endpoints[0].addresses[0]: expected a string, got an integer
endpoints: {} → endpoints: expected a list, got an object
""",
)
def test_a_malformed_slice_is_one_error_that_names_the_field(given, error):
    item = an_slice(**fields(given))
    assert (item.object, item.error) == (None, error)
    assert item.key == ObjectKey(Kind.SLICE, "ns", "web-x")


@pytest.mark.parametrize(
    ("annotations", "triggered"),
    [(None, ""), ({"a": "b"}, ""), ({TRIGGER: "2026-11-21T22:31:37Z"}, "2026-11-21T22:31:37Z")],
)
def test_trigger_time_of_a_slice(annotations, triggered):
    meta = {"name": "a", "namespace": "ns", "labels": {OF_SERVICE: "web"}}
    body = {"metadata": meta | {"annotations": annotations}, "addressType": "IPv4"}
    item = read(Kind.SLICE, body)
    assert item.trigger_time == triggered
    assert item.object == read(Kind.SLICE, {"metadata": meta, "addressType": "IPv4"}).object


def test_repeated_strings_are_interned():
    hinted = "nodeName: node-a, zone: zone-a, hints: {forZones: [{name: zone-a}]}"
    ends = [{"addresses": [f"10.1.0.{i}"]} | fields(hinted) for i in (1, 2)]
    one, two = (an_slice(endpoints=ends, ports=[{"name": "http", "port": 80}]).object for _ in "12")
    assert one.namespace is two.namespace
    assert one.ports[0].name is two.ports[0].name
    first, second = one.endpoints[0], two.endpoints[1]
    assert first.node is second.node
    assert first.zone is second.zone
    assert first.zone_hints is second.zone_hints


@each_pair(
    "spec, line",
    """\
clusterIP: 010.096.1.1 → spec.clusterIP: '010.096.1.1' has leading zeros; it is read as 10.96.1.1
externalIPs: [192.0.2.01] → spec.externalIPs[0]: '192.0.2.01' has leading zeros; it is read as 192.0.2.1
clusterIP: 10.0.0.100 →
clusterIP: 0fd0::10 →
""",
)
def test_leading_zeros_are_reported(spec, line):
    given = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]} | fields(spec)
    item = read(Kind.SERVICE, {"metadata": {"name": "x", "namespace": "n"}, "spec": given})
    assert " ".join(item.object.skipped) == line


@each_pair(
    "addresses, line",
    """\
10.1.0.1 →
10.1.0.01 → endpoints[0].addresses: '10.1.0.01' has leading zeros; it is read as 10.1.0.1
10.1.0.1 10.1.0.2 →
10.1.0.1 nonsense → endpoints[0].addresses[1]: 'nonsense' is not an IP address
""",
)
def test_odd_endpoint_addresses_are_reported_and_the_first_is_used(addresses, line):
    item = an_slice(endpoints=[{"addresses": addresses.split()}])
    assert [end.address for end in item.object.endpoints] == [a("10.1.0.1")]
    assert " ".join(item.object.skipped) == line
