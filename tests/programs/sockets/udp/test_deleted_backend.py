# SPDX-License-Identifier: Apache-2.0
"""The end of a backend, and of the state that UDP sockets hold."""

import contextlib
import errno
import socket
import time
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from kbpf.dataplane.bpf import plane as plane_module
from kbpf.dataplane.bpf import udp
from kbpf.dataplane.bpf.maps.agent_maps import MapGrowth
from kbpf.dataplane.bpf.state import commit
from kbpf.dataplane.bpf.state.commit import GraceQueue
from kbpf.dataplane.bpf.udp_cutter import UdpCutter
from kbpf.errors import KernelError
from kbpf.model.address import V4_PREFIX
from kbpf.model.desired import ServiceState
from kbpf.model.objects import Protocol
from tests.programs.sockets.udp.bench import DNS, WEB, WEB6, Bench, answer, edit, kept, socket_of, talk
from tests.support.features import needs
from tests.support.lab.lab import PATIENCE
from tests.support.plane import desired, flush, service
from tests.support.table import each_cells, each_row, table

CANNOT_WRITE = Mock(side_effect=KernelError("cannot write", "map", errno=errno.ENOMEM))

# ---- the end of a backend ----------------------------------------------------------------------


class End(NamedTuple):
    """What happens after `one` served a Service: who serves it then (gone: it is deleted), and who gets the next
    datagram of an unconnected socket.
    """

    name: str
    then: str
    next: str = ""

    def services(self, bench: Bench) -> list[ServiceState]:
        return [] if self.then == "gone" else [bench.udp(WEB, self.then), bench.udp(WEB6, self.then)]


ENDS = table(
    End,
    """
another backend        | two  | two
zero endpoints         |      | ECONNREFUSED
the Service is deleted | gone
""",
)


CLIENTS = {
    "pod": ("pod", "10.96.0.1"),
    "host": ("host", "10.96.0.1"),
    "IPv6": ("pod", "fd00:96::1"),
    "v4-mapped": ("pod", "::ffff:10.96.0.1"),
}


@pytest.mark.parametrize("client", CLIENTS)
@each_row(ENDS)
def test_connected_sockets_of_a_deleted_backend_are_destroyed(bench: Bench, row: End, client: str):
    """In every network namespace, idle ones included, but only those connected to this Service."""
    bench.serve(*(bench.udp(at, "one") for at in (WEB, WEB6, DNS)))
    name, host = CLIENTS[client]
    place = bench[name]
    with (
        kept(place, host, connected=True) as via,
        kept(place, "10.96.0.2", connected=True) as other,
        kept(place, bench["one"].ip, connected=True, port=8080) as plain,
    ):
        bench.take_udp_cuts()
        bench.serve(*row.services(bench), bench.udp(DNS, "one"))
        assert bench.take_cut_flows() == {6 if client == "IPv6" else 4: 1}
        assert via() == "cut"
        assert other() == "one", "another Service's socket lives"
        assert plain() == "one", "it never used a Service"


@pytest.mark.parametrize("how", ["destroyed", "dissolved"])
def test_formerly_connected_socket_chooses_a_new_backend(bench: Bench, how: str):
    """The backend left and still serves another Service. (An IPv6 socket then receives only from
    its old peer: the kernel forgets that address for sending only.)
    """
    bench.web("one", dns="one")
    pod = bench["pod"]
    assert pod.udp("10.96.0.1", 53, keep="s", connected=True)["name"] == "one"
    if how == "dissolved":
        pod.ask("dissolve", keep="s")
        assert pod.udp("10.96.0.1", 53, keep="s")["name"] == "one", "as long as it serves"
    bench.web("two", dns="one")
    if how == "destroyed":
        assert pod.ask("hear", keep="s")["error"] in ("ECONNABORTED", "EDESTADDRREQ")
    answer = pod.udp("10.96.0.1", 53, keep="s")
    assert (answer.get("name"), answer.get("peer")) == ("two", ["10.96.0.1", 53])
    pod.ask("drop", keep="s")


def test_connected_socket_that_connects_again_keeps_a_backend_that_serves(bench: Bench, monkeypatch):
    """Until that has left, although it still serves another Service and the socket lives."""
    bench.web("one two", dns="one two")
    pod = bench["pod"]

    def connects_again() -> set[str]:
        return {pod.udp("10.96.0.1", 53, keep="s", connected=True)["name"] for _ in range(12)}

    first = pod.udp("10.96.0.1", 53, keep="s", connected=True)["name"]
    with contextlib.ExitStack() as stack:
        stack.callback(pod.ask, "drop", keep="s")
        assert connects_again() == {first}
        other = "two" if first == "one" else "one"
        monkeypatch.setattr(udp.UdpPasses, "advance", lambda *_: None)
        bench.plane.apply(desired(bench.udp(WEB, other), bench.udp(DNS, "one two")), None)
        assert connects_again() == {other}
        monkeypatch.undo()


