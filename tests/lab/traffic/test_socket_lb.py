# SPDX-License-Identifier: Apache-2.0
"""Which sockets are translated at connect(), and which are left to the packet path.

One node with the packet path on, with a folder as its source. Each test dials from a place and
captures at the pod's device. If packets there carry the backend's address, the socket hooks
translated; if they carry the Service's, the hooks did not and the packet path has to.
"""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kbpf.cli import app
from kbpf.dataplane.bpf.maps.layout import ConfigFlag
from tests.support.lab.field import Field, split, there
from tests.support.lab.lab import Agent, Place, remove_cgroup, until
from tests.support.packets.wire import Wire
from tests.support.plane import HOOKS

LABEL = "kbpf.io/socket-lb"
ON, HOST_ONLY, OFF = "on", "hostNamespaceOnly", "off"
NONE = ConfigFlag(0)
HOOKED, PACKETS = "hooks", "packets"
TCP4, TCP6 = "10.96.0.1:80", "[fd00:10:96::1]:80"
UDP4, UDP6 = "10.96.0.2:80", "[fd00:10:96::2]:80"
DIALS = (("tcp", TCP4), ("tcp", TCP6), ("udp", UDP4), ("udp", UDP6), ("udp-connected", UDP4))


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field(name="lb", pods=(2,)) as made:
        made.create(*made.web(1, "a1", dual=True), *made.web(2, "a1", "UDP", dual=True))
        made.settle()
        yield made


def restart(field: Field, mode: str, *more: str) -> None:
    field.agent.stop()
    field.agent.start(extra=("--socket-lb", mode, *more))
    flag = {ON: NONE, HOST_ONLY: ConfigFlag.HOST_ONLY, OFF: ConfigFlag.SOCKET_LB_OFF}[mode]
    until(
        f"{mode} is in force",
        lambda: field.agent.config_flags() & (ConfigFlag.HOST_ONLY | ConfigFlag.SOCKET_LB_OFF) == flag,
    )


def run_hooked(field: Field) -> None:
    """Restarts the agent with the hooks on, unless it runs with them and no other setting."""
    if not field.agent.is_running or field.agent.extra not in ((), ("--socket-lb", ON)):
        restart(field, ON)


def dial(place: Place, protocol: str, to: str, **more: Any) -> dict[str, Any]:
    host, port = split(to)
    if protocol == "tcp":
        return place.tcp(host, port, **more)
    return place.udp(host, port, connected=protocol == "udp-connected", **more)


@contextlib.contextmanager
def listening(field: Field, pod: Place) -> Iterator[Wire]:
    """A capture at the node's end of this pod's veth pair."""
    node = field.home["a1"]
    index = [each.netns for each in node.pods].index(pod.netns) + 1
    with Wire(node.netns, f"p{index}", tap=True) as tap:
        yield tap


def check(field: Field, place: Place, served_by: str) -> None:
    """The place is served over every protocol, getpeername() shows the Service, and the captured
    destination shows that `served_by` translated.
    """
    for protocol, to in DIALS:
        with listening(field, place) as tap:
            answer = dial(place, protocol, to)
            why = f"{place.name} {protocol} {to}: {answer}\n{tap.told()}\n{field.agent.tail(5)}"
            assert answer.get("name") == "a1", why
            assert answer["peer"] == list(split(to)), why
            v6, kind = "[" in to, protocol.partition("-")[0]
            client = place.ip6 if v6 else place.ip
            first = tap.expect(
                lambda p: (
                    p.protocol == kind  # noqa: B023
                    and split(p.source)[0] == client  # noqa: B023
                    and p.flags in ("", "S")
                )  # skip packets of an earlier connection that is closing
            )
            backend = field["a1"].ip6 if v6 else field["a1"].ip
            wanted = list(split(to)) if served_by == PACKETS else [backend, 8080]
            assert list(split(first.destination)) == wanted, why


