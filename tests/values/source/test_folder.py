# SPDX-License-Identifier: Apache-2.0
"""A folder of YAML: what is read from it and which events a change makes. A bad file keeps its
previous objects and does not affect other files.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kbpf.errors import ConfigError, ObjectError
from kbpf.model.address import parse_addr
from kbpf.model.config import Config
from kbpf.model.events import Delete, Event, Kind, ObjectKey, Rejected, Synced, Upsert
from kbpf.model.objects import EndpointSlice, Node, Protocol, Service, SlicePort
from kbpf.policy.compute import compute_desired_state
from kbpf.source.base import SourceState
from kbpf.source.folder.documents import parse_documents
from kbpf.source.folder.folder import EMPTY_FOLDER_PROBLEM, POLL_INTERVAL, FolderSource
from tests.support.lab.lab import until

WEB = """\
apiVersion: v1
kind: Service
metadata:
  name: web
  creationTimestamp: 2024-01-01T00:00:00Z
spec:
  clusterIP: 10.96.0.1
  ports:
  - name: http
    port: 80
"""
SLICE = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  labels: {kubernetes.io/service-name: web}
addressType: IPv4
endpoints:
- addresses: [10.1.0.1]
ports:
- port: 8080
"""
NODE = "{apiVersion: v1, kind: Node, metadata: {name: n1}}\n"
BOTH = f"{WEB}---\n{SLICE}"


def service(name: str, port: object = 80, **meta: str) -> str:
    obj = {
        "kind": "Service",
        "metadata": {"name": name} | meta,
        "spec": {"clusterIP": "10.96.0.9", "ports": [{"port": port}]},
    }
    return json.dumps(obj)


class Run:
    """A FolderSource without its thread: look() polls it once."""

    def __init__(self, path: Path, node_name: str = "n1") -> None:
        self.path = path
        self.events: list[Event] = []
        self.all: list[Event] = []
        self.folder = FolderSource(path, self.put, node_name, clock=lambda: 7.0)

    def put(self, event: Event) -> None:
        self.events.append(event)
        self.all.append(event)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def look(self) -> list[str]:
        """Polls once and returns the events in short."""
        del self.events[:]
        self.folder.poll()
        return self.said

    def settle(self) -> list[str]:
        """Polls twice and returns the events: a change is read at the second poll."""
        first = self.look()
        return first + self.look()

    @property
    def said(self) -> list[str]:
        marks = {Upsert: "+", Delete: "-", Rejected: "!"}
        return [
            f"synced {e.kind}" if isinstance(e, Synced) else marks[type(e)] + e.key.name
            for e in self.events
        ]

    @property
    def problems(self) -> tuple[str, ...]:
        return self.folder.status().problems


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


SYNCED = ["synced Service", "synced EndpointSlice", "synced Node", "synced Pod"]


# --- reading a file ---


