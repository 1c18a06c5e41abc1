# SPDX-License-Identifier: Apache-2.0
"""Weights: the annotation, which endpoints a rule applies to, and the weights of a set."""

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kbpf.model.address import format_addr, parse_addr
from kbpf.model.events import Kind
from kbpf.model.objects import (
    Algorithm,
    EndpointSlice,
    Node,
    Protocol,
    Service,
    ServicePort,
    Weights,
    pack_names,
    unpack_names,
)
from kbpf.policy.endpoints import EndpointReason, EndpointSelection, select_endpoints
from kbpf.source.decode import decode
from tests.support.table import each_cells, table
from tests.values.policy.services import end, numbers, piece, service

# ---- the annotations ---------------------------------------------------------------------------

FORM = "; write NAME=WEIGHT, separated by commas, each name once: "
AT = "metadata.annotations[kbpf.io/weights]: cannot use "


def read(annotations: dict[str, Any] | None) -> decode.DecodedObject:
    meta = {"name": "web", "namespace": "ns", "annotations": annotations}
    spec = {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
    item = decode.decode_object(Kind.SERVICE, msgspec.json.encode({"metadata": meta, "spec": spec}))
    assert decode.convert_object(Kind.SERVICE, {"metadata": meta, "spec": spec}) == item
    return item


def said(annotations: dict[str, Any] | None) -> Service:
    item = read(annotations)
    assert item.error == ""
    assert item.object.ports == (ServicePort("", Protocol.TCP, 80),), "served on"
    return item.object


class Annotation(NamedTuple):
    """The annotation, the rules parsed from it, and the parts that cannot be used."""

    text: str
    means: str
    bad: str = ""


ANNOTATIONS = table(
    Annotation,
    """
web-0=3 | web-0=3 *=1
10.0.0.7=0 | 10.0.0.7=0 *=1
010.0.0.07=1 | 10.0.0.7=1 *=1
fd00::9=5, FD00:0::9=5 | fd00::9=5 *=1
node:worker-2.example=2 | node:worker-2.example=2 *=1
zone:EU_1a=2 | zone:EU_1a=2 *=1
*=0 | *=0
*=7,web-0=1000 | web-0=1000 *=7
web-0=3, 10.0.0.7=0, node:worker-2=2, zone:eu-1a=2, *=1 | 10.0.0.7=0 web-0=3 node:worker-2=2 zone:eu-1a=2 *=1
web-0=3,web-1=x | web-0=3 *=1 | 'web-1=x'
web-0=-1 | none | 'web-0=-1'
web-0=1001 | none | 'web-0=1001'
web-0=1.5 | none | 'web-0=1.5'
web-0=٣ | none | 'web-0=٣'
web-0= | none | 'web-0='
=3 | none | '=3'
3 | none | '3'
Web_0=3 | none | 'Web_0=3'
node:=3 | none | 'node:=3'
zone:-x=3 | none | 'zone:-x=3'
web-0=1,web-0=2 | web-0=1 *=1 | 'web-0=2'
*=1,*=2 | *=1 | '*=2'
a=x,b=x,c=x,d=x,e=x | none | 'a=x', 'b=x', 'c=x' and 2 more
""",
)


ANNOTATIONS += [
    Annotation(" web-0 = 3 ,web-1=2,\n", "web-0=3 web-1=2 *=1"),
    Annotation("", "none", "''"),
    Annotation(f"zone:{'z' * 64}=3", "none", f"'zone:{'z' * 59}'"),
]


def shown(weights: Weights | None) -> str:
    """The rules in the order in which they apply."""
    if weights is None:
        return "none"
    rules = [(format_addr(address), weight) for address, weight in weights.addresses]
    rules += [*weights.pods, *((f"node:{name}", weight) for name, weight in weights.nodes)]
    rules += [*((f"zone:{name}", weight) for name, weight in weights.zones), ("*", weights.default)]
    return " ".join(f"{name}={weight}" for name, weight in rules)


@pytest.mark.parametrize("row", ANNOTATIONS, ids=lambda row: row.text[:30])
def test_annotation_weights(row: Annotation):
    found = said({"kbpf.io/weights": row.text})
    assert shown(found.weights) == row.means
    lines = [line.removeprefix(AT).partition(FORM)[0] for line in found.skipped]
    assert lines == ([row.bad] if row.bad else [])


@pytest.mark.parametrize(
    ("text", "means", "problem"),
    [
        ("random", Algorithm.RANDOM, ()),
        (" maglev\n", Algorithm.MAGLEV, ()),
        ("Maglev", None, ("'Maglev' is unknown",)),
        ("", None, ("'' is unknown",)),
    ],
)
def test_annotation_algorithm(text, means, problem):
    found = said({"kbpf.io/algorithm": text})
    assert found.algorithm == means
    at = "metadata.annotations[kbpf.io/algorithm]: "
    assert found.skipped == tuple(f"{at}{one}; write random or maglev" for one in problem)


@pytest.mark.parametrize("annotations", [None, {}, {"other.io/weights": "nonsense"}])
def test_without_annotations_there_are_no_weights_and_no_problem(annotations):
    found = said(annotations)
    assert (found.algorithm, found.weights, found.skipped) == (None, None, ())


@given(st.text())
def test_any_text_is_parsed_or_reported(text):
    found = said({"kbpf.io/weights": text, "kbpf.io/algorithm": text})
    assert found.weights is not None or found.skipped


# ---- names of Pods -----------------------------------------------------------------------------

NAMES = st.text(st.characters(blacklist_characters="\n", blacklist_categories=["Cs"]))


@given(st.lists(NAMES | st.sampled_from(["web-7d4b9c-a", "web-7d4b9c-bb", ""]), max_size=6))
def test_packed_names_unpack_to_the_same_names(names):
    packed = pack_names(names)
    assert (packed == "") == (not any(names))
    if packed:
        assert unpack_names(packed) == tuple(names)


# ---- weights of a set --------------------------------------------------------------------------

PORT = ServicePort("http", Protocol.TCP, 80)
ME = Node("me", zone="a")


def ask(weights: Weights | None, *pieces: EndpointSlice, **more: Any) -> EndpointSelection:
    return select_endpoints(pieces, PORT, replace(service("web ClusterIP"), weights=weights, **more), ME, 4)


def addr(number: int) -> Any:
    return end(number).address


def rules(text: str) -> Weights:
    """Weights as RULE=WEIGHT: 1 is the address 10.1.0.1; web-1 a Pod; me and you are nodes; a and b zones; * all."""
    addresses, pods, nodes, zones, default = [], [], [], [], 1
    for word in text.split():
        name, _, weight = word.partition("=")
        if name == "*":
            default = int(weight)
        elif name.isdigit():
            addresses.append((addr(int(name)), int(weight)))
        else:
            kind = pods if "-" in name else nodes if len(name) > 1 else zones
            kind.append((name, int(weight)))
    return Weights(tuple(addresses), tuple(pods), tuple(nodes), tuple(zones), default)


THREE = piece("1@me,a 2@you,a 3@you,b", pods="web-1 web-2 web-3")


@each_cells(
    "rules_text, who, weights",
    """
no rule                       |               | 1 2 3
equal weights                 | *=9           | 1 2 3
by Pod                        | web-1=3       | 1 2 3 | 3 1 1
by address                    | 2=5           | 1 2 3 | 1 5 1
by node                       | you=4         | 1 2 3 | 1 4 4
by zone                       | a=2           | 1 2 3 | 2 2 1
by default                    | web-1=3 *=2   | 1 2 3 | 3 2 2
a common divisor is removed   | web-1=30 *=20 | 1 2 3 | 3 2 2
an address beats a Pod        | 1=7 web-1=3   | 1 2 3 | 7 1 1
a Pod beats a node            | web-2=7 you=3 | 1 2 3 | 1 7 3
a node beats a zone           | me=7 a=3      | 1 2 3 | 7 3 1
a zone beats the default      | b=7 *=3       | 1 2 3 | 3 3 7
0 from the more specific rule | web-2=0 you=3 | 1 3   | 1 3
0 gets nothing                | web-1=0       | 2 3
all but one are 0             | web-1=9 *=0   | 1
all are 0: as without weights | *=0           | 1 2 3
a rule for an unknown Pod     | web-9=9       | 1 2 3
""",
)
def test_weights_of_a_set(rules_text, who, weights):
    """Rules for three endpoints, the endpoints that get connections, and their weights."""
    selection = ask(rules(rules_text), THREE)
    assert numbers(selection.cluster) == who
    assert " ".join(map(str, selection.cluster_weights)) == weights
    assert numbers(selection.serving) == "1 2 3", "UDP flows stay with whoever serves"
    assert selection.any_endpoints
    for line in selection.explain():
        is_chosen = str(line.endpoint.address[-1]) in who
        assert (line.reason is EndpointReason.WEIGHT_ZERO) is not is_chosen


def test_cluster_set_and_local_set_are_weighted_separately():
    """With policy Local, a node whose only endpoint has weight 0 still serves with it."""
    outside = {"internal_local": True, "external_ips": (parse_addr("192.0.2.1"),)}
    found = ask(rules("web-1=0 web-2=2"), THREE, **outside)
    assert (numbers(found.cluster), found.cluster_weights) == ("2 3", (2, 1))
    assert (numbers(found.local), found.local_weights) == ("1", ())
    reasons = {line.endpoint.address[-1]: line.reason for line in found.explain()}
    assert reasons[1] is EndpointReason.LOCAL_ONLY


@each_cells(
    "first, its_pods, second, pods, text, weights",
    """\
draining ones | 1/draining 2/draining | a-1 b-1 |  |  | a-1=5 | 5 1
an address in two slices: the ready entry | 1/down 2 | old-1 x-1 | 1 | new-1 | new-1=3 old-1=0 | 3 1
equal entries: the last Pod name | 1 2 | p-1 x-1 | 1 | q-1 | p-1=3 q-1=5 | 5 1
""",
)
def test_weights_of_entries_of_an_address(first, its_pods, second, pods, text, weights):
    """Two slices, each with the names of its Pods, the rules, and the weights of endpoints 1 and 2, in any order of
    slices.
    """
    one, two = piece(first, pods=its_pods, name="s0"), piece(second, pods=pods, name="s1")
    for pieces in ((one, two), (two, one)):
        found = ask(rules(text), *pieces)
        assert (numbers(found.cluster), found.cluster_weights) == ("1 2", tuple(map(int, weights.split())))
