# SPDX-License-Identifier: Apache-2.0
"""The agent's status on its way through the map `agent_status`."""

import pytest
from msgspec.structs import replace

from kbpf.dataplane.bpf.maps import status_entries
from kbpf.dataplane.bpf.maps.layout import MAPS, STATUS_SIZE
from kbpf.dataplane.bpf.maps.status_entries import HEADER_SIZE, pack_entry
from kbpf.model.status import MAX_PROBLEMS, MAX_STATUS_BYTES, AgentStatus, decode, encode
from tests.support.table import each_pair
from tests.values.views.snapshots import AGENT

SPEC = MAPS["agent_status"]
TEXTS = (b"the first", b"the second", b"a third, which is longer", b"4")
NEW = b"NO BYTE OF THE OTHERS"


class Overwritten:
    """A map's values, of which the next update() writes only `size` bytes."""

    value_size = STATUS_SIZE

    def __init__(self) -> None:
        self.values = {key.to_bytes(4, "little"): bytes(STATUS_SIZE) for key in range(SPEC.entries)}
        self.size = STATUS_SIZE

    def lookup(self, key: bytes) -> bytes:
        return self.values[key]

    def update(self, key: bytes, value: bytes) -> None:
        assert len(value) == STATUS_SIZE
        self.values[key] = value[: self.size] + self.values[key][self.size :]


@pytest.mark.parametrize("count", range(len(TEXTS) + 1))
@pytest.mark.parametrize("size", [0, 1, 4, 8, 15, *range(HEADER_SIZE, HEADER_SIZE + 25)])
def test_text_is_the_last_or_the_one_before_and_never_a_mixture(count, size):
    map_ = Overwritten()
    for text in TEXTS[:count]:
        status_entries.write(map_, text)
    before = TEXTS[count - 1] if count else b""
    assert status_entries.read(map_) == before
    map_.size = size
    status_entries.write(map_, NEW)
    is_whole = size >= HEADER_SIZE + len(NEW)
    assert status_entries.read(map_) == (NEW if is_whole else before)
    map_.size = STATUS_SIZE
    status_entries.write(map_, b"the next")
    assert status_entries.read(map_) == b"the next"


@each_pair(
    "entries, text",
    """\
- - →
- 1:x → x
7:old 8:new → new
9:new 8:old → new
ff 8:old → old
ff {{ →
1: - →
""",
)
def test_newest_complete_entry_is_read(entries, text):
    """What the map holds: a number and a text, nothing, or bytes without sense → the text that is read."""
    map_ = Overwritten()
    for key, word in zip(map_.values, entries.split(), strict=True):
        number, colon, body = word.partition(":")
        senseless = {"-": b"", "ff": b"\xff" * STATUS_SIZE, "{{": b"{" * STATUS_SIZE}
        entry = pack_entry(int(number), body.encode()) if colon else senseless[word]
        map_.values[key] = entry.ljust(STATUS_SIZE, b"\0")
    assert status_entries.read(map_) == text.encode()


LONG = "x" * 1000
SIZES = {
    "nothing to say": {},
    "as many problems as possible": {"problems": ("short",) * MAX_PROBLEMS},
    "problems with long names": {"problems": (LONG,) * MAX_PROBLEMS, "problem_count": 70},
    "long names everywhere": {
        "problems": (LONG,) * MAX_PROBLEMS,
        "left_to_node": (LONG,) * MAX_PROBLEMS,
        "refused_system": (LONG,) * MAX_PROBLEMS,
        "faults": ("no program at connect4",),
    },
    "one endless line": {"problems": (LONG * 100,), "faults": ("no program at connect4",)},
}


@pytest.mark.parametrize("case", SIZES)
def test_a_long_status_keeps_what_there_is_room_for(case):
    said: AgentStatus = replace(AGENT, **SIZES[case])
    text = encode(said)
    assert len(text) <= MAX_STATUS_BYTES
    read = decode(text)
    assert read is not None
    lists = ("problems", "left_to_node", "refused_system")
    for name in lists:
        kept, wanted = getattr(read, name), getattr(said, name)
        assert kept == wanted[: len(kept)]
        assert len(kept) >= min(len(wanted), 6) or case == "one endless line"
    none = dict.fromkeys(lists, ())
    assert replace(read, **none) == replace(said, **none)
    is_short = case in ("nothing to say", "as many problems as possible")
    assert (read == said) == is_short
