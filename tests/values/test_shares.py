"""Who has how many entries of the map `affinity`. Maps are dicts here; real ones, and programs that
count: tests/programs/test_isolation.py.
"""

from typing import Any, NamedTuple

import pytest

from kbpf.dataplane.bpf.layout import AFFINITY, AFFINITY_KEY, U32
from kbpf.dataplane.bpf.shares import LOOK_SECONDS, Shares
from kbpf.model.address import parse_addr

ONE, OTHER, NEAR, FAR = "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8:0:1::1"
NETWORK = "2001:db8::"


class FakeMap(dict[bytes, bytes]):
    """As libbpf.Map, as far as it is asked; read `piece` entries at a time."""

    piece = 100

    def lookup(self, key: bytes) -> bytes | None:
        return self.get(key)

    def replace(self, key: bytes, value: bytes) -> None:
        self[key] = value

    def delete(self, key: bytes) -> None:
        del self[key]

    def batch(self, cursor: bytes | None) -> tuple[bytes, bytes, bytes | None]:
        start = U32.unpack(cursor)[0] if cursor else 0
        found = sorted(self.items())[start : start + self.piece]
        end = start + self.piece
        keys, values = b"".join(k for k, _ in found), b"".join(v for _, v in found)
        return keys, values, U32.pack(end) if end < len(self) else None


class Row(NamedTuple):
    """Entries (client, cgroup), what was counted before and what is afterwards."""

    name: str
    entries: tuple[tuple[str, int], ...]
    before: dict[str, int]
    after: dict[str, int]


ROWS = [
    Row("nothing", (), {}, {}),
    Row("right", ((ONE, 0), (ONE, 0)), {ONE: 2}, {ONE: 2}),
    Row("one has gone", ((ONE, 0),), {ONE: 2}, {ONE: 1}),
    Row("all have gone", (), {ONE: 2, OTHER: 1}, {}),
    Row("a network of IPv6", ((NEAR, 0), ("2001:db8::2", 0), (FAR, 0)), {NETWORK: 9}, {NETWORK: 2}),
    Row("nobody's share", ((FAR, 0),), {}, {}),
]


@pytest.mark.parametrize("piece", [1, 100])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_shares_are_counted_again(row: Row, piece: int):
    affinity, shares = FakeMap(), FakeMap()
    affinity.piece = piece
    for number, (client, cgroup) in enumerate(row.entries):
        key = AFFINITY_KEY.pack(parse_addr(client), number, 0)
        affinity[key] = AFFINITY.pack(0, 1, cgroup)
    shares |= {bytes(parse_addr(at)): U32.pack(count) for at, count in row.before.items()}
    maps: Any = {"affinity": affinity, "affinity_shares": shares}
    counting = Shares()
    for number in range(len(row.entries) + 1):
        counting.look(maps, number * LOOK_SECONDS)
    assert shares == {bytes(parse_addr(at)): U32.pack(count) for at, count in row.after.items()}


def test_what_programs_count_meanwhile_is_not_lost():
    affinity, shares = FakeMap(), FakeMap()
    affinity.piece = 1
    own = bytes(parse_addr(ONE))
    for number in range(2):
        affinity[AFFINITY_KEY.pack(own, number, 0)] = AFFINITY.pack(0, 1, 0)
    shares[own] = U32.pack(5)
    counting, maps = Shares(), {"affinity": affinity, "affinity_shares": shares}
    counting.look(maps, 0)  # type: ignore[arg-type]
    shares[own] = U32.pack(8)
    counting.look(maps, LOOK_SECONDS)  # type: ignore[arg-type]
    assert shares[own] == U32.pack(2 + 3)


def test_sockets_are_counted_by_their_cgroup():
    affinity, shares = FakeMap(), FakeMap()
    own = U32.pack(7) + bytes(8) + b"\xff" * 4
    for number in range(3):
        key = AFFINITY_KEY.pack((10 + number).to_bytes(16, "little"), 1, 1)
        affinity[key] = AFFINITY.pack(0, 1, 7)
    shares[own] = U32.pack(9)
    maps: Any = {"affinity": affinity, "affinity_shares": shares}
    Shares().look(maps, 0)
    assert shares[own] == U32.pack(3)
