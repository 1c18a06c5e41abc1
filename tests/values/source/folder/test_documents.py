# SPDX-License-Identifier: Apache-2.0
"""What is read from a file of YAML, and the age of Services in a folder."""

import os

import pytest

from kbpf.errors import ObjectError
from kbpf.model.address import parse_addr
from kbpf.model.events import Delete, Kind, ObjectKey, Upsert
from kbpf.model.objects import Protocol, Service, SlicePort
from kbpf.source.folder.documents import parse_documents
from tests.support.table import each_case, each_cells, each_pair
from tests.values.source.folder.folder import BOTH, NODE, WEB, Run, service


def test_file_of_two_documents_has_two_objects_with_defaults():
    service, one = (found.item.object for found in parse_documents("a.yaml", BOTH.encode()).objects)
    assert (service.namespace, service.type) == ("default", "ClusterIP")
    assert service.creation_timestamp == "2024-01-01T00:00:00Z"
    assert one.namespace == "default"
    assert one.ports == (SlicePort("", Protocol.TCP, 8080),)
    assert [end.address for end in one.endpoints] == [parse_addr("10.1.0.1")]


FILES = {
    "YAML": ("a.yaml", WEB),
    "YAML between document markers": ("a.yaml", f"---\n{WEB}---\n"),
    "JSON": ("a.json", service("web")),
    "JSON in YAML": ("a.yml", service("web")),
    "a List": ("a.yaml", "kind: List\napiVersion: v1\nitems:\n- " + service("web")),
    "a typed list, as the API returns it": (
        "a.json",
        '{"kind": "ServiceList", "items": [' + service("web").replace('"kind": "Service", ', "") + "]}",
    ),
    "another namespace": ("a.json", service("web", namespace="default")),
}


@each_case("file, text", FILES)
def test_service_is_read_from(file, text):
    (found,) = parse_documents(file, text.encode()).objects
    assert found.item.key == ObjectKey(Kind.SERVICE, "default", "web")
    assert found.item.object.ports[0].port == 80


@pytest.mark.parametrize("text", ["2001:10:1:2:3:4:5:6", "fd00::10", "fd00:10:96::1", "10.96.0.1"])
def test_addresses_need_no_quotes(text):
    """The first would be a number of base 60 in YAML 1.1."""
    (found,) = parse_documents("a.yaml", WEB.replace("10.96.0.1", text).encode()).objects
    assert found.item.error == ""
    assert found.item.object.cluster_ips == (parse_addr(text),)


@each_pair(
    "field, error",
    """\
port: "80" → spec.ports[0].port: expected an integer, got a string (a.yaml:10)
port: 80.5 → spec.ports[0].port: expected an integer, got a fraction (a.yaml:10)
name: 80 → spec.ports[0].name: expected a string, got an integer (a.yaml:9)
name: no → spec.ports[0].name: expected a string, got a boolean (a.yaml:9)
clusterIP: 10.96.0 → spec.clusterIP: '10.96.0' is not an IP address (a.yaml:7)
""",
)
def test_bad_field_is_an_error_with_its_line(field, error):
    """The field replaces its namesake in WEB (the last one)."""
    old = {"port": "port: 80", "name": "name: http", "clusterIP": "clusterIP: 10.96.0.1"}[field.partition(":")[0]]
    (found,) = parse_documents("a.yaml", WEB.replace(old, field).encode()).objects
    assert found.item.error == error
    assert found.item.key == ObjectKey(Kind.SERVICE, "default", "web")


@each_pair(
    "spec, problem",
    """\
{type: NodePort, ports: [{port: 80}]} → yes
{clusterIP: '', ports: [{port: 80}]} → yes
{clusterIPs: [], ports: [{port: 80}]} → yes
{clusterIPs: [''], ports: [{port: 80}]} → yes
 → yes
{clusterIP: None, ports: [{port: 80}]} → no
{clusterIPs: [None], ports: [{port: 80}]} → no
{type: ExternalName, externalName: example.com} → no
{ports: [{port: 0}]} → yes
""",
)
def test_service_without_an_address_is_an_error_unless_it_needs_none(spec, problem):
    """An API server would assign one; nothing does in a folder."""
    (found,) = parse_documents("a.yaml", f"kind: Service\nmetadata: {{name: web}}\nspec: {spec}\n".encode()).objects
    error = "spec.clusterIP: missing; write an address, since no API server assigns one (a.yaml:3)"
    assert (found.item.object, found.item.error) == (None, error if problem == "yes" else "")


