# SPDX-License-Identifier: Apache-2.0
"""NodePorts beside programs of other tools that return TC_ACT_OK. On the uplink, by TCX: attached
before kbpf, and in front of it while it serves. On a pod's device: filters on a clsact. No packet
is lost meanwhile: tests/programs/packets/tc/test_attach.py; behind kbpf: neighbours/test_cilium.py.
"""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kbpf.cli import app
from kbpf.kernel.bpf.clsact import Direction, Filter
from kbpf.kernel.bpf.objects import Link, Program
from kbpf.kernel.bpf.tc import ATTACH_TYPE, AttachMethod, TcAttacher
from kbpf.kernel.bpf.uapi import BPF_F_BEFORE
from kbpf.kernel.net.uapi import NLM_F_EXCL
from kbpf.kernel.system import netns
from tests.programs.packets.test_hook_probe import OK, returning
from tests.support.features import needs
from tests.support.lab.dial import REFUSED, Dial
from tests.support.lab.field import Field, check, there
from tests.support.lab.lab import run, until
from tests.support.table import table

pytestmark = needs("tcx")

ETH_P_ALL = 3


class Beside(Field):
    """A program of another tool is at ingress of node-1's uplink before kbpf starts."""

    def prepare(self) -> None:
        program = returning("earlier", OK)
        self.own.callback(program.close)
        self.own.callback(self.attach(program).close)

    def attach(self, program: Program, direction: Direction = Direction.INGRESS, flags: int = 0) -> Link:
        def work() -> Link:
            ifindex = socket.if_nametoindex("eth0")
            return Link.attach(program, ifindex, ATTACH_TYPE[direction], flags)

        return netns.run_in(Path("/run/netns") / str(self.lab.nodes[0].netns), work)


@pytest.fixture(scope="module")
def field() -> Iterator[Beside]:
    with Beside(name="po", pods=(2, 1), agents=1, module="tests.support.runtime.hasty_agent") as made:
        made.create(*made.all_of("81 -> a1\n82 -> b1"))
        made.settle()
        yield made


ROWS = table(
    Dial,
    """
a pod here            | outside | 198.18.0.1:30081       | a1 | tcp | 198.18.0.1
a pod elsewhere       | outside | 198.18.0.1:30082       | b1 | tcp | 198.18.0.1
a pod here, IPv6      | outside | [fd00:198:18::1]:30081 | a1 | tcp | fd00:198:18::1
a pod elsewhere, IPv6 | outside | [fd00:198:18::1]:30082 | b1 | tcp | fd00:198:18::1
""",
)


def count_packets(field: Beside, device: str) -> int:
    """The packets that have reached the filters of this device, in both directions."""
    rows = json.loads(run("tc", "-n", field.lab.nodes[0].netns, "-s", "-j", "qdisc", "show"))
    (clsact,) = (row for row in rows if (row["dev"], row["kind"]) == (device, "clsact"))
    return int(clsact["packets"])


@contextlib.contextmanager
def filters(field: Beside, device: str) -> Iterator[None]:
    """As the network policy agent of AWS attaches its programs: clsact, priority 1, direct action
    (aws-ebpf-sdk-go, pkg/tc/tc.go). Here they return TC_ACT_OK for each packet.
    """
    netns_name = field.lab.nodes[0].netns
    run("tc", "-n", netns_name, "qdisc", "add", "dev", device, "clsact")

    def attach(program: Program, direction: Direction) -> None:
        place = Filter("bpf", 1, socket.htons(ETH_P_ALL), 1, "handle", 0)
        ifindex = socket.if_nametoindex(device)
        with TcAttacher(Path("/nowhere"), AttachMethod.CLSACT) as tc:
            tc._filters._write(ifindex, direction, program, place, NLM_F_EXCL)

    try:
        for direction in Direction:
            with returning(f"handle_{direction}", OK) as program:
                netns.run_in(Path("/run/netns") / netns_name, lambda p=program, d=direction: attach(p, d))
        yield
    finally:
        run("tc", "-n", netns_name, "qdisc", "del", "dev", device, "clsact")


def test_filters_on_the_device_of_a_pod_disturb_no_node_port(field: Beside):
    """Pods see the node's address, and clients the frontend's: kbpf's programs run, too."""
    with filters(field, "p1"):
        before = count_packets(field, "p1")
        for row in ROWS:
            check(field, row)
        # each of two connections has some packets each way
        assert count_packets(field, "p1") >= before + 2 * 8


def check_attached(field: Beside, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    capsys.readouterr()
    arguments = ["check", "--attached", "-o", "json", "--pin-dir", str(field.agent.pin_dir)]
    code = there(field["host-1"], lambda: app.call(arguments))
    shown = json.loads(capsys.readouterr().out)["items"]
    return code, [r["detail"] for r in shown if r["name"].startswith("packets at")]


@contextlib.contextmanager
def paused_agent(field: Beside) -> Iterator[None]:
    """Stops the agent's threads, so that it does not look at the order."""
    os.kill(field.agent.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(field.agent.pid, signal.SIGCONT)


def test_program_in_front_is_named_and_passed(field: Beside, capsys):
    assert check_attached(field, capsys) == (0, [])
    with contextlib.ExitStack() as stack:
        program = stack.enter_context(returning("in_front", OK))
        with paused_agent(field):
            stack.enter_context(field.attach(program, flags=BPF_F_BEFORE))
            for row in ROWS:
                check(field, replace(row, outcome=REFUSED))
            code, (detail,) = check_attached(field, capsys)
        assert code == 1
        assert f"in_front (id {program.read_info().id}, tcx) runs before kbpf's program" in detail
        until("ours is in front", lambda: not check_attached(field, capsys)[0])
        for row in ROWS:
            check(field, row)
        assert check_attached(field, capsys) == (0, [])
    until("it is logged", lambda: "moved=1" in field.agent.log.read_text())
