# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect endpoints` against a real API server: each endpoint of a Service, and why clients
of a node reach it or not.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.cli import app
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube import Kube, Object
from tests.support.cluster.kube_objects import (
    endpoint,
    endpoint_slice,
    node,
    port,
    service,
    slice_port,
)

POD = {"kind": "Pod", "namespace": "default"}


@pytest.fixture(scope="module")
def kubeconfig(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = apiserver.kubeconfig(tmp_path_factory.mktemp("endpoints") / "kubeconfig")
    with apiserver.kube() as kube:
        kube.clear()
        kube.create(node("here", "198.18.0.1", zone="a"))
        create(kube)
        yield path
        kube.clear()


def of_pod(row: Object, pod: str) -> Object:
    return row | {"targetRef": POD | {"name": pod}}


ENDS = (
    of_pod(endpoint("10.1.0.1", node="here", zone="a"), "web-1"),
    of_pod(endpoint("10.1.0.2", node="there", zone="b"), "web-2"),
    of_pod(endpoint("10.1.0.3", node="here", zone="a", ready=False), "web-3"),
    of_pod(
        endpoint("10.1.0.4", node="here", zone="a", ready=False, serving=True, terminating=True),
        "web-4",
    ),
)


def create(kube: Kube) -> None:
    kube.create(service("web", port(80, "http")))
    kube.create(endpoint_slice("web", *ENDS, ports=[slice_port(8080, "http")]))
    kube.create(service("local", port(80, "http"), internal_policy="Local"))
    kube.create(endpoint_slice("local", *ENDS[1:], ports=[slice_port(8080, "http")]))
    kube.create(service("misnamed", port(80, "http")))
    kube.create(endpoint_slice("misnamed", ENDS[0], ports=[slice_port(8080, "www")]))
    kube.create(service("empty", port(80, "http")))


ROWS = {
    "web": """
        web-1|ready|cluster|Ready
        web-2|ready|cluster|Ready
        web-3|not ready||NotReady
        web-4|serving, terminating||Draining""",
    "local": """
        web-2|ready||NotLocal
        web-3|not ready||NotReady
        web-4|serving, terminating|local|TerminatingFallback""",
    "misnamed": "web-1|ready||NoPort",
    "empty": "",
}
"""Service → pod, state, which sets it is in and why, of each endpoint."""


def shown(kubeconfig: Path, name: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    arguments = ["inspect", "endpoints", name, "--kubeconfig", str(kubeconfig), *more]
    assert app.call([*arguments, "--hostname-override", "here", "--pin-dir", "/none"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ROWS)
def test_each_endpoint_is_explained(kubeconfig: Path, name: str, capsys: pytest.CaptureFixture[str]):
    rows = json.loads(shown(kubeconfig, f"default/{name}", capsys, "-o", "json"))["items"]
    found = []
    for row in rows:
        sets = " ".join(each for each in ("cluster", "local") if row[each])
        found.append(f"{row['pod']}|{row['state']}|{sets}|{row['reason']}")
        assert (row["node"], row["zone"]) == (("there", "b") if row["pod"] == "web-2" else ("here", "a"))
        assert row["why"]
    assert found == [line.strip() for line in ROWS[name].splitlines() if line.strip()]


def test_the_table_has_a_line_for_each(kubeconfig: Path, capsys: pytest.CaptureFixture[str]):
    head, first, *_ = shown(kubeconfig, "web", capsys).splitlines()
    assert head.split() == ["PORT", "ENDPOINT", "POD", "NODE", "ZONE", "STATE", "CLUSTER", "LOCAL", "WHY"]
    assert first.split()[:8] == ["http", "10.1.0.1:8080", "web-1", "here", "a", "ready", "yes", "no"]


@pytest.mark.parametrize(
    ("words", "says"),
    [("default/none", "no Service default/none"), ("default/web --kubeconfig /none", "/none")],
    ids=["no such Service", "no such file"],
)
def test_errors_are_one_line(kubeconfig: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]):
    line = ["inspect", "endpoints", "--kubeconfig", str(kubeconfig), *words.split()]
    assert app.call([*line, "--hostname-override", "here"]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