def test_file_of_two_documents_has_two_objects_with_defaults():
    service, one = (found.item.object for found in parse_documents("a.yaml", BOTH.encode()).objects)
    assert isinstance(service, Service)
    assert (service.namespace, service.type) == ("default", "ClusterIP")
    assert service.creation_timestamp == "2024-01-01T00:00:00Z"
    assert isinstance(one, EndpointSlice)
    assert one.namespace == "default"
    assert one.ports == (SlicePort("", Protocol.TCP, 8080),)
    assert [end.address for end in one.endpoints] == [parse_addr("10.1.0.1")]


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("YAML", "a.yaml", WEB),
        ("YAML between document markers", "a.yaml", f"---\n{WEB}---\n"),
        ("JSON", "a.json", service("web")),
        ("JSON in YAML", "a.yml", service("web")),
        ("a List", "a.yaml", "kind: List\napiVersion: v1\nitems:\n- " + service("web")),
        ("a typed list, as the API returns it", "a.json", json.dumps({"kind": "ServiceList",
         "items": [{k: v for k, v in json.loads(service("web")).items() if k != "kind"}]})),
        ("another namespace", "a.json", service("web", namespace="default")),
    ],
)  # fmt: skip
def test_service_is_read_from(name, file, text):
    (found,) = parse_documents(file, text.encode()).objects
    assert found.item.key == ObjectKey(Kind.SERVICE, "default", "web"), name
    assert isinstance(found.item.object, Service)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2001:10:1:2:3:4:5:6", "2001:10:1:2:3:4:5:6"),  # YAML 1.1: a number of base 60
        ("fd00::10", "fd00::10"),
        ("fd00:10:96::1", "fd00:10:96::1"),
        ("10.96.0.1", "10.96.0.1"),
    ],
)
def test_addresses_need_no_quotes(text, value):
    text = WEB.replace("clusterIP: 10.96.0.1", f"clusterIP: {text}")
    (found,) = parse_documents("a.yaml", text.encode()).objects
    assert found.item.error == ""
    assert isinstance(found.item.object, Service)
    assert found.item.object.cluster_ips == (parse_addr(value),)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "port: 80",
            'port: "80"',
            "spec.ports[0].port: expected an integer, got a string (a.yaml:10)",
        ),
        ("port: 80", "port: 70000", "spec.ports[0].port: 70000 is not a port (a.yaml:10)"),
        (
            "port: 80",
            "port: 80.5",
            "spec.ports[0].port: expected an integer, got a fraction (a.yaml:10)",
        ),
        (
            "name: http",
            "name: 80",
            "spec.ports[0].name: expected a string, got an integer (a.yaml:9)",
        ),
        (
            "name: http",
            "name: no",
            "spec.ports[0].name: expected a string, got a boolean (a.yaml:9)",
        ),
        ("10.96.0.1", "10.96.0", "spec.clusterIP: '10.96.0' is not an IP address (a.yaml:7)"),
    ],
)
def test_bad_field_is_an_error_with_its_line(old, new, error):
    (found,) = parse_documents("a.yaml", WEB.replace(old, new).encode()).objects
    assert found.item.error == error
    assert found.item.key == ObjectKey(Kind.SERVICE, "default", "web")


def test_line_numbers_in_later_documents_lists_and_json():
    bad = service("b", 0)
    (_, second) = parse_documents("a.yaml", f"{WEB}---\n{bad}\n".encode()).objects
    assert second.item.error == "spec.ports[0].port: 0 is not a port (a.yaml:12)"
    text = f'{{"kind": "List", "items": [\n{service("a")},\n{bad}\n]}}'
    (_, second) = parse_documents("a.json", text.encode()).objects
    assert second.item.error == "items[1].spec.ports[0].port: 0 is not a port (a.json:3)"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- a\n- b\n", "kind: missing (a.yaml:1)"),
        ("just words\n", "kind: missing (a.yaml:1)"),
        ("metadata: {name: x}\n", "kind: missing (a.yaml:1)"),
        ("kind: Service\nmetadata: {}\n", "not a Service: metadata.name: missing (a.yaml:1)"),
        ("kind: Service\n", "not a Service: object missing required field metadata (a.yaml:1)"),
        ("kind: Servcie\n", "kind: Servcie is not supported; is Service meant? (a.yaml:1)"),
        ("\nkind: service\n", "kind: service is not supported; is Service meant? (a.yaml:2)"),
        (
            "kind: EndpointSlices\n",
            "kind: EndpointSlices is not supported; is EndpointSlice meant? (a.yaml:1)",
        ),
        (
            "kind: Endpoints\napiVersion: v1\n",
            "kind: Endpoints is not supported; write an EndpointSlice (discovery.k8s.io/v1) "
            "(a.yaml:1)",
        ),
        (
            "kind: ConfigMap\ndata:\n  a: 1\n  a: 2\n",
            "a occurs twice; the last one is used (a.yaml:4)",
        ),
        (
            "kind: EndpointSlice\napiVersion: discovery.k8s.io/v1beta1\n",
            "apiVersion: 'discovery.k8s.io/v1beta1' is not supported; write discovery.k8s.io/v1"
            " (a.yaml:2)",
        ),
    ],
)
def test_invalid_document_is_a_problem_and_the_others_are_read(text, error):
    contents = parse_documents("a.yaml", f"{text}---\n{WEB}".encode())
    assert contents.problems == (error,)
    assert len(contents.objects) == 1


UNUSED_KINDS = ("Deployment", "ServiceCIDR", "ServiceAccount", "ServiceMonitor", "PodGroup", "Role",
               "NodePool", "ConfigMap", "Ingress")  # fmt: skip