def test_backend_that_serves_again_keeps_its_new_sockets_during_a_pass(bench: Bench, monkeypatch):
    """The pass that cuts clients off it takes longer than the change after which it serves again.
    A client connects as soon as that is written.
    """
    write = commit.write
    with contextlib.ExitStack() as stack:
        sockets = []

        def connect_after(*arguments: Any) -> None:
            write(*arguments)
            sockets.append(stack.enter_context(kept(bench["pod"], "10.96.0.1", connected=True)))

        bench.web("one")
        with monkeypatch.context() as patch:
            patch.setattr(udp.UdpPasses, "advance", lambda *_: None)
            bench.plane.apply(desired(bench.udp(WEB, "two")), None)
        with monkeypatch.context() as patch:
            patch.setattr(commit, "write", connect_after)
            bench.plane.apply(desired(bench.udp(WEB, "one")), None)
        flush(bench.plane)
        assert [s() for s in sockets] == ["one"]


def test_only_sockets_connected_to_the_deleted_backend_are_destroyed(bench: Bench):
    """Old kernels give the same cookie to sockets of several network namespaces. Then an unrelated
    socket may have the cookie of one that is to be destroyed.
    """
    bench.web("one two")
    with socket_of(bench["pod"]) as s:
        s.connect(("10.96.0.1", 53))
        name, _ = answer(s)
        (other,) = {"one", "two"} - {name}
        address = V4_PREFIX + socket.inet_aton(bench[other].ip)
        edit(bench, "sock_peers", s, lambda raw: raw[:28] + address + raw[44:])
        bench.web(name)
        assert talk(s)[0] == name


@each_row(ENDS, lambda row: needs("set_retval") if row.next == "ECONNREFUSED" else ())
def test_unconnected_sockets_of_a_deleted_backend_choose_again(bench: Bench, row: End):
    bench.web("one")
    with kept(bench["pod"], "10.96.0.1") as s:
        bench.take_udp_cuts()
        bench.serve(*row.services(bench))
        (look,) = bench.take_udp_cuts()
        assert look.flows == {4: 1}
        assert 0 < look.seconds < PATIENCE
        assert bench.take_udp_cuts() == [], "each is returned once"
        flush(bench.plane)
        bench.tick(time.monotonic())
        assert [look.flows for look in bench.take_udp_cuts()] == [{4: 0}], "the second pass finds none"
        if row.next:
            assert s() == row.next
        bench.web("three")
        assert s() == "three"


def test_a_flood_of_cuts_is_bounded_and_delays_no_other_service(bench: Bench, monkeypatch):
    """Another Service's endpoints are all replaced again and again, and no pass has time to end.
    A socket that was silent meanwhile chooses another backend all the same.
    """
    monkeypatch.setattr(bench.plane._agent_maps.maps["udp_cuts"], "max_entries", 256)

    def other(number: int) -> ServiceState:
        backends = " ".join(f"10.9.{number}.{host}:53" for host in range(1, 201))
        return service("other", DNS, backends, Protocol.UDP)

    bench.serve(bench.udp(WEB, "one"), other(0))
    with monkeypatch.context() as busy, kept(bench["pod"], "10.96.0.1") as s:
        busy.setattr(plane_module, "SLICE_BUDGET_S", 0.0)
        for number in range(1, 16):
            served = bench.udp(WEB, "one" if number < 8 else "two")
            bench.plane.apply(desired(served, other(number)), None)
            assert len(bench.site.entries("udp_cuts")) <= 256
        assert s() == "two", "before any pass has ended"
    bench.web("two")
    flush(bench.plane)
    assert not bench.plane._udp_passes.is_busy
    assert bench.site.dump()["strays"] == {}
    assert len(bench.site.entries("udp_cuts")) <= 256


def test_late_reply_of_a_deleted_backend_is_not_translated(bench: Bench):
    """The backend no longer speaks for the Service."""
    one = (bench["one"].ip, 8080)
    bench.web("one", dns="one")
    with socket_of(bench["pod"]) as s:
        service_seen = ("one", ("10.96.0.1", 53))
        assert [answer(s), answer(s, one)] == [service_seen, service_seen]
        bench.web("two", dns="one")
        assert answer(s, one) == ("one", one)


def test_terminating_backend_keeps_its_clients(bench: Bench):
    """It left the sets and still serves; kube-proxy leaves such flows alone."""
    bench.web("one")
    pod = bench["pod"]
    with kept(pod, "10.96.0.1", connected=True) as connected, kept(pod, "10.96.0.1") as loose:
        bench.web("two", serving="one two")
        flush(bench.plane)
        assert (connected(), loose()) == ("one", "one")
        assert pod.udp("10.96.0.1", 53)["name"] == "two"
        bench.web("two")
        assert (connected(), loose()) == ("cut", "two")