def test_service_of_another_proxy_needs_no_address():
    text = "kind: Service\nmetadata: {name: web, labels: {service.kubernetes.io/service-proxy-name: x}}\n"
    (found,) = parse_documents("a.yaml", text.encode()).objects
    assert (found.item.object, found.item.error) == (None, "")


def test_line_numbers_in_later_documents_lists_and_json():
    bad = service("b", 0)
    (_, second) = parse_documents("a.yaml", f"{WEB}---\n{bad}\n".encode()).objects
    assert second.item.error == "spec.ports[0].port: 0 is not a port (a.yaml:12)"
    text = f'{{"kind": "List", "items": [\n{service("a")},\n{bad}\n]}}'
    (_, second) = parse_documents("a.json", text.encode()).objects
    assert second.item.error == "items[1].spec.ports[0].port: 0 is not a port (a.json:3)"


@each_pair(
    "text, error",
    """\
[a, b] → kind: missing (a.yaml:1)
just words → kind: missing (a.yaml:1)
metadata: {name: x} → kind: missing (a.yaml:1)
kind: !!python/object/apply:os.system [touch x] → kind: missing (a.yaml:1)
{kind: Service, metadata: {}} → not a Service: metadata.name: missing (a.yaml:1)
kind: Service → not a Service: object missing required field metadata (a.yaml:1)
kind: Servcie → kind: Servcie is not supported; is Service meant? (a.yaml:1)
# a comment;kind: service → kind: service is not supported; is Service meant? (a.yaml:2)
kind: EndpointSlices → kind: EndpointSlices is not supported; is EndpointSlice meant? (a.yaml:1)
kind: Endpoints → kind: Endpoints is not supported; write an EndpointSlice (discovery.k8s.io/v1) (a.yaml:1)
kind: ConfigMap;data:;  a: 1;  a: 2 → a occurs twice; the last one is used (a.yaml:4)
kind: EndpointSlice;apiVersion: discovery.k8s.io/v2 → apiVersion: 'discovery.k8s.io/v2' is not supported; write
""",
)
def test_invalid_document_is_a_problem_and_the_others_are_read(text, error):
    """A document, with ; between its lines → the problem."""
    contents = parse_documents("a.yaml", f"{text}\n---\n{WEB}".replace(";", "\n").encode())
    (problem,) = contents.problems
    assert problem.startswith(error)
    assert len(contents.objects) == 1


UNUSED = "Deployment ServiceCIDR ServiceAccount ServiceMonitor PodGroup Role NodePool ConfigMap Ingress"


@pytest.mark.parametrize("kind", UNUSED.split())
def test_unused_kind_is_ignored_without_a_problem(kind):
    contents = parse_documents("a.yaml", f"kind: {kind}\nmetadata: {{name: x}}\n".encode())
    assert (contents.ignored_kinds, contents.problems) == ((kind,), ())


NOT_OURS = "Service default/web: metadata.annotations[kbpf.io/%s] is not an annotation of kbpf (a.yaml:5); %s"
MISTAKES = [
    # a text in WEB, what it is replaced by, and the problem
    ("  name: web\n", "  name: old\n  name: web\n", "name occurs twice; the last one is used (a.yaml:5)"),
    ("spec:\n", "spec:\n  clusterIP: 10.96.0.9\n", "clusterIP occurs twice; the last one is used (a.yaml:8)"),
    (
        "  name: web\n",
        "  name: web\n  annotations: {kbpf.io/wieghts: '*=2'}\n",
        NOT_OURS % ("wieghts", "is kbpf.io/weights meant?"),
    ),
    (
        "  name: web\n",
        "  name: web\n  annotations: {kbpf.io/color: red, mine/x: y}\n",
        NOT_OURS % ("color", "it is ignored"),
    ),
    ("  name: web\n", "  name: web\n  annotations: {kbpf.io/weights: '*=2'}\n", ""),
    ("  - name: http\n", "  - &port {name: http}\n  - <<: *port\n", ""),
]


