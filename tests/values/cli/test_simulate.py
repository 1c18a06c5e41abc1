# SPDX-License-Identifier: Apache-2.0
"""`kbpf simulate` and `diff` as commands: the sets of the scenarios, as an agent programs them, the
example of the documents, and notes.
"""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from kbpf.cli import app, origin, simulate
from tests.support.cluster import scenario
from tests.support.faults.scripted import ScriptedServer
from tests.support.runtime import docs
from tests.values.source.reflector.scripted import listed, service

Sets = dict[tuple[str, str, str], set[str]]
"""(Service, address family, cluster or local) → backends as ADDRESS:PORT/PROTOCOL."""


def programmed(name: str) -> Sets:
    """The sets in the file `expected` of a scenario: what an agent writes into the kernel."""
    sets: Sets = defaultdict(set)
    for line in scenario.expected(name):
        frontend, *fields = line.split("; ")
        words = frontend.split()
        family = "6" if words[0].startswith("[") else "4"
        for field in fields:
            set_name, _, backends = field.partition(": ")
            sets[words[1], family, set_name] |= set(backends.split())
    return dict(sets)


@pytest.mark.parametrize("name", scenario.names())
def test_backends_are_those_that_an_agent_programs(name, capsys):
    command = ["simulate", str(scenario.HERE / name), "--node", "node-1", "-o", "json"]
    assert app.call(command) == 0
    sets: Sets = defaultdict(set)
    shares: dict[tuple[str, str, int, str], float] = defaultdict(float)
    for row in json.loads(capsys.readouterr().out)["items"]:
        if row["what"] == "backend":
            backend = f"{row['name']}/{row['protocol']}"
            sets[row["service"], str(row["family"]), row["set"]].add(backend)
            shares[row["service"], row["port"], row["family"], row["set"]] += row["share_after"]
            assert row["share_before"] is None
    assert sets == programmed(name)
    assert all(total == pytest.approx(1, abs=0.001) for total in shares.values())


OBJECTS = """\
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.10, ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-x7k2p, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.244.1.5], nodeName: node-1, zone: a, targetRef: {kind: Pod, name: web-0}}
- {addresses: [10.244.2.7], nodeName: node-2, zone: b, targetRef: {kind: Pod, name: web-1}}
- {addresses: [10.244.3.4], nodeName: node-3, zone: b, targetRef: {kind: Pod, name: web-2}}
"""
NODE = """
---
apiVersion: v1
kind: Node
metadata: {{name: node-{0}, labels: {{topology.kubernetes.io/zone: {1}}}}}
status: {{addresses: [{{type: InternalIP, address: 192.0.2.{0}}}]}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder `objects` of the example, in the working directory."""
    monkeypatch.chdir(tmp_path)
    objects = tmp_path / "objects"
    objects.mkdir()
    nodes = "".join(NODE.format(number, zone) for number, zone in ((1, "a"), (2, "b"), (3, "b")))
    (objects / "shop.yaml").write_text(OBJECTS + nodes)
    return objects


def test_the_example_of_the_documents(folder: Path, capsys):
    (block,) = [b for b in docs.blocks("docs/operate.md", "") if "kbpf simulate" in b]
    command, _, shown = block.partition("\n")
    assert app.call(command.removeprefix("$ kbpf ").split()) == 0
    out, err = capsys.readouterr()
    assert out + err == shown


def test_differences_of_some_nodes_name_them(folder: Path, tmp_path, capsys):
    after = shutil.copytree(folder, tmp_path / "after")
    text = (after / "shop.yaml").read_text()
    hinted = re.sub(r"zone: (\w), targetRef", r"hints: {forZones: [{name: \1}]}, zone: \1, targetRef", text)
    (after / "shop.yaml").write_text(hinted)
    assert app.call(["diff", "objects", "after"]) == 1
    lines = capsys.readouterr().out.splitlines()[1:]
    cells = [re.split(r"\s{3,}", line) for line in lines]
    assert {row[1] for row in cells} == {"node-1", "node-2,node-3"}
    assert len(cells) == 6


def test_without_nodes_and_with_too_many(folder: Path, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "MAX_NODES", 2)
    assert app.call(["simulate", "objects"]) == 0
    assert "computed for 2 of 3 Nodes; choose others with --node" in capsys.readouterr().err
    (folder / "shop.yaml").write_text(OBJECTS)
    assert app.call(["simulate", "objects"]) == 0
    assert "there are no Nodes: computed for " in capsys.readouterr().err


def test_a_node_that_is_gone_is_a_note(folder: Path, tmp_path, capsys):
    after = shutil.copytree(folder, tmp_path / "after")
    (after / "shop.yaml").write_text(OBJECTS + NODE.format(1, "a"))
    assert app.call(["diff", "objects", "after"]) == 0
    assert "not computed, since they are gone: node-2, node-3" in capsys.readouterr().err
    assert app.call(["diff", "objects", "after", "--node", "node-3"]) == 2
    assert "the Node node-3 is gone" in capsys.readouterr().err
    (after / "shop.yaml").write_text(OBJECTS)
    assert app.call(["diff", "objects", "after"]) == 2
    assert "all would be gone: node-1, node-2, node-3" in capsys.readouterr().err


def test_what_cannot_be_read_is_a_note(folder: Path, capsys):
    (folder / "bad.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: Bad_Name}\n")
    assert app.call(["diff", "objects", "objects", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["items"] == []
    assert "Bad_Name" in err


def test_what_an_api_server_has_that_cannot_be_used_is_a_note(tmp_path, capsys):
    kubeconfig = tmp_path / "kubeconfig"
    services = (service(f"web-{n}", n, clusterIP="x") for n in range(origin.MAX_REJECTED + 2))
    with ScriptedServer(listed(), listed(*services), listed()) as server:
        kubeconfig.write_text(
            "{current-context: c, contexts: [{name: c, context: {cluster: c}}], "
            f"clusters: [{{name: c, cluster: {{server: '{server.url}'}}}}]}}"
        )
        assert app.call(["simulate", "cluster", "--kubeconfig", str(kubeconfig)]) == 0
    err = capsys.readouterr().err
    assert "Service ns/web-0: spec.clusterIP" in err
    assert "2 more objects cannot be used" in err


def test_diff_is_silent_without_differences_and_lists_them_otherwise(folder: Path, tmp_path, capsys):
    assert app.call(["diff", "objects", "objects"]) == 0
    assert capsys.readouterr() == ("", "")
    before = shutil.copytree(folder, tmp_path / "before")
    (folder / "shop.yaml").write_text((folder / "shop.yaml").read_text().replace("10.96.0.10", "10.96.0.11"))
    assert app.call(["diff", str(before), "objects", "-o", "json"]) == 1
    rows = json.loads(capsys.readouterr().out)["items"]
    assert [(r["what"], r["name"], r["before"], r["after"], r["all_nodes"]) for r in rows] == [
        ("frontend", "10.96.0.10:80/TCP", "ClusterIP", "", True),
        ("frontend", "10.96.0.11:80/TCP", "", "ClusterIP", True),
    ]
    assert rows[0]["nodes"] == ["node-1", "node-2", "node-3"]