@pytest.mark.parametrize("fails", [False, True], ids=["", "an apply fails meanwhile"])
def test_connect_during_a_flip_is_cut_with_the_old_set(bench: Bench, monkeypatch, fails: bool):
    """connect() read the frontend before the flip and finished after the first pass."""
    bench.web("one")
    with contextlib.ExitStack() as stack:
        with bench.site.pinned("services") as services:
            ((key, old),) = services.items()
            bench.web("two")
            new = services.lookup(key)
            assert new not in (None, old)
            services.update(key, old)
            s = stack.enter_context(kept(bench["pod"], "10.96.0.1", connected=True))
            services.update(key, new or b"")
        if fails:
            state = desired(bench.udp(WEB, "two"), bench.udp(DNS, "one"))
            with monkeypatch.context() as patch:
                patch.setattr(commit, "write", CANNOT_WRITE)
                with pytest.raises(KernelError):
                    bench.plane.apply(state, state.services.keys())
            bench.plane.apply(state, state.services.keys(), authoritative=False)
        flush(bench.plane)
        assert s() == "cut"


def test_next_agent_cuts_sockets_of_backends_deleted_meanwhile(bench: Bench):
    """A backend was deleted while no agent ran."""
    bench.web("one", dns="one")
    pod = bench["pod"]
    with (
        kept(pod, "10.96.0.1", connected=True) as gone,
        kept(pod, "10.96.0.2", connected=True) as stays,
        kept(pod, "10.96.0.1") as loose,
    ):
        again = bench.site.open()
        assert gone() == "one", "not synced yet, so nothing is destroyed"
        again.apply(desired(bench.udp(WEB, "two"), bench.udp(DNS, "one")), None)
        assert (gone(), stays(), loose()) == ("cut", "one", "two")
    again.apply(desired(), None)
    flush(again)
    bench.plane.close()
    bench.plane = bench.site.open()


FAILURES = [
    (MapGrowth, "make_room"),  # before the flip
    (commit, "write"),  # after it
    (UdpCutter, "cut"),
    (udp.UdpPasses, "advance"),
    (GraceQueue, "add"),  # after the first cut
]


@pytest.mark.parametrize("removed", [False, True], ids=["backend", "Service"])
@pytest.mark.parametrize(("where", "name"), FAILURES, ids=[name for _, name in FAILURES])
def test_sockets_are_cut_after_a_failed_apply(bench: Bench, monkeypatch, where: Any, name: str, removed: bool):
    """The next apply() cuts them, even if some object cannot be read. Clients of a Service that
    could not be read keep their backends.
    """
    dns, web = bench.udp(DNS, "one"), bench.udp(WEB, "two")
    bench.serve(bench.udp(WEB, "one"), dns, bench.udp("10.96.0.3:53", "one"))
    state = desired(dns) if removed else desired(web, dns)
    real = getattr(where, name)

    def fail(*arguments: Any, **more: Any) -> None:
        if name in ("write", "make_room"):
            real(*arguments, **more)
        CANNOT_WRITE()

    with contextlib.ExitStack() as stack:
        hosts = ("10.96.0.1", "10.96.0.2", "10.96.0.3")
        sockets = [stack.enter_context(kept(bench["pod"], host, connected=True)) for host in hosts]
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fail)
            with pytest.raises(KernelError):
                bench.plane.apply(state, {web.key})
        bench.plane.apply(state, {web.key}, authoritative=False)
        flush(bench.plane)
        assert [s() for s in sockets] == ["cut", "one", "one"]


def test_sendto_on_a_connected_socket_keeps_its_backend(bench: Bench):
    """The kernel drops replies from every address but the backend that connect() chose."""
    bench.web("one two three")
    for _ in range(40):
        with socket_of(bench["pod"]) as s:
            s.connect(("10.96.0.1", 53))
            assert answer(s)[1] == ("10.96.0.1", 53)


@pytest.mark.parametrize("connected", [False, True], ids=["sendto", "connect"])
@each_cells(
    "before, first, second",
    """
the address goes to another Service  | 192.0.2.9:53 |              | 192.0.2.9:53
the port changes                     | 192.0.2.9:53 | 192.0.2.9:54
the NodePort goes to another Service | {node}:30053 |              | {node}:30053
""",
)
def test_sockets_leave_a_frontend_that_moved(bench: Bench, before, first, second, connected: bool):
    """A frontend of the first Service, and what the first and the second Service have later. Both Services and their
    backends stay; only the address has moved.
    """

    def state(number: int, also: str) -> ServiceState:
        kind = also.replace("{node}", "NodePort=0.0.0.0").replace("192", "ExternalIP=192")
        to = bench.to("one" if number == 1 else "two")
        return service(f"moves{number}", f"10.96.0.{number}:53 {kind}", to, Protocol.UDP)

    bench.serve(state(1, before), state(2, ""))
    host, _, port = before.format(node=bench.node.ip).rpartition(":")
    with kept(bench["pod"], host, connected, int(port)) as s:
        bench.serve(state(1, first), state(2, second))
        if connected:
            assert s() == "cut"
        elif second:
            assert s() == "two"
        else:
            assert s(timeout=0.5) == "timeout", "no Service has this frontend any more"
