# SPDX-License-Identifier: Apache-2.0
"""Lists of maps that a new map is easily missing from. Each map is in the list, or here with the
reason why it is not.
"""

from collections.abc import Collection, Iterable

import pytest

from kbpf.dataplane.bpf.inspect import node_differences
from kbpf.dataplane.bpf.maps.layout import ALL_MAPS, MAPS
from kbpf.dataplane.bpf.packet_path.rehearsal import SHARED_MAPS
from kbpf.dataplane.bpf.state import contents

STATE = """
    affinity affinity_shares sock_peers former_peers udp_flows flows flow_queue flow_count
    unconfirmed unconfirmed_queue flow_marks flow_generations doubtful_ports port_slots fragments
    refusal_limits refused_peers foreign_flows flow_scratch counts latencies connect_times failures
    reasons
"""
"""What the programs write about connections and packets."""

NOT_COMPARED = {
    STATE: "does not follow from the desired state",
    "zero_counts zero_latencies": "always 0",
    "udp_cuts new_flows_paused_until": "times of changes in the past",
    "agent_sockets agent_status": "about the agent's process",
    "endpoint_names": "for display only",
    "monitored_until monitors monitor_ring": "belong to commands that watch events",
}
"""Maps that `kbpf verify` does not compare → why."""

NOT_SHARED = {
    STATE: "the rehearsal must not change it",
    "monitored_until monitors monitor_ring monitor_rings": "a rehearsal is no event",
    "service_names endpoint_names meta agent_status": "for the agent only",
    "exempt_cgroups udp_cuts zero_latencies": "for socket hooks only",
}
"""Maps that a rehearsal does not read → why. It gets an empty one of its own, or none."""


def listed(*names: Iterable[str]) -> list[str]:
    return sorted(name for each in names for name in each)


def words(table: Collection[str]) -> list[str]:
    return " ".join(table).split()


@pytest.mark.parametrize(
    ("maps", "lists"),
    [
        (MAPS, (contents.MAPS_READ, node_differences.MAPS_COMPARED, words(NOT_COMPARED))),
        (ALL_MAPS, (SHARED_MAPS, words(NOT_SHARED))),
    ],
    ids=["kbpf verify", "rehearsal"],
)
def test_each_map_is_in_one_list(maps: Collection[str], lists: tuple[Collection[str], ...]):
    assert listed(*lists) == sorted(maps)
