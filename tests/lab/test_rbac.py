"""manifests/rbac.yaml is what the agent needs, and no more: tried with a token of its account."""

import json
from pathlib import Path

import pytest
import yaml

from kbpf.model.events import Event, Kind, Synced
from kbpf.source.cluster import Cluster
from kbpf.source.kubeconfig import find_access
from kbpf.source.reflector import Reflector
from kbpf.source.resource import SERVICES, SLICES, exempt_pods, own_node
from tests.support.apiserver import ApiServer
from tests.support.kube import Kube
from tests.support.kube_objects import service
from tests.support.lab import until

MANIFEST = Path(__file__).parents[2] / "manifests" / "rbac.yaml"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
PATHS = {
    "ServiceAccount": "/api/v1/namespaces/kube-system/serviceaccounts",
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
}


def post(kube: Kube, path: str, body: object) -> tuple[int, dict]:
    status, raw = kube.request(
        "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return status, json.loads(raw)


@pytest.fixture(scope="module")
def token(apiserver: ApiServer) -> str:
    """Of the ServiceAccount kbpf, after the manifest was applied."""
    with apiserver.kube() as admin:
        for document in yaml.safe_load_all(MANIFEST.read_text()):
            status, answer = post(admin, PATHS[document["kind"]], document)
            assert status in (201, 409), answer
        path = f"{PATHS['ServiceAccount']}/kbpf/token"
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        status, answer = post(admin, path, wanted)
        assert status == 201, answer
        return answer["status"]["token"]


def test_the_agents_sources_sync_with_it(apiserver: ApiServer, token: str, tmp_path: Path):
    config = json.loads(apiserver.kubeconfig(tmp_path / "config").read_text())
    config["users"][0]["user"]["token"] = token
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    heard: list[Event] = []
    cluster = Cluster(find_access(path))
    watched = (SERVICES, SLICES, own_node("n"), exempt_pods("n"))
    sources = [Reflector(cluster, r, heard.append) for r in watched]
    try:
        for source in sources:
            source.start()
        until(
            "all have synced",
            lambda: {e.kind for e in heard if isinstance(e, Synced)} == set(Kind),
        )
    finally:
        for source in sources:
            source.stop()


REFUSED = [
    ("it changes no Service", "POST", "/api/v1/namespaces/default/services"),
    ("it reads no Secrets", "GET", "/api/v1/secrets"),
    ("it reads no ConfigMaps", "GET", "/api/v1/configmaps"),
    ("it changes no Pod", "DELETE", "/api/v1/namespaces/default/pods/x"),
    ("it reads no Pod alone", "GET", "/api/v1/namespaces/default/pods/x"),
    ("it reads no Pod's log", "GET", "/api/v1/namespaces/default/pods/x/log"),
]


@pytest.mark.parametrize(("name", "method", "path"), REFUSED, ids=[row[0] for row in REFUSED])
def test_it_may_do_no_more(apiserver: ApiServer, token: str, name: str, method: str, path: str):
    body = json.dumps(service("x")).encode() if method == "POST" else None
    headers = {"Content-Type": "application/json"}
    with Kube(apiserver.url, token, apiserver.authority.crt, netns=apiserver.netns) as kube:
        assert kube.request(method, path, body, headers)[0] == 403, name
