# SPDX-License-Identifier: Apache-2.0
"""`kbpf diff` and `kbpf simulate` on a real API server, and on the objects in a `kbpf sysdump`."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbpf.cli import app
from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, node, port, service, slice_port

NODE = "here"
HTTP = [slice_port(8080, "http")]
WEIGHTS = {"kbpf.io/weights": "10.1.0.1=3", "kbpf.io/algorithm": "maglev", "team": "hidden"}


@pytest.fixture(scope="module")
def cluster(apiserver: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Objects in the API server; the path of a kubeconfig."""
    path = apiserver.kubeconfig(tmp_path_factory.mktemp("cluster") / "kubeconfig")
    with apiserver.kube() as kube:
        kube.clear()
        kube.create(node(NODE, "198.18.0.1", zone="a"))
        kube.create(node("there", "198.18.0.2", zone="b"))
        kube.create(service("web", port(80, "http"), annotations=WEIGHTS))
        kube.create(
            endpoint_slice(
                "web",
                endpoint("10.1.0.1", node=NODE, zone="a"),
                endpoint("10.1.0.2", node="there", zone="b"),
                ports=HTTP,
            )
        )
        kube.create(
            service(
                "near", port(80, "http", node_port=30080), type="NodePort", external_policy="Local", affinity_seconds=60
            )
        )
        kube.create(endpoint_slice("near", endpoint("10.1.0.3", node="there"), ports=HTTP))
        yield path
        kube.clear()


def test_the_objects_of_a_sysdump_are_the_clusters(cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    at = ("--kubeconfig", str(cluster))
    dump = tmp_path / "dump.tar.gz"
    assert app.call(["sysdump", str(dump), "--pin-dir", "/nowhere", *at]) == 0
    with tarfile.open(dump) as tar:
        tar.extractall(tmp_path)
    (objects,) = tmp_path.glob("*/objects")
    assert "hidden" not in (objects / "cluster.yaml").read_text()
    assert app.call(["diff", "cluster", str(objects), *at]) == 0
    shares = []
    for world in ("cluster", str(objects)):
        capsys.readouterr()
        assert app.call(["simulate", world, "-o", "json", *at]) == 0
        shares.append(json.loads(capsys.readouterr().out)["items"])
    assert shares[0] == shares[1]
    found = {(row["service"], row["name"], row["share_after"]) for row in shares[0]}
    assert ("default/near", "10.1.0.3:8080", 1.0) in found
    # a changed copy shows what would change
    text = (objects / "cluster.yaml").read_text()
    (objects / "cluster.yaml").write_text(text.replace("10.1.0.3", "10.1.0.4"))
    assert app.call(["diff", "cluster", str(objects), "-o", "json", *at]) == 1
    names = {row["name"] for row in json.loads(capsys.readouterr().out)["items"]}
    assert names == {"10.1.0.3:8080", "10.1.0.4:8080"}
