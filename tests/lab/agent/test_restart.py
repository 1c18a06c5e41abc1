# SPDX-License-Identifier: Apache-2.0
"""The agent is stopped, killed, restarted or upgraded without disturbing traffic."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kbpf
from tests.support import plane
from tests.support.cluster.cluster import Cluster
from tests.support.features import needs
from tests.support.lab.dial import UNSERVED, Dial, check
from tests.support.lab.lab import Agent, until
from tests.support.lab.load import under_load

HOST, HOST6, NAME = "10.96.0.20", "fd00:10:96::20", "web-20"
UDP = "10.96.0.21"
ENDS = [Agent.stop, Agent.kill]


@pytest.fixture(autouse=True)
def _runs(cluster: Cluster) -> Iterator[None]:
    """Makes sure that our agent runs after each test."""
    yield
    cluster.agent.code = None
    if not cluster.agent.is_running:
        cluster.start(cluster.agent)


@pytest.fixture
def web(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with two Services, for TCP and for UDP."""
    with cluster.given(*cluster.web(20, "a1 a2", dual=True), *cluster.web(21, "a1 a2", "UDP")):
        yield cluster


def expect(cluster: Cluster, to: str, outcome: str, client: str = "a3", how: str = "tcp") -> None:
    check(cluster, Dial("current state", client, to, outcome, how))


def strays(agent: Agent) -> dict[str, list[object]]:
    """Unreferenced entries of the maps."""
    return dict(plane.dump(agent.entries)["strays"])


@pytest.mark.parametrize("end", ENDS, ids=["SIGTERM", "SIGKILL"])
def test_no_connection_fails_when_the_agent_restarts(web: Cluster, end: Callable[[Agent], int | None]):
    before = web.served()
    client = web["a3"]
    client.tcp(HOST, 80, keep="tcp")
    with (
        under_load(web, HOST, "a2", "host-1") as tcp,
        under_load(web, HOST6, "a-net") as tcp6,
        under_load(web, UDP, "a1", protocol="udp") as udp,
    ):
        assert end(web.agent) in (0, None)
        for load in (tcp, tcp6, udp):
            load.goes_on()
        assert web.served() == before, "served as before, without an agent"
        web.start(web.agent)
    assert web.served() == before
    assert "name" in client.ask("talk", keep="tcp"), "an established connection must survive"
    client.ask("drop", keep="tcp")
    said = "\n".join(web.agent.lines())
    assert "adopted=True" in said
    assert "hooks attached changed=0" in said, "no hook is attached again"


def test_datagrams_and_affinity_outlive_the_agent(cluster: Cluster):
    client = cluster["a3"]
    with cluster.given(*cluster.web(23, "a1", "UDP"), *cluster.web(22, "a1", affinity_seconds=3600)):
        client.udp("10.96.0.23", 80, keep="connected", connected=True)
        client.udp("10.96.0.23", 80, keep="unconnected")
        expect(cluster, "10.96.0.22:80", "a1")
        cluster.change(cluster.slice("web-22", "a1 a2 a3"))
        cluster.agent.kill()
        cluster.start(cluster.agent)
        answer = client.ask("talk", keep="connected")
        assert answer.get("name") == "a1", (answer, cluster.agent.lines())
        answer = client.udp("10.96.0.23", 80, keep="unconnected")
        assert (answer["name"], answer["peer"]) == ("a1", ["10.96.0.23", 80])
        assert client.many(20, "10.96.0.22", 80)["names"] == {"a1": 20}
        for kept in ("connected", "unconnected"):
            client.ask("drop", keep=kept)


@needs("socket_iterator")  # with which UDP sockets of deleted backends are found
def test_changes_made_while_the_agent_is_down_are_applied(cluster: Cluster):
    """Changed endpoints, a new Service, a deleted one, one with other ports; UDP sockets are
    aborted.
    """
    stays, goes, comes = cluster.web(30, "a1"), cluster.web(31, "a1"), cluster.web(32, "a2")
    dns = cluster.web(33, "a1", "UDP")
    client = cluster["a3"]
    with cluster.given(*stays, *goes, *dns):
        client.udp("10.96.0.33", 80, keep="udp", connected=True)
        cluster.agent.kill()
        for obj in (cluster.slice("web-30", "a2"), cluster.web(33, "a2", "UDP")[1]):
            cluster.kube.replace(obj)
        cluster.delete(*goes)
        cluster.create(*comes)
        expect(cluster, "10.96.0.30:80", "a1")
        expect(cluster, "10.96.0.31:80", "a1")
        cluster.start(cluster.agent)
        expect(cluster, "10.96.0.30:80", "a2")
        expect(cluster, "10.96.0.31:80", UNSERVED)
        expect(cluster, "10.96.0.32:80", "a2")
        assert client.ask("hear", keep="udp") == {"error": "ECONNABORTED"}
        client.ask("drop", keep="udp")
        cluster.delete(*comes)
        until("no unreferenced entry is left", lambda: not strays(cluster.agent))


def test_a_kill_during_writes_fails_no_connection(cluster: Cluster):
    """Killed at work and while starting, during many changes: no connection fails, and no entry is
    left behind.
    """
    made = cluster.web(40, "a1 a2")
    sets = itertools.cycle(("a1", "a1 a2 a3", "a2 a3", "a3/draining a1"))
    with cluster.given(*made), under_load(cluster, "10.96.0.40", "a2", "host-1", answers="a1 a2 a3"):
        for is_up in (True, False, True, False, True):
            for who in itertools.islice(sets, 6):
                cluster.kube.replace(cluster.slice("web-40", who))
            cluster.agent.kill()
            for who in itertools.islice(sets, 3):
                cluster.kube.replace(cluster.slice("web-40", who))
            cluster.start(cluster.agent, wait=is_up)
        cluster.agent.wait_synced()
        cluster.change(cluster.slice("web-40", "a2"))
        expect(cluster, "10.96.0.40:80", "a2")
    until("no unreferenced entry is left", lambda: not strays(cluster.agent))


def test_an_upgrade_fails_no_connection(web: Cluster, tmp_path: Path):
    """An agent with other programs takes over, then the first one again."""
    copy = tmp_path / "kbpf"
    shutil.copytree(Path(kbpf.__file__).parent, copy)
    source = copy / "bpf" / "sock.c"
    ours = source.read_text()
    others = ours.replace("#define CGROUP_LEVELS 10\n", "#define CGROUP_LEVELS 9\n")
    assert others != ours
    source.write_text(others)
    with under_load(web, HOST, "a2", "host-1") as load:
        for code in (tmp_path, None):
            web.agent.stop()
            web.agent.code = code
            web.start(web.agent)
            said = "\n".join(web.agent.lines())
            assert f"hooks attached changed={len(plane.HOOKS)}" in said, "all programs are replaced"
            load.goes_on()
