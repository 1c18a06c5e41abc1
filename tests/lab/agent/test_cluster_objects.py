# SPDX-License-Identifier: Apache-2.0
"""Commands that read a real API server: `kbpf inspect endpoints`, `kbpf diff` and `kbpf simulate`, the
last two also on the objects in a `kbpf sysdump`.
"""

import json
import tarfile
from collections.abc import Iterator

import pytest
import yaml

from kbpf.cli import app
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube_objects import endpoint_slice, node, port, service, slice_port

ENDPOINTS = yaml.safe_load("""
- addresses: [10.1.0.1]
  nodeName: here
  zone: a
  targetRef: {kind: Pod, namespace: default, name: web-1}
  conditions: {ready: true}
- addresses: [10.1.0.2]
  nodeName: there
  zone: b
  targetRef: {kind: Pod, namespace: default, name: web-2}
  conditions: {ready: true}
- addresses: [10.1.0.3]
  nodeName: here
  zone: a
  targetRef: {kind: Pod, namespace: default, name: web-3}
  conditions: {ready: false}
- addresses: [10.1.0.4]
  nodeName: here
  zone: a
  targetRef: {kind: Pod, namespace: default, name: web-4}
  conditions: {ready: false, serving: true, terminating: true}
""")
WEIGHTS = {"kbpf.io/weights": "10.1.0.1=3", "kbpf.io/algorithm": "maglev", "team": "hidden"}


@pytest.fixture(scope="module")
def at(apiserver: ApiServer, tmp_path_factory) -> Iterator[tuple[str, ...]]:
    """Creates the objects; the options that lead a command to them."""
    path = apiserver.kubeconfig(tmp_path_factory.mktemp("cluster") / "kubeconfig")
    with apiserver.kube() as kube:
        kube.clear()
        kube.create(node("here", "198.18.0.1", zone="a"))
        kube.create(node("there", "198.18.0.2", zone="b"))
        kube.create(service("web", port(80, "http"), annotations=WEIGHTS))
        kube.create(service("local", port(80, "http"), internal_policy="Local", affinity_seconds=60))
        kube.create(service("misnamed", port(80, "http")))
        kube.create(service("empty", port(80, "http")))
        for name, ends, port_name in (
            ("web", ENDPOINTS, "http"),
            ("local", ENDPOINTS[1:], "http"),
            ("misnamed", ENDPOINTS[:1], "www"),
        ):
            kube.create(endpoint_slice(name, *ends, ports=[slice_port(8080, port_name)]))
        yield "--kubeconfig", str(path), "--pin-dir", "/nowhere"
        kube.clear()


EXPLAINED = {
    "web": "web-1 ready cluster Ready, web-2 ready cluster Ready, web-3 not ready, serving - NotReady, "
    "web-4 terminating, serving - Draining",
    "local": "web-2 ready - NotLocal, web-3 not ready, serving - NotReady, "
    "web-4 terminating, serving local TerminatingFallback",
    "misnamed": "web-1 ready - NoPort",
    "empty": "",
}
"""Service → pod, state, which set it is in and why, of each endpoint."""


@pytest.mark.parametrize("name", EXPLAINED)
def test_each_endpoint_is_explained(at: tuple[str, ...], name: str, capsys):
    command = ["inspect", "endpoints", f"default/{name}", "--hostname-override", "here", *at]
    assert app.call([*command, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["items"]
    found = []
    for row in rows:
        sets = [each for each in ("cluster", "local") if row[each]]
        found.append(f"{row['pod']} {row['state']} {' '.join(sets) or '-'} {row['reason']}")
        assert (row["node"], row["zone"]) == (("there", "b") if row["pod"] == "web-2" else ("here", "a"))
        assert row["why"]
    assert ", ".join(found) == EXPLAINED[name]
    assert app.call(command) == 0
    table = capsys.readouterr().out.split()
    assert table[:9] == ["PORT", "ENDPOINT", "POD", "NODE", "ZONE", "STATE", "CLUSTER", "LOCAL", "WHY"]


@pytest.mark.parametrize(
    ("name", "more", "says"), [("none", (), "no Service default/none"), ("web", ("--kubeconfig", "/none"), "/none")]
)
def test_errors_are_one_line(at: tuple[str, ...], name: str, more: tuple[str, ...], says: str, capsys):
    assert app.call(["inspect", "endpoints", f"default/{name}", "--hostname-override", "here", *at, *more]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_the_objects_of_a_sysdump_are_the_clusters(at: tuple[str, ...], tmp_path, capsys):
    dump, server = tmp_path / "dump.tar.gz", at[:2]
    assert app.call(["sysdump", str(dump), *at]) == 0
    with tarfile.open(dump) as tar:
        tar.extractall(tmp_path)
    (objects,) = tmp_path.glob("*/objects")
    assert "hidden" not in (objects / "cluster.yaml").read_text()
    assert app.call(["diff", "cluster", str(objects), *server]) == 0
    shares = []
    for world in ("cluster", str(objects)):
        capsys.readouterr()
        assert app.call(["simulate", world, "-o", "json", *server]) == 0
        shares.append(json.loads(capsys.readouterr().out)["items"])
    assert shares[0] == shares[1]
    found = {(row["service"], row["name"], row["share_after"]) for row in shares[0]}
    assert ("default/local", "10.1.0.2:8080", 1.0) in found
    # a changed copy shows what would change
    text = (objects / "cluster.yaml").read_text()
    (objects / "cluster.yaml").write_text(text.replace("10.1.0.2", "10.1.0.9"))
    assert app.call(["diff", "cluster", str(objects), "-o", "json", *server]) == 1
    changed = json.loads(capsys.readouterr().out)["items"]
    names = {row["name"] for row in changed if row["service"] == "default/local"}
    assert names == {"10.1.0.2:8080", "10.1.0.9:8080"}
