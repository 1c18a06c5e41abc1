# SPDX-License-Identifier: Apache-2.0
"""Pods whose traffic a service mesh redirects: their proxy has to see the Service's address.

The rules are those that the meshes' own programs write into a pod (tests/rows/meshes), and the
annotations those that they write at the Pod; the proxy is a fake (mesh_proxy.py).
"""

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lab.traffic.test_socket_lb import pod_object
from tests.rows import services as rows
from tests.support.lab.field import Field
from tests.support.lab.lab import (
    DIE_WITH_US,
    Place,
    inside,
    remove_cgroup,
    run,
    until,
)
from tests.support.packets.wire import Wire
from tests.support.runtime import pods as runtime

PROXY = Path(runtime.__file__).with_name("mesh_proxy.py")
RULES = Path(rows.__file__).with_name("meshes")
HOSTS, PORT = ("10.96.0.1", "fd00:10:96::1"), 80
V6 = {
    "127.0.0.1/32": "::1/128",
    "127.0.0.6/32": "::6/128",
    "169.254.7.127": "e9ac:1e77:90ca:399f:4d6d:ece2:2f9b:3164",
}
"""Addresses in the rules for IPv4, and what the meshes write in their place for IPv6: istio/istio
461f85ba, tools/istio-iptables/pkg/constants, and 0098d99f, cni/pkg/config; consul/sdk v0.17.1,
iptables/iptables.go, with dual stack. Linkerd's rules have no addresses.
"""


class Mesh(NamedTuple):
    """A mesh: the annotation of its Pods, and the port and user of its proxy. `mark`: its proxy is
    a pod of its own, whose packets have this mark. `routes`: commands for `ip`.
    """

    name: str
    annotation: tuple[str, str]
    port: int
    user: int = 0
    mark: int = 0
    routes: tuple[str, ...] = ()

    def write_rules(self, netns: str) -> None:
        text = (RULES / f"{self.name}.rules").read_text()
        within = ("nsenter", f"--net=/run/netns/{netns}")
        run(*within, "iptables-restore", "--noflush", stdin=text)
        for address, address6 in V6.items():
            text = text.replace(address, address6)
        run(*within, "ip6tables-restore", "--noflush", stdin=text)
        self._change_routes(netns, self.routes)

    def delete_rules(self, netns: str) -> None:
        for program, table, action in product(("iptables", "ip6tables"), ("nat", "mangle"), ("-F", "-X")):
            run("nsenter", f"--net=/run/netns/{netns}", program, "-t", table, action)
        self._change_routes(netns, (line.replace(" add ", " del ", 1) for line in self.routes))

    def _change_routes(self, netns: str, lines: Iterable[str]) -> None:
        for line, family in product(lines, ("-4", "-6")):
            run("ip", family, "-n", netns, *line.split())


LINKERD = Mesh("linkerd", ("linkerd.io/proxy-version", "edge-26.11.1"), port=4140, user=2102)
MESHES = (
    Mesh(
        "istio-sidecar",
        ("sidecar.istio.io/status", '{"initContainers":["istio-init"],"containers":["istio-proxy"]}'),
        port=15001,
        user=1337,
    ),
    Mesh(
        "istio-ambient",
        ("ambient.istio.io/redirection", "enabled"),
        port=15001,
        mark=0x539,
        routes=(  # istio/istio 0eea8146, cni/pkg/iptables/iptables_linux.go
            "rule add fwmark 0x111/0xfff pref 32764 lookup 100",
            "route add local default dev lo table 100",
        ),
    ),
    LINKERD,
    Mesh("consul", ("consul.hashicorp.com/transparent-proxy-status", "enabled"), port=15001, user=5995),
)


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    with Field(name="me", pods=(3,)) as made:
        made.create(*made.web(1, "a1", dual=True))
        made.settle()
        yield made


class MeshPod:
    """A pod with two containers, the application and (except for ambient meshes) the proxy."""

    def __init__(self, field: Field, mesh: Mesh, stack: contextlib.ExitStack) -> None:
        self._field, self._mesh, self.uid = field, mesh, str(uuid.uuid4())
        home, where = field.home["a2"], field["a2"].netns
        self.cgroup = home.cgroup / f"kubepods/pod{self.uid}"
        stack.callback(_remove, self.cgroup)
        self.app = Place("app", where, self.cgroup / "app")
        stack.callback(self.app.close)
        mesh.write_rules(str(where))
        stack.callback(mesh.delete_rules, str(where))
        # ztunnel is a pod of its own, which opens its sockets in the network of others
        proxy = self.cgroup / "proxy" if not mesh.mark else home.cgroup / f"ztunnel{self.uid}"
        proxy.mkdir(parents=True)
        user = ("setpriv", f"--reuid={mesh.user}", f"--regid={mesh.user}", "--clear-groups", "--")
        command = (*user, sys.executable, "-S", str(PROXY), str(mesh.port), str(mesh.mark))
        process = subprocess.Popen([*DIE_WITH_US, *inside(where, proxy, *command)], stdout=subprocess.PIPE)
        stack.callback(remove_cgroup, proxy)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"serves\n"

    def object(self, **annotations: str) -> dict[str, Any]:
        return pod_object("meshed", uid=self.uid, annotations=annotations)

    def is_exempt(self) -> bool:
        keys = self._field.agent.entries("exempt_cgroups")
        return self.cgroup.stat().st_ino in {int.from_bytes(key, "little") for key in keys}

    def dial(self, host: str = HOSTS[0]) -> dict[str, Any]:
        return self.app.tcp(host, PORT)


def _remove(pod: Path) -> None:
    """Removes the cgroup of a pod, and that of all pods if it was the last."""
    remove_cgroup(pod)
    with contextlib.suppress(OSError):
        pod.parent.rmdir()


@contextlib.contextmanager
def meshed(field: Field, mesh: Mesh) -> Iterator[MeshPod]:
    with contextlib.ExitStack() as stack:
        pod = MeshPod(field, mesh, stack)
        stack.callback(field.delete, pod.object())
        yield pod


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.name)
def test_a_redirected_pod_is_left_to_the_packet_path(field: Field, mesh: Mesh):
    backends = [[address, 8080] for address in (field["a1"].ip, field["a1"].ip6)]
    with meshed(field, mesh) as pod:

        def originals() -> list[object]:
            return [pod.dial(host)["original"] for host in HOSTS]

        field.change(pod.object())
        assert originals() == backends, "without the annotation it is translated"
        field.change(pod.object(**dict([mesh.annotation])))
        until("the pod is exempt", pod.is_exempt)
        until("the hooks know it", lambda: not any(map(backends.__contains__, originals())))
        assert originals() == [[host, PORT] for host in HOSTS], "the proxy sees the Service's address"
        for host in HOSTS:
            answer = pod.dial(host)
            assert answer.get("name") == "a1", f"the proxy's own connection: {answer}"
        assert translated_at_connect(field), "a pod beside keeps the socket hooks"
        field.change(pod.object())
        until("the pod has left the mesh", lambda: originals() == backends)


def translated_at_connect(field: Field) -> bool:
    """Whether the packets of a process in a pod without a mesh carry the backend's address."""
    with Wire(field.home["a3"].netns, "p3", tap=True) as tap:
        assert field["a3"].tcp(HOSTS[0], PORT).get("name") == "a1"
        first = tap.expect(lambda packet: packet.flags == "S")
        return first.destination == f"{field['a1'].ip}:8080"
