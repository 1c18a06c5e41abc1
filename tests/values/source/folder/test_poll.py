# SPDX-License-Identifier: Apache-2.0
"""Which events the changes of a folder make."""

import logging
import os
from pathlib import Path

from kbpf.model.events import Rejected
from kbpf.source.base import SourceState
from tests.support.table import each_line, each_named_pair
from tests.values.source.folder.folder import BOTH, NODE, SLICE, SYNCED, WEB, service

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


def test_only_our_own_node_is_an_event(run):
    assert run.place(f"{NODE}---\n{NODE.replace('n1', 'n2')}", "n.yaml") == ["+n1", *SYNCED]


def test_objects_outside_the_api_selectors_are_ignored(run):
    other = service("other").replace('"name"', '"labels": {"%s": "x"}, "name"')
    run.write("a.yaml", other % "service.kubernetes.io/service-proxy-name")
    run.write("b.yaml", other % "service.kubernetes.io/headless")
    run.write("c.yaml", WEB.replace("10.96.0.1", "None"))
    run.write("d.yaml", WEB.replace("  clusterIP: 10.96.0.1\n", ""))
    assert run.place(SLICE.replace("IPv4", "FQDN"), "e.yaml") == SYNCED


def test_file_being_written_is_not_read(run):
    run.place(WEB)
    for size in range(10, len(BOTH), 60):
        assert run.place(BOTH[:size]) == []
    assert run.change(BOTH) == ["+web-1"]


def test_file_that_changes_during_a_read_is_ignored_until_stable(run, monkeypatch):
    run.place(BOTH)
    real, writers = open, [lambda: run.write("a.yaml", WEB)]

    def opened(path: Path, mode: str) -> object:
        if writers:
            writers.pop()()
        return real(path, mode)

    os.utime(run.path / "a.yaml")
    run.look()
    monkeypatch.setattr("kbpf.source.folder.folder.open", opened, raising=False)
    assert run.look() == []
    assert run.change(BOTH) == []


def test_file_missing_for_one_poll_keeps_its_objects(run):
    run.place(WEB)
    (run.path / "a.yaml").rename(run.path / "a.yaml~")
    assert run.look() == []
    (run.path / "a.yaml~").rename(run.path / "a.yaml")
    assert run.settle() == []


@each_line(
    "old, new, field, number, meant",
    r"""
clusterIP:   | internalTraficPolicy: Local;  clusterIP:      | spec.internalTraficPolicy    | 7  | internalTrafficPolicy
clusterIP:   | clusterIp: 10.96.0.1;  clusterIP:             | spec.clusterIp                | 7  | clusterIP
port: 80     | port: 80;    cow: {a: 1}                      | spec.ports[0].cow             | 11
addressType: | adressType: IPv4;addressType:                 | adressType                    | 17 | addressType
[10.1.0.1]   | [10.1.0.1];  conditions: {raedy: false}       | endpoints[0].conditions.raedy | 20 | ready
[10.1.0.1]   | [10.1.0.1];  hints: {forZone: [{name: a}]}    | endpoints[0].hints.forZone    | 20 | forZones
clusterIP:   | "a\nb": 1;  clusterIP:                        | spec.a\nb                     | 1
clusterIP:   | selector: {any: thing};  clusterIP:
metadata:    | metadata:;  lables: {}
clusterIP:   | trafficDistribution: PreferSameZone;  clusterIP:
clusterIP:   | sessionAffinityConfig: {clientIP: {timeoutSeconds: 9}};  clusterIP:
""",
)
def test_unknown_field_is_one_problem_and_its_object_is_served(run, caplog, old, new, field, number, meant):
    """A text in BOTH, the lines that replace it (with ; between them), the field that is a problem with its line (none:
    no problem), and the field that is meant. A selector has any keys, and those of metadata are not checked.
    """
    assert run.place(BOTH.replace(old, new.replace(";", "\n"), 1)) == ["+web", "+web-1", *SYNCED]
    subject, kind = "EndpointSlice default/web-1", "an EndpointSlice"
    if field.startswith("spec"):
        subject, kind = "Service default/web", "a Service"
    hint = f"is {meant} meant?" if meant else "it is ignored"
    line = f"{subject}: {field} is not a field of {kind} (a.yaml:{number}); {hint}"
    assert run.problems == ((line,) if field else ())
    run.change(NODE, "b.yaml")
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == len(run.problems), "once"


def test_unknown_field_of_a_rejected_list_item_is_named(run):
    bad = service("b", 0).replace('"spec"', '"sepc": 1, "spec"')
    assert run.place(f'{{"kind": "List", "items": [\n{bad}\n]}}', "a.json") == ["!b", *SYNCED]
    assert run.problems == (
        "Service default/b: items[0].sepc is not a field of a Service (a.json:2); is spec meant?",
        "Service default/b: items[0].spec.ports[0].port: 0 is not a port (a.json:2)",
    )


def test_invalid_name_is_rejected_in_one_line(run):
    run.place(service("we\nb"), "a.json")
    assert isinstance(run.events[0], Rejected)
    (line,) = run.problems
    assert line.startswith(r"Service default/we\nb: metadata.name: 'we\nb' is not a DNS label (")
    assert line.endswith(" (a.json:1)")
    assert "\n" not in line


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


FILES = {"WEB": WEB, "SLICE": SLICE, "BOTH": BOTH, "BAD": service("x", 0), "81": WEB.replace("80", "81"), "": ""}


@each_named_pair(
    "change, events",
    """\
a new file: a.yaml=WEB | b.yaml=SLICE → +web-1
a changed file: a.yaml=WEB | a.yaml=81 → +web
a removed file: a.yaml=WEB b.yaml=SLICE | a.yaml → -web
an object is removed from a file: a.yaml=BOTH | a.yaml=SLICE → -web
an object moves to another file: a.yaml=BOTH | a.yaml=WEB z.yaml=SLICE →
a file is written with the same text: a.yaml=WEB | a.yaml=WEB →
a bad object is removed: a.yaml=BAD | a.yaml= → -x
""",
)
def test_events_of_a_change(run, change, events):
    """The files before | those that are written, or removed → the events."""
    before, now = (part.split() for part in change.split("|"))
    for word in before:
        file, _, text = word.partition("=")
        run.write(file, FILES[text])
    run.look()
    for word in now:
        file, is_written, text = word.partition("=")
        if is_written:
            run.write(file, FILES[text])
        else:
            (run.path / file).unlink()
    assert run.settle() == events.split()