@pytest.mark.parametrize("kind", UNUSED_KINDS)
def test_unused_kind_is_ignored_without_a_problem(kind):
    contents = parse_documents("a.yaml", f"kind: {kind}\nmetadata: {{name: x}}\n".encode())
    assert (contents.ignored_kinds, contents.problems) == ((kind,), ())


MISTAKES = [
    ("  name: web\n", "  name: old\n  name: web\n", "name occurs twice; the last one is used"
     " (a.yaml:5)"),
    ("spec:\n", "spec:\n  clusterIP: 10.96.0.9\n",
     "clusterIP occurs twice; the last one is used (a.yaml:8)"),
    ("  name: web\n", "  name: web\n  annotations: {kbpf.io/wieghts: '*=2'}\n",
     "Service default/web: metadata.annotations[kbpf.io/wieghts] is not an annotation of kbpf"
     " (a.yaml:5); is kbpf.io/weights meant?"),
    ("  name: web\n", "  name: web\n  annotations: {kbpf.io/color: red, mine/x: y}\n",
     "Service default/web: metadata.annotations[kbpf.io/color] is not an annotation of kbpf"
     " (a.yaml:5); it is ignored"),
    ("  name: web\n", "  name: web\n  annotations: {kbpf.io/weights: '*=2'}\n", ""),
    ("  - name: http\n", "  - &port {name: http}\n  - <<: *port\n", ""),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "problem"), MISTAKES)
def test_duplicate_key_or_unknown_annotation_is_a_problem_and_the_service_is_read(
    old, new, problem
):
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
        ("a.yaml", "a: !!int x\n", 1),
        ("a.json", '{\n"kind": \n}', 3),
        ("a.json", "[" * 100_000, 1),
    ],
)
def test_unparsable_text_is_one_error_with_its_line(name, text, line):
    with pytest.raises(ObjectError) as caught:
        parse_documents(name, text.encode())
    assert f"({name}:{line})" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_invalid_utf8_is_an_error():
    with pytest.raises(ObjectError, match="not YAML"):
        parse_documents("a.yaml", b"a: \xff\xfe")


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
@pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
def test_empty_file_has_no_objects(name, text):
    assert parse_documents(name, text.encode()).objects == ()


def test_other_kinds_are_ignored_by_name():
    text = f"kind: Deployment\n---\n{WEB}---\nkind: ConfigMap\n---\nkind: Deployment\n"
    contents = parse_documents("a.yaml", text.encode())
    assert contents.ignored_kinds == ("Deployment", "ConfigMap")
    assert (len(contents.objects), contents.problems) == (1, ())


# --- missing objects ---


@pytest.mark.parametrize(
    ("files", "named"),
    [(("n1",), False), ((), False), (("n2", "n3"), True), (("n1", "n2"), False)],
)
def test_missing_own_node_is_a_problem_if_other_nodes_exist(
    run: Run, files: tuple[str, ...], named: bool
):
    for name in files:
        run.write(f"{name}.yaml", NODE.replace("n1", name))
    run.look()
    line = (
        "no file has a Node n1 (--hostname-override), only n2, n3: no endpoint counts as "
        "local, and this node has no zone"
    )
    assert run.problems == ((line,) if named else ())


# --- the age of a Service ---


class Conflict(NamedTuple):
    """Two Services that claim one address: the files' mtimes and texts, and the winner's name."""

    story: str
    files: dict[str, int]
    texts: dict[str, str]
    wins: str


DATED = "2024-01-01T00:00:00Z"
CONFLICTS = [
    Conflict("the older file", {"a": 200, "z": 100}, {"a": service("a"), "z": service("z")}, "z"),
    Conflict("one ns older", {"a": 101, "z": 100}, {"a": service("a"), "z": service("z")}, "z"),
    Conflict("equally old: by name", {"a": 1, "z": 1}, {"a": service("a"), "z": service("z")}, "a"),
    Conflict("creationTimestamp takes precedence", {"a": 100, "z": 200 * 10**18},
             {"a": service("a", creationTimestamp="2025-01-01T00:00:00Z"),
              "z": service("z", creationTimestamp=DATED)}, "z"),
    Conflict("creationTimestamp and mtime", {"a": 100, "z": 200},
             {"a": service("a"), "z": service("z", creationTimestamp=DATED)}, "a"),
]  # fmt: skip


