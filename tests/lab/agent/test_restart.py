# SPDX-License-Identifier: Apache-2.0
"""The agent is stopped, killed, restarted or upgraded without disturbing traffic."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kbpf
from tests.support import plane
from tests.support.cluster.cluster import Cluster
from tests.support.features import needs
from tests.support.lab.dial import REFUSED, UNSERVED, Dial, check
from tests.support.lab.lab import Agent, until
from tests.support.lab.load import under_load

HOST, HOST6, NAME = "10.96.0.20", "fd00:10:96::20", "web-20"
UDP = "10.96.0.21"
ENDS = [Agent.stop, Agent.kill]


@pytest.fixture(scope="module")
def small(programs: None) -> Iterator[Cluster]:
    with Cluster(1, "r") as made:
        yield made


@pytest.fixture(autouse=True)
def _runs(small: Cluster) -> Iterator[None]:
    """Makes sure that our agent runs after each test."""
    yield
    small.agent.code = None
    if not small.agent.is_running:
        small.start(small.agent)


@pytest.fixture
def web(small: Cluster) -> Iterator[Cluster]:
    """The cluster with two Services, for TCP and for UDP."""
    with small.given(*small.web(20, "a1 a2", dual=True), *small.web(21, "a1 a2", "UDP")):
        yield small


def expect(cluster: Cluster, to: str, outcome: str, client: str = "a3", how: str = "tcp") -> None:
    check(cluster, Dial("current state", client, to, outcome, how))


def strays(agent: Agent) -> dict[str, list[object]]:
    """Unreferenced entries of the maps."""
    return dict(plane.dump(agent.entries)["strays"])


@pytest.mark.parametrize("end", ENDS, ids=["SIGTERM", "SIGKILL"])
def test_no_connection_fails_when_the_agent_restarts(web: Cluster, end: Callable[[Agent], int | None]) -> None:
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


@pytest.mark.parametrize("end", ENDS, ids=["SIGTERM", "SIGKILL"])
def test_datagrams_and_affinity_outlive_the_agent(small: Cluster, end: Callable[[Agent], int | None]) -> None:
    dns = small.web(23, "a1", "UDP")
    sticky = small.web(22, "a1", affinity_seconds=3600)
    client = small["a3"]
    with small.given(*dns, *sticky):
        client.udp("10.96.0.23", 80, keep="connected", connected=True)
        client.udp("10.96.0.23", 80, keep="unconnected")
        expect(small, "10.96.0.22:80", "a1")
        small.change(small.slice("web-22", "a1 a2 a3"))
        end(small.agent)
        small.start(small.agent)
        answer = client.ask("talk", keep="connected")
        assert answer.get("name") == "a1", (answer, small.agent.lines())
        answer = client.udp("10.96.0.23", 80, keep="unconnected")
        assert (answer["name"], answer["peer"]) == ("a1", ["10.96.0.23", 80])
        assert client.many(20, "10.96.0.22", 80)["names"] == {"a1": 20}
        for kept in ("connected", "unconnected"):
            client.ask("drop", keep=kept)


def test_a_service_recreated_before_a_kill_keeps_its_clients(small: Cluster) -> None:
    """The deleted Service is not retired yet when the agent is killed; the new one keeps its
    clients.

    Eight Services, because map order decides which of the two is read first.
    """
    numbers = range(70, 78)
    made = [obj for number in numbers for obj in small.web(number, "a1", "UDP")]
    client = small["a3"]
    with small.given(*made):
        small.delete(*made)
        small.settle()
        small.create(*made)
        small.settle()
        for number in numbers:
            client.udp(f"10.96.0.{number}", 80, keep=str(number), connected=True)
        small.agent.kill()
        small.start(small.agent)
        answers = [client.ask("talk", keep=str(number)).get("name") for number in numbers]
        for number in numbers:
            client.ask("drop", keep=str(number))
    assert answers == ["a1"] * 8


@needs("socket_iterator")  # with which UDP sockets of deleted backends are found
def test_changes_made_while_the_agent_is_down_are_applied(small: Cluster) -> None:
    """Changed endpoints, a new Service, a deleted one, one with other ports; UDP sockets are
    aborted.
    """
    stays, goes, comes = small.web(30, "a1"), small.web(31, "a1"), small.web(32, "a2")
    dns = small.web(33, "a1", "UDP")
    client = small["a3"]
    with small.given(*stays, *goes, *dns):
        client.udp("10.96.0.33", 80, keep="udp", connected=True)
        small.agent.kill()
        for obj in (small.slice("web-30", "a2"), small.web(33, "a2", "UDP")[1]):
            small.kube.replace(obj)
        small.delete(*goes)
        small.create(*comes)
        expect(small, "10.96.0.30:80", "a1")
        expect(small, "10.96.0.31:80", "a1")
        small.start(small.agent)
        expect(small, "10.96.0.30:80", "a2")
        expect(small, "10.96.0.31:80", UNSERVED)
        expect(small, "10.96.0.32:80", "a2")
        assert client.ask("hear", keep="udp") == {"error": "ECONNABORTED"}
        client.ask("drop", keep="udp")
        small.delete(*comes)
        until("no unreferenced entry is left", lambda: not strays(small.agent))


def test_a_kill_during_writes_fails_no_connection(small: Cluster) -> None:
    """Killed at work and while starting, during many changes: no connection fails, and no entry is
    left behind.
    """
    made = small.web(40, "a1 a2")
    sets = itertools.cycle(("a1", "a1 a2 a3", "a2 a3", "a3/draining a1"))
    with small.given(*made), under_load(small, "10.96.0.40", "a2", "host-1", answers="a1 a2 a3"):
        for is_up in (True, False, True, False, True):
            for who in itertools.islice(sets, 6):
                small.kube.replace(small.slice("web-40", who))
            small.agent.kill()
            for who in itertools.islice(sets, 3):
                small.kube.replace(small.slice("web-40", who))
            small.start(small.agent, wait=is_up)
        small.agent.wait_synced()
        small.change(small.slice("web-40", "a2"))
        expect(small, "10.96.0.40:80", "a2")
    until("no unreferenced entry is left", lambda: not strays(small.agent))


def test_an_upgrade_fails_no_connection(web: Cluster, tmp_path: Path) -> None:
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


def test_an_api_server_restart_fails_no_connection(web: Cluster) -> None:
    """It crashes and returns with its data; old and new Services are served."""
    with under_load(web, HOST, "a2", "host-1") as load:
        web.api.kill()
        load.goes_on()
        until(
            "the agent reports the outage",
            lambda: all(source["error"] for source in web.agent.status()["sources"]),
        )
        web.api.restart()
        web.kube.close()
        web.change(web.slice(NAME, "a2"))
        expect(web, f"{HOST}:80", "a2")
        load.goes_on()
    with web.given(*web.web(50, "a3")):
        expect(web, "10.96.0.50:80", "a3")


def test_cleanup_stops_serving_and_a_start_resumes(web: Cluster) -> None:
    """This shows that kbpf, and nothing else, serves every kind of address."""
    more = web.web(60, "a1", type="NodePort", node_port=30060, external_ips=["192.0.2.60"])
    addresses = {
        f"{HOST}:80": "a1 a2",
        f"[{HOST6}]:80": "a1 a2",
        "192.0.2.60:80": "a1",
        "198.18.0.1:30060": "a1",
    }
    with web.given(*more):
        for client, (to, names) in itertools.product(("a3", "host-1", "a-net"), addresses.items()):
            expect(web, to, names, client)
        web.agent.stop()
        command = (sys.executable, "-m", "kbpf", "cleanup", "--pin-dir", str(web.agent.pin_dir))
        subprocess.run(command, check=True, capture_output=True)
        assert not web.agent.pin_dir.exists()
        for client, to in itertools.product(("a3", "host-1", "a-net"), addresses):
            got = web[client].tcp(*split(to))["error"]
            assert got == (REFUSED if "30060" in to else UNSERVED), "only kbpf serves it"
        web.start(web.agent)
        for client, (to, names) in itertools.product(("a3", "host-1", "a-net"), addresses.items()):
            expect(web, to, names, client)


def split(to: str) -> tuple[str, int]:
    host, _, number = to.rpartition(":")
    return host.strip("[]"), int(number)
