# SPDX-License-Identifier: Apache-2.0
"""Masks: nothing of a name or address is left, and policy decides the same up to the names."""

import ipaddress
import json
import random
import string
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.model.address import ANY4, ANY6, Addr, family_of, format_addr, parse_addr
from kbpf.model.config import Config
from kbpf.model.desired import DesiredState
from kbpf.model.events import Event, Kind
from kbpf.model.objects import Cidr
from kbpf.policy.compute import DesiredStateBuilder
from kbpf.policy.store import ChangeSet, ObjectStore
from kbpf.source.decode.fields import special_address_problem
from kbpf.source.folder.folder import FolderSource
from kbpf.source.recording.fields import SHAPES, list_texts, reduce_object
from kbpf.source.recording.format import RecordingReader
from kbpf.source.recording.mask import MASKS, AddressMasks, Masker, NameClass, mask_recording
from kbpf.source.recording.replay import read_events
from tests.values.source.recording.samples import HEADER, added, encode, service, slice_of

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("kind", Kind)
def test_each_text_has_a_rule(kind: Kind) -> None:
    assert set(MASKS[kind]) == set(list_texts(SHAPES[kind]))


# ---- addresses -----------------------------------------------------------------------------------

V4 = st.ip_addresses(v=4) | st.ip_addresses(network="10.0.0.0/14")
V6 = (
    st.ip_addresses(v=6)
    | st.ip_addresses(network="fd00:10::/60")
    | st.ip_addresses(network="::/95")
)
SPECIAL = st.sampled_from(
    ("127.0.0.1", "169.254.1.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "::", "::1", "fe80::1")
).map(ipaddress.ip_address)


def common_bits(one: Addr, other: Addr) -> int:
    return 128 - (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()


@given(st.lists(V4 | V6 | SPECIAL, min_size=1, max_size=30))
@settings(deadline=None)
def test_masks_of_addresses_keep_order_networks_and_meaning(texts: list[Any]) -> None:
    addresses = sorted({parse_addr(str(text)) for text in texts})
    masks = AddressMasks(addresses)
    masked = [masks.mask(address) for address in addresses]
    assert masked == sorted(set(masked))
    for i, address in enumerate(addresses):
        assert family_of(masked[i]) == family_of(address)
        assert special_address_problem(masked[i]) == special_address_problem(address)
        for j in range(i):
            assert common_bits(address, addresses[j]) == common_bits(masked[i], masked[j])


EMBEDDED = {
    "64:ff9b::203.0.113.5": "64::1",
    "::203.0.113.5": "::cb00:1",
    "::ffff:0:203.0.113.5": "::ffff:0:cb00:1",
    "fe80::a8bb:ccff:fedd:eeff": "fe80::1",
    "ff02::1:ffdd:eeff": "ff02::1",
    "169.254.7.7": "169.254.0.1",
    "203.0.113.5": "203.0.0.1",
}


@pytest.mark.parametrize("text", EMBEDDED)
def test_addresses_inside_of_addresses_are_masked(text: str) -> None:
    address = parse_addr(text)
    assert format_addr(AddressMasks([address]).mask(address)) == format_addr(
        parse_addr(EMBEDDED[text])
    )


@given(st.lists(V4, min_size=1, max_size=20), V4, st.integers(0, 32))
@settings(deadline=None)
def test_an_address_is_in_a_network_exactly_if_its_mask_is(
    texts: list[Any], base: Any, prefix: int
) -> None:
    network = Cidr.parse(f"{base}/{prefix}")
    addresses = [parse_addr(str(text)) for text in texts]
    masks = AddressMasks([network.address, *addresses])
    masked = masks.mask_network(network)
    assert masked.bits == network.bits
    for address in addresses:
        assert masked.contains(masks.mask(address)) == network.contains(address)


# ---- names ---------------------------------------------------------------------------------------

LETTERS = st.text(string.ascii_lowercase + string.digits + "-.", min_size=1, max_size=8)
KEPT = st.sampled_from(("default", "kube-system", "kubernetes", "a", "zz", "Bad Name", "x" * 300))


@given(st.sets(LETTERS | KEPT, min_size=1, max_size=20), st.sampled_from(NameClass))
@settings(deadline=None)
def test_masks_of_usable_names_sort_like_the_names(names: set[str], class_: NameClass) -> None:
    masker = Masker()
    for name in names:
        masker.mask_name(class_, name)
    masker.finish()
    masks = {name: masker.mask_name(class_, name) for name in sorted(names)}
    usable = [mask for mask in masks.values() if not mask.startswith("MASKED")]
    assert usable == sorted(set(usable))
    assert len(set(masks.values())) == len(names)


# ---- policy --------------------------------------------------------------------------------------


def compute(events: Sequence[Event], node: str) -> DesiredState:
    store, builder = ObjectStore(node), DesiredStateBuilder()
    store.apply(events)
    builder.update(store, ChangeSet(all_services=True), store.node.addresses, Config())
    return builder.state


def mask_all(objects: Sequence[dict[str, Any]]) -> tuple[Masker, list[dict[str, Any]]]:
    masker = Masker()
    for obj in objects:
        masker.collect(obj)
    masker.finish()
    return masker, [masker.mask(obj) for obj in objects]


def rename(value: Any, masker: Masker) -> Any:
    """A desired state with the masks of its addresses and names, as plain values; without the
    slices, which decide nothing.
    """
    match value:
        case bytes():
            text = format_addr(value)
            return text if value in (ANY4, ANY6) else masker.mask_address(text)
        case tuple() if hasattr(value, "_fields"):
            return rename_tuple(value, masker)
        case tuple() | list():
            return [rename(item, masker) for item in value]
        case Set():
            return sorted((rename(item, masker) for item in value), key=repr)
        case Mapping():
            rows = [(rename(k, masker), rename(v, masker)) for k, v in value.items()]
            return sorted(rows, key=repr)
    fields = getattr(value, "__struct_fields__", ())
    return {
        field: rename(getattr(value, field), masker) for field in fields if field != "slices"
    } or value


def rename_tuple(value: Any, masker: Masker) -> dict[str, Any]:
    classes = {
        "namespace": NameClass.NAMESPACE, "name": NameClass.SERVICE, "port": NameClass.PORT,
    }  # fmt: skip
    if isinstance(value, Cidr):
        return {"network": str(masker.mask_network(str(value)))}
    names = {field: rename(getattr(value, field), masker) for field in value._fields}
    if not hasattr(value, "namespace"):
        return names
    return names | {
        field: masker.mask_name(class_, getattr(value, field))
        for field, class_ in classes.items()
        if field in value._fields
    }


class Nothing(Masker):
    """Masks nothing: for a state that is masked already."""

    def mask_name(self, class_: NameClass, name: str) -> str:
        return name

    def mask_address(self, text: str) -> str:
        return text

    def mask_network(self, text: str) -> str:
        return text


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """All objects of a folder, reduced."""
    from kbpf.source.decode import decode

    objects: list[dict[str, Any]] = []

    def convert(kind: Kind, value: object) -> decode.DecodedObject:
        item = decode.convert_object(kind, value)
        objects.append(reduce_object(kind, value))
        return item

    FolderSource(folder, lambda _: None, convert_object=convert).poll()
    return objects


def events_of(objects: Sequence[dict[str, Any]], path: Path) -> list[Event]:
    path.write_bytes(encode(HEADER, *map(added, objects)))
    return [event for _, event in read_events(RecordingReader(path))]


@pytest.mark.parametrize("scenario", ["conflicts", "odd", "policies", "shop"])
@pytest.mark.parametrize("node", ["node-1", "node-2"])
def test_masked_objects_have_the_same_desired_state(
    scenario: str, node: str, tmp_path: Path
) -> None:
    objects = read_folder(ROOT / "tests/scenarios" / scenario)
    random.Random(1).shuffle(objects)
    masker, masked = mask_all(objects)
    plain_state = compute(events_of(objects, tmp_path / "plain"), node)
    masked_node = masker.mask_name(NameClass.NODE, node)
    masked_state = compute(events_of(masked, tmp_path / "masked"), masked_node)
    assert plain_state.services
    assert rename(plain_state, masker) == rename(masked_state, Nothing())


SPACES = st.sampled_from(("default", "kube-system", "apps", "zoo"))
SERVICES = st.sampled_from(("kubernetes", "api", "web"))
NODES = st.sampled_from(("node-1", "node-2", "a.b"))
ZONES = st.sampled_from(("eu-1", "eu-2", ""))
IPS = st.integers(1, 6).map("10.1.0.{}".format)
EXTERNAL = st.sampled_from(("203.0.113.1", "203.0.113.2", "52.0.0.1", "192.0.2.1", "10.1.0.3"))
RULES = st.sampled_from(
    ("pod-1=0", "pod-2=3", "10.1.0.1=2", "node:node-1=0", "zone:eu-1=5", "*=2", "bad", "10.1.0.9=1")
)


@st.composite
def services(draw: st.DrawFn, number: int) -> dict[str, Any]:
    obj = service(
        draw(SERVICES), f"10.96.0.{number + 1}",
        type=draw(st.sampled_from(("ClusterIP", "NodePort", "LoadBalancer"))),
        externalIPs=draw(st.lists(EXTERNAL, max_size=2)),
        loadBalancerSourceRanges=draw(st.lists(st.sampled_from(
            ("198.51.100.0/24", "198.51.100.128/25", "0.0.0.0/0", "10.1.0.0/29")), max_size=2)),
        externalTrafficPolicy=draw(st.sampled_from(("Cluster", "Local"))),
        internalTrafficPolicy=draw(st.sampled_from(("Cluster", "Local"))),
    )  # fmt: skip
    weights = ", ".join(draw(st.lists(RULES, max_size=3, unique=True)))
    obj["metadata"] |= {"namespace": draw(SPACES), "annotations": {"kbpf.io/weights": weights}}
    obj["status"] = {"loadBalancer": {"ingress": [{"ip": draw(EXTERNAL)}]}}
    return obj


@st.composite
def slices(draw: st.DrawFn, number: int) -> dict[str, Any]:
    obj = slice_of(draw(SERVICES), *draw(st.lists(IPS, max_size=4)))
    obj["metadata"] |= {
        "name": f"{draw(st.sampled_from('az'))}-{number}",
        "namespace": draw(SPACES),
    }
    for endpoint in obj["endpoints"]:
        zone, node = draw(ZONES), draw(NODES)
        endpoint |= {
            "nodeName": node, "zone": zone,
            "conditions": {"ready": draw(st.booleans()), "terminating": draw(st.booleans())},
            "hints": {"forZones": [{"name": draw(ZONES)}]} if draw(st.booleans()) else {},
            "targetRef": {"kind": "Pod", "name": draw(st.sampled_from(("pod-1", "pod-2")))},
        }  # fmt: skip
    return obj


def node_object(name: str, number: int, zone: str) -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
        "spec": {"podCIDRs": [f"10.1.{number}.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": f"192.0.2.{number + 1}"}]},
    }


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_masked_objects_have_the_same_desired_state(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    objects = [
        *(data.draw(services(n)) for n in range(data.draw(st.integers(1, 5)))),
        *(data.draw(slices(n)) for n in range(data.draw(st.integers(0, 5)))),
        *(node_object(name, n, data.draw(ZONES)) for n, name in enumerate(("node-1", "node-2"))),
    ]
    folder = tmp_path_factory.getbasetemp()
    masker, masked = mask_all([reduce_object(Kind(obj["kind"]), obj) for obj in objects])
    plain = compute(events_of(objects, folder / "any-plain"), "node-1")
    node = masker.mask_name(NameClass.NODE, "node-1")
    other = compute(events_of(masked, folder / "any-masked"), node)
    assert without_words(rename(plain, masker)) == without_words(rename(other, Nothing()))


def without_words(value: Any) -> Any:
    """Without the reasons of refused frontends, which are sentences about names and addresses."""
    match value:
        case {"refused": refused}:
            rows = [row[0] for row in refused]
            return {k: without_words(v) for k, v in value.items()} | {"refused": rows}
        case dict():
            return {k: without_words(v) for k, v in value.items()}
        case list() | tuple():
            return [without_words(item) for item in value]
    return value


def test_nothing_of_the_names_is_left() -> None:
    secret = [
        service(
            "secret-app", "10.96.1.2", externalIPs=["52.1.2.3"],
            loadBalancerSourceRanges=["198.51.100.0/24", "not-a-network-secret"],
            sessionAffinity="Secret", type="Secret",
        ),
        slice_of("secret-app", "10.244.7.9", "secret-host"),
        {"kind": "Node", "metadata": {"name": "secret-node", "labels": {
            "topology.kubernetes.io/zone": "secret-zone"}},
         "spec": {"podCIDR": "10.244.7.0/24", "taints": [{"key": "secret"}]},
         "status": {"addresses": [{"type": "Hostname", "address": "secret-node"},
                                  {"type": "InternalIP", "address": "192.0.2.77"}]}},
        {"kind": "Pod", "metadata": {"name": "secret-pod", "namespace": "secret", "uid": "se-cret",
                                     "labels": {"kbpf.io/socket-lb": "secret"},
                                     "annotations": {"sidecar.istio.io/status": "{secret}"}}},
    ]  # fmt: skip
    secret[0]["metadata"] |= {
        "namespace": "secret-ns", "labels": {"app": "secret"},
        "annotations": {
            "kbpf.io/algorithm": "secret",
            "kbpf.io/weights": "secret-pod=1, node:secret-node=2, zone:secret-zone=3, 10.244.7.9=0,"
            " secret, secret=secret, *=4",
        },
    }  # fmt: skip
    secret[1]["endpoints"][0] |= {
        "nodeName": "secret-node", "zone": "secret-zone",
        "hints": {"forZones": [{"name": "secret-zone"}], "forNodes": [{"name": "secret-node"}]},
        "targetRef": {"kind": "Secret", "name": "secret-pod"},
    }  # fmt: skip
    reduced = [reduce_object(Kind(obj["kind"]), obj) for obj in secret]
    _, masked = mask_all(reduced)
    text = json.dumps(masked)
    assert "ecret" not in text
    for part in ("96.1.2", "1.2.3", "51.100", "244.7", "0.2.77"):
        assert part not in text
    weights = masked[0]["metadata"]["annotations"]["kbpf.io/weights"]
    pod, node, zone = (
        masked[1]["endpoints"][0][field] if field != "pod" else
        masked[1]["endpoints"][0]["targetRef"]["name"] for field in ("pod", "nodeName", "zone")
    )  # fmt: skip
    address = masked[1]["endpoints"][0]["addresses"][0]
    assert weights == (f"{pod}=1, node:{node}=2, zone:{zone}=3, {address}=0, masked, masked, *=4")


def test_a_whole_recording_is_masked(tmp_path: Path) -> None:
    lines = encode(
        HEADER, added(service("web")), {"t": 1, "type": "DELETED", "object": {
            "kind": "Service", "metadata": {"name": "web", "namespace": "shop"}}},
    ).splitlines(keepends=True)  # fmt: skip
    path = tmp_path / "masked"
    with path.open("wb") as file:
        mask_recording(lambda: lines, file)
    header, first, last = map(json.loads, path.read_text().splitlines())
    assert header == HEADER | {"masked": True, "node": "node-001"}
    assert first["object"]["metadata"]["name"] == last["object"]["metadata"]["name"]
    assert "web" not in path.read_text()
    assert "shop" not in path.read_text()
