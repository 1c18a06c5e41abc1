# SPDX-License-Identifier: Apache-2.0
"""`frontend_ports`: a destination whose port no Service uses is passed after one look-up, and a
Service is found as long as it has a frontend.

Each row is a desired state. Then the map must hold the ports that it lists, and a client connects
to the addresses that it lists.
"""

from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import Reason, unpack_ports
from kbpf.model.objects import Protocol
from tests.support.lab.events import read, watched
from tests.support.lab.lab import Place
from tests.support.plane import LOCAL, Site, desired, picks, service
from tests.support.table import table

BACKEND, NODE = LOCAL[0], LOCAL[-1]


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
BOTH = "one 10.96.0.1:53; two 10.96.0.2:53"


@pytest.mark.parametrize("name", dict.fromkeys(step.name for step in STEPS))
def test_history_of_frontend_ports(site: Site, client: Place, name: str):
    plane = site.open()
    for step in STEPS:
        if step.name == name:
            plane.apply(state(step.services), None)
            assert ports(site) == set(map(int, step.ports.split()))
            for to, gets in (words.split() for words in step.dials.split(", ")):
                assert picks(client, to) == [GETS[gets]], to


def test_value_of_another_key_is_not_used(site: Site, client: Place):
    """The kernel may give the memory of an entry to another key while a program reads it."""
    plane = site.open()
    plane.apply(state(BOTH), None)
    with site.pinned("services") as services:
        (first, _), (_, other) = sorted(services.items())
        services.update(first, other)
    with watched(site) as monitor:
        assert picks(client, "10.96.0.1:53") == ["ECONNREFUSED"]
        assert {event.reason for event in read(monitor)} == {"unsteady_read"}
    assert site.reasons()[Reason.UNSTEADY_READ]
    assert not site.reasons()[Reason.SET_VANISHED]
    plane.invalidate()
    plane.apply(state(BOTH), None)
    assert picks(client, "10.96.0.1:53") == [BACKEND]


# ---- helpers -----------------------------------------------------------------------------------


def state(services: str):
    made = (text.strip().partition(" ") for text in services.split(";") if text)
    return desired(*(service(name, at, f"{BACKEND}:9", Protocol.UDP) for name, _, at in made), nodes=NODE)


def ports(site: Site) -> set[int]:
    return set(unpack_ports(site.entries("frontend_ports").items()))
