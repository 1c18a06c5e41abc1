# SPDX-License-Identifier: Apache-2.0
"""`frontend_ports`: a destination whose port no Service uses is passed after one look-up, and a
Service is found as long as it has a frontend.

Each row is a sequence of desired states. After each state the map must hold the ports that it
lists, and a client connects to the addresses that it lists.
"""

import errno
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import U32, U64, Reason, pack_ports, unpack_ports
from kbpf.dataplane.bpf.plane import BpfPlane
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from kbpf.model.objects import Protocol
from tests.support.lab.events import read, watched
from tests.support.lab.lab import Place
from tests.support.plane import LOCAL, Site, desired, picks, service

BACKEND, NODE = LOCAL[0], LOCAL[-1]
FIRST, SECOND = "10.96.0.1", "10.96.0.2"


def web(name: str, frontends: str, protocol: Protocol = Protocol.UDP):
    return service(name, frontends, f"{BACKEND}:9", protocol)


class Step(NamedTuple):
    """A desired state (``name frontends`` a line), the ports that the map then holds, and where
    connect() leads for each destination.
    """

    services: dict[str, str]
    ports: set[int]
    dials: dict[str, str]


PASSES, REFUSED = "ENETUNREACH", "ECONNREFUSED"
ONE = {"one": f"{FIRST}:53"}
TWO = {"two": f"{SECOND}:53"}

HISTORIES = {
    "no Service": [Step({}, set(), {f"{FIRST}:53": PASSES})],
    "a Service is added and deleted": [
        Step(ONE, {53}, {f"{FIRST}:53": BACKEND, f"{SECOND}:53": PASSES}),
        Step({}, set(), {f"{FIRST}:53": PASSES}),
    ],
    "an unknown port is refused at a ClusterIP and passes elsewhere": [
        Step(ONE, {53}, {f"{FIRST}:54": REFUSED, f"{SECOND}:54": PASSES})
    ],
    "of two Services with one port one is deleted": [
        Step(ONE | TWO, {53}, {f"{FIRST}:53": BACKEND, f"{SECOND}:53": BACKEND}),
        Step(TWO, {53}, {f"{SECOND}:53": BACKEND, f"{FIRST}:53": PASSES}),
    ],
    "a Service changes its port": [
        Step(ONE, {53}, {f"{FIRST}:53": BACKEND}),
        Step({"one": f"{FIRST}:65535"}, {65_535}, {f"{FIRST}:65535": BACKEND}),
        Step({"one": f"{FIRST}:1"}, {1}, {f"{FIRST}:1": BACKEND, f"{FIRST}:65535": REFUSED}),
    ],
    "every kind of frontend counts": [
        Step(
            {"one": f"{FIRST}:53 NodePort=0.0.0.0:30053 ExternalIP=192.0.2.1:54 LoadBalancer=192.0.2.2:55"},
            {53, 54, 55, 30_053},
            {f"{FIRST}:53": BACKEND, "192.0.2.1:54": BACKEND, "192.0.2.2:55": BACKEND, f"{NODE}:30053": BACKEND},
        )
    ],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_history_of_frontend_ports(site: Site, client: Place, history: list[Step]):
    plane = site.open()
    for step in history:
        plane.apply(state(step.services), None)
        assert ports(site) == step.ports
        for to, gets in step.dials.items():
            assert picks(client, to) == [gets], to


def test_destination_of_no_service_is_counted(site: Site, client: Place):
    site.open().apply(state(ONE), None)
    before = site.reasons()
    picks(client, f"{SECOND}:54", 3)
    assert (site.reasons() - before)[Reason.NOT_A_SERVICE] >= 3


def test_map_missing_in_an_older_version_is_filled_at_start(site: Site):
    """The agent sets the bits before it attaches programs that read them."""
    site.open().apply(state(ONE | TWO), None)
    with site.pinned("frontend_ports") as words:
        for word in range(words.max_entries):
            words.update(U32.pack(word), U64.pack(0))
    site.open()
    assert ports(site) == {53}


def test_failed_write_hides_no_frontend(site: Site, plane: BpfPlane, monkeypatch: pytest.MonkeyPatch):
    """Whichever write fails, a port is in the map before its frontend is written and until its
    frontend is deleted; the next change repairs everything.
    """
    plane.apply(state(ONE), None)
    for target in ({"two": f"{SECOND}:54"}, {}):
        for fails in ("frontend_ports", "services", "cluster_ips"):
            with monkeypatch.context() as patch:
                refuse_writes(patch, fails)
                try:
                    plane.apply(state(target), None)
                except KernelError:
                    assert "ports that programs do not see" not in site.dump()["strays"], fails
            plane.invalidate()
            plane.apply(state(ONE), None)
            assert ports(site) == {53}


def test_value_of_another_key_is_not_used(site: Site, client: Place):
    """The kernel may give the memory of an entry to another key while a program reads it."""
    plane = site.open()
    plane.apply(state(ONE | {"two": f"{SECOND}:53"}), None)
    with site.pinned("services") as services:
        (first, _), (_, other) = sorted(services.items())
        services.update(first, other)
    with watched(site) as monitor:
        assert picks(client, f"{FIRST}:53") == [REFUSED]
        assert {event.reason for event in read(monitor)} == {"unsteady_read"}
    assert site.reasons()[Reason.UNSTEADY_READ]
    assert not site.reasons()[Reason.SET_VANISHED]
    plane.invalidate()
    plane.apply(state(ONE | TWO), None)
    assert picks(client, f"{FIRST}:53") == [BACKEND]


@pytest.mark.parametrize("held", [set(), {0}, {63, 64}, {1, 65_535}, set(range(1, 200))])
def test_ports_are_packed_into_64_bit_words(held: set[int]):
    words = pack_ports(held, range(65_536))
    assert len(words) == 1024
    assert set(unpack_ports(words)) == held


def test_only_changed_words_are_packed():
    assert pack_ports({1, 2, 700}, [1, 63]) == [(U32.pack(0), U64.pack(0b110))]


# ---- helpers -----------------------------------------------------------------------------------


def state(services: dict[str, str]):
    return desired(*(web(name, text) for name, text in services.items()), nodes=NODE)


def ports(site: Site) -> set[int]:
    return set(unpack_ports(site.entries("frontend_ports").items()))


def refuse_writes(patch: pytest.MonkeyPatch, name: str) -> None:
    """Makes every write to this map fail."""
    for method in ("update", "update_batch", "delete_batch"):
        usual = getattr(Map, method)

        def write(held: Map, *given, usual=usual):
            if held.name == name:
                raise KernelError("refused", f"map {name}", errno=errno.EIO)
            return usual(held, *given)

        patch.setattr(Map, method, write)