def winner(run: Run) -> str:
    """The name of the Service that has 10.96.0.9 after the events so far."""
    services = {e.key: e.object for e in run.all if isinstance(e, Upsert)}
    for event in run.all:
        if isinstance(event, Delete):
            services.pop(event.key, None)
    listed = [one for one in services.values() if isinstance(one, Service)]
    state = compute_desired_state(listed, (), Node("n1"), (), Config())
    (name,) = {key.name for key, found in state.services.items() if found.frontends}
    losers = {key.name: found.lost for key, found in state.services.items() if found.lost}
    assert all(str(by) == f"default/{name}" for lost in losers.values() for _, by in lost)
    assert len(losers) == len(listed) - 1
    return name


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: row.story)
def test_the_older_of_two_services_keeps_an_address(run: Run, row: Conflict):
    for name, text in row.texts.items():
        run.write(f"{name}.json", text)
        os.utime(run.path / f"{name}.json", ns=(0, row.files[name]))
    run.look()
    assert winner(run) == row.wins


def test_rewritten_file_keeps_the_age_of_its_service(run: Run):
    run.write("z.json", service("z"))
    os.utime(run.path / "z.json", ns=(0, 100))
    run.look()
    run.write("a.json", service("a"))
    os.utime(run.path / "a.json", ns=(0, 200))
    assert run.settle() == ["+a"]
    assert winner(run) == "z"
    run.write("z.json", service("z", port=80) + "\n")
    os.utime(run.path / "z.json", ns=(0, 300))
    assert run.settle() == [], "it is as old as it was"
    assert winner(run) == "z"
    (run.path / "z.json").rename(run.path / "b.json")
    run.settle()
    assert winner(run) == "z"
    (run.path / "b.json").unlink()
    assert run.settle() == ["-z"]
    assert winner(run) == "a"
    run.write("z.json", service("z"))
    os.utime(run.path / "z.json", ns=(0, 400))
    run.settle()
    assert winner(run) == "a", "it has come anew"


# --- events of the folder ---


def test_all_files_are_read_at_the_first_poll(run):
    run.write("b.yaml", NODE)
    run.write("a.yml", WEB)
    run.write("c.json", service("api"))
    run.write("notes.txt", "not for us")
    run.write(".hidden.yaml", "{")
    run.write("a.yaml~", "{")
    (run.path / "folder.yaml").mkdir()
    assert run.look() == ["+web", "+n1", "+api", *SYNCED]
    status = run.folder.status()
    assert (status.state, status.synced, status.last_contact) == (SourceState.WATCHING, True, 7.0)
    assert (status.error, status.problems) == ("", ())
    assert run.look() == []


def test_an_empty_folder_is_synced(run):
    assert run.look() == SYNCED


def test_only_our_own_node_is_an_event(run):
    run.write("n.yaml", f"{NODE}---\n{NODE.replace('n1', 'n2')}")
    assert run.look() == ["+n1", *SYNCED]


def test_objects_outside_the_api_selectors_are_ignored(run):
    other = service("other").replace('"name"', '"labels": {"%s": "x"}, "name"')
    run.write("a.yaml", other % "service.kubernetes.io/service-proxy-name")
    run.write("b.yaml", other % "service.kubernetes.io/headless")
    run.write("c.yaml", WEB.replace("10.96.0.1", "None"))
    run.write("d.yaml", WEB.replace("  clusterIP: 10.96.0.1\n", ""))
    run.write("e.yaml", SLICE.replace("IPv4", "FQDN"))
    assert run.look() == SYNCED


def test_change_is_read_once_the_file_is_unchanged_for_two_polls(run):
    run.write("a.yaml", BOTH)
    run.look()
    run.write("a.yaml", BOTH.replace("8080", "8081"))
    assert run.look() == []
    assert run.look() == ["+web-1"]
    assert run.look() == []


def test_file_being_written_is_not_read(run):
    run.write("a.yaml", WEB)
    run.look()
    for size in range(10, len(BOTH), 60):
        run.write("a.yaml", BOTH[:size])
        assert run.look() == []
    run.write("a.yaml", BOTH)
    assert run.settle() == ["+web-1"]


