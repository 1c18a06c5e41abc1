# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: the fixture `apiserver`, one real API server for the whole run, and the programs
`kubectl`, `kubeadm`, `previous_kubeadm`, `helm` and `kube_proxy`.

Programs are built once, which takes minutes, when collection ends, and only if a test needs them by
a fixture of BUILDS, directly or indirectly: a test's time limit should not have to cover the build.
A failed build fails these tests.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.build import go_build
from tests.support.build.programs import CNI_PLUGINS
from tests.support.cluster.apiserver import ApiServer

BUILDS = {
    "programs": go_build.DEFAULT,
    "kubectl": ("kubectl",),
    "kubeadm": ("kubeadm",),
    "previous_kubeadm": ("kubeadm-1.36",),
    "helm": ("helm",),
    "registers": ("registers",),
    "kube_proxy": ("kube-proxy",),
    "cni_programs": (*CNI_PLUGINS, "flannel", "flanneld"),
    "kube_router": ("kube-router",),
}
"""Fixture → the programs that it needs."""
_FAILED = pytest.StashKey[dict[str, go_build.BuildError]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the collected tests need."""
    session.config.stash[_FAILED] = {}
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    capture = session.config.pluginmanager.getplugin("capturemanager")
    for fixture, names in BUILDS.items():
        if fixture not in wanted:
            continue
        try:
            with capture.global_and_fixture_disabled():
                for name in names:
                    go_build.build(name)
        except go_build.BuildError as error:
            session.config.stash[_FAILED][fixture] = error


def _built(request: pytest.FixtureRequest, fixture: str) -> tuple[Path, ...]:
    if (error := request.config.stash[_FAILED].get(fixture)) is not None:
        raise error
    return tuple(go_build.build(name) for name in BUILDS[fixture])


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> None:
    """Makes sure that kube-apiserver and etcd are built, for fixtures that start them."""
    _built(request, "programs")


def _program_fixture(name: str) -> Callable[[pytest.FixtureRequest], Path]:
    @pytest.fixture(scope="session", name=name)
    def program(request: pytest.FixtureRequest) -> Path:
        return _built(request, name)[0]

    return program


kubectl = _program_fixture("kubectl")
"""The program, also used as kustomize (`kubectl kustomize`)."""
kube_proxy = _program_fixture("kube_proxy")
"""The program that kbpf replaces."""
kubeadm = _program_fixture("kubeadm")
"""The program that creates the objects which kbpf replaces."""
previous_kubeadm = _program_fixture("previous_kubeadm")
"""kubeadm of the previous minor version."""
helm = _program_fixture("helm")
registers = _program_fixture("registers")
"""The judge of histories."""
cni_programs = _program_fixture("cni_programs")
"""The CNI plugins, and flanneld."""
kube_router = _program_fixture("kube_router")
"""The router and firewall, used as CNI."""


@pytest.fixture(scope="session")
def apiserver(programs: None) -> Iterator[ApiServer]:
    """A running API server shared by all tests, which delete their objects or use unique names."""
    with ApiServer() as server:
        yield server
