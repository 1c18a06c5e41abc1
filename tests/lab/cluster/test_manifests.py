# SPDX-License-Identifier: Apache-2.0
"""manifests/ with a real API server: it accepts every object, and grants the account the listed
rights and no others. tests/host/test_manifests.py compares the chart's objects with these.
"""

import re
from pathlib import Path

import pytest

from tests.support.cluster.apiserver import ApiServer
from tests.support.cluster.kubectl import MANIFESTS, OVERLAYS, Kubectl, kustomize

NAMES = sorted(f"overlays/{path.name}" for path in OVERLAYS.iterdir())


@pytest.fixture
def admin(apiserver: ApiServer, kubectl: Path, tmp_path) -> Kubectl:
    return Kubectl(kubectl, apiserver, tmp_path)


@pytest.mark.parametrize("name", [*NAMES, "cleanup", "prepull"])
def test_the_server_accepts_each_overlay(admin: Kubectl, kubectl: Path, name: str):
    folder = MANIFESTS / name
    said = admin("--warnings-as-errors", "apply", "--dry-run=server", "-k", str(folder)).splitlines()
    assert len(said) == len(kustomize(kubectl, folder))
    assert all(line.endswith("(server dry run)") for line in said), said


GRANTED = {
    "services": {"list", "watch"},
    "nodes": {"list", "watch"},
    "endpointslices.discovery.k8s.io": {"list", "watch"},
    "events.events.k8s.io": {"create"},
}
ANYBODY = re.compile(r"selfsubject\S+\.(authorization|authentication)\.k8s\.io|clustertrustbundles\..*")
"""What every ServiceAccount may do: review its own rights, and read public paths."""


def test_the_account_has_exactly_the_documented_rights(admin: Kubectl):
    """The account of the overlay side-by-side has exactly the rights of the base."""
    folder = str(OVERLAYS / "side-by-side")
    account = "--as=system:serviceaccount:kube-system:kbpf"
    admin("apply", "-k", folder)
    try:
        text = admin("auth", "can-i", "--list", account, "-n", "kube-system")
    finally:
        admin("delete", "-k", folder, "--wait=false")
    rows = {}
    for line in text.splitlines()[1:]:
        found = re.fullmatch(r"(\S+)?\s+\[(.*?)\]\s+\[(.*?)\]\s+\[(.*?)\]", line)
        assert found is not None, line
        resource, urls, names, verbs = found.groups()
        if resource and not ANYBODY.fullmatch(resource):
            assert (urls, names) == ("", "")
            rows[resource] = set(verbs.split())
    assert rows == GRANTED
