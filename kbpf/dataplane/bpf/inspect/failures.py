# SPDX-License-Identifier: Apache-2.0
"""Reads the failed connections from the map `failures` (bpf/failures.h)."""

from collections.abc import Mapping
from typing import Any, Final

from kbpf.dataplane.bpf.maps.layout import EVENT, FAILURE, Target
from kbpf.dataplane.bpf.state.contents import unpack_address, unpack_backend
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import mounts, pods
from kbpf.model.inspection import FailureEntry, ServicePort
from kbpf.model.objects import Protocol
from kbpf.model.reasons import Reason

REASONS: Final = tuple(Reason)
"""By their numbers."""
PROTOCOLS: Final = tuple(map(int, Protocol))


def read(map_: Map, ports: Mapping[int, ServicePort]) -> tuple[FailureEntry, ...]:
    """All entries, the newest first. `ports`: the Service ports by id."""
    values = [
        (first, count, event)
        for _, raw in map_.items()
        for first, count, raw_event in [FAILURE.unpack(raw)]
        if _is_valid(event := EVENT.unpack(raw_event))
    ]
    cgroups = mounts.find_cgroups(event[1] for _, _, event in values if event[1])
    names = pods.name_pods(cgroups)
    entries = (_build_entry(value, ports, cgroups, names) for value in values)
    return tuple(sorted(entries, key=lambda entry: -entry.last))


def _is_valid(value: tuple[Any, ...]) -> bool:
    """Whether a program can have written this entry."""
    *_, frontend, backend, _, _, reason = value
    return reason < len(REASONS) and frontend[18] in PROTOCOLS and backend[18] in (0, *PROTOCOLS)


def _build_entry(
    value: tuple[int, int, tuple[Any, ...]],
    ports: Mapping[int, ServicePort],
    cgroups: Mapping[int, mounts.Cgroup],
    names: Mapping[int, str],
) -> FailureEntry:
    first, count, event = value
    last, cgroup, client, frontend, backend, service, _, reason = event
    return FailureEntry(
        first / 1e9,
        last / 1e9,
        count,
        REASONS[reason],
        ports.get(service) or ServicePort(service, None),
        unpack_address(frontend),
        unpack_backend(backend) if any(backend) else None,
        Target.unpack(client).address if any(client) else None,
        cgroup,
        cgroups[cgroup].path if cgroup in cgroups else "",
        names.get(cgroup, ""),
    )
