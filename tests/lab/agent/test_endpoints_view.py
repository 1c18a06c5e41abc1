# SPDX-License-Identifier: Apache-2.0
"""`kbpf inspect endpoints` against a real API server: each endpoint of a Service, and why clients
of a node reach it or not.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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


class Row(NamedTuple):
    """An endpoint as it must be shown: in the cluster set, in the local set, and why."""

    pod: str
    state: str
    cluster: bool
    local: bool
    reason: str


ROWS = {
    "web": (
        Row("web-1", "ready", True, False, "Ready"),
        Row("web-2", "ready", True, False, "Ready"),
        Row("web-3", "not ready", False, False, "NotReady"),
        Row("web-4", "serving, terminating", False, False, "Draining"),
    ),
    "local": (
        Row("web-2", "ready", False, False, "NotLocal"),
        Row("web-3", "not ready", False, False, "NotReady"),
        Row("web-4", "serving, terminating", False, True, "TerminatingFallback"),
    ),
    "misnamed": (Row("web-1", "ready", False, False, "NoPort"),),
    "empty": (),
}


def shown(kubeconfig: Path, name: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    arguments = ["inspect", "endpoints", name, "--kubeconfig", str(kubeconfig), *more]
    assert app.call([*arguments, "--hostname-override", "here", "--pin-dir", "/none"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ROWS)
def test_each_endpoint_is_explained(kubeconfig: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(shown(kubeconfig, f"default/{name}", capsys, "-o", "json"))["items"]
    found = tuple(Row(*(row[field] for field in Row._fields)) for row in rows)
    assert found == ROWS[name]
    for row in rows:
        assert row["zone"] == ("b" if row["pod"] == "web-2" else "a")
        assert row["node"] == ("there" if row["pod"] == "web-2" else "here")
        assert row["why"]


def test_the_table_has_a_line_for_each(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(kubeconfig, "web", capsys).splitlines()
    assert lines[0].split() == [
        "PORT",
        "ENDPOINT",
        "POD",
        "NODE",
        "ZONE",
        "STATE",
        "CLUSTER",
        "LOCAL",
        "WHY",
    ]
    assert lines[1].split()[:8] == [
        "http",
        "10.1.0.1:8080",
        "web-1",
        "here",
        "a",
        "ready",
        "yes",
        "no",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("default/none",), "no Service default/none"),
        (("default/web", "--kubeconfig", "/none"), "/none"),
    ],
    ids=["no such Service", "no such file"],
)
def test_errors_are_one_line(
    kubeconfig: Path,
    arguments: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["inspect", "endpoints", "--kubeconfig", str(kubeconfig), *arguments]
    assert app.call([*line, "--hostname-override", "here"]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
