# SPDX-License-Identifier: Apache-2.0
"""Ids: never given out twice, saved before use, and kept while they are referenced."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.dataplane.bpf.maps.ids import ID_LIMIT, BackendTable, IdAllocator
from kbpf.dataplane.bpf.maps.layout import Meta
from kbpf.model.address import parse_addr
from kbpf.model.desired import Backend
from kbpf.model.objects import Protocol

NEW = Meta(0, 0, 0)


def backend(number: int, protocol: Protocol = Protocol.TCP) -> Backend:
    return Backend(parse_addr(f"10.0.0.{number}"), 80, protocol)


@pytest.mark.parametrize(("meta", "ids"), [(NEW, [1, 2, 1, 1]), (Meta(5, 6, 7), [5, 6, 6, 7])])
def test_each_kind_of_id_has_its_own_counter_that_starts_at_one(meta: Meta, ids: list[int]):
    found = IdAllocator(meta)
    made = [found.allocate_service(), found.allocate_service(), found.allocate_backend(), found.allocate_set()]
    assert made == ids


def test_allocated_ids_have_to_be_saved():
    ids = IdAllocator(Meta(3, 3, 3))
    assert ids.unsaved_meta() is None
    ids.allocate_set()
    assert ids.unsaved_meta() == Meta(3, 3, 4)
    ids.mark_saved(Meta(3, 3, 4))
    assert ids.unsaved_meta() is None
    ids.allocate_backend()
    assert ids.unsaved_meta() == Meta(3, 4, 4)


def test_a_new_map_is_written_once():
    """0 in the map means 1: 0 is not an id."""
    assert IdAllocator(NEW).unsaved_meta() == Meta(1, 1, 1)


@pytest.mark.parametrize("found", [0, 4, 9, 100])
def test_ids_found_in_maps_are_not_given_out_again(found):
    """Even if `meta` is lower: it may have been lost while the entries were not."""
    ids = IdAllocator(Meta(10, 10, 10))
    ids.skip_past(found, found, found)
    assert {ids.allocate_service(), ids.allocate_backend(), ids.allocate_set()} == {max(10, found + 1)}


def test_after_the_last_id_allocation_wraps_and_skips_held_ids():
    held = {(2, 1), (2, 2), (2, 4), (2, ID_LIMIT - 1)}
    ids = IdAllocator(Meta(1, 1, ID_LIMIT - 2), lambda which, number: (which, number) in held)
    assert [ids.allocate_set() for _ in range(4)] == [ID_LIMIT - 2, ID_LIMIT - 1, 3, 5], (
        "held ids are skipped only after the wrap"
    )
    assert ids.unsaved_meta() == Meta(1, 1, 6)
    assert (ids.allocate_service(), ids.allocate_backend()) == (1, 1), "each kind has its own counter"


def test_saved_counters_are_always_in_the_accepted_range():
    """At the last id, the saved counters stay in the range that adopt.next_ids accepts."""
    ids = IdAllocator(Meta(1, 1, ID_LIMIT - 1))
    ids.allocate_set()
    unsaved = ids.unsaved_meta()
    assert unsaved is not None
    assert max(unsaved) < ID_LIMIT


def test_a_restart_after_a_wrap_gives_out_no_held_id():
    held = {1, 2, ID_LIMIT - 1}
    ids = IdAllocator(Meta(1, 1, 3), lambda _, number: number in held)
    ids.skip_past(0, 0, ID_LIMIT - 1)
    assert [ids.allocate_set(), ids.allocate_set()] == [3, 4]


def test_backends_differ_by_protocol():
    table = BackendTable(IdAllocator(NEW))
    table.acquire((backend(1), backend(1, Protocol.UDP)))
    assert len(table) == 2


def test_adopted_backends_stay_until_swept():
    table = BackendTable(IdAllocator(NEW))
    for number in (1, 2):
        table.adopt(backend(number), 10 + number)
    assert table.acquire((backend(1),)) == [], "it is already in the map"
    assert table.count_unknown((backend(1), backend(2), backend(3))) == 1
    assert table.remove_unreferenced() == [12]
    assert table.remove_unreferenced() == []
    assert table.id_of(backend(1)) == 11


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(1, 6), unique=True, max_size=4), max_size=20), st.randoms())
def test_only_referenced_backends_have_an_id(groups: list[list[int]], chance):
    """Compared with a simple model: a list of holders."""
    table, holders, known, seen = BackendTable(IdAllocator(NEW)), [], {}, set()
    for group in groups:
        if holders and chance.random() < 0.4:
            gone = holders.pop(chance.randrange(len(holders)))
            still = {number for one in holders for number in one}
            released = table.release(tuple(map(backend, gone)))
            assert released == [known.pop(n) for n in gone if n not in still]
        new = table.acquire(tuple(map(backend, group)))
        assert [one for _, one in new] == [backend(n) for n in group if n not in known]
        assert not seen & {number for number, _ in new}, "an id is given out once"
        seen |= {number for number, _ in new}
        known |= {n: table.id_of(backend(n)) for n in group}
        holders.append(group)
        assert len(table) == len(known) == len(set(known.values()))