def test_file_that_changes_during_a_read_is_ignored_until_stable(run, monkeypatch):
    run.write("a.yaml", BOTH)
    run.look()
    real, writers = open, [lambda: run.write("a.yaml", WEB)]

    def opened(path: Path, mode: str) -> object:
        if writers:
            writers.pop()()
        return real(path, mode)

    os.utime(run.path / "a.yaml")
    run.look()
    monkeypatch.setattr("kbpf.source.folder.folder.open", opened, raising=False)
    assert run.look() == []
    run.write("a.yaml", BOTH)
    assert run.settle() == []


def test_file_missing_for_one_poll_keeps_its_objects(run):
    run.write("a.yaml", WEB)
    run.look()
    (run.path / "a.yaml").rename(run.path / "a.yaml~")
    assert run.look() == []
    (run.path / "a.yaml~").rename(run.path / "a.yaml")
    assert run.settle() == []


def test_new_file_and_removed_file(run):
    run.write("a.yaml", WEB)
    run.look()
    run.write("b.yaml", SLICE)
    assert run.settle() == ["+web-1"]
    (run.path / "a.yaml").unlink()
    assert run.settle() == ["-web"]


class UnknownField(NamedTuple):
    """A replacement in BOTH, and the one problem line it makes ("": none)."""

    name: str
    old: str
    new: str
    line: str


WEB_SAYS = "Service default/web: "
UNKNOWN_FIELDS = [
    UnknownField("a misspelt field", "  clusterIP:", "  internalTraficPolicy: Local\n  clusterIP:",
                 WEB_SAYS + "spec.internalTraficPolicy is not a field of a Service (a.yaml:7); "
                 "is internalTrafficPolicy meant?"),
    UnknownField("wrong case", "  clusterIP:", "  clusterIp: 10.96.0.1\n  clusterIP:",
         WEB_SAYS + "spec.clusterIp is not a field of a Service (a.yaml:7); is clusterIP meant?"),
    UnknownField("unlike any field", "    port: 80", "    port: 80\n    cow: {a: 1}",
         WEB_SAYS + "spec.ports[0].cow is not a field of a Service (a.yaml:11); it is ignored"),
    UnknownField("a top-level field", "addressType:", "adressType: IPv4\naddressType:",
         "EndpointSlice default/web-1: adressType is not a field of an EndpointSlice (a.yaml:17); "
         "is addressType meant?"),
    UnknownField("an endpoint's condition",
                 "[10.1.0.1]", "[10.1.0.1]\n  conditions: {raedy: false}",
                 "EndpointSlice default/web-1: endpoints[0].conditions.raedy is not a field of an "
                 "EndpointSlice (a.yaml:20); is ready meant?"),
    UnknownField("a hint", "[10.1.0.1]", "[10.1.0.1]\n  hints: {forZone: [{name: a}]}",
                 "EndpointSlice default/web-1: endpoints[0].hints.forZone is not a field of an "
                 "EndpointSlice (a.yaml:20); is forZones meant?"),
    UnknownField("a selector has any key",
                 "  clusterIP:", "  selector: {any: thing}\n  clusterIP:", ""),
    UnknownField("metadata is not checked", "metadata:\n  name: web\n",
                 "metadata:\n  lables: {}\n  name: web\n", ""),
    UnknownField("known fields that are not read",
                 "  clusterIP:", "  trafficDistribution: PreferSameZone\n"
                 "  sessionAffinityConfig: {clientIP: {timeoutSeconds: 9}}\n  clusterIP:", ""),
    UnknownField("a name with a line feed", "  clusterIP:", '  "a\\nb": 1\n  clusterIP:',
                 WEB_SAYS + r"spec.a\nb is not a field of a Service (a.yaml:1); it is ignored"),
]  # fmt: skip


@pytest.mark.parametrize("slip", UNKNOWN_FIELDS, ids=lambda slip: slip.name)
def test_unknown_field_is_one_problem_and_its_object_is_served(run, caplog, slip: UnknownField):
    run.write("a.yaml", BOTH.replace(slip.old, slip.new, 1))
    assert run.look() == ["+web", "+web-1", *SYNCED]
    assert run.problems == ((slip.line,) if slip.line else ())
    run.write("b.yaml", NODE)
    run.settle()
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == len(run.problems), "once"


