# SPDX-License-Identifier: Apache-2.0
"""Counting each client's entries of the map `affinity`. Maps are dicts here;
tests/programs/maps/test_isolation.py has real maps and the programs that count.
"""

import time
from typing import Any

import pytest

from kbpf.dataplane.bpf.maps.affinity_shares import (
    MAX_AFFINITY_TIMEOUT_S,
    RECOUNT_INTERVAL_S,
    STEP_ENTRIES,
    AffinityShares,
)
from kbpf.dataplane.bpf.maps.layout import AFFINITY, AFFINITY_KEY, OWNER_ADDRESS, OWNER_DEVICE, U32
from kbpf.model.address import parse_addr
from tests.support.table import each_cells

ONE, OTHER, NEAR, FAR = "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8:0:1::1"
NETWORK = "2001:db8::"


class FakeMap(dict[bytes, bytes]):
    """The methods of Map that are used here; it is read `piece` entries at a time."""

    piece = 100

    def lookup(self, key: bytes) -> bytes | None:
        return self.get(key)

    def replace(self, key: bytes, value: bytes) -> None:
        self[key] = value

    def delete(self, key: bytes) -> None:
        del self[key]

    def lookup_batch(self, cursor: bytes | None) -> tuple[bytes, bytes, bytes | None]:
        start = U32.unpack(cursor)[0] if cursor else 0
        found = sorted(self.items())[start : start + self.piece]
        end = start + self.piece
        keys, values = b"".join(k for k, _ in found), b"".join(v for _, v in found)
        return keys, values, U32.pack(end) if end < len(self) else None


def entry(client: str, service: int, age_s: float = 0, owner: int = 0) -> tuple[bytes, bytes]:
    """A client's entry for a Service, last used so many seconds ago."""
    used = time.monotonic_ns() - int(age_s * 10**9)
    return AFFINITY_KEY.pack(parse_addr(client), service, 0), AFFINITY.pack(used, 1, owner)


def counts(text: str) -> dict[bytes, bytes]:
    words = (word.split("=") for word in text.split())
    return {bytes(parse_addr(NAMES[name])): U32.pack(int(count)) for name, count in words}


AT_ONCE = float("inf")
TIMEOUT = 100
SERVICES = range(1000)


def counted(affinity: FakeMap, shares: FakeMap) -> AffinityShares:
    """AffinityShares on these maps; all Services have the same time-out."""
    maps: Any = {"affinity": affinity, "affinity_shares": shares}
    return AffinityShares(lambda: maps, lambda: dict.fromkeys(SERVICES, TIMEOUT))


NAMES = {"one": ONE, "other": OTHER, "near": NEAR, "far": FAR, "network": NETWORK, "near2": "2001:db8::2"}
NAMES |= {"device7": "ffff:ffff::700:80", "cgroup7": "ffff:ffff::700:0"}
OWNERS = {"": 0, "address": OWNER_ADDRESS, "device": OWNER_DEVICE | 7, "cgroup": 7}


@pytest.mark.parametrize("piece", [1, 100])
@each_cells(
    "entries_text, before, after",
    """\
no entries, no counts |  |
a correct count stays | one one | one=2 | one=2
one entry is gone | one | one=2 | one=1
all entries are gone |  | one=2 other=1
an IPv6 network | near near2 far | network=9 | network=2
entries without a count | far |
pods behind a bridge | near/address network | near=9 network=9 | near=1 network=1
a pod with its own device, and another owner with its address | one/device far/device one | device7=1 one=2 \
| device7=2 one=1
sockets of a cgroup | one/cgroup other/cgroup near/cgroup | cgroup7=9 | cgroup7=3
""",
)
def test_a_recount_corrects_the_counts(entries_text, before, after, piece):
    """Entries CLIENT/OWNER, and the counts before and after a recount. The key of a device or cgroup has its number in
    its last word, in little-endian order.
    """
    entries = [word.partition("/") for word in entries_text.split()]
    affinity = FakeMap(entry(NAMES[name], n, owner=OWNERS[owner]) for n, (name, _, owner) in enumerate(entries))
    shares = FakeMap(counts(before))
    affinity.piece = piece
    counting = counted(affinity, shares)
    for number in range(len(entries) + 1):
        counting.advance(number * RECOUNT_INTERVAL_S, AT_ONCE)
    assert shares == counts(after)


def test_counts_made_during_a_recount_are_kept():
    affinity, shares = FakeMap(entry(ONE, number) for number in range(2)), FakeMap(counts("one=5"))
    affinity.piece = 1
    counting = counted(affinity, shares)
    counting.advance(0, AT_ONCE)
    shares |= counts("one=8")
    counting.advance(RECOUNT_INTERVAL_S, AT_ONCE)
    assert shares == counts("one=5"), "2 entries, and 3 that were counted meanwhile"


@each_cells(
    "service, seconds, stays",
    f"""\
in use | 1 | 0 | yes
idle | 1 | {TIMEOUT - 5} | yes
expired | 1 | {TIMEOUT + 1} | no
an unknown Service | 1000 | {TIMEOUT + 1} | yes
an unknown Service, older than any time-out | 1000 | {MAX_AFFINITY_TIMEOUT_S + 1} | no
""",
    service=int,
    seconds=int,
    stays=bool,
)
def test_expired_entries_are_deleted_and_not_counted(service, seconds, stays):
    """An entry of a Service, and whether it is kept."""
    now = time.monotonic_ns() + 10**15
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: now)
        affinity, shares = FakeMap([entry(ONE, service, seconds)]), FakeMap(counts("one=1"))
        counted(affinity, shares).advance(0, AT_ONCE)
    assert (len(affinity), len(shares)) == ((1, 1) if stays else (0, 0))


def test_an_entry_used_again_during_the_recount_stays():
    affinity, shares = FakeMap([entry(ONE, 1, TIMEOUT + 1)]), FakeMap(counts("one=1"))
    affinity.lookup = lambda _: entry(ONE, 1)[1]  # type: ignore[method-assign]
    counted(affinity, shares).advance(0, AT_ONCE)
    assert (len(affinity), len(shares)) == (1, 1)


def test_a_full_map_is_recounted_in_steps():
    """The agent can do other work between two steps."""
    affinity, shares = FakeMap(), FakeMap()
    count = affinity.piece = 4 * STEP_ENTRIES
    used = time.monotonic_ns()
    for number in range(count):
        own = number.to_bytes(8, "big") + bytes(8)
        affinity[AFFINITY_KEY.pack(own, 1, 0)] = AFFINITY.pack(used, 1, 0)
        shares[own] = U32.pack(2)
    counting, steps = counted(affinity, shares), 1
    counting.advance(0, 0)
    while counting.is_busy:
        counting.advance(0, 0)
        steps += 1
    assert steps >= 3 * count / STEP_ENTRIES
    assert set(shares.values()) == {U32.pack(1)}
