# SPDX-License-Identifier: Apache-2.0
"""Switching a serving node from one mode to the other and back: the agent is restarted."""

import contextlib
import json
import shutil
from collections.abc import Iterator

import pytest

from tests.support.features import needs
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import NODES4, Field, at, check, split
from tests.support.lab.kept import Kept
from tests.support.lab.lab import Agent, on, run, until
from tests.support.lab.load import under_load

pytestmark = needs("ipvs")

OTHER = {"bpf": "ipvs", "ipvs": "bpf"}
SLOWLY = 240.0
"""Seconds to wait: IPVS keeps closed connections for two minutes."""


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field(name="md", pods=(3, 1), agents=1) as made:
        made.create(*made.all_of(SERVICES))
        pod = made["a3"]
        made.unhook("a3!", pod.netns, pod.ip, pod.ip6, made.home["a3"])
        made.settle()
        yield made


SERVICES = """
81 -> a1
82 -> b1
83 93:UDP -> a1 b1
84 ->
85 -> a1 b1 external=Local
"""


def become(agent: Agent, mode: str) -> None:
    """Restarts the agent with another --mode and an empty state folder, as a new container has."""
    agent.stop()
    shutil.rmtree(agent.state_dir, ignore_errors=True)
    agent.mode = mode
    agent.start()


def serves(field: Field) -> None:
    """Checks new connections from all kinds of clients."""
    own = NODES4[0]
    for row in (
        Dial("NodePort, local", "outside", at("NodePort", 81), "a1", "tcp", own),
        Dial("NodePort, remote", "outside", at("NodePort", 82), "b1", "tcp", own),
        Dial("VIP, Local", "outside", at("VIP", 85), "a1", "tcp", "198.18.0.254"),
        Dial("no endpoints", "outside", at("VIP", 84), REFUSED),
        Dial("a pod", "a3", at("ClusterIP", 82), "b1", "tcp", field["a3"].ip),
        Dial("UDP", "outside", at("NodePort", 93), "a1 b1", "udp", own),
    ):
        check(field, row)


KEPT = (
    ("outside", "NodePort", 81),
    ("outside", "NodePort", 82),
    ("outside", "VIP", 83),
    ("outside", "VIP", 85),
    ("a2", "ClusterIP", 81),
    ("a2", "ClusterIP", 82),
    ("a2!", "ClusterIP", 82),
    ("host-1", "ClusterIP", 82),
)
"""Connections that stay open during the switch: the client, and the Service it dials.

No pod has both these and new ones. A connection translated by a socket hook goes to its backend directly. If IPVS sent
a new one from the same port to the same backend, it would get the replies of both (docs/ipvs.md).
"""


def left(agent: Agent) -> list[str]:
    """What is left of the other mode on the node."""
    if agent.mode == "bpf":
        links = json.loads(run("ip", "-n", agent.node.netns, "-j", "link", "show"))
        found = [link["ifname"] for link in links if link["ifname"] == "kbpf-ipvs0"]
        tables = on(agent.node, "nft", "list", "tables")
        found += [line for line in tables.splitlines() if "kbpf" in line]
        found += list(agent.virtual_services())
        return found + [str(path) for path in agent.state_dir.glob("*")]
    devices = run("tc", "-n", agent.node.netns, "filter", "show", "dev", "eth0", "ingress")
    return ([str(agent.pin_dir)] if agent.pin_dir.exists() else []) + (["filters"] if "kbpf" in devices else [])


def known(field: Field) -> str:
    """The IPVS connections of the node, for the error message of a failed test."""
    return on(field.agent.node, "cat", "/proc/net/ip_vs_conn")[:20_000]


@pytest.mark.parametrize("mode", ["ipvs", "bpf"])
def test_switching_the_mode_fails_no_connection(field: Field, mode: str):
    """New connections work throughout, established ones continue, and nothing of the old mode
    stays.
    """
    if field.agent.mode == mode:  # if this test is run alone
        become(field.agent, OTHER[mode])
    kept = Kept(*((field[client], split(at(kind, number))) for client, kind, number in KEPT))
    kept.open()
    with contextlib.ExitStack() as stack:
        loads = [
            stack.enter_context(under_load(field, *to, pause=0.05, **how))
            for *to, how in (
                (split(at("NodePort", 83))[0], "outside", {"port": 30083, "answers": "a1 b1"}),
                ("10.96.0.83", "a3!", "a3", "host-1", {"answers": "a1 b1"}),
            )
        ]
        try:
            become(field.agent, mode)
            for load in loads:
                load.goes_on()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{field.agent.tail(40)}\n{known(field)}") from None
    kept.all_talk()
    serves(field)
    status = field.agent.status()
    assert status is not None
    assert status["choice"] == {
        "requested": mode if mode == "ipvs" else "auto",
        "mode": mode,
        "reason": "",
        "detail": "",
    }
    kept.close()
    until("nothing is left of the other mode", lambda: left(field.agent) == [], SLOWLY)
    serves(field)


def test_a_second_agent_of_the_other_mode_does_not_start(field: Field):
    agent = field.agent
    other = Agent(field.lab.nodes[0], "--source", str(field.folder))
    other.state_dir, other.log = agent.state_dir, agent.log.with_suffix(".other")
    other.mode = OTHER[agent.mode]
    field.lab.nodes[0].agent = agent
    other.start(wait=False)
    assert other.wait_ended() != 0
    assert "another agent is at work here" in other.tail()
    serves(field)