def test_unknown_field_of_a_rejected_list_item_is_named(run):
    bad = service("b", 0).replace('"spec"', '"sepc": 1, "spec"')
    run.write("a.json", f'{{"kind": "List", "items": [\n{bad}\n]}}')
    assert run.look() == ["!b", *SYNCED]
    assert run.problems == (
        "Service default/b: items[0].sepc is not a field of a Service (a.json:2); is spec meant?",
        "Service default/b: items[0].spec.ports[0].port: 0 is not a port (a.json:2)",
    )


def test_invalid_name_is_rejected_in_one_line(run):
    run.write("a.json", service("we\nb"))
    run.look()
    assert isinstance(run.events[0], Rejected)
    (line,) = run.problems
    assert line.startswith(r"Service default/we\nb: metadata.name: 'we\nb' is not a DNS label (")
    assert line.endswith(" (a.json:1)")
    assert "\n" not in line


def test_object_removed_from_a_file_is_deleted(run):
    run.write("a.yaml", BOTH)
    run.look()
    run.write("a.yaml", SLICE)
    assert run.settle() == ["-web"]


def test_object_moved_to_another_file_is_not_deleted(run):
    run.write("a.yaml", BOTH)
    run.look()
    run.write("a.yaml", WEB)
    run.write("z.yaml", SLICE)
    assert run.settle() == []


def test_file_replaced_by_rename_is_read(run):
    run.write("a.yaml", WEB)
    run.look()
    run.write("new", WEB.replace("port: 80", "port: 81"))
    os.replace(run.path / "new", run.path / "a.yaml")
    assert run.settle() == ["+web"]


def test_changed_symbolic_link_is_followed(run):
    for name, port in (("one", 80), ("two", 81)):
        (run.path / name).mkdir()
        run.write(f"{name}/a.yaml", WEB.replace("port: 80", f"port: {port}"))
    (run.path / "..data").symlink_to("one")
    (run.path / "a.yaml").symlink_to("..data/a.yaml")  # as the kubelet mounts a ConfigMap
    assert run.look() == ["+web", *SYNCED]
    (run.path / "new").symlink_to("two")
    os.replace(run.path / "new", run.path / "..data")
    assert run.settle() == ["+web"]


def test_touched_file_makes_no_event(run):
    run.write("a.yaml", WEB)
    run.look()
    os.utime(run.path / "a.yaml")
    assert run.settle() == []


# --- bad files ---


def test_unparsable_file_keeps_its_previous_objects(run):
    run.write("a.yaml", BOTH)
    run.write("b.yaml", service("other"))
    run.look()
    run.write("a.yaml", WEB + "\tspec: {")
    assert run.settle() == []
    (problem,) = run.problems
    assert "not YAML" in problem
    assert "(a.yaml:11)" in problem
    run.write("a.yaml", WEB)
    assert run.settle() == ["-web-1"]
    assert run.problems == ()


def test_file_unparsable_from_the_start_does_not_affect_the_others(run):
    run.write("a.yaml", "{")
    run.write("b.yaml", WEB)
    assert run.look() == ["+web", *SYNCED]
    assert len(run.problems) == 1


def test_bad_object_is_rejected_until_corrected(run):
    run.write("a.yaml", BOTH)
    run.look()
    run.write("a.yaml", BOTH.replace("port: 80\n", "port: 0\n"))
    assert run.settle() == ["!web"]
    rejected = run.events[0]
    assert isinstance(rejected, Rejected)
    assert rejected.error == "spec.ports[0].port: 0 is not a port (a.yaml:10)"
    assert run.problems == (f"Service default/web: {rejected.error}",)
    run.write("b.yaml", NODE)
    assert run.settle() == ["+n1"]  # and not rejected again
    run.write("a.yaml", BOTH)
    assert run.settle() == ["+web"]
    assert run.problems == ()


def test_removed_bad_object_is_deleted(run):
    run.write("a.yaml", service("x", 0))
    assert run.look() == ["!x", *SYNCED]
    run.write("a.yaml", "")
    assert run.settle() == ["-x"]


