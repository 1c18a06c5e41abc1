"""pytest plugin: the fixture `apiserver`, one real API server for the whole run.

Its programs are built (once, minutes) when collection ends and only if a test asks for them, by
`programs` or a fixture that does: a test's own time limit must not have to cover that. A build that
fails fails these tests.
"""

from collections.abc import Iterator

import pytest

from tests.support import go_build
from tests.support.apiserver import ApiServer
from tests.support.faults import FaultProxy

_FAILED = pytest.StashKey[go_build.BuildError]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the collected tests need."""
    if session.config.option.collectonly:
        return
    if not any("programs" in getattr(item, "fixturenames", ()) for item in session.items):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            for name in go_build.DEFAULT:
                go_build.build(name)
    except go_build.BuildError as error:
        session.config.stash[_FAILED] = error


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> None:
    """kube-apiserver and etcd are there; for fixtures that start them themselves."""
    if (error := request.config.stash.get(_FAILED, None)) is not None:
        raise error


@pytest.fixture(scope="session")
def apiserver(programs: None) -> Iterator[ApiServer]:
    """A running API server; tests clear their objects from it, or use names of their own."""
    with ApiServer() as server:
        yield server


@pytest.fixture
def faults(apiserver: ApiServer) -> Iterator[FaultProxy]:
    """A fault proxy of the test's own in front of `apiserver`."""
    with FaultProxy(apiserver) as proxy:
        yield proxy
