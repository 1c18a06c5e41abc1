# SPDX-License-Identifier: Apache-2.0
"""Fakes of pinned maps, and their entries as bytes."""

from collections.abc import Iterator, Mapping
from typing import Self

from kbpf.dataplane.bpf.maps import layout
from kbpf.dataplane.bpf.maps.layout import MAPS, U32, U32_PAIR, pack_target
from kbpf.model.address import parse_addr
from kbpf.model.desired import ServicePortKey
from kbpf.model.objects import Protocol

TCP = Protocol.TCP
Entries = Mapping[bytes, bytes]


class FakeMap:
    def __init__(self, name: str, entries: Entries, max_entries: int = 0) -> None:
        spec = MAPS[name]
        self.name, self.type, self.value_size = name, spec.map_type, spec.value_size
        self.max_entries = max_entries or max(spec.entries, 100)
        self._entries = dict(entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def read_memory(self) -> int:
        return 4096 * (1 + len(self._entries))

    def lookup(self, key: bytes) -> bytes | None:
        return self._entries.get(key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._entries.items())

    def batches(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"".join(self._entries), b"".join(self._entries.values())


def target(text: str, protocol: int = TCP) -> bytes:
    host, _, port = text.rpartition(":")
    return pack_target(parse_addr(host.strip("[]")), int(port), protocol)


def names(keys: Mapping[int, ServicePortKey]) -> Entries:
    """Of `service_names`."""
    return {U32.pack(i): layout.pack_service_name(key) for i, key in keys.items()}


def slots(sets: Mapping[int, Mapping[int, int] | list[int]]) -> Entries:
    """Of `backend_slots`: set id → index → backend id."""
    return {
        U32_PAIR.pack(set_id, index): U32.pack(backend)
        for set_id, ids in sets.items()
        for index, backend in (ids.items() if isinstance(ids, Mapping) else enumerate(ids))
    }
