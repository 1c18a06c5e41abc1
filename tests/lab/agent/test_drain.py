# SPDX-License-Identifier: Apache-2.0
"""The drain of a stopped agent of mode bpf: new connections are not translated, established ones
continue, and with the last of them everything is removed. What serves next is tested in
test_modes.py.

Also the take-over: connections that start while another data plane serves stay with it. nftables
rules stand in for IPVS, which not every kernel has.
"""

import time
from collections.abc import Iterator

import pytest

from kbpf.dataplane.bpf.drain import PreviousBpfPlane
from kbpf.dataplane.bpf.maps.layout import NODE, NodeFlag
from kbpf.errors import KernelError
from kbpf.model.config import Config
from tests.lab.outside.netfilter import nft_table
from tests.support.lab.dial import Dial
from tests.support.lab.field import NODES4, Field, at, check, forward, split, there
from tests.support.lab.lab import PATIENCE, Agent, on, run, until
from tests.support.runtime.yielding_agent import CLSACT, HOLD
from tests.support.table import table


@pytest.fixture
def field() -> Iterator[Field]:
    with Field(*forward("stack"), name="rm", pods=(2, 1), agents=1) as made:
        made.create(*made.all_of("81 91:UDP -> a1\n82 -> b1"))
        made.settle()
        yield made


def remains_of(field: Field) -> PreviousBpfPlane:
    return PreviousBpfPlane(Config(pin_dir=field.agent.pin_dir))


UNTRANSLATED = table(
    Dial,
    """
NodePort               | outside | 198.18.0.1:30081 | ECONNREFUSED
VIP                    | outside | 192.0.2.81:80    | EHOSTUNREACH
a port that it had not | outside | 10.96.0.81:9     | EHOSTUNREACH
a pod                  | a2!     | 10.96.0.81:80    | EHOSTUNREACH
a pod with hooks       | a2      | 10.96.0.81:80    | EHOSTUNREACH
""",
)


def test_drain_ends_with_the_last_connection(field: Field):
    client, host = field["outside"], field.lab.nodes[0].host
    kept = {
        "local": (client, at("NodePort", 81)),
        "remote": (client, at("VIP", 82)),
        "pod": (field["a2!"], at("ClusterIP", 82)),
        "hook": (field["a2"], at("ClusterIP", 81)),
    }
    for name, (place, to) in kept.items():
        assert "name" in place.tcp(*split(to), keep=name), name
    udp = field["a2!"].udp(*split(at("ClusterIP", 91)), keep="udp", connected=True)
    assert udp["name"] == "a1"
    remains = remains_of(field)
    with pytest.raises(KernelError, match="another agent is at work"):
        there(host, remains.claim)
    field.agent.stop()
    assert there(host, remains.claim)
    assert there(host, lambda: remains.drain(time.monotonic())) is not None
    for name, (place, _) in kept.items():
        assert "name" in place.ask("talk", keep=name), name
    (said,) = remains.problems()
    assert "3 connections" in said  # the one made by a socket hook is not a flow
    for row in UNTRANSLATED:
        check(field, row)
    assert "error" in field["a2!"].ask("talk", keep="udp", timeout=5.0), "UDP is not drained"
    for name, (place, _) in kept.items():
        place.ask("drop", keep=name)
    later = time.monotonic() + PATIENCE  # until then the drain is not checked again

    def gone() -> bool:
        nonlocal later
        later += PATIENCE
        return there(host, lambda: remains.drain(later)) is None

    until("everything is removed", gone)
    remains.close()
    assert not field.agent.pin_dir.exists()
    for direction in ("ingress", "egress"):
        shown = run("tc", "-n", field.agent.node.netns, "filter", "show", "dev", "eth0", direction)
        assert "kbpf" not in shown
    assert not remains_of(field).claim()


