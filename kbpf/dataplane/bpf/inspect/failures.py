# SPDX-License-Identifier: Apache-2.0
"""Reads the failed connections from the map `failures` (bpf/failures.h)."""

from collections.abc import Mapping
from typing import Final

from kbpf.dataplane.bpf.changes.adopt import address_of
from kbpf.dataplane.bpf.maps.layout import FAILURE, Target
from kbpf.dataplane.bpf.udp import unpack_backend
from kbpf.kernel.bpf.objects import Map
from kbpf.kernel.system import pods
from kbpf.model.inspection import FailureEntry, ServicePort
from kbpf.model.reasons import Reason

REASONS: Final = tuple(Reason)
"""By their numbers."""


def read(map_: Map, ports: Mapping[int, ServicePort]) -> tuple[FailureEntry, ...]:
    """All entries, the newest first. `ports`: the Service ports by id."""
    values = [FAILURE.unpack(raw) for _, raw in map_.items()]
    paths = pods.find_cgroup_paths({value[3] for value in values if value[3]})
    names = pods.list_pod_names()
    entries = (_build_entry(value, ports, paths, names) for value in values)
    return tuple(sorted(entries, key=lambda entry: -entry.last))


def _build_entry(
    value: tuple[int, int, int, int, bytes, bytes, bytes, int, int, int],
    ports: Mapping[int, ServicePort],
    paths: Mapping[int, str],
    names: Mapping[str, str],
) -> FailureEntry:
    first, last, count, cgroup, client, frontend, backend, service, _, reason = value
    path = paths.get(cgroup, "")
    uid = pods.pod_uid(path)
    return FailureEntry(
        first / 1e9,
        last / 1e9,
        count,
        REASONS[reason],
        ports.get(service) or ServicePort(service, None),
        address_of(frontend),
        unpack_backend(backend) if any(backend) else None,
        Target.unpack(client).address if any(client) else None,
        cgroup,
        path,
        names.get(uid, f"uid {uid}") if uid else "",
    )
