# SPDX-License-Identifier: Apache-2.0
"""The filter in front of the map `flows`: which packets look for a flow."""

from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from kbpf.dataplane.bpf.maps import flow_entries
from kbpf.dataplane.bpf.maps import flow_entries as fields
from kbpf.dataplane.bpf.maps.layout import FLOW_MARKS, U32, U64
from kbpf.dataplane.bpf.packet_path import flow_gc
from kbpf.errors import KernelError
from kbpf.kernel.bpf.objects import Map
from tests.programs.maps.flows.table import LIVES, Flows
from tests.programs.packets.path.single_packets import parsed

MAPS = ("flows", "flow_marks", "flow_generations")


@pytest.fixture
def maps(flows: Flows) -> Iterator[dict[str, Map]]:
    """The maps of the filter, in which nothing is marked."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(flows.site.pinned(name)) for name in MAPS}
        for index in range(FLOW_MARKS):
            opened["flow_marks"].update(U32.pack(index), U64.pack(0))
        current, _ = flow_entries.read_generations(opened)
        flow_entries._write_generations(opened, max(current, 1), max(current, 1))
        yield opened


def marked(maps: dict[str, Map]) -> set[int]:
    """The indexes whose mark counts."""
    _, oldest = flow_entries.read_generations(maps)
    return {U32.unpack(key)[0] for key, raw in maps["flow_marks"].items() if U64.unpack(raw)[0] >= oldest}


def ends_of(flows: Flows) -> set[int]:
    """The indexes of the frontends and backends of all entries."""
    return {
        flow_entries.mark_index(raw[part])
        for raw in flows.site.entries("flows").values()
        for part in (fields.FRONTEND, fields.BACKEND)
    }


def is_translated(flows: Flows, port: int) -> tuple[bool, bool]:
    """Whether data of the client, and of the backend, is translated."""
    flow = flows.flows[port]
    there, back = (parsed(flow.path.through(flow.packet(word))[1]) for word in ("A+", "<A+"))
    return there.destination == flow.back, back.source == flow.front


class Agent:
    """The agent's passes over the map, of one part each."""

    def __init__(self, maps: dict[str, Map]) -> None:
        self._maps, self._now, self._collector = maps, 0.0, flow_gc.FlowGarbageCollector()

    def sweep(self, only_writers: bool = True) -> None:
        self._now += flow_gc.GC_INTERVAL_S
        self._collector.collect(self._maps, self._now, only_writers)


def test_programs_mark_the_frontend_and_the_backend(flows: Flows, maps: dict[str, Map]):
    """No more: clients cannot fill the filter. The agent computes the same hash."""
    flows.talk(2000, LIVES)
    flows.talk(2001, "?")
    assert marked(maps) == ends_of(flows)


def test_packet_between_unmarked_ends_looks_for_no_flow(flows: Flows, maps: dict[str, Map]):
    """The flow exists, and only its marks are gone: this shows that the filter decides."""
    flows.talk(2000, LIVES)
    assert is_translated(flows, 2000) == (True, True)
    for index in marked(maps):
        maps["flow_marks"].update(U32.pack(index), U64.pack(0))
    assert is_translated(flows, 2000) == (False, False)
    flow_entries.mark_ends(maps, flows.site.entries("flows").values())
    assert is_translated(flows, 2000) == (True, True)


def test_in_new_maps_every_end_counts_as_marked(flows: Flows, maps: dict[str, Map]):
    """Earlier programs, which knew no marks, may have written the flows."""
    flows.talk(2000, LIVES)
    for index in marked(maps):
        maps["flow_marks"].update(U32.pack(index), U64.pack(0))
    flow_entries._write_generations(maps, 0, 0)
    assert is_translated(flows, 2000) == (True, True)
    agent = Agent(maps)
    for _ in range(3):
        agent.sweep()
        assert is_translated(flows, 2000) == (True, True)
    assert marked(maps) == ends_of(flows)


def test_marks_without_entries_expire(flows: Flows, maps: dict[str, Map]):
    flows.talk(2000, LIVES)
    agent = Agent(maps)
    for _ in range(4):
        agent.sweep()
        assert marked(maps) == ends_of(flows)
        assert is_translated(flows, 2000) == (True, True)
    flows.delete_flows()
    agent.sweep()
    assert marked(maps) == set()


def test_flow_that_begins_during_a_pass_stays_marked(flows: Flows, maps: dict[str, Map]):
    """It begins before the pass, between its start and its first part, or after it."""
    agent = Agent(maps)
    for port in (2000, 2001, 2002):
        flows.delete_flows()
        flows.talk(port, LIVES)
        agent.sweep()
        assert marked(maps) >= ends_of(flows)
        assert is_translated(flows, port) == (True, True)


def test_nothing_expires_while_other_programs_write_flows(flows: Flows, maps: dict[str, Map]):
    """Their flows may be in another map, or without marks. A pass during which there are some
    counts as little as one that has begun before the start.
    """
    flows.talk(2000, LIVES)
    agent, before = Agent(maps), marked(maps)
    flows.delete_flows()
    for only_writers in (False, False, False, True, False, True):
        agent.sweep(only_writers)
        assert marked(maps) == before
    agent.sweep()
    assert marked(maps) == set()


def test_nothing_expires_after_a_part_that_failed(flows: Flows, maps: dict[str, Map], monkeypatch):
    """The kernel refused to read or delete entries, so some of them may be unmarked."""

    flows.talk(2000, LIVES)
    agent, before = Agent(maps), marked(maps)
    agent.sweep()
    with monkeypatch.context() as patch:
        patch.setattr(flow_gc, "remove_unused", Mock(side_effect=KernelError("cannot delete")))
        with pytest.raises(KernelError):
            agent.sweep()
    flows.delete_flows()
    agent.sweep()
    assert marked(maps) == before
    agent.sweep()
    assert marked(maps) == set()