@pytest.mark.parametrize(("old", "new", "problem"), MISTAKES)
def test_duplicate_key_or_unknown_annotation_is_a_problem_and_the_service_is_read(old, new, problem):
    contents = parse_documents("a.yaml", WEB.replace(old, new, 1).encode())
    (found,) = contents.objects
    assert found.item.key == ObjectKey(Kind.SERVICE, "default", "web")
    assert [line for line in contents.problems if line] == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "kind: Service\nspec: [\n", 3),
        ("a.yaml", "a: b\n\tc: d\n", 2),
        ("a.yaml", "a: \x00", 1),
        ("a.yaml", "a: &x [*y]\n", 1),
        ("a.yaml", "a: *b\n", 1),
        ("a.json", '{\n"kind": \n}', 3),
        ("a.json", "[" * 100_000, 1),
    ],
)
def test_unparsable_text_is_one_error_with_its_line(name, text, line):
    with pytest.raises(ObjectError) as caught:
        parse_documents(name, text.encode())
    assert f"({name}:{line})" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
@pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
def test_empty_file_has_no_objects(name, text):
    assert parse_documents(name, text.encode()).objects == ()


# --- missing objects ---


@pytest.mark.parametrize(
    ("files", "named"), [(("n1",), False), ((), False), (("n2", "n3"), True), (("n1", "n2"), False)]
)
def test_missing_own_node_is_a_problem_if_other_nodes_exist(run: Run, files: tuple[str, ...], named):
    for name in files:
        run.write(f"{name}.yaml", NODE.replace("n1", name))
    run.look()
    line = (
        "no file has a Node n1 (--hostname-override), only n2, n3: no endpoint counts as "
        "local, and this node has no zone"
    )
    assert run.problems == ((line,) if named else ())


def winner(run: Run) -> str:
    """The name of the oldest Service after the events so far: of several that claim one address it gets it."""
    services = {e.key: e.object for e in run.all if isinstance(e, Upsert)}
    for event in run.all:
        if isinstance(event, Delete):
            services.pop(event.key, None)
    assert all(isinstance(one, Service) and one.creation_timestamp for one in services.values())
    return min(services.values(), key=lambda one: (one.creation_timestamp, one.name)).name


LATER = 200 * 10**18


def write(run: Run, name: str, text: str, mtime: int) -> None:
    run.write(name, text)
    os.utime(run.path / name, ns=(0, mtime))


@each_cells(
    "a, z, winner_text",
    """
the older file                      | 200                      | 100                      | z
one ns older                        | 101                      | 100                      | z
equally old: by name                | 1                        | 1                        | a
creationTimestamp takes precedence  | 100 2025-01-01T00:00:00Z | LATER 2024-01-01T00:00:00Z | z
creationTimestamp and mtime         | 100                      | 200 2024-01-01T00:00:00Z | a
""",
)
def test_the_older_of_two_services_keeps_an_address(run: Run, a, z, winner_text):
    """The mtime and the creationTimestamp of Services a and z, which claim one address, and the winner."""
    for file, age in (("a", a), ("z", z)):
        mtime, _, created = age.replace("LATER", str(LATER)).partition(" ")
        meta = {"creationTimestamp": created} if created else {}
        write(run, f"{file}.json", service(file, **meta), int(mtime))
    run.look()
    assert winner(run) == winner_text


def test_rewritten_file_keeps_the_age_of_its_service(run: Run):
    write(run, "z.json", service("z"), 100)
    run.look()
    write(run, "a.json", service("a"), 200)
    assert (run.settle(), winner(run)) == (["+a"], "z")
    write(run, "z.json", service("z") + "\n", 300)
    assert (run.settle(), winner(run)) == ([], "z")
    (run.path / "z.json").rename(run.path / "b.json")
    run.settle()
    assert winner(run) == "z"
    (run.path / "b.json").unlink()
    assert (run.settle(), winner(run)) == (["-z"], "a")
    write(run, "z.json", service("z"), 400)
    run.settle()
    assert winner(run) == "a", "it has come anew"
