# SPDX-License-Identifier: Apache-2.0
"""`kbpf verify` on a node that serves: nothing differs, also while everything changes. Then what the
agent has attached is damaged while the agent is down, and must be named. Damages of the maps:
tests/programs/maps/test_differences.py.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Link, Map, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE
from kbpf.kernel.bpf.uapi import BPF_F_BEFORE, BPF_PROG_TYPE_CGROUP_SOCK_ADDR
from kbpf.kernel.net.devices import list_devices
from kbpf.kernel.system import netns
from tests.programs.packets.test_hook_probe import OK, returning
from tests.support import plane
from tests.support.cluster import scenario
from tests.support.cluster.cluster import Cluster, Places
from tests.support.cluster.kube_objects import endpoint, endpoint_slice, service, slice_port
from tests.support.cluster.scenario import FolderNode, Object
from tests.support.features import lacking
from tests.support.lab.lab import Agent, detach, until

CONNECT4 = 10
POD_UID = "0f4a1c1e-5d0b-4c52-9a57-3d6a2a1f9b10"


def flags(node: FolderNode) -> list[str]:
    """The agent's own; it runs with the default of none of them."""
    agent = node.agent
    return [
        *("--hostname-override", agent.node.name, "--cgroup", str(agent.node.cgroup)),
        *("--source", str(node.folder)),
    ]


def verify_as_json(node: Places, *arguments: str) -> dict[str, Any]:
    done = node.agent.kbpf("verify", *arguments, "-o", "json")
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["equal"] else 1), (document, done.stderr)
    return document


def lines(document: dict[str, Any]) -> list[str]:
    return [
        f"{found['kind']} {found['where']} {found['subject']}: {found['desired']} / {found['actual']}"
        for found in document["items"]
    ]


def test_nothing_differs_with_the_settings_of_the_agent(node: FolderNode):
    """Only its folders are given; its other settings are those of the running agent."""
    done = node.agent.kbpf("verify")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("no differences: compared Service ports: 9, ")
    document = verify_as_json(node)
    assert (document["total"], document["notes"], document["changing"]) == (0, [], [])
    # TCP and UDP of IPv4, TCP of IPv6, and the packets
    assert document["proven"] == 4


def test_connections_are_tried_from_the_cgroup_of_pods(node: FolderNode):
    before = verify_as_json(node)["proven"]
    folder = node.agent.node.cgroup / "kubepods" / f"pod{POD_UID}"
    folder.mkdir(parents=True)
    try:
        after = verify_as_json(node)["proven"]
        assert [path.name for path in folder.parent.glob("*/")] == [folder.name], "left behind"
    finally:
        folder.rmdir()
        folder.parent.rmdir()
    assert after == 2 * before - 1


def test_a_contradiction_of_settings_is_named(node: FolderNode):
    document = verify_as_json(node, "--masquerade-all")
    assert [line.partition(":")[0] for line in lines(document)] == ["changed node "]


# ---- while everything changes --------------------------------------------------------------------

SERVICES = 120
CHANGES = 500
"""Objects that change in a second."""


def churning_service(number: int) -> Object:
    return service(f"churn-{number}", cluster_ip=f"10.96.8.{number + 1}")


def churning_slice(number: int, turn: int) -> Object:
    ends = (endpoint(address) for address in (f"10.250.{turn % 250}.{number + 1}", "10.250.250.250"))
    return endpoint_slice(f"churn-{number}", *ends, ports=[slice_port(8080)])


