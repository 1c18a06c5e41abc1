# SPDX-License-Identifier: Apache-2.0
"""Which sockets are translated at connect(), and which are left to the packet path.

One node with the packet path on, with a folder as its source. Each test dials from a place and
captures at the pod's device. If packets there carry the backend's address, the socket hooks
translated; if they carry the Service's, the hooks did not and the packet path has to.
"""

import contextlib
import json
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbpf.cli import app
from kbpf.dataplane.bpf.maps.layout import ConfigFlag
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kube import KubeError
from tests.support.lab.field import FORWARDINGS, Field, forward, split, there
from tests.support.lab.lab import PATIENCE, Agent, Place, remove_cgroup, until
from tests.support.packets.wire import Wire
from tests.support.plane import HOOKS

LABEL = "kbpf.io/socket-lb"
ON, HOST_ONLY, OFF = "on", "hostNamespaceOnly", "off"
NONE = ConfigFlag(0)
HOOKED, PACKETS = "hooks", "packets"
TCP4, TCP6 = "10.96.0.1:80", "[fd00:10:96::1]:80"
UDP4, UDP6 = "10.96.0.2:80", "[fd00:10:96::2]:80"
PORT = 40_000
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
        lambda: config_flags(field.agent) & (ConfigFlag.HOST_ONLY | ConfigFlag.SOCKET_LB_OFF) == flag,
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


def config_flags(agent: Agent) -> ConfigFlag:
    (raw,) = agent.entries("config").values()
    return ConfigFlag(int.from_bytes(raw[8:12], "little"))


# ---- modes ---------------------------------------------------------------------------------------

PROVEN = (f"{TCP4}/TCP", f"{UDP4}/UDP", f"{TCP6}/TCP", f"{UDP6}/UDP")
TURNS = (HOST_ONLY, OFF, ON, OFF, HOST_ONLY, ON)
"""Starting from "on": each mode is entered from each other mode once."""


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


def test_switching_between_all_modes_on_a_live_node(field: Field, capsys: pytest.CaptureFixture[str]):
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


def test_a_port_reused_after_a_flow_can_dial_the_backend_directly(field: Field):
    """The flow of a closed connection must not translate the replies of another connection from the
    same port: a pod may have been exempt before and not be any more.
    """
    run_hooked(field)
    backend = (field["a1"].ip, 8080)

    def talk(to: tuple[str, int], port: int) -> int:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.settimeout(PATIENCE)
            client.bind(("", port))
            client.connect(to)
            client.sendall(b"bye\n")
            assert json.loads(client.recv(4096))["name"] == "a1"
            assert client.recv(1) == b"", "the server closes first"
            return int(client.getsockname()[1])

    port = there(field["a2!"], lambda: talk(split(TCP4), 0))
    there(field["a2!"], lambda: talk(backend, port))
    there(field["a2!"], lambda: talk(split(TCP4), port))


@pytest.mark.parametrize("forwarding", FORWARDINGS)
@pytest.mark.parametrize("to", [UDP4, UDP6], ids=["v4", "v6"])
def test_clients_of_one_pod_with_and_without_hooks_may_use_one_udp_port(field: Field, to: str, forwarding: str):
    """The packet path knows a flow of that port for 30 s after a datagram of the one without."""
    restart(field, ON, *forward(forwarding))

    def unhooked() -> None:
        family = socket.AF_INET6 if "[" in to else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.settimeout(PATIENCE)
            client.bind(("", PORT))
            client.connect(split(to))
            client.send(b"hello\n")
            assert json.loads(client.recv(4096))["name"] == "a1"

    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    before = there(field["a2"], path.read_text)
    there(field["a2"], lambda: path.write_text(f"{PORT} {PORT}"))  # the hooked client's
    try:
        for _ in range(2):
            there(field["a2"], unhooked)
            answer = field["a2"].many(2, *split(to), protocol="udp", connected=True)
            assert answer["names"] == {"a1": 2}, answer
    finally:
        there(field["a2"], lambda: path.write_text(before))


# ---- exemptions ----------------------------------------------------------------------------------


class Kubelet:
    """Pods with cgroups as kubelet makes them, in the network namespace of a2."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self.root = field.home["a2"].cgroup
        self._places: list[Place] = []

    def run(self, folder: str) -> Place:
        """A container in this pod cgroup, a folder below the node's cgroup."""
        pod = self.field["a2"]
        made = Place(f"in {folder}", pod.netns, self.root / folder / "container")
        made.ip, made.ip6 = pod.ip, pod.ip6
        self._places.append(made)
        return made

    def end(self, place: Place) -> None:
        place.close()
        assert place.cgroup is not None
        for folder in place.cgroup.parents:
            if folder == self.root or any(each.is_dir() for each in folder.iterdir()):
                break
            remove_cgroup(folder)
        self._places.remove(place)

    def close(self) -> None:
        for place in tuple(self._places):
            self.end(place)


@pytest.fixture
def kubelet(field: Field) -> Iterator[Kubelet]:
    made = Kubelet(field)
    yield made
    made.close()


def pod_object(uid: str, label: str | None = "off") -> dict[str, Any]:
    labels = {} if label is None else {LABEL: label}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "sidecar", "namespace": "default", "uid": uid, "labels": labels},
        "spec": {"nodeName": "node-1", "containers": [{"name": "c", "image": "x"}]},
    }


