# SPDX-License-Identifier: Apache-2.0
"""How Nodes and Pods are decoded, and what holds for all objects."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.errors import ObjectError
from kbpf.model.events import Kind, ObjectKey
from kbpf.model.objects import Node, Pod
from kbpf.source.decode import decode
from tests.values.source.decode.objects import OF_SERVICE, a, cidr, read


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


@pytest.mark.parametrize(("name", "meta", "spec", "leaving"), BEING_DELETED, ids=[r[0] for r in BEING_DELETED])
def test_node_being_deleted(name, meta, spec, leaving):
    item = read(Kind.NODE, {"metadata": {"name": "n1"} | meta, "spec": spec})
    assert item.object == Node("n1", being_deleted=leaving)


def test_podcidr_is_used_without_podcidrs():
    item = read(Kind.NODE, {"metadata": {"name": "n1"}, "spec": {"podCIDR": "10.1.0.0/24"}})
    assert isinstance(item.object, Node)
    assert item.object.pod_cidrs == (cidr("10.1.0.0", 120),)


UID = "0f4b1c5e-7d2a-4a8e-9d3f-1a2b3c4d5e6f"
OFF = {"kbpf.io/socket-lb": "off"}


def marked(annotation: str, value: str, mesh: str) -> tuple[dict[str, Any], dict[str, Any], Pod | None]:
    """A row of PODS: a Pod with this annotation, and the mesh that it belongs to, "" if to none."""
    pod = Pod("ns", "x", UID, "n1", mesh) if mesh else None
    return {"annotations": {annotation: value}, "uid": UID}, {"nodeName": "n1"}, pod


PODS = {
    "off": ({"labels": OFF, "uid": UID}, {"nodeName": "n1"}, Pod("ns", "x", UID, "n1")),
    "on no node yet": ({"labels": OFF, "uid": UID}, {}, Pod("ns", "x", UID)),
    "a uid not a UUID": ({"labels": OFF, "uid": "abc1"}, {}, Pod("ns", "x", "abc1")),
    "no labels": ({"uid": UID}, {}, None),
    "other labels": ({"labels": {"app": "x"}, "uid": UID}, {}, None),
    "on": ({"labels": {"kbpf.io/socket-lb": "on"}, "uid": UID}, {}, None),
    "an unknown value": ({"labels": {"kbpf.io/socket-lb": "OFF"}, "uid": UID}, {}, None),
    "no uid": ({"labels": OFF}, {}, "metadata.uid: missing"),
    "a uid that is a path": ({"labels": OFF, "uid": "../.."}, {}, "metadata.uid: '../..'"),
    "a uid that is a pattern": ({"labels": OFF, "uid": "*"}, {}, "metadata.uid: '*'"),
    "a uid of a wrong type": ({"labels": OFF, "uid": 5}, {}, "metadata.uid"),
    "Istio's sidecar": marked("sidecar.istio.io/status", '{"revision":"default"}', "Istio"),
    "Istio's CNI": marked("ambient.istio.io/redirection", "enabled", "Istio ambient"),
    "Istio's CNI, not yet": marked("ambient.istio.io/redirection", "pending", "Istio ambient"),
    "Istio's CNI, not": marked("ambient.istio.io/redirection", "disabled", ""),
    "Linkerd": marked("linkerd.io/proxy-version", "edge-26.11.1", "Linkerd"),
    "Linkerd, only asked for": marked("linkerd.io/inject", "enabled", ""),
    "Consul": marked("consul.hashicorp.com/transparent-proxy-status", "enabled", "Consul"),
    "Consul's CNI": marked("consul.hashicorp.com/transparent-proxy-status", "complete", "Consul"),
    "Consul, not transparent": marked("consul.hashicorp.com/connect-inject-status", "injected", ""),
    "an empty mark": marked("sidecar.istio.io/status", "", ""),
    "a mark of a wrong type": (
        {"annotations": {"linkerd.io/proxy-version": 5}, "uid": UID},
        {},
        "metadata.annotations",
    ),
    "a mesh and the label": (
        {"labels": OFF, "annotations": {"linkerd.io/proxy-version": "x"}, "uid": UID},
        {"nodeName": "n1"},
        Pod("ns", "x", UID, "n1"),
    ),
    "a mesh and no uid": ({"annotations": {"linkerd.io/proxy-version": "x"}}, {}, "metadata.uid: missing"),
}
"""metadata and spec of a Pod, and the result: a Pod, None if ignored, or words of the error."""


@pytest.mark.parametrize("name", PODS)
def test_pod_is_used_if_its_label_or_its_mesh_says_so(name: str):
    metadata, spec, made = PODS[name]
    meta = {"name": "x", "namespace": "ns", **metadata}
    item = read(Kind.POD, {"metadata": meta, "spec": {**spec, "containers": [{"name": 5}]}})
    if isinstance(made, str):
        assert item.object is None
        assert made in item.error
    else:
        assert (item.object, item.error) == (made, "")
    assert item.key == ObjectKey(Kind.POD, "ns", "x")


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b'{"metadata":{}}', b'{"metadata":{"name":5}}', b"\xff", b"[" * 9999],
    ids=lambda data: repr(data[:30]),
)
@pytest.mark.parametrize("kind", list(Kind))
def test_an_object_without_a_readable_name_raises(kind, data):
    with pytest.raises(ObjectError):
        decode.decode_object(kind, data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "spec",
                    "status",
                    "ports",
                    "port",
                    "endpoints",
                    "addresses",
                    "clusterIP",
                    "clusterIPs",
                    "type",
                    "addressType",
                    "conditions",
                    "hints",
                    "forZones",
                    "name",
                    "loadBalancer",
                ]
            ),
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
def test_object_over_6_mib_is_refused(more: int, fits: bool):
    raw = b'{"metadata": {"name": "a", "namespace": "b"}}'
    raw += b" " * (decode.MAX_OBJECT_BYTES + more - len(raw))
    if fits:
        assert decode.decode_object(Kind.NODE, raw).key.name == "a"
    else:
        with pytest.raises(ObjectError, match="not a Node: larger than 6 MiB"):
            decode.decode_object(Kind.NODE, raw)
