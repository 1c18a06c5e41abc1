# SPDX-License-Identifier: Apache-2.0
"""How Nodes and Pods are decoded, and what holds for all objects."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.errors import ObjectError
from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import Node, Pod
from kbpf.source.decode import decode
from tests.support.table import each_line, each_pair
from tests.values.source.decode.objects import OF_SERVICE, a, cidr, fields, read


def test_node_has_internal_addresses_first_zone_and_pod_networks():
    obj = """
        metadata: {name: n1, labels: {topology.kubernetes.io/zone: z1}, resourceVersion: '3'},
        spec: {podCIDR: 10.1.0.0/24, podCIDRs: [10.1.0.0/24, 'fd00:1::/64', x]},
        status: {addresses: [
            {type: Hostname, address: n1},
            {type: ExternalIP, address: 198.51.100.1},
            {type: InternalIP, address: 10.0.0.1},
            {type: InternalIP, address: not-an-address},
            {type: InternalIP, address: 'fd00::1'},
        ]}
    """
    item = read(Kind.NODE, fields(obj))
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


@each_pair(
    "text, deleted",
    """\
metadata: {name: n1, deletionTimestamp: '2026-01-01T00:00:00Z'} → yes
spec: {taints: [{key: a}, {key: ToBeDeletedByClusterAutoscaler}]} → yes
spec: {taints: [{key: node.kubernetes.io/unschedulable}]} → no
spec: {taints: [{effect: NoSchedule}]} → no
spec: {unschedulable: true} → no
""",
)
def test_node_being_deleted(text, deleted):
    item = read(Kind.NODE, {"metadata": {"name": "n1"}} | fields(text))
    assert item.object == Node("n1", being_deleted=deleted == "yes")


def test_podcidr_is_used_without_podcidrs():
    item = read(Kind.NODE, {"metadata": {"name": "n1"}, "spec": {"podCIDR": "10.1.0.0/24"}})
    assert item.object.pod_cidrs == (cidr("10.1.0.0", 120),)


UID = "0f4b1c5e-7d2a-4a8e-9d3f-1a2b3c4d5e6f"
OFF, LINKERD = "labels: {kbpf.io/socket-lb: 'off'}", "annotations: {linkerd.io/proxy-version: x}"


@each_pair(
    "text, result",
    f"""\
{OFF}, uid: {UID} → a Pod
{OFF}, uid: abc1 → a Pod
uid: {UID} → ignored
labels: {{app: x}}, uid: {UID} → ignored
labels: {{kbpf.io/socket-lb: 'on'}}, uid: {UID} → ignored
labels: {{kbpf.io/socket-lb: 'OFF'}}, uid: {UID} → ignored
{OFF} → metadata.uid: missing
{OFF}, uid: ../.. → metadata.uid: '../..'
{OFF}, uid: '*' → metadata.uid: '*'
{OFF}, uid: 5 → metadata.uid
annotations: {{linkerd.io/proxy-version: 5}}, uid: {UID} → metadata.annotations
{OFF}, {LINKERD}, uid: {UID} → a Pod
{LINKERD} → metadata.uid: missing
""",
)
def test_pod_is_used_if_its_label_or_its_mesh_says_so(text, result):
    """Metadata of a Pod → whether it is read or ignored, or words of the error."""
    meta = {"name": "x", "namespace": "ns", **fields(text)}
    item = read(Kind.POD, {"metadata": meta, "spec": {"nodeName": "n1", "containers": [{"name": 5}]}})
    assert item.object == (Pod("ns", "x", meta["uid"], "n1") if result == "a Pod" else None)
    assert result in ("a Pod", "ignored") or result in item.error
    assert bool(item.error) == (result not in ("a Pod", "ignored"))
    assert item.key == ObjectKey(Kind.POD, "ns", "x")


def test_pod_may_be_on_no_node_yet():
    item = read(Kind.POD, {"metadata": {"name": "x", "namespace": "ns", "uid": UID} | fields(OFF), "spec": {}})
    assert item.object == Pod("ns", "x", UID)


@each_line(
    "annotation, value, mesh",
    """
sidecar.istio.io/status                        | {"revision":"default"} | Istio
sidecar.istio.io/status
ambient.istio.io/redirection                   | enabled                | Istio ambient
ambient.istio.io/redirection                   | pending                | Istio ambient
ambient.istio.io/redirection                   | disabled
linkerd.io/proxy-version                       | edge-26.11.1           | Linkerd
linkerd.io/inject                              | enabled
consul.hashicorp.com/transparent-proxy-status  | enabled                | Consul
consul.hashicorp.com/transparent-proxy-status  | complete               | Consul
consul.hashicorp.com/connect-inject-status     | injected
kmesh.net/redirection                          | enabled                | Kmesh
kmesh.net/redirection                          | disabled
""",
)
def test_mesh_of_a_pod(annotation, value, mesh):
    """An annotation, its value, and the mesh of a Pod that has it."""
    meta = {"name": "x", "namespace": "ns", "uid": UID, "annotations": {annotation: value}}
    item = read(Kind.POD, {"metadata": meta, "spec": {"nodeName": "n1"}})
    assert (item.object, item.error) == (Pod("ns", "x", UID, "n1", mesh) if mesh else None, "")


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b'{"metadata":{}}', b'{"metadata":{"name":5}}', b"\xff", b"[" * 9999],
    ids=lambda data: repr(data[:30]),
)
@pytest.mark.parametrize("kind", list(Kind))
def test_an_object_without_a_readable_name_raises(kind, data):
    with pytest.raises(ObjectError):
        decode.decode_object(kind, data)


FIELDS = (
    "spec status ports port endpoints addresses clusterIP clusterIPs type addressType conditions hints forZones name "
    "loadBalancer"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS.split()),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(kind=st.sampled_from(list(Kind)), body=JSON)
@settings(max_examples=200)
def test_decoding_random_objects_raises_no_exception(kind, body):
    obj = {**body} if isinstance(body, dict) else {"spec": body}
    obj["metadata"] = {"name": "x", "labels": {OF_SERVICE: "web"}}
    item = decode.decode_object(kind, msgspec.json.encode(obj))
    assert item.key.name == "x"
    assert "\n" not in item.error


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_object_over_6_mib_is_refused(more, fits):
    raw = b'{"metadata": {"name": "a", "namespace": "b"}}'
    raw += b" " * (decode.MAX_OBJECT_BYTES + more - len(raw))
    if fits:
        assert decode.decode_object(Kind.NODE, raw).key.name == "a"
    else:
        with pytest.raises(ObjectError, match="not a Node: larger than 6 MiB"):
            decode.decode_object(Kind.NODE, raw)