def test_an_agent_restarted_during_drain_serves_again(field: Field):
    host = field.lab.nodes[0].host
    assert "name" in field["outside"].tcp(*split(at("NodePort", 82)), keep="k")
    field.agent.stop()
    remains = remains_of(field)
    assert there(host, remains.claim)
    assert there(host, lambda: remains.drain(time.monotonic())) is not None
    remains.close()
    field.agent.start()
    assert "name" in field["outside"].ask("talk", keep="k")
    for number, who in ((81, "a1"), (82, "b1")):
        check(field, Dial("again", "outside", at("VIP", number), who, "tcp", NODES4[0]))
        check(field, Dial("again", "a2", at("ClusterIP", number), who, "tcp", field["a2"].ip))


OTHER = """
  chain before {
    type nat hook prerouting priority -100;
    ip daddr 198.18.0.1 tcp dport 30081 dnat to POD:8080
  }
  chain after {
    type nat hook postrouting priority 100;
    ct status dnat masquerade
  }
  chain lose {
    type filter hook postrouting priority 300;
    ip protocol tcp ct status dnat tcp flags & (syn|ack) == syn|ack drop
  }
"""


@pytest.mark.parametrize("who", ["mode ipvs", "kube-proxy"])
def test_a_connection_of_another_data_plane_keeps_its_backend(field: Field, who: str):
    """The connection's SYN-ACK is lost while the packet programs are attached. Its SYN is repeated
    when they serve, and must go to the backend it had at first: a2, chosen by the other data plane.
    Ours would choose a1.

    For a kube-proxy of which only rules are left, the agent is passive only where attaching loses
    packets (clsact).
    """
    agent, home = field.agent, field.lab.nodes[0]
    agent.stop()
    remains = remains_of(field)
    assert there(home.host, remains.claim)
    until("everything is removed", lambda: there(home.host, lambda: remains.drain(1e9)) is None)
    remains.close()
    table = "kube-proxy" if who == "kube-proxy" else "other"
    row = Dial("new", "outside", at("NodePort", 81), "a1", "tcp", NODES4[0])
    agent.state_dir.mkdir(exist_ok=True)
    if who == "mode ipvs":
        (agent.state_dir / "kbpf-ipvs0").mkdir()  # this folder is how mode ipvs is detected
    else:
        (agent.state_dir / CLSACT).touch()
    (agent.state_dir / HOLD).touch()
    agent.module = "tests.support.runtime.yielding_agent"
    with nft_table(home, f"ip {table}", OTHER.replace("POD", field["a2"].ip)):
        agent.start(wait=False)
        until("the agent is passive", lambda: NodeFlag.PASSIVE in stance(agent))
        field["outside"].ask("begin", host=NODES4[0], port=30081, keep="begun")
        until("the foreign flow is recorded", lambda: agent.entries("foreign_flows"))
        assert field["outside"].tcp(NODES4[0], 30081, timeout=0.5)["error"] == "timeout"
        (agent.state_dir / HOLD).unlink()
        agent.wait_synced()
        until("the agent serves", lambda: NodeFlag.PASSIVE not in stance(agent))
        check(field, row)
        assert "error" in field["outside"].ask("go_on", keep="begun", timeout=0.1)
        on(home, "nft", "flush", "chain", "ip", table, "lose")
        # the longer it has waited, the later the SYN is repeated
        answer = field["outside"].ask("go_on", keep="begun", timeout=2 * PATIENCE)
        assert answer.get("name") == "a2"
        assert field["outside"].ask("talk", keep="begun")["name"] == "a2"
        check(field, row)
        until("the agent no longer coexists", lambda: stance(agent) == NodeFlag(0))


def stance(agent: Agent) -> NodeFlag:
    """The flags that tell its programs about another data plane."""
    try:
        told = agent.entries("node")[bytes(4)]
    except KernelError:  # the map does not exist yet
        return NodeFlag(0)
    return NodeFlag(NODE.unpack(told)[2]) & (NodeFlag.PASSIVE | NodeFlag.COEXISTING)