def inspect(field: Field, what: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code, out = command(field, capsys, "inspect", what)
    return code, json.loads(out)


def command(field: Field, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code, and the JSON that it prints."""
    capsys.readouterr()
    code = app.call([*arguments, "-o", "json", "--pin-dir", str(field.agent.pin_dir)])
    return code, capsys.readouterr().out


# ---- modes ---------------------------------------------------------------------------------------

PROVEN = (f"{TCP4}/TCP", f"{UDP4}/UDP", f"{TCP6}/TCP", f"{UDP6}/UDP")
TURNS = (HOST_ONLY, OFF, ON)
"""Starting from "on". The other changes: tests/programs/sockets/test_exemptions.py."""


def keep(field: Field, label: str) -> list[tuple[str, str, str]]:
    """Opens one socket of each kind in the pod, before the mode changes. Returns their names,
    protocols and addresses.
    """
    names = [(f"{label} {protocol} {to}", protocol, to) for protocol, to in DIALS]
    for name, protocol, to in names:
        answer = dial(field["a2"], protocol, to, keep=name)
        assert answer.get("name") == "a1", (name, answer)
    return names


def check_kept(field: Field, kept: list[tuple[str, str, str]], before: str, mode: str) -> None:
    """Checks that they still work. Those that the hooks translated send to the backend as before;
    an unconnected one only while there are hooks.
    """
    pod = field["a2"]
    for name, protocol, to in kept:
        with listening(field, pod) as tap:
            if protocol == "udp":  # unconnected: it sends to the Service's address each time
                answer = dial(pod, protocol, to, keep=name)
                assert answer.get("peer") == list(split(to)), (name, answer)
            else:
                answer = pod.ask("talk", keep=name)
            assert answer.get("name") == "a1", (name, answer)
            if before == ON and (protocol != "udp" or mode == HOST_ONLY):
                backend = field["a1"].ip6 if "[" in to else field["a1"].ip
                tap.expect(lambda p: split(p.destination) == (backend, 8080))  # noqa: B023
        pod.ask("drop", keep=name)


def test_switching_between_all_modes_on_a_live_node(field: Field, capsys):
    run_hooked(field)
    before, pod, host = ON, field["a2"], field["host-1"]
    for mode in TURNS:
        kept = keep(field, f"{before} to {mode}")
        at_host = dial(host, "tcp", TCP4, keep=f"{before} to {mode}") if before != OFF else None
        pod.ask("start_load", host=split(TCP4)[0], port=80, pause=0.005)
        until("connections are made", lambda: pod.ask("peek_load")["names"])
        restart(field, mode)
        load = pod.ask("stop_load")
        assert load["errors"] == [], f"{before} to {mode}"
        check_kept(field, kept, before, mode)
        if at_host is not None:
            assert at_host["name"] == "a1"
            assert host.ask("talk", keep=f"{before} to {mode}")["name"] == "a1"
            host.ask("drop", keep=f"{before} to {mode}")
        check(field, pod, HOOKED if mode == ON else PACKETS)
        if mode != OFF:
            for protocol, to in DIALS:
                assert dial(host, protocol, to).get("name") == "a1", f"host {to}, {mode}"
        _check_told(field, mode, capsys)
        before = mode


PROOF = {
    ON: [f"dial {to}" for to in PROVEN],
    HOST_ONLY: [*(f"dial {to} from the host" for to in PROVEN), f"leave {PROVEN[0]} from a pod"],
    OFF: [],
}
"""What `kbpf check --attached` tries in each mode."""


def _check_told(field: Field, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    def healthy() -> Any:
        code, said = inspect(field, "status", capsys)
        return said if code == 0 else None

    said = until("the agent is healthy", healthy)
    assert (said["ok"], said["socket_lb"], said["hooks_missing"]) == (True, mode, [])
    pins = {pin.name for pin in (field.agent.pin_dir / "links").iterdir()}
    assert pins == (set() if mode == OFF else HOOKS), mode
    programs = [path.name for path in field.agent.pin_dir.glob("programs-sock-*")]
    assert len(programs) == (0 if mode == OFF else 1), mode
    code, programs = inspect(field, "programs", capsys)
    rows = programs["items"]
    socket_rows = [row for row in rows if row["hook"] in HOOKS]
    assert code == 0
    assert {row["state"] for row in socket_rows} == {"off" if mode == OFF else "attached"}
    _, out = there(field["host-1"], lambda: command(field, capsys, "check", "--attached"))
    found = json.loads(out)
    assert found["attached"] is True, found["items"]
    names = [row["name"] for row in found["items"]]
    assert [name for name in names if name.startswith(("dial", "leave"))] == PROOF[mode]


# ---- exemptions ----------------------------------------------------------------------------------


POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec: {{nodeName: {node}, containers: [{{name: c, image: x}}]}}
"""
OFF_LABEL = {LABEL: "off"}


def pod_object(name: str = "sidecar", node: str = "node-1", **metadata: object) -> dict[str, Any]:
    made = yaml.safe_load(POD.format(name=name, node=node))
    made["metadata"] |= metadata
    return made


def exempt(agent: Agent, *folders: Path) -> Callable[[], bool]:
    """A condition: exactly these cgroups are exempt, and the flag that makes the programs check for
    exemptions agrees.
    """

    def so() -> bool:
        found = {int.from_bytes(key, "little") for key in agent.entries("exempt_cgroups")}
        flag = ConfigFlag.EXEMPTIONS in agent.config_flags()
        return found == {folder.stat().st_ino for folder in folders} and flag == bool(folders)

    return so


def test_a_pod_with_the_label_is_left_to_the_packet_path(field: Field):
    """Which cgroups and when: tests/programs/sockets/test_exemptions.py."""
    run_hooked(field)
    uid, pod = str(uuid.uuid4()), field["a2"]
    pods = field.home["a2"].cgroup / "kubepods"
    folder = pods / f"burstable/pod{uid}"
    place = Place("labelled", pod.netns, folder / "container")
    place.ip, place.ip6 = pod.ip, pod.ip6
    try:
        check(field, place, HOOKED)
        field.change(pod_object(uid=uid, labels=OFF_LABEL))
        until("the pod is exempt", exempt(field.agent, folder))
        check(field, place, PACKETS)
        check(field, pod, HOOKED)
        restart(field, ON)
        check(field, place, PACKETS)
        field.change(pod_object(uid=uid))
        until("nothing is exempt", exempt(field.agent))
        check(field, place, HOOKED)
    finally:
        place.close()
        remove_cgroup(pods)
    field.delete(pod_object())
    field.settle()
