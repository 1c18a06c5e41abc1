"""Ids: never twice, saved before use, and held as long as somebody holds them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbpf.dataplane.bpf.maps.ids import LIMIT, BackendTable, Ids
from kbpf.dataplane.bpf.maps.layout import Meta
from kbpf.model.address import parse_addr
from kbpf.model.desired import Backend
from kbpf.model.objects import Protocol

NEW = Meta(0, 0, 0)


def backend(number: int, protocol: Protocol = Protocol.TCP) -> Backend:
    return Backend(parse_addr(f"10.0.0.{number}"), 80, protocol)


def test_zero_is_no_id():
    ids = Ids(NEW)
    assert (ids.service(), ids.backend(), ids.set()) == (1, 1, 1)
    assert (ids.service(), ids.backend(), ids.set()) == (2, 2, 2)


def test_each_kind_counts_alone():
    ids = Ids(Meta(5, 6, 7))
    assert [ids.service(), ids.service(), ids.backend(), ids.set()] == [5, 6, 6, 7]


def test_what_was_given_out_has_to_be_saved_first():
    ids = Ids(Meta(3, 3, 3))
    assert ids.unsaved() is None
    ids.set()
    assert ids.unsaved() == Meta(3, 3, 4)
    ids.saved(Meta(3, 3, 4))
    assert ids.unsaved() is None
    ids.backend()
    assert ids.unsaved() == Meta(3, 4, 4)


def test_a_new_map_is_written_once():
    """0 in the map means 1: an id that was never used is never 0."""
    assert Ids(NEW).unsaved() == Meta(1, 1, 1)


@pytest.mark.parametrize("found", [0, 4, 9, 100])
def test_ids_found_in_maps_are_not_given_out_again(found: int):
    """Even when `meta` says less: it might have been lost, the entries are there."""
    ids = Ids(Meta(10, 10, 10))
    ids.at_least(found, found, found)
    assert {ids.service(), ids.backend(), ids.set()} == {max(10, found + 1)}


def test_after_the_last_id_they_begin_again_without_those_that_are_held():
    held = {(2, 1), (2, 2), (2, 4), (2, LIMIT - 1)}
    ids = Ids(Meta(1, 1, LIMIT - 2), lambda which, number: (which, number) in held)
    assert [ids.set() for _ in range(4)] == [LIMIT - 2, LIMIT - 1, 3, 5], "the last was free then"
    assert ids.unsaved() == Meta(1, 1, 6)
    assert (ids.service(), ids.backend()) == (1, 1), "each kind counts alone"


def test_what_is_saved_is_always_believed():
    """A restart at the very end finds no number that it takes for damage (adopt.next_ids)."""
    ids = Ids(Meta(1, 1, LIMIT - 1))
    ids.set()
    unsaved = ids.unsaved()
    assert unsaved is not None
    assert max(unsaved) < LIMIT


def test_a_restart_after_ids_have_begun_again_gives_out_none_that_is_held():
    held = {1, 2, LIMIT - 1}
    ids = Ids(Meta(1, 1, 3), lambda _, number: number in held)
    ids.at_least(0, 0, LIMIT - 1)
    assert [ids.set(), ids.set()] == [3, 4]


def test_a_backend_keeps_its_id_while_it_is_held():
    table = BackendTable(Ids(NEW))
    one, two, three = map(backend, (1, 2, 3))
    assert table.hold((one, two)) == [(1, one), (2, two)]
    assert table.hold((two, three)) == [(3, three)], "only new ones are to be written"
    assert (table.id_of(two), len(table)) == (2, 3)
    assert table.release((one, two)) == [1]
    assert table.release((two, three)) == [2, 3]
    assert len(table) == 0
    assert table.hold((one,)) == [(4, one)], "and a new one when it comes again"


def test_protocols_and_ports_are_different_backends():
    table = BackendTable(Ids(NEW))
    table.hold((backend(1), backend(1, Protocol.UDP)))
    assert len(table) == 2


def test_adopted_backends_stay_until_swept():
    table = BackendTable(Ids(NEW))
    for number in (1, 2):
        table.adopt(backend(number), 10 + number)
    assert table.hold((backend(1),)) == [], "it is in the map already"
    assert table.unknown((backend(1), backend(2), backend(3))) == 1
    assert table.sweep() == [12]
    assert table.sweep() == []
    assert table.id_of(backend(1)) == 11


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(1, 6), unique=True, max_size=4), max_size=20), st.randoms())
def test_held_backends_have_one_id_and_others_none(groups: list[list[int]], chance):
    """Against a plain model: a list of holders."""
    table, holders, known, seen = BackendTable(Ids(NEW)), [], {}, set()
    for group in groups:
        if holders and chance.random() < 0.4:
            gone = holders.pop(chance.randrange(len(holders)))
            still = {number for one in holders for number in one}
            released = table.release(tuple(map(backend, gone)))
            assert released == [known.pop(n) for n in gone if n not in still]
        new = table.hold(tuple(map(backend, group)))
        assert [one for _, one in new] == [backend(n) for n in group if n not in known]
        assert not seen & {number for number, _ in new}, "never twice"
        seen |= {number for number, _ in new}
        known |= {n: table.id_of(backend(n)) for n in group}
        holders.append(group)
        assert len(table) == len(known) == len(set(known.values()))
