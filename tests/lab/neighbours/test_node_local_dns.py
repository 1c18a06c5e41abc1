# SPDX-License-Identifier: Apache-2.0
"""NodeLocal DNSCache at the ClusterIP of kube-dns: it answers the node's clients while it runs, and
when it ends, kube-dns answers within a second, also if it is killed and leaves its address and its
rules. Clients are a pod and the node, by UDP and TCP. In mode ipvs (KBPF_TEST_MODE) there is a
device with the same address, kbpf's.
"""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lab.neighbours import dns_queries
from tests.lab.neighbours.dns_cache import AT_CACHE, AT_SERVER, METRICS, WHERE, NodeCache, dns_service, start_server
from tests.support.features import IN_GUEST
from tests.support.lab.field import Field
from tests.support.lab.lab import DIE_WITH_US, PATIENCE, Place, inside, ip, until
from tests.support.lab.modes import PACKETS

DNS, UPSTREAM = "10.96.0.10", "10.96.0.11"
MAX_ROUNDS = 1 if IN_GUEST else 10
ANSWER_S = 60.0 if IN_GUEST else 0.2
"""How long clients wait for an answer before they ask again. It is the resolution of what is
measured; in an emulator CoreDNS needs many seconds from bind() to its first answer.
"""
LOST = {("tcp", "ConnectionResetError"), ("udp", "TimeoutError")}
"""What may become of one query of each kind that is under way when the cache starts, in mode ipvs:
IPVS ends the connections of a virtual service that is removed.
"""
RECOVERY_S = PATIENCE if IN_GUEST else 1.0
"""How long clients may be without an answer when the cache ends, in at least one round: the machine
may be busy in others.
"""


ASKED = "asked"
"""A query that is not answered yet."""


class Answer(NamedTuple):
    """A query of dns_queries.py: its time, and the answer, the error, or ASKED."""

    time: float
    protocol: str
    text: str


class Queries:
    """A client's queries to kube-dns, in a loop."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self._output = folder / f"queries.{place.name}"
        command = ("/usr/bin/python3", "-S", dns_queries.__file__, DNS, WHERE, str(ANSWER_S), str(PATIENCE))
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*DIE_WITH_US, *inside(place.netns, place.cgroup, *command)], stdout=output
            )

    def read(self, protocol: str) -> list[Answer]:
        """The queries so far, in order; the last ones may not be answered yet."""
        lines = self._output.read_text().rpartition("\n")[0].splitlines()
        texts = {(float(at), own): text for at, own, text in map(str.split, lines)}
        return [Answer(at, own, text) for (at, own), text in texts.items() if own == protocol]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module", params=["ipvs"] if PACKETS else ["on", "off"])
def socket_lb(request) -> str:
    """Whether connections are translated at the socket or by the packet path, or by IPVS."""
    return str(request.param)


@pytest.fixture(scope="module")
def field(socket_lb: str) -> Iterator[Field]:
    arguments = () if PACKETS else ("--socket-lb", socket_lb)
    with Field(*arguments, name="nd", pods=(3,)) as made:
        ip("route del unreachable 10.96.0.0/16", netns=made["host-1"].netns)
        with made.given(
            *dns_service("kube-dns", DNS, made["a1"].ip), *dns_service("kube-dns-upstream", UPSTREAM, made["a1"].ip)
        ):
            yield made


@pytest.fixture
def server(field: Field) -> Iterator[None]:
    process = start_server(field["a1"], field.lab.folder)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cache(field: Field) -> Iterator[NodeCache]:
    """The cache, which listens at the ClusterIP."""
    made = NodeCache(field.lab.nodes[0], DNS, UPSTREAM)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def clients(field: Field, server: None, socket_lb: str) -> Iterator[list[Queries]]:
    """A pod and the node. Without the socket hooks the node's packets to an address of a device
    stay on the node, so kube-dns cannot answer them while a killed cache leaves its address.
    """
    names = ("a3", "host-1") if socket_lb == "on" else ("a3",)
    made = [Queries(field[name], field.lab.folder) for name in names]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def answers(clients: list[Queries]) -> dict[tuple[str, str], list[Answer]]:
    """The answers of each client by each protocol."""
    return {(c.place.name, protocol): c.read(protocol) for c in clients for protocol in ("udp", "tcp")}


def answered_by(clients: list[Queries], address: str) -> Callable[[], bool]:
    """Whether the last queries that are answered have this answer."""

    def is_so() -> bool:
        texts = ([answer.text for answer in each if answer.text != ASKED] for each in answers(clients).values())
        return all(set(each[-3:]) == {address} for each in texts)

    return is_so


def show(clients: list[Queries]) -> Callable[[], object]:
    return lambda: {who: each[-3:] for who, each in answers(clients).items()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_cache_serves_and_when_it_ends_the_service_does(
    field: Field, cache: NodeCache, clients: list[Queries], number: signal.Signals
):
    until("kube-dns answers", answered_by(clients, AT_SERVER), state=show(clients))
    seconds: list[float] = []
    while len(seconds) < MAX_ROUNDS and min(seconds, default=math.inf) > RECOVERY_S:
        began = time.monotonic()
        cache.start()
        until("the cache answers", answered_by(clients, AT_CACHE), state=show(clients))
        until("all queries have ended", partial(have_ended, clients, began, time.monotonic()), 2 * PATIENCE)
        lost = [one for one in since(clients, began) if one.text not in (AT_CACHE, AT_SERVER, ASKED)]
        assert [answer for answer in lost if not PACKETS or answer[1:] not in LOST] == []
        assert len({answer.protocol for answer in lost}) == len(lost), "one of each kind at most"
        cache.add_rules()
        until("its rules exist", cache.has_rules)
        until("the status has it", lambda: len(left_to_node(field)) == 2)
        for client in clients:
            assert "error" not in client.place.tcp(DNS, METRICS), "where the cache does not listen"
        began = time.monotonic()
        cache.end(number)
        until("kube-dns answers again", answered_by(clients, AT_SERVER), state=show(clients))
        assert cache.has_address() == cache.has_rules() == (number == signal.SIGKILL)
        until("the status has it no more", lambda: not left_to_node(field))
        seconds.append(max(seconds_without(each, began) for each in answers(clients).values()))
    print(seconds, file=sys.stderr)
    assert min(seconds) <= RECOVERY_S


def since(clients: list[Queries], began: float) -> list[Answer]:
    return [answer for each in answers(clients).values() for answer in each if answer.time > began]


def have_ended(clients: list[Queries], began: float, end: float) -> bool:
    """Whether all queries of this time are answered, or have failed."""
    return not [answer for answer in since(clients, began) if answer.time < end and answer.text == ASKED]


def seconds_without(answers: list[Answer], began: float) -> float:
    """From `began` to the first query from which on kube-dns answers all of them."""
    while answers[-1].text == ASKED:
        answers = answers[:-1]
    recovered = None
    for answer in answers:
        if answer.time > began:
            recovered = None if answer.text != AT_SERVER else recovered or answer.time
    assert recovered is not None
    return recovered - began


def left_to_node(field: Field) -> list[str]:
    return list((field.agent.status() or {})["left_to_node"])
