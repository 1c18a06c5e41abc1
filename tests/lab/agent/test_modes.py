# SPDX-License-Identifier: Apache-2.0
"""Switching a serving node from one mode to the other and back: the agent is restarted."""

import contextlib
import json
import shutil
from collections.abc import Iterator

import pytest

from tests.support.features import needs
from tests.support.lab.dial import Dial
from tests.support.lab.field import Field, at, check, split
from tests.support.lab.kept import Kept
from tests.support.lab.lab import Agent, on, run, until
from tests.support.lab.load import under_load
from tests.support.table import pairs, table

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


ROWS = table(
    Dial,
    """
NodePort, local  | outside | 198.18.0.1:30081 | a1           | tcp | 198.18.0.1
NodePort, remote | outside | 198.18.0.1:30082 | b1           | tcp | 198.18.0.1
VIP, Local       | outside | 192.0.2.85:80    | a1           | tcp | 198.18.0.254
no endpoints     | outside | 192.0.2.84:80    | ECONNREFUSED
a pod            | a3      | 10.96.0.82:80    | b1           | tcp | 10.244.1.4
UDP              | outside | 198.18.0.1:30093 | a1 b1        | udp | 198.18.0.1
""",
)


def serves(field: Field) -> None:
    """Checks new connections from all kinds of clients."""
    for row in ROWS:
        check(field, row)


KEPT = pairs("""\
outside → 198.18.0.1:30081
outside → 198.18.0.1:30082
outside → 192.0.2.83:80
outside → 192.0.2.85:80
a2 → 10.96.0.81:80
a2 → 10.96.0.82:80
a2! → 10.96.0.82:80
host-1 → 10.96.0.82:80
""")
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
    kept = Kept(*((field[client], split(to)) for client, to in KEPT))
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