def test_object_in_two_files_is_used_from_the_first_and_reported(run):
    run.write("b.yaml", service("web", 81))
    run.write("a.yaml", service("web", 80))
    assert run.look() == ["+web", *SYNCED]
    first = run.events[0]
    assert isinstance(first, Upsert)
    assert isinstance(first.object, Service)
    assert first.object.ports[0].port == 80
    assert run.problems == ("b.yaml: Service default/web is already in a.yaml; ignored here",)
    (run.path / "a.yaml").unlink()
    assert run.settle() == ["+web"]
    assert run.problems == ()


def test_of_two_files_with_one_object_the_first_by_name_wins(run):
    run.write("b.yaml", service("web", 81))
    run.look()
    run.write("a.yaml", service("web", 80))
    assert run.settle() == ["+web"]
    assert run.problems == ("b.yaml: Service default/web is already in a.yaml; ignored here",)


def test_object_twice_in_one_file_is_reported(run):
    run.write("a.yaml", f"{WEB}---\n{WEB}")
    assert run.look() == ["+web", *SYNCED]
    assert run.problems == ("a.yaml: Service default/web is already in a.yaml; ignored here",)


def test_missing_folder_is_an_error_at_start(tmp_path):
    folder = FolderSource(tmp_path / "none", lambda event: None)
    with pytest.raises(ConfigError, match=r"no such folder of objects .*--source DIR"):
        folder.start()


def test_vanished_folder_keeps_all_objects(tmp_path, caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    (tmp_path / "objects").mkdir()
    run = Run(tmp_path / "objects")
    run.write("a.yaml", WEB)
    run.look()
    run.path.rename(tmp_path / "away")
    assert run.settle() == []
    status = run.folder.status()
    assert status.state is SourceState.RETRYING
    assert status.failures == 2
    assert "cannot read the folder: No such file or directory" in status.error
    (tmp_path / "away").rename(run.path)
    assert run.settle() == []
    status = run.folder.status()
    assert (status.state, status.error, status.failures) == (SourceState.WATCHING, "", 0)
    assert [r.getMessage().split(" error")[0] for r in caplog.records[1:]] == [
        "cannot read the folder", f"folder can be read again path={run.path} failures=2",
    ]  # fmt: skip


def test_unreadable_file_keeps_its_objects(run, monkeypatch):
    run.write("a.yaml", WEB)
    run.look()
    real, denied = open, [True]

    def guarded(path: Path, mode: str) -> object:
        if denied[0]:
            raise PermissionError(13, "Permission denied")
        return real(path, mode)

    monkeypatch.setattr("kbpf.source.folder.folder.open", guarded, raising=False)
    os.utime(run.path / "a.yaml")
    assert run.settle() == []
    assert run.problems == ("cannot read the file: Permission denied (a.yaml)",)
    denied[0] = False
    assert run.settle() == []
    assert run.problems == ()


def test_problems_and_ignored_kinds_are_logged_once(run, caplog):
    caplog.set_level(logging.INFO, "kbpf.source")
    run.write("a.yaml", "kind: Deployment\n---\nkind: Deployment\n")
    run.write("b.yaml", "{")
    run.look()
    run.write("c.yaml", f"kind: Deployment\n---\n{WEB}")
    run.settle()
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "kind=Deployment" in line]) == 1
    assert len([line for line in lines if "b.yaml:2" in line]) == 1


@pytest.mark.parametrize(
    "text",
    [b"spec: {ports: &a [*a]}", b"- " * 100_000, b"[" * 100_000, b"\xff\xfe\x00", b"{"],
    ids=("a cycle", "deep", "deep flow", "bytes", "half"),
)
def test_one_bad_file_spoils_only_itself(run, text):
    """The bad file sorts first, and had a valid object before."""
    run.write("aaa.yaml", service("kept"))
    run.write("b.yaml", WEB)
    run.look()
    (run.path / "aaa.yaml").write_bytes(text)
    run.write("b.yaml", WEB.replace("port: 80", "port: 81"))
    run.write("c.yaml", service("new"))
    assert run.settle() == ["+web", "+new"]
    (problem,) = run.problems
    assert "aaa.yaml" in problem
    assert not run.folder.status().authoritative
    run.write("aaa.yaml", service("kept"))
    assert run.settle() == []
    assert run.problems == ()