@contextlib.contextmanager
def churn(node: FolderNode) -> Iterator[Callable[[], int]]:
    """Changes CHANGES slices a second; the function returns how many have been changed."""
    stop, turns = threading.Event(), [0]
    node.write([churning_service(number) for number in range(SERVICES)], "churn-services.yaml")

    def work() -> None:
        while not stop.wait(SERVICES / CHANGES):
            turns[0] += 1
            slices = [churning_slice(number, turns[0]) for number in range(SERVICES)]
            # JSON is YAML, and is written and read faster
            scenario.put(node.folder, "churn-slices.yaml", "\n---\n".join(map(json.dumps, slices)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: turns[0] * SERVICES
    finally:
        stop.set()
        thread.join()
        for path in node.folder.glob("churn-*.yaml"):
            path.unlink()
        node.settle()


def test_changes_under_way_are_no_differences_and_a_damage_is_one(node: FolderNode):
    def verified_while_much_changes() -> bool:
        before = count()
        document = verify_as_json(node)
        assert document["equal"], lines(document)
        return count() > before + CHANGES

    with churn(node) as count:
        until("changes are programmed", lambda: node.agent.status()["applied"] > 20)
        for _ in range(2):  # on a busy machine our thread may have changed little meanwhile
            until("much has changed meanwhile", verified_while_much_changes)
        with Map.open(node.agent.map_path("cluster_ips")) as map_:
            key = next(key for key, _ in map_.items() if key.endswith(bytes((10, 96, 0, 20))))
            map_.delete(key)
            document = verify_as_json(node)
            map_.update(key, bytes((1, 0, 0, 0)))
        assert lines(document) == ["missing cluster_ips : 10.96.0.20 / "]


# ---- with an API server --------------------------------------------------------------------------


def test_nothing_differs_from_the_api(cluster: Cluster):
    with cluster.given(*cluster.web(20, "a1 a2", dual=True), *cluster.web(21, "a1 a2", "UDP")):
        document = verify_as_json(cluster)
        assert (document["equal"], document["notes"]) == (True, []), document
        assert document["proven"] >= 3


@contextlib.contextmanager
def stopped(agent: Agent, seconds: float | None) -> Iterator[None]:
    """The agent is stopped for this long, at most in this block."""
    is_over = threading.Event()

    def go_on() -> None:
        is_over.wait(seconds)
        os.kill(agent.pid, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    os.kill(agent.pid, signal.SIGSTOP)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(("seconds", "is_equal"), [(7.0, True), (None, False)], ids=["for a while", "for good"])
def test_agent_that_is_stopped_may_catch_up(cluster: Cluster, seconds: float | None, is_equal: bool):
    """A busy node may not let it work for some seconds. One that hangs hides nothing."""
    late = cluster.web(31, "a1")
    with stopped(cluster.agent, seconds):
        cluster.create(*late)
        try:
            document = verify_as_json(cluster)
        finally:
            cluster.delete(*late)
    cluster.settle()
    assert document["equal"] is is_equal, document
    is_named = any(row["subject"].startswith("default/web-31") for row in document["items"])
    assert is_named is not is_equal


# ---- damages while the agent is down -------------------------------------------------------------


def link(node: FolderNode, name: str) -> Path:
    return node.agent.pin_dir / "links" / name


Damage = Callable[[FolderNode], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def detached_hook(node: FolderNode) -> Iterator[None]:
    with Link.open(link(node, "connect6")) as found:
        found.detach()
    yield


@contextlib.contextmanager
def removed_pin(node: FolderNode) -> Iterator[None]:
    detach(link(node, "sendmsg6"))
    link(node, "sendmsg6").unlink()
    yield


def denying(name: str) -> Program:
    """A program at connect() that returns 1: allowed, and not translated."""
    code = bytes.fromhex("b700000001000000" + "9500000000000000")
    return Program.load(name, BPF_PROG_TYPE_CGROUP_SOCK_ADDR, CONNECT4, code)


@contextlib.contextmanager
def replaced_hook(node: FolderNode) -> Iterator[None]:
    with Link.open(link(node, "connect4")) as found, denying("stranger") as program:
        found.update(program)
    yield


@contextlib.contextmanager
def stranger_at_hook(node: FolderNode) -> Iterator[None]:
    descriptor = os.open(node.agent.node.cgroup, os.O_RDONLY)
    try:
        with denying("intruder") as program, Link.attach(program, descriptor, CONNECT4):
            yield
    finally:
        os.close(descriptor)


def uplink(node: FolderNode) -> tuple[str, int]:
    devices = netns.run_in(Path("/run/netns") / node.agent.node.netns, list_devices)
    return next((d.name, d.ifindex) for d in devices if d.name == "eth0")


@contextlib.contextmanager
def detached_from_device(node: FolderNode) -> Iterator[None]:
    pin = node.agent.pin_dir / "devices" / f"{uplink(node)[1]}-egress"
    detach(pin)
    pin.unlink()
    yield


@contextlib.contextmanager
def stranger_before_ours(node: FolderNode) -> Iterator[None]:
    def attach(program: Program) -> Link:
        return Link.attach(program, uplink(node)[1], ATTACH_TYPE[Direction.INGRESS], BPF_F_BEFORE)

    path = Path("/run/netns") / node.agent.node.netns
    with returning("stranger", OK) as program, netns.run_in(path, lambda: attach(program)):
        yield


@contextlib.contextmanager
def new_service(node: FolderNode) -> Iterator[None]:
    added = [churning_service(0)]
    node.write(added)
    yield
    node.remove(added)


UNREACHED: dict[Damage, tuple[str, ...]] = {
    replaced_hook: (
        "foreign hook connect4 connect() on IPv4 sockets: kbpf's program / program %(stranger), which",
        "unreached from the cgroup of the host dial 10.96.0.",
    ),
    detached_from_device: ("missing devices egress of eth0: tc_egress, as the device of a host",),
    stranger_before_ours: ("unreached on a device packets at ingress of eth0:  / stranger",),
    new_service: ("missing services default/churn-0 TCP IPv4: ClusterIP 10.96.8.1:80/TCP", "missing cluster_ips :"),
}
"""Damages, for each the beginnings of the lines that must be found, and what else is in them."""
MISSING: dict[Damage, tuple[str, ...]] = {
    detached_hook: ("missing hook connect6 connect() on IPv6 sockets: at",),
    removed_pin: ("missing hook sendmsg6 sendto() on UDP, IPv6: at",),
    stranger_at_hook: ("foreign programs :  / a program of another load balancer is attached: %intruder",),
}
"""While a hook is missing no connection is tried."""


def test_what_is_damaged_while_the_agent_is_down_is_named(node: FolderNode):
    """And before that nothing differs. The agent has deleted what it no longer needed."""
    until("nothing is left", lambda: plane.dump(node.agent.entries)["strays"] == {})
    node.agent.kill()
    document = verify_as_json(node, *flags(node))
    assert (document["equal"], document["readings"]) == (True, 1), document
    if lacking("tcx"):
        del UNREACHED[stranger_before_ours]
    for damages in (UNREACHED, MISSING):
        with contextlib.ExitStack() as stack:
            for damage in damages:
                stack.enter_context(damage(node))
            found = lines(verify_as_json(node, *flags(node)))
        for beginning in (each for wanted in damages.values() for each in wanted):
            first, *pieces = beginning.split("%")
            assert any(line.startswith(first) and all(piece in line for piece in pieces) for line in found), (
                beginning,
                found,
            )
    node.agent.start()
    node.settle()