def exempt(agent: Agent, *folders: Path) -> Callable[[], bool]:
    """A condition: exactly these cgroups are exempt, and the flag that makes the programs check for
    exemptions agrees.
    """

    def so() -> bool:
        found = {int.from_bytes(key, "little") for key in agent.entries("exempt_cgroups")}
        flag = ConfigFlag.EXEMPTIONS in config_flags(agent)
        return found == {folder.stat().st_ino for folder in folders} and flag == bool(folders)

    return so


FOLDERS = {
    "cgroup": "kubepods/burstable/pod{uid}",
    "label": "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid_}.slice",
}
"""What comes first, and the pod's folder by kubelet's driver cgroupfs or systemd."""


@pytest.mark.parametrize("first", FOLDERS)
def test_a_pod_with_the_label_is_left_to_the_packet_path(field: Field, kubelet: Kubelet, first: str):
    run_hooked(field)
    uid = str(uuid.uuid4())
    folder = FOLDERS[first].format(uid=uid, uid_=uid.replace("-", "_"))
    place = kubelet.run(folder) if first == "cgroup" else None
    if place is not None:
        check(field, place, HOOKED)
    field.change(pod_object(uid))
    place = place or kubelet.run(folder)
    until("the pod is exempt", exempt(field.agent, kubelet.root / folder))
    check(field, place, PACKETS)
    check(field, field["a2"], HOOKED)
    restart(field, ON)
    check(field, place, PACKETS)
    field.change(pod_object(uid, label=None))
    until("nothing is exempt", exempt(field.agent))
    check(field, place, HOOKED)
    field.delete(pod_object(uid))
    field.settle()


def test_a_pattern_exempts_cgroups_created_later(field: Field, kubelet: Kubelet):
    below = kubelet.root.relative_to(_root(kubelet.root))
    here, later = f"system.slice/istio-{1}.service", "system.slice/istio-2.service"
    first, other = kubelet.run(here), kubelet.run("system.slice/sshd.service")
    restart(field, ON, "--socket-lb-exempt", f"nothing,{below}/system.slice/istio*")
    until("the first is exempt", exempt_paths(field, kubelet, here))
    check(field, first, PACKETS)
    check(field, other, HOOKED)
    second = kubelet.run(later)
    until("the second is exempt", exempt_paths(field, kubelet, here, later))
    check(field, second, PACKETS)
    restart(field, ON)
    until("nothing is exempt", exempt(field.agent))
    check(field, first, HOOKED)


def exempt_paths(field: Field, kubelet: Kubelet, *folders: str) -> Callable[[], bool]:
    """A condition: these cgroups are exempt and, as they match the pattern too, their
    containers.
    """
    there = [kubelet.root / folder for folder in folders]
    return exempt(field.agent, *there, *(folder / "container" for folder in there))


def _root(cgroup: Path) -> Path:
    return next(p for p in cgroup.parents if not (p.parent / "cgroup.procs").exists())


# ---- from an API server --------------------------------------------------------------------------


@pytest.fixture
def account(cluster: Cluster) -> None:
    """The API server admits no Pod without this ServiceAccount."""
    made = {"kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "default"}}
    with contextlib.suppress(KubeError):  # it exists from another test
        cluster.kube.create({"apiVersion": "v1", **made})


ANNOTATION = "ambient.istio.io/redirection"


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"labels": {LABEL: None}}, {"labels": {LABEL: "off"}}),
        ({"labels": {LABEL: None}, "annotations": {ANNOTATION: None}}, {"annotations": {ANNOTATION: "enabled"}}),
    ],
    ids=("label", "mesh"),
)
def test_pods_of_an_api_server_are_exempt_on_their_node(
    cluster: Cluster, account: None, off: dict[str, Any], on: dict[str, Any]
):
    """A running Pod begins and ceases to be exempt; Pods of other nodes are not watched."""
    folders = {}
    for name, at in (("here", "node-1"), ("there", "node-2")):
        uid = cluster.kube.create(_without_uid(name, at))["metadata"]["uid"]
        folders[name] = cluster.home["a2"].cgroup / f"kubepods/burstable/pod{uid}"
        folders[name].mkdir(parents=True)
    agent = cluster.agents[0]
    try:
        until("the pod of this node is exempt", exempt(agent, folders["here"]))
        cluster.kube.patch("Pod", "here", {"metadata": off}, "default")
        until("nothing is exempt", exempt(agent))
        cluster.kube.patch("Pod", "here", {"metadata": on}, "default")
        until("the pod is exempt again", exempt(agent, folders["here"]))
        agent.kill()
        cluster.start(agent)
        assert exempt(agent, folders["here"])()
    finally:
        for name, folder in folders.items():
            cluster.kube.request("DELETE", f"/api/v1/namespaces/default/pods/{name}?gracePeriodSeconds=0")
            folder.rmdir()
        until("nothing is exempt after the deletion", exempt(agent))
        for folder in folders["here"].parents[:2]:
            folder.rmdir()


def _without_uid(name: str, node: str) -> dict[str, Any]:
    made = pod_object("")
    made["metadata"] = {**made["metadata"], "name": name}
    del made["metadata"]["uid"]
    made["spec"]["nodeName"] = node
    return made