def test_internal_error_in_one_file_does_not_affect_the_others(run, monkeypatch, caplog):
    def broken(name, data):
        if name == "a.yaml":
            raise RuntimeError("on purpose")
        return parse_documents(name, data)

    monkeypatch.setattr("kbpf.source.folder.folder.parse_documents", broken)
    run.write("a.yaml", WEB)
    run.write("b.yaml", service("b"))
    assert run.look() == ["+b", *SYNCED]
    assert run.settle() == []
    (problem,) = run.problems
    assert problem.startswith("cannot read the file: RuntimeError('on purpose') (a.yaml)")
    assert caplog.text.count("Traceback") == 1


class Clock:
    now = 7.0


@pytest.fixture
def clocked(tmp_path) -> tuple[Run, Clock]:
    run, clock = Run(tmp_path), Clock()
    run.folder = FolderSource(tmp_path, run.put, "n1", clock=lambda: clock.now, empty_grace=60.0)
    run.write("a.yaml", WEB)
    run.look()
    (tmp_path / "a.yaml").unlink()
    return run, clock


def test_emptied_folder_keeps_its_objects_for_a_grace_period(clocked, caplog):
    run, clock = clocked
    for _ in range(5):
        assert run.settle() == []
        clock.now += 11.0
    assert run.problems == (EMPTY_FOLDER_PROBLEM,)
    assert not run.folder.status().authoritative
    assert caplog.text.count(EMPTY_FOLDER_PROBLEM) == 1
    assert "deleting its objects" not in caplog.text
    clock.now += 6.0
    assert run.settle() == ["-web"]
    assert run.settle() == []
    assert caplog.text.count("the folder is still empty, deleting its objects") == 1
    assert run.problems == ()


def test_file_that_returns_within_the_grace_period_makes_no_event(clocked):
    run, clock = clocked
    assert run.settle() == []
    run.write("a.yaml", WEB)
    assert run.settle() == []
    assert run.problems == ()
    assert run.folder.status().authoritative
    (run.path / "a.yaml").unlink()
    clock.now += 59.0
    assert run.settle() == [], "the time begins again"


def test_without_grace_period_an_emptied_folder_deletes_its_objects(tmp_path):
    run = Run(tmp_path)
    run.folder = FolderSource(tmp_path, run.put, "n1", empty_grace=0.0)
    run.write("a.yaml", WEB)
    run.look()
    (tmp_path / "a.yaml").unlink()
    assert run.settle() == ["-web"]


# --- the folder's thread ---


@pytest.fixture
def running(tmp_path) -> Iterator[Callable[[], Run]]:
    run = Run(tmp_path)

    def start() -> Run:
        run.folder.start()
        return run

    yield start
    run.folder.stop()
    until(
        "no thread is left",
        lambda: not any(t.name == "folder" for t in threading.enumerate()),
    )


def test_thread_reads_a_change_within_half_a_second_and_stops(running, tmp_path):
    (tmp_path / "a.yaml").write_text(WEB)
    run = running()
    until("the file is read", lambda: len(run.events) == len(SYNCED) + 1)
    (tmp_path / "a.yaml").write_text(WEB.replace("port: 80", "port: 81"))
    until("the change is read", lambda: len(run.events) == len(SYNCED) + 2)
    run.folder.stop()
    until("the folder has stopped", lambda: run.folder.status().state is SourceState.STOPPED)
    assert 3 * POLL_INTERVAL < 0.5, "a change is read at the second look, and begins in the first"


def test_internal_error_does_not_end_the_thread(tmp_path, caplog):
    (tmp_path / "a.yaml").write_text(WEB)
    said: list[Event] = []
    faults = [RuntimeError("no room")]

    def put(event: Event) -> None:
        if faults:
            raise faults.pop()
        said.append(event)

    folder = FolderSource(tmp_path, put, poll_interval=0.01)
    folder.start()
    until("the file is read", lambda: len(said) == len(SYNCED) + 1)
    folder.stop()
    assert isinstance(said[0], Upsert)
    assert "no room" in caplog.text
