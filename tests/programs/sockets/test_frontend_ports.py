# SPDX-License-Identifier: Apache-2.0
"""`frontend_ports`: a destination whose port no Service uses is passed after one look-up, and a
Service is found as long as it has a frontend.

Each row is a desired state. Then the map must hold the ports that it lists, and a client connects
to the addresses that it lists.
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
from tests.support.table import table

BACKEND, NODE = LOCAL[0], LOCAL[-1]
FIRST, SECOND = "10.96.0.1", "10.96.0.2"


class Step(NamedTuple):
    """Services (``name frontends`` each), the ports that the map then holds, and where connect() leads
    for destinations. Steps of one name follow each other.
    """

    name: str
    services: str
    ports: str
    dials: str


STEPS = table(
    Step,
    """
no Service        |                                    |       | 10.96.0.1:53 passes
added and deleted | one 10.96.0.1:53                   | 53    | 10.96.0.1:53 backend, 10.96.0.2:53 passes
added and deleted |                                    |       | 10.96.0.1:53 passes
an unknown port   | one 10.96.0.1:53                   | 53    | 10.96.0.1:54 refused, 10.96.0.2:54 passes
two with one port | one 10.96.0.1:53; two 10.96.0.2:53 | 53    | 10.96.0.1:53 backend, 10.96.0.2:53 backend
two with one port | two 10.96.0.2:53                   | 53    | 10.96.0.2:53 backend, 10.96.0.1:53 passes
another port      | one 10.96.0.1:53                   | 53    | 10.96.0.1:53 backend
another port      | one 10.96.0.1:65535                | 65535 | 10.96.0.1:65535 backend
another port      | one 10.96.0.1:1                    | 1     | 10.96.0.1:1 backend, 10.96.0.1:65535 refused
a NodePort        | one NodePort=0.0.0.0:30053         | 30053 | 10.99.0.60:30053 backend
an external IP    | one ExternalIP=192.0.2.1:54        | 54    | 192.0.2.1:54 backend
a load balancer   | one LoadBalancer=192.0.2.2:55      | 55    | 192.0.2.2:55 backend
""",
)
GETS = {"passes": "ENETUNREACH", "refused": "ECONNREFUSED", "backend": BACKEND}
ONE, TWO = "one 10.96.0.1:53", "two 10.96.0.2:53"
BOTH = f"{ONE}; {TWO}"


@pytest.mark.parametrize("name", dict.fromkeys(step.name for step in STEPS))
def test_history_of_frontend_ports(site: Site, client: Place, name: str):
    plane = site.open()
    for step in STEPS:
        if step.name == name:
            plane.apply(state(step.services), None)
            assert ports(site) == set(map(int, step.ports.split()))
            for to, gets in (words.split() for words in step.dials.split(", ")):
                assert picks(client, to) == [GETS[gets]], to


def test_destination_of_no_service_is_counted(site: Site, client: Place):
    site.open().apply(state(ONE), None)
    before = site.reasons()
    picks(client, f"{SECOND}:54", 3)
    assert (site.reasons() - before)[Reason.NOT_A_SERVICE] >= 3


def test_map_missing_in_an_older_version_is_filled_at_start(site: Site):
    """The agent sets the bits before it attaches programs that read them."""
    site.open().apply(state(BOTH), None)
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
    for target in (f"two {SECOND}:54", ""):
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
    plane.apply(state(BOTH), None)
    with site.pinned("services") as services:
        (first, _), (_, other) = sorted(services.items())
        services.update(first, other)
    with watched(site) as monitor:
        assert picks(client, f"{FIRST}:53") == ["ECONNREFUSED"]
        assert {event.reason for event in read(monitor)} == {"unsteady_read"}
    assert site.reasons()[Reason.UNSTEADY_READ]
    assert not site.reasons()[Reason.SET_VANISHED]
    plane.invalidate()
    plane.apply(state(BOTH), None)
    assert picks(client, f"{FIRST}:53") == [BACKEND]


@pytest.mark.parametrize("held", [set(), {0}, {63, 64}, {1, 65_535}, set(range(1, 200))])
def test_ports_are_packed_into_64_bit_words(held: set[int]):
    words = pack_ports(held, range(65_536))
    assert len(words) == 1024
    assert set(unpack_ports(words)) == held


def test_only_changed_words_are_packed():
    assert pack_ports({1, 2, 700}, [1, 63]) == [(U32.pack(0), U64.pack(0b110))]


# ---- helpers -----------------------------------------------------------------------------------


def state(services: str):
    made = (text.strip().partition(" ") for text in services.split(";") if text)
    return desired(*(service(name, at, f"{BACKEND}:9", Protocol.UDP) for name, _, at in made), nodes=NODE)


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
