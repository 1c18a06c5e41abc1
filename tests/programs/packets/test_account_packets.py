"""What tracked flows come to, counted by Service and backend: single packets, to the byte.

A row is the packets of a connection in order, each through both programs as on its way, and what
must have been added for it. Bytes are those of packets from the IP header on.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kbpf.dataplane.bpf.maps.layout import (
    CONFIG,
    COUNTS,
    U32,
    U32_PAIR,
    ConfigFlag,
    unpack_service_name,
)
from kbpf.dataplane.bpf.metrics import NO_BACKEND
from kbpf.model.metrics import ConnectionStats
from tests.programs.packets.test_packets import (
    CLUSTER,
    LOCAL,
    NONE,
    RESTRICTED,
    Path_,
    _outside,
    both,
    client,
    path,
    pod,
    vip,
)
from tests.support.packets.packets import Talk, tcp, udp
from tests.support.packets.parse import parse

__all__ = ["_outside", "path"]


@pytest.fixture(autouse=True)
def full(path: Path_) -> Iterator[None]:
    settle(path, ConfigFlag.COUNT_CONNECTION_ENDS)
    yield
    settle(path, ConfigFlag(0))


def settle(path: Path_, flags: ConfigFlag) -> None:
    """As `--accounting full` or `connections`."""
    with path.site.pinned("config") as config:
        netns, have, share = CONFIG.unpack(config.lookup(U32.pack(0)))
        config.update(
            U32.pack(0), CONFIG.pack(netns, have & ~ConfigFlag.COUNT_CONNECTION_ENDS | flags, share)
        )


def had(path: Path_, v: int, which: int, protocol: str = "tcp") -> dict[bool, ConnectionStats]:
    """Of a Service port in one family: with a backend, and without."""
    names = {U32.unpack(k)[0]: unpack_service_name(raw) for k, raw in
             path.site.entries("service_names").items()}  # fmt: skip
    found = {True: ConnectionStats(), False: ConnectionStats()}
    for key, raw in path.site.entries("counts").items():
        service, backend = U32_PAIR.unpack(key)
        if (names[service].name, names[service].family) == (f"s{which}-{protocol}", v):
            found[backend != NO_BACKEND] = ConnectionStats(*COUNTS.unpack(raw))
    return found


def minus(after: ConnectionStats, before: ConnectionStats) -> ConnectionStats:
    return ConnectionStats(*(a - b for a, b in zip(after, before, strict=True)))


class Story(NamedTuple):
    """Words of packets.Talk; and what is added, but for bytes. `unsaid`: how many of the last
    segments each side has not said.
    """

    name: str
    segments: str
    adds: ConnectionStats
    unsaid: tuple[int, int] = (0, 0)


OPEN = "S <SA A "
STORIES = [
    Story("in order", OPEN + "A+100 <A+1000 FA <FA A", ConnectionStats(begun=1, ended=1), (1, 0)),
    Story(
        "in order, the backend first",
        OPEN + "A+7 <FA+900 FA <A",
        ConnectionStats(begun=1, ended=1),
        (0, 1),
    ),
    Story("refused by the backend", "S <RA", ConnectionStats(begun=1, ended=1, unanswered=1)),
    Story(
        "reset by the backend", OPEN + "A+100 <A+50 <R", ConnectionStats(begun=1, ended=1, broken=1)
    ),
    Story(
        "reset by the client", OPEN + "A+100 <A+50 R", ConnectionStats(begun=1, ended=1, broken=1)
    ),
    Story("it goes on", OPEN + "A+100 <A+50", ConnectionStats(begun=1), (3, 2)),
    Story("asked twice", "S S <SA A FA <FA A", ConnectionStats(begun=1, ended=1), (1, 0)),
]


def play(path: Path_, v: int, which: int, story: str) -> tuple[list[int], list[int]]:
    """Lengths of the client's packets and of the backend's, as they came in."""
    own, source, talk = client(v), "", Talk()
    lengths: tuple[list[int], list[int]] = ([], [])
    for word in story.split():
        back = word.startswith("<")
        ends = (pod(v), source) if back else (own, vip(v, which))
        packet = talk.segment(word, *ends)
        lengths[back].append(len(packet))
        _, inside = path.run("tc_ingress", packet)
        _, out = path.run("tc_egress", inside)
        if not back:
            source = parse(out, l2=False).source
    return lengths


@both
@pytest.mark.parametrize("which", [CLUSTER, LOCAL], ids=["Cluster", "Local"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_what_a_connection_adds(path: Path_, v: int, which: int, story: Story) -> None:
    before = had(path, v, which)
    there, back = play(path, v, which, story.segments)
    after = had(path, v, which)
    said_in, said_out = (
        sum(lengths[: len(lengths) - unsaid])
        for lengths, unsaid in zip((there, back), story.unsaid, strict=True)
    )
    wanted = story.adds._replace(bytes_in=said_in, bytes_out=said_out)
    assert minus(after[True], before[True]) == wanted
    assert after[False] == before[False]


@both
def test_much_is_said_while_it_goes_on(path: Path_, v: int) -> None:
    before = had(path, v, LOCAL)
    there, _ = play(path, v, LOCAL, OPEN + "A+1400 " * 200)
    added = minus(had(path, v, LOCAL)[True], before[True])
    assert 0 <= sum(there) - added.bytes_in < 256 << 10
    assert added.bytes_in >= 256 << 10


@both
def test_datagrams(path: Path_, v: int) -> None:
    own, size = client(v), 0
    before = had(path, v, LOCAL, "udp")
    for _ in range(10):
        question = udp(own, vip(v, LOCAL), bytes(500))
        size += len(question)
        _, inside = path.run("tc_ingress", question)
        path.run("tc_egress", inside)
    added = minus(had(path, v, LOCAL, "udp")[True], before[True])
    assert added.begun == 1
    assert 4 << 10 <= added.bytes_in <= size


@both
@pytest.mark.parametrize("which", [NONE, RESTRICTED], ids=["no endpoints", "not let in"])
def test_who_gets_no_backend(path: Path_, v: int, which: int) -> None:
    before = had(path, v, which)
    path.run("tc_ingress", tcp(client(v), vip(v, which), flags="S"))
    after = had(path, v, which)
    assert minus(after[False], before[False]) == ConnectionStats(refused=1)
    assert after[True] == before[True]


@both
def test_by_default_only_what_begins_is_counted(path: Path_, v: int) -> None:
    settle(path, ConfigFlag(0))
    before = had(path, v, CLUSTER)
    play(path, v, CLUSTER, OPEN + "A+100 <A+1000 FA <FA A")
    assert minus(had(path, v, CLUSTER)[True], before[True]) == ConnectionStats(begun=1)
